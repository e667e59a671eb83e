"""A few values of each tensor tell a fine-tune from a stranger, whatever the float types."""

import numpy as np
import pytest
import torch
from tiny_checkpoints import fine_tune, weights, write_folder

from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.likeness import LENGTH, RUNS, compare, likeness
from hf_ext.storage.safetensors_file import RawTensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def normal(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_bits_are_those_of_ordered_distances(dtype):
    values = torch.tensor([1.0, -1.0, 0.0, 3.0], dtype=dtype)
    steps = torch.nextafter(values, torch.full_like(values, torch.inf))
    a, b = RawTensor.from_torch(values), RawTensor.from_torch(steps)
    assert compare(a, a, 4) == (1.0, 0.0)
    assert compare(a, b, 4)[1] == 0  # the same distance everywhere
    half = RawTensor.from_torch(torch.cat([values[:2], steps[2:]]))
    assert compare(half, a, 4)[1] == 1  # changed or not
    down = torch.nextafter(values, torch.zeros_like(values))
    mixed = RawTensor.from_torch(torch.cat([values[:1], steps[1:2], values[2:3], down[3:]]))
    assert compare(mixed, a, 4)[1] == pytest.approx(1.5)  # up, down or not
    signs = (RawTensor.from_torch(torch.tensor([zero, 0.0], dtype=dtype)) for zero in (0.0, -0.0))
    assert compare(*signs, 2) == (0.5, 1.0)


def test_evenly_spread_values_of_a_large_tensor_count():
    base = normal(1 << 20, 0)
    tuned = base.clone()
    starts = np.linspace(0, len(base) - LENGTH, RUNS).astype(int)
    tuned[starts[1] : starts[1] + LENGTH] *= -1
    tuned[starts[2] + LENGTH : starts[3]] *= -1
    share, _ = compare(RawTensor.from_torch(tuned), RawTensor.from_torch(base), len(base))
    assert share == 1 - 1 / RUNS


def test_special_values_and_odd_places_are_compared_too():
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-42, 7.0])
    raw = RawTensor.from_torch(values)
    odd = np.empty(21, np.uint8)
    odd[1:] = raw.data
    assert compare(raw, RawTensor("F32", (5,), odd[1:]), 5) == (1.0, 0.0)
    assert compare(raw, raw, 0) == (0.0, 0.0)


def open_folder(path, tensors):
    return Checkpoint(write_folder(path, tensors))


def test_a_tensor_without_counterpart_costs_its_full_width(tmp_path):
    base = weights()
    src = open_folder(tmp_path / "src", base | {"score.weight": torch.ones(10, 16), "ids": torch.arange(5)})
    result = likeness(src, open_folder(tmp_path / "base", base))
    total = sum(tensor.numel() for tensor in base.values())
    assert result.shared == pytest.approx(total / (total + 160))
    assert (result.agreement, result.same_layers) == (1.0, True)
    assert result.bits == pytest.approx(32 * 160 / (total + 160))


def test_common_rows_of_resized_embeddings_are_compared(tmp_path):
    base, name = weights(), "model.embed_tokens.weight"
    grown = base | {name: torch.cat([base[name], torch.ones(32, 16)])}
    bigger, smaller = open_folder(tmp_path / "grown", grown), open_folder(tmp_path / "base", base)
    assert likeness(bigger, smaller).agreement == likeness(smaller, bigger).agreement == 1.0
    assert likeness(bigger, smaller).shared < 1 == likeness(smaller, bigger).shared
    assert likeness(bigger, smaller).same_layers


def test_nothing_is_read_where_too_little_is_shared(tmp_path):
    src = open_folder(tmp_path / "src", fine_tune(weights()))
    other = open_folder(tmp_path / "other", {"lm_head.weight": weights()["lm_head.weight"]})
    assert likeness(src, other).agreement > 0.9
    assert likeness(src, other, 0.5).agreement == 0


def test_masks_that_all_models_of_a_kind_share_do_not_count(tmp_path):
    mask = {"model.layers.0.attn.bias": torch.ones(256, 256, dtype=torch.uint8).tril()}
    one, other = (Checkpoint(write_folder(tmp_path / str(i), weights(seed=i) | mask)) for i in range(2))
    assert likeness(one, other).agreement < 0.35
