"""Every process of a sharded training publishes its own rows."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from tiny_runs import same

from hf_ext import CheckpointError
from hf_ext.weight_sync import Publisher, Subscriber

SHAPES = {"matrix": (10, 6), "odd": (5, 3), "small": (1, 4), "vector": (7,)}


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def _rank(rank: int, store: str, place: str, kind: str) -> None:
    from torch.distributed import destroy_process_group, init_device_mesh, init_process_group
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    placement = {"sharded": Shard(0), "replicated": Replicate(), "columns": Shard(1)}[kind]
    mesh = init_device_mesh("cpu", (2,))
    with Publisher(place, anchor_every=2, run="sharded", rank=rank, world_size=2) as run:
        for step in range(3):
            run.publish({name: distribute_tensor(x, mesh, [placement]) for name, x in tensors(step).items() if x.ndim}, step)
    destroy_process_group()


def _start(tmp_path: Path, kind: str) -> list[int | None]:
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "store"), str(tmp_path / "place"), kind)
    children = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_shards_and_replicas_make_up_the_tensors(tmp_path: Path, kind: str):
    assert _start(tmp_path, kind) == [0, 0]
    subscriber = Subscriber(tmp_path / "place")
    for step in range(3):
        subscriber.update(step=step)
        assert same(subscriber.tensors, tensors(step))


def test_shards_of_columns_are_refused(tmp_path: Path):
    assert _start(tmp_path, "columns") == [1, 1]
    with pytest.raises(CheckpointError, match="Nothing is published"):
        Subscriber(tmp_path / "place").update()
