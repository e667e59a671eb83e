"""PiSSA and QPiSSA: adapters that start from the principal singular components of the weights (arXiv 2404.02948)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
