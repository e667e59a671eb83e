"""A subscriber brings tensors to any published step, bit for bit, and never leaves them between two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_runs import bits, files, publish, same, weights, zeros

from hf_ext import CheckpointError
from hf_ext.weight_sync import Publisher, Rows, Subscriber, rows


@pytest.fixture(params=["whole", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in parts":
        monkeypatch.setattr(rows, "PART", 1000)


@pytest.mark.usefixtures("parts")
def test_tensors_follow_step_by_step_in_place(tmp_path: Path):
    subscriber, tensors = Subscriber(tmp_path), zeros()
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert subscriber.steps() == []
    with Publisher(tmp_path, anchor_every=3) as run:
        for step in range(5):
            run.publish(weights(step), step)
            run.wait()
            assert subscriber.update(tensors) == subscriber.step == step
            assert same(tensors, weights(step))
            assert ("frozen" in subscriber.changed) == (step == 0)
    assert before == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert subscriber.tensors == {}  # no copies
    assert subscriber.update(tensors) == 4 and subscriber.changed == set()


def test_experts_in_one_tensor_follow_in_place(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    run = [torch.randn(3, 256, 256, generator=generator).bfloat16()]
    for expert, share in ((0, 0.01), (2, 1.0)):  # few changes of one expert, then all values of another
        after = run[-1].clone()
        after[expert][torch.rand(256, 256, generator=generator) < share] *= 1.01
        run.append(after)
    subscriber, tensors = Subscriber(tmp_path), {"experts": torch.zeros_like(run[0])}
    with Publisher(tmp_path, anchor_every=9) as publisher:
        for step, experts in enumerate(run):
            publisher.publish({"experts": experts}, step)
            publisher.wait()
            subscriber.update(tensors)
            assert bits(tensors["experts"]) == bits(experts)
    assert len(files(tmp_path, "anchor")) == 1


@pytest.mark.usefixtures("parts")
def test_missed_steps_are_applied_in_one_update(tmp_path: Path):
    publish(tmp_path, range(7), anchor_every=3)
    subscriber = Subscriber(tmp_path)
    assert subscriber.steps() == list(range(3, 7))  # since the second newest anchor
    for step in (5, 3, 6, 4):  # forward and back
        assert subscriber.update(step=step) == step
        assert same(subscriber.tensors, weights(step))
    with pytest.raises(CheckpointError, match="Step 1 is not, or no longer, .* there are 3 to 6"):
        subscriber.update(step=1)
    assert subscriber.step == 4 and same(subscriber.tensors, weights(4))


def test_an_anchor_is_taken_if_that_is_less_to_read(tmp_path: Path):
    torch.manual_seed(0)
    subscriber, noise = Subscriber(tmp_path), [{"x": torch.randn(500, 100)} for _ in range(7)]
    with Publisher(tmp_path, anchor_every=6) as run:
        for step, tensors in enumerate(noise):  # deltas as large as the tensors
            run.publish(tensors, step)
            if step == 0:
                run.wait()
                subscriber.update()
    for name in files(tmp_path, "step")[1:5]:
        (tmp_path / name).unlink()
    assert subscriber.update() == 6 and same(subscriber.tensors, noise[6])


@pytest.mark.usefixtures("parts")
def test_ranks_publish_rows_and_readers_take_whole_tensors(tmp_path: Path):
    cut = {"embedding.weight": 130, "layer.weight": 31}

    def share(step: int, rank: int) -> dict[str, torch.Tensor | Rows]:
        return {
            name: Rows(tensor[: cut[name]] if rank == 0 else tensor[cut[name] :], rank * cut[name], tuple(tensor.shape))
            if name in cut
            else tensor
            for name, tensor in weights(step).items()
            if name in cut or rank == 0
        }

    runs = [Publisher(tmp_path, anchor_every=2, run="sharded", rank=rank, world_size=2) for rank in range(2)]
    subscriber = Subscriber(tmp_path)
    for step in range(4):
        for rank, run in enumerate(runs):
            assert subscriber.steps() == list(range(step))  # a step is there when all ranks have published it
            run.publish(share(step, rank), step)
            run.wait()
        assert subscriber.update() == step
        assert same(subscriber.tensors, weights(step))
    for run in runs:
        run.close()


def test_tied_tensors_may_be_published_and_kept_under_both_names(tmp_path: Path):
    live, kept, subscriber = torch.randn(30, 4), torch.zeros(30, 4), Subscriber(tmp_path)
    with Publisher(tmp_path) as run:
        for step in range(3):
            live += 1e-3
            run.publish({"embedding": live, "head": live}, step)
            run.wait()
            assert subscriber.update({"embedding": kept, "head": kept}) == step
            assert bits(kept) == bits(live)
        run.publish({"embedding": live, "head": live + 1}, step + 1)  # the training unties them
    with pytest.raises(CheckpointError, match="'head' and 'embedding' are one tensor here"):
        subscriber.update({"embedding": kept, "head": kept})
    assert bits(kept) == bits(live)


def test_rows_that_nobody_publishes_are_noticed(tmp_path: Path):
    publish_rows = {"x": Rows(torch.ones(3, 4), 0, (5, 4))}
    with Publisher(tmp_path) as run:
        run.publish(publish_rows, 0)
    with pytest.raises(CheckpointError, match="No rank of the training publishes the rows of 'x' from 3 on"):
        Subscriber(tmp_path).update()


def test_tensors_that_cannot_change_in_place_are_copied_to(tmp_path: Path):
    publish(tmp_path, range(2))
    subscriber = Subscriber(tmp_path)
    tensors = zeros() | {"layer.weight": torch.zeros(64, 64).T, "frozen": torch.nn.Parameter(torch.zeros(8, 8))}
    for step in (0, 1):
        subscriber.update(tensors, step)
        assert same({name: tensor.detach() for name, tensor in tensors.items()}, weights(step))
    assert list(subscriber.tensors) == ["layer.weight"]
    others = {"layer.weight": torch.zeros(64, 64).T}  # new ones get what did not change, too
    subscriber.update(others)
    assert same(others, {"layer.weight": weights(1)["layer.weight"]})


def _copy_into(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(torch.ones(64, 64))


def _give_other_memory(tensor: torch.nn.Parameter) -> None:
    tensor.data = torch.zeros(64, 64).T


@pytest.mark.parametrize("change", [_copy_into, _give_other_memory])
def test_copied_tensors_that_someone_changed_are_copied_whole(tmp_path: Path, change: Callable):
    publish(tmp_path, range(3))
    subscriber, tensors = Subscriber(tmp_path), {"layer.weight": torch.nn.Parameter(torch.zeros(64, 64).T)}
    for step in (0, 1, 2, 2):
        subscriber.update(tensors, step)
        assert bits(tensors["layer.weight"]) == bits(weights(step)["layer.weight"])
        change(tensors["layer.weight"])


def test_a_single_value_may_be_kept_with_any_stride(tmp_path: Path):
    tensors = {"x": torch.zeros(1, 1, 3)[..., 1]}
    with Publisher(tmp_path) as run:
        run.publish({"x": torch.ones(1, 1)}, 0)
    Subscriber(tmp_path).update(tensors)
    assert tensors["x"].item() == 1


DTYPES = [torch.uint64, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changed_rows_of_every_type_are_copied(tmp_path: Path, dtype: torch.dtype):
    width = torch.empty((), dtype=dtype).element_size()
    steps = [torch.randint(2 if dtype == torch.bool else 256, (9, 4 * width), dtype=torch.uint8) for _ in range(2)]
    steps[1][1:] = steps[0][1:]
    with torch.inference_mode():
        tensors = {"x": torch.zeros(4, 9, dtype=dtype).T}
    subscriber = Subscriber(tmp_path)
    with Publisher(tmp_path) as run:
        for step, x in enumerate(steps):
            run.publish({"x": x.view(dtype)}, step)
            run.wait()
            subscriber.update(tensors)
            assert bits(tensors["x"]) == bits(x.view(dtype))


def test_a_transform_publishes_what_servers_hold(tmp_path: Path):
    def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        blocks = tensors["embedding.weight"].float().unflatten(0, (-1, 30)).unflatten(2, (-1, 32))
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        packed = (blocks / scales).to(torch.float8_e4m3fn).reshape(300, 64)
        return tensors | {"embedding.weight": packed, "embedding.scale": scales.squeeze()}

    servers = [
        quantized({name: x.bfloat16() if x.is_floating_point() else x for name, x in weights(n).items()}) for n in range(4)
    ]
    subscriber, tensors = Subscriber(tmp_path), {name: torch.zeros_like(x) for name, x in servers[0].items()}
    with Publisher(tmp_path, dtype=torch.bfloat16, transform=quantized) as run:
        for step, expected in enumerate(servers):
            run.publish({name: torch.nn.Parameter(x, x.is_floating_point()) for name, x in weights(step).items()}, step)
            run.wait()
            subscriber.update(tensors)
            assert same(tensors, expected)
    with pytest.raises(ValueError, match="whole tensors"):
        Publisher(tmp_path / "2", transform=quantized, run="x", world_size=2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_a_transform_may_change_its_tensors_in_place(tmp_path: Path, dtype: torch.dtype | None):
    def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.mul_(2) for name, tensor in tensors.items()}

    shared = torch.ones(4, 4)
    live = {"float": shared, "tied": shared, "half": torch.ones(3).bfloat16(), "rows": Rows(torch.ones(2), 0, (2,))}
    with Publisher(tmp_path, dtype=dtype, transform=doubled) as run:
        for step in range(2):
            run.publish(live, step)
    assert all((getattr(tensor, "tensor", tensor) == 1).all() for tensor in live.values())
    subscriber = Subscriber(tmp_path)
    assert subscriber.update() == 1 and all((tensor == 2).all() for tensor in subscriber.tensors.values())


def test_inference_tensors_may_be_published_too(tmp_path: Path):
    with Publisher(tmp_path) as run:
        for step in range(4):
            with torch.inference_mode(step < 3):
                run.publish(weights(step), step)
    subscriber = Subscriber(tmp_path)
    assert subscriber.update() == 3 and same(subscriber.tensors, weights(3))


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"frozen": torch.zeros(8, 9)}, r"'frozen', which is published as .*, is .* \[8, 9\]"),
        ({"frozen": torch.zeros(8, 8).half()}, "torch.float16"),
        ({"frozen": torch.empty(8, 8, device="meta")}, "'frozen' has no memory for each of its values"),
        ({"frozen": torch.zeros(8, 8).to_sparse()}, "'frozen' has no memory for each of its values"),
        ({"frozen": torch.zeros(8).expand(8, 8)}, "'frozen' has no memory for each of its values"),
        ({"frozen": None}, "'frozen' has no memory for each of its values"),
        ({"frozen": torch.zeros(8, 8), "unknown": torch.zeros(1)}, "Nothing is published .* for the tensor 'unknown'"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict, message: str):
    publish(tmp_path, range(1))
    with pytest.raises(CheckpointError, match=message):
        Subscriber(tmp_path).update(tensors)
    assert not any(tensor.to_dense().any() for tensor in tensors.values() if tensor is not None and not tensor.is_meta)
