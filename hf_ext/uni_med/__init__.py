"""Uni-Med: one model for medical images and text, with a mixture of experts as its connector (NeurIPS 2024)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
