"""PiSSA and QPiSSA: adapters that start from the principal singular components of the weights (arXiv 2404.02948)."""

from hf_ext.pissa.config import PissaConfig, QPissaConfig
from hf_ext.pissa.conversion import LoraConversion, convert_to_lora
from hf_ext.pissa.layer import accept_pissa
from hf_ext.pissa.report import PissaReport, report

__all__ = [
    "LoraConversion",
    "PissaConfig",
    "PissaReport",
    "QPissaConfig",
    "accept_pissa",
    "convert_to_lora",
    "report",
]
