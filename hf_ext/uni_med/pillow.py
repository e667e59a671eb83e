"""Pillow, an optional package: what opens images imports it from here."""

from hf_ext.errors import MissingDependencyError

try:
    from PIL import Image, ImageOps
except ImportError as error:
    raise MissingDependencyError("Uni-Med's images require Pillow: pip install 'pillow>=10'.") from error

__all__ = ["Image", "ImageOps"]
