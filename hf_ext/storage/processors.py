"""The number of cores that this process may use. A container or a batch system often grants fewer than the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def available_cores(root: Path = Path("/")) -> int:
    """Returns the cores that this process may run on, or its CPU quota, rounded up, if that is less. `root` is the folder that
    holds `proc` and `sys`."""
    return min([_allowed(), *(math.ceil(quota) for quota in _quotas(root))])


def _allowed() -> int:
    """Returns the cores of the machine, or those that `taskset`, a batch system or PYTHON_CPU_COUNT leaves."""
    if hasattr(os, "process_cpu_count"):  # from Python 3.13 on
        return os.process_cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Yields the CPU quotas of this process in cores: those of its control groups, version 2 and 1, and of the groups above."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):  # not Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if not controllers:
            mounts, read = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), _quota
        elif "cpu" in controllers.split(","):
            mounts, read = ("sys/fs/cgroup/cpu", f"sys/fs/cgroup/{controllers}"), _old_quota
        else:
            continue
        for mount in mounts:
            # A container may see the path outside of it. Then only the last folder, that of the mount, is there.
            for group in (Path(path), *Path(path).parents):
                try:
                    quota, period = read(root / mount / group.relative_to("/"))
                    if quota > 0 and period > 0:
                        yield quota / period
                except (OSError, ValueError):  # the group does not exist or has no limit
                    continue


def _quota(group: Path) -> tuple[int, int]:
    quota, period = (group / "cpu.max").read_text().split()
    return int(quota), int(period)


def _old_quota(group: Path) -> tuple[int, int]:
    return int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())
