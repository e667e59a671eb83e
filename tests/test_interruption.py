"""Long work ends soon after Ctrl-C or after its Prefetcher is closed, also in the middle of a tensor."""

import signal
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
import torch

from hf_ext.emr.modulators import TaskWriter
from hf_ext.storage import encode
from hf_ext.storage.native import FLOATS, _native, cast
from hf_ext.storage.prefetch import Prefetcher, check_awaited

VALUES, ROW = 1 << 26, 4096  # take far longer than the tenth of a second between two checks
BF16 = FLOATS["BF16"]


class Enough(Exception):
    """Raised by a check."""


def enough() -> None:
    raise Enough


@pytest.fixture(scope="module")
def base() -> np.ndarray:
    return np.tile(bits(np.random.default_rng(0).normal(size=VALUES // 8)), 8)


@pytest.fixture(scope="module")
def tensor() -> np.ndarray:
    return np.tile(bits(1.02 * np.random.default_rng(0).normal(size=VALUES // 8)), 8)


def bits(values: np.ndarray) -> np.ndarray:
    return cast(values.astype(np.float32).view(np.uint8), "F32", "BF16")


@pytest.fixture(scope="module")
def body(base, tensor) -> bytes:
    return _native.encode(tensor, base, BF16, ROW, VALUES)


@pytest.fixture
def slowest():
    """The slowest kernels, and the check that was there before."""
    before = _native.use("scalar")
    yield
    _native.check_with(check_awaited)
    _native.use(before)


def test_a_check_that_raises_ends_encoding_decoding_and_electing(base, tensor, body, slowest):
    out = np.zeros_like(base)
    elected, masks, sums = np.zeros_like(base), np.zeros(VALUES // 8, np.uint8), np.zeros(72, np.uint8)
    _native.check_with(enough)
    with pytest.raises(Enough):
        _native.encode(tensor, base, BF16, ROW, VALUES)
    with pytest.raises(Enough):
        _native.decode(body, (out, base, BF16, ROW, VALUES))
    assert out[:4].any() and not out[-4:].any()
    with pytest.raises(Enough):
        _native.elect(BF16, base, (tensor,) * 8, elected, np.tile(masks, 8), np.tile(sums, 8))
    assert elected[:4].any() and not elected[-4:].any()


def test_no_check_ends_a_switch_of_tasks_in_memory(base, slowest):
    live = base.copy()
    _native.check_with(enough)
    targets = ((BF16, base, base, None, 1.0, None, 1.0, live),) * 20
    assert _native.retarget(targets) == len(targets)


def test_a_signal_reaches_the_main_thread_while_it_decodes(base, body, slowest):
    out = np.zeros_like(base)
    before = signal.signal(signal.SIGALRM, lambda *_: enough())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Enough):
            _native.decode(body, (out, base, BF16, ROW, VALUES))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert out[:4].any() and not out[-4:].any()


@pytest.mark.parametrize("kind", ["low rank", "integers", "mask"])
def test_nobody_waits_for_the_work_of_a_closed_prefetcher(tmp_path, kind):
    generator = torch.Generator().manual_seed(0)
    if kind == "low rank":
        before = torch.randn(3072, 3072, generator=generator)
        after = before + torch.randn(3072, 16, generator=generator) @ torch.randn(16, 3072, generator=generator) * 1e-3
        work = Prefetcher(lambda _: encode(after, before, level=3), {"tensor": 1})
    elif kind == "integers":
        numbers = torch.randint(0, 100, (1 << 26,), dtype=torch.int16, generator=generator)
        work = Prefetcher(lambda _: encode(numbers, None, level=3), {"tensor": 1})
    else:
        mask = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8, generator=generator).numpy()
        work = Prefetcher(lambda _: TaskWriter(tmp_path / "task").add_mask("tensor", mask), {"tensor": 1})
    (running,) = work._running.values()
    assert isinstance(running, Future)
    while not (running.running() or running.done()):
        pass
    work.close()
    assert isinstance(running.exception(), CancelledError)
