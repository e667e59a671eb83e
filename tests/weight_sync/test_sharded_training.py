"""Every process of a sharded training publishes its own rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from processes import on_ranks
from tiny_runs import same
from transformers import TrainerState

from hf_ext import CheckpointError
from hf_ext.weight_sync import Publisher, PublishWeights, Subscriber
from hf_ext.weight_sync.training import checkpoint_weights

SHAPES = {"matrix": (10, 6), "odd": (5, 3), "small": (1, 4), "vector": (7,)}


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def _rank(rank: int, store: str, place: str, kind: str, resume: bool) -> None:
    from torch.distributed import destroy_process_group, init_device_mesh, init_process_group
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    placement = {"sharded": Shard(0), "replicated": Replicate(), "columns": Shard(1)}[kind]
    mesh = init_device_mesh("cpu", (2,))
    with Publisher(place, anchor_every=2, run="sharded", rank=rank, world_size=2, resume=resume) as run:
        for step in (1, 2) if resume else (0, 1, 2):
            weights = {name: distribute_tensor(x, mesh, [placement]) for name, x in tensors(step).items()}
            if rank == 0 or not resume:  # when they resume, the other one publishes nothing any more
                run.publish(weights, step)
    destroy_process_group()


def _start(tmp_path: Path, kind: str, resume: bool = False) -> list[int | None]:
    return on_ranks(_rank, str(tmp_path / f"store-{resume}"), str(tmp_path / "place"), kind, resume)


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_shards_and_replicas_make_up_the_tensors(tmp_path: Path, kind: str):
    assert _start(tmp_path, kind) == [0, 0]
    subscriber = Subscriber(tmp_path / "place")
    for step in range(3):
        subscriber.update(step=step)
        assert same(subscriber.tensors, tensors(step))


def _fsdp(rank: int, folder: str) -> None:
    from torch.distributed import destroy_process_group, init_device_mesh, init_process_group
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, mesh = tiny_models.llama(tied=True), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    subscriber = Subscriber(f"{folder}/place")

    def note(step: int) -> None:
        with open(f"{folder}/steps", "a") as file:
            print(rank, step, subscriber.update(), file=file)

    callback = PublishWeights(f"{folder}/place", on_step=note)
    args = SimpleNamespace(run_name="fsdp", process_index=rank, world_size=2)
    state = TrainerState(global_step=0, is_world_process_zero=rank == 0)
    callback.on_train_begin(args, state, None, model=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    state.global_step = 1
    callback.on_step_end(args, state, None, model=model)
    callback.on_train_end(args, state, None, model=model)
    destroy_process_group()


def test_an_fsdp_model_is_published_under_checkpoint_names(tmp_path: Path):
    assert on_ranks(_fsdp, str(tmp_path)) == [0, 0]
    # The first process calls `on_step`, once the step is whole.
    assert (tmp_path / "steps").read_text().splitlines() == ["0 0 0", "0 1 1"]
    weights = {name: weight.bfloat16() for name, weight in checkpoint_weights(tiny_models.llama(tied=True)).items()}
    subscriber = Subscriber(tmp_path / "place")
    for step, sign in ((0, 1), (1, -1)):
        subscriber.update(step=step)
        assert same(subscriber.tensors, {name: sign * weight for name, weight in weights.items()})


def test_steps_of_different_attempts_are_not_mixed(tmp_path: Path):
    assert _start(tmp_path, "sharded") == [0, 0]
    assert _start(tmp_path, "sharded", resume=True) == [0, 0]
    subscriber = Subscriber(tmp_path / "place")
    assert subscriber.steps() == [0]
    assert subscriber.update() == 0 and same(subscriber.tensors, tensors(0))


def test_several_ranks_resume_only_if_they_know_of_each_other(tmp_path: Path):
    with pytest.raises(ValueError, match="several ranks can only resume together"):
        Publisher(tmp_path, run="sharded", rank=1, world_size=2, resume=True)


def test_shards_of_columns_are_refused(tmp_path: Path):
    assert _start(tmp_path, "columns") == [1, 1]
    with pytest.raises(CheckpointError, match="Nothing is published"):
        Subscriber(tmp_path / "place").update()
