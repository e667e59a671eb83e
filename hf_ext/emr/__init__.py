"""Merges: many fine-tunes of one base model in one folder, which a loaded model switches by name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
