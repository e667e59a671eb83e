"""Imports PEFT before anything else does: with it comes bitsandbytes, which warns of optional kernels that it lacks, and nobody
who imports this package should have to read that."""

import logging

_bitsandbytes = logging.getLogger("bitsandbytes.backends")
_level = _bitsandbytes.level
_bitsandbytes.setLevel(logging.ERROR)
import peft  # noqa: E402, F401

_bitsandbytes.setLevel(_level)
