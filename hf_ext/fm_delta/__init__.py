"""FM-Delta: a fine-tuned checkpoint stored as its lossless difference from the base model (NeurIPS 2024)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
