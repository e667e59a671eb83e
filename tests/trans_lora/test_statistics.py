"""How varied and how near texts are, against what the definitions give by hand."""

import math

import pytest
import torch

from hf_ext.trans_lora.reports import describe
from hf_ext.trans_lora.statistics import distinct, mmd, nearest, plane


def test_distinct_counts_different_runs_among_all():
    assert distinct(["a b a b", "a b"], 1) == 2 / 6
    assert distinct(["a b a b", "a b"], 2) == 2 / 4
    assert distinct(["a"], 2) == 0.0


def test_mmd_is_what_its_definition_says():
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0]])

    def k(a: float, b: float) -> float:
        return math.exp(-((a - b) ** 2) / 8)

    square = (2 + 2 * k(0, 1)) / 4 + 1 - 2 * (k(0, 3) + k(1, 3)) / 2
    assert mmd(x, y, bandwidth=2.0) == pytest.approx(math.sqrt(square))


def test_mmd_is_zero_for_the_same_points_and_grows_with_distance():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    near, far = mmd(x, x + 0.5, 2.0), mmd(x, x + 5, 2.0)
    assert mmd(x, x) < 1e-6 < near < far <= math.sqrt(2)
    assert mmd(x[:1].repeat(3, 1), x[:1]) == 0.0  # no distance to take a median of


def test_the_nearest_text_shares_most():
    assert nearest("a b c d", ["x y z", "a b c e", "a b c d"]) == ("a b c d", 1.0)
    assert nearest("a b c d", ["x y z", "a b c e"]) == ("a b c e", 1 / 3)


def test_real_inputs_add_a_distance_and_change_no_other_figure():
    texts = {"seeds": ["a b"], "kept": ["a c", "b c", "c d"], "dropped": ["d"]}
    points = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    embeddings, real = {"seeds": points[:1], "kept": points[1:4], "dropped": points[4:5]}, points[5:] + 3
    without, given = describe(texts, embeddings, real[:0]), describe(texts, embeddings, real)
    width = torch.pdist(points[:5].double()).median().item()
    expected = {name: mmd(real, embeddings[name], width) for name in ("kept", "dropped")}
    assert given == without | {"mmd_to_real": pytest.approx(expected)} and without["mmd_to_real"] == {}
    assert given["mmd"] == pytest.approx({name: mmd(points[:1], embeddings[name], width) for name in expected})


def test_one_input_alone_has_a_distance_to_the_real_ones():
    texts, point = {"seeds": [], "kept": ["a"], "dropped": []}, torch.tensor([[1.0, 0.0]])
    embeddings = {"seeds": point[:0], "kept": point, "dropped": point[:0]}
    results = describe(texts, embeddings, torch.tensor([[0.0, 1.0]]))
    assert results["mmd"] == {} and results["mmd_to_real"] == {"kept": pytest.approx(mmd(point, point.flip(1), 1.0))}


@pytest.mark.parametrize("count, width", [(1, 5), (2, 5), (30, 1), (30, 2), (30, 5)])
def test_the_map_keeps_what_two_dimensions_can(count, width):
    points = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    flat = plane(points)
    assert flat.shape == (count, 2)
    if width <= 2:
        assert torch.allclose(torch.pdist(flat), torch.pdist(points.double()), atol=1e-5)
    assert (torch.pdist(flat) <= torch.pdist(points.double()) + 1e-5).all()
