"""PiSSA and QPiSSA: adapters that start from the principal singular components of the weights (arXiv 2404.02948)."""

import logging

# PEFT imports bitsandbytes, which warns of optional kernels that it lacks: nothing that every user of this package should read.
_bitsandbytes = logging.getLogger("bitsandbytes.backends")
_level = _bitsandbytes.level
_bitsandbytes.setLevel(logging.ERROR)
import peft  # noqa: E402, F401

_bitsandbytes.setLevel(_level)

from hf_ext.pissa.config import PissaConfig, QPissaConfig  # noqa: E402
from hf_ext.pissa.conversion import LoraConversion, convert_to_lora  # noqa: E402
from hf_ext.pissa.layer import accept_pissa  # noqa: E402
from hf_ext.pissa.report import PissaReport, report  # noqa: E402

__all__ = [
    "LoraConversion",
    "PissaConfig",
    "PissaReport",
    "QPissaConfig",
    "accept_pissa",
    "convert_to_lora",
    "report",
]
