"""Differences between the supported versions of Transformers and PEFT. Each function names the versions it is about."""

from __future__ import annotations

from functools import cache

from packaging.version import Version

from hf_ext.integration import versions


@cache
def converts_on_cpu() -> bool:
    """Tells if a `WeightConverter` may set `force_cpu`. Transformers 5.16 leaves such a weight on the CPU; 5.17 and later move it
    to the device that `device_map` says."""
    return Version(versions.installed("transformers") or "0") >= Version("5.17")
