"""The cores that a process may use: its CPU affinity, or fewer by the CPU quotas of control groups, as containers set them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.storage.processors import _quotas, available_cores

V1 = "4:memory:/box\n3:cpu,cpuacct:/box/inner\n2:cpuset:/box"
#: The lines of /proc/self/cgroup, the files of control groups, and the quotas in cores.
GROUPS = {
    "none": ("0::/", {}, []),
    "no limit": ("0::/", {"cpu.max": "max 100000"}, []),
    "a namespace's own": ("0::/", {"cpu.max": "150000 100000"}, [1.5]),
    "a group and the one above": ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, [0.5]),
    "both versions mounted": (f"{V1}\n0::/box", {"unified/box/cpu.max": "200000 100000"}, [2]),
    "the old version": (V1, {"cpu/box/cpu.cfs_quota_us": "300000", "cpu/box/cpu.cfs_period_us": "100000"}, [3]),
    "a path of the host": (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, [0.5]),
    "the old version, no limit": (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
    "a group of another controller": (V1, {"memory/box/cpu.cfs_quota_us": "1", "memory/box/cpu.cfs_period_us": "1"}, []),
    "nonsense": ("0::/\n1\n:", {"cpu.max": "many"}, []),
    "a period of nothing": ("0::/", {"cpu.max": "100000 0"}, []),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_quotas_are_those_of_all_groups_that_a_process_is_in(tmp_path, groups):
    lines, files, quotas = GROUPS[groups]
    for name, text in ({"proc/self/cgroup": lines} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        path = Path(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert list(_quotas(tmp_path)) == quotas
    if quotas:
        assert available_cores(tmp_path) == min(-(-quotas[0] // 1), available_cores(tmp_path / "nothing"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_process_that_may_run_on_one_core_uses_one():
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from hf_ext.storage.prefetch import CORES, Prefetcher
with_threads = Prefetcher(lambda name: None, {"a": 1})
print(CORES, with_threads._pool._max_workers)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout == "1 1\n", result.stderr
