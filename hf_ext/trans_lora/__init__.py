"""Trans-LoRA: an adapter moved to another base model, without the task's data (arXiv 2405.17258)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
