"""PiSSA and QPiSSA: adapters that start from the principal singular components of the weights (arXiv 2404.02948)."""

from hf_ext.pissa.config import PissaConfig, QPissaConfig
from hf_ext.pissa.layer import accept_pissa

__all__ = ["PissaConfig", "QPissaConfig", "accept_pissa"]
