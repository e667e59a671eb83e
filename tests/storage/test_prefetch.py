"""Tensors are read ahead in threads, each on one core, within the limit of cores that a caller sets."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_ext.storage.prefetch import CORES, BatchPrefetcher, Prefetcher, at_most_cores, cores


def test_a_limit_of_cores_holds_in_the_threads_too():
    assert cores() == CORES
    with at_most_cores(1):
        ahead = Prefetcher(lambda name: cores(), {str(i): 1 for i in range(4)})
        assert cores() == 1 and [count for _, count in ahead] == [1] * 4
    assert cores() == CORES
    with pytest.raises(ValueError, match="1 or more, not 0"), at_most_cores(0):
        pass
    with at_most_cores(10_000):
        assert cores() == CORES


def test_batches_hold_what_fits():
    calls = []
    sizes = dict(a=3, b=4, c=0, d=1, e=9, f=2)
    with at_most_cores(1):
        work = BatchPrefetcher(lambda names: calls.append(names) or [name.upper() for name in names], sizes, 8)
        assert [*work] == [(name, name.upper()) for name in sizes]
    assert calls == [["a", "b", "c", "d"], ["e"], ["f"]]
    alone = BatchPrefetcher(lambda names: [len(names)], dict.fromkeys("ab", 1), 0)
    assert alone.result("b") == alone.result("a") == alone.result("a") == 1
    alone.close()


@pytest.mark.slow  # starts three interpreters
def test_pytorch_keeps_its_cores_if_a_pool_is_first_to_use_it():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("OMP_NUM_THREADS", None)

    def threads_after(work: str) -> str:
        script = (
            f"import torch; from hf_ext.storage.prefetch import Prefetcher, in_threads; {work}; print(torch.get_num_threads())"
        )
        return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True).stdout

    alone = threads_after("pass")
    assert alone and alone == threads_after("list(Prefetcher(str, dict.fromkeys('ab', 1)))") == threads_after(
        "in_threads(str, 2, 2)"
    )


def test_pytorch_uses_one_core_per_tensor():
    def threads_of_a_new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with contextlib.closing(Prefetcher(lambda _: torch.get_num_threads(), dict.fromkeys("abcdef", 1))) as work:
            assert [threads for _, threads in work] == [1] * 6
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == threads_of_a_new_thread() == 3
        work = Prefetcher(lambda _: torch.get_num_threads(), dict.fromkeys("abcdef", 1))
        assert work.result("a") == 1
        del work  # by a reader that failed
        assert threads_of_a_new_thread() == 3
    finally:
        torch.set_num_threads(before)


def test_a_log_file_gets_few_states_of_a_bar():
    script = "import time; from hf_ext.storage.prefetch import progress; bar = progress('Testing', 30)\n"
    script += "for _ in range(30): time.sleep(0.02); bar.update()\nbar.close()"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert "Testing tensors: 100%" in result.stderr and result.stderr.count("Testing tensors") <= 2
