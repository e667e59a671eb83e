"""Tensors in shared memory: another process sees each step, and cannot change it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tiny_runs import bits, publish, same, weights

from hf_ext.weight_sync import Publisher, Subscriber
from hf_ext.weight_sync.shared_memory import ALIGNMENT, Share, SharedTensors, machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="this memory is shared by Linux's /proc")


def read(connection: Connection) -> None:
    """Answers each share by the bits of its tensors, and then overwrites what it sees. A process of its own."""
    while (share := connection.recv()) is not None:
        tensors = share.open()
        connection.send((machine(), {name: bits(tensor) for name, tensor in tensors.items()}))
        for tensor in tensors.values():
            tensor.zero_()


@pytest.fixture
def reader():
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=read, args=(theirs,))
    process.start()
    yield mine
    mine.send(None)
    process.join(60)
    assert process.exitcode == 0


def test_another_process_sees_each_step(reader: Connection, tmp_path: Path):
    shared = SharedTensors()
    subscriber = Subscriber(tmp_path, shared.allocate)
    publish(tmp_path, range(2))
    for step in (0, 1, 0):
        subscriber.update(step=step)
        reader.send(shared.share)
        assert reader.recv() == (machine(), {name: bits(tensor) for name, tensor in weights(step).items()})
        assert same(subscriber.tensors, weights(step))
    before = shared.share
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in subscriber.tensors.values())
    with Publisher(tmp_path / "other") as run:  # whose tensors have other shapes
        run.publish({"layer.weight": torch.ones(3), "scale": torch.tensor(2)}, 0)
    subscriber.place = Subscriber(tmp_path / "other").place
    subscriber.update()
    assert shared.share != before
    reader.send(shared.share)
    assert reader.recv()[1] == {name: bits(tensor) for name, tensor in subscriber.tensors.items()}


def keep(connection: Connection) -> None:
    shared = SharedTensors()
    tensors = shared.allocate({"weight": (torch.float32, (1000, 1000))})
    tensors["weight"].fill_(1)
    connection.send(shared.share)
    connection.recv()


def test_a_killed_process_leaves_nothing(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=keep, args=(theirs,))
    process.start()
    share: Share = mine.recv()
    tensors = share.open()
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert tensors["weight"].sum() == 1e6  # what is mapped stays
    with pytest.raises(RuntimeError):
        share.open()
