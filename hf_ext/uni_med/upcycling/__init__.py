"""Uni-Med's connector in other models: the trained projector becomes a mixture of experts, as a PEFT method."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
