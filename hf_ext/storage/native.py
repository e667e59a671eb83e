"""The C++ extension, the float types that it handles, and arrays in the form that it takes."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from hf_ext.errors import MissingDependencyError


class MissingExtension:
    """A stand-in for the extension where it cannot be imported. It raises an error when one of its functions is used."""

    def __init__(self, cause: ImportError):
        self._cause = cause

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # looked up by copy, inspect and others
            raise AttributeError(name)
        raise MissingDependencyError(
            f"FM-Delta and EMR-Merging need the C++ extension of hf_ext, which cannot be imported: {self._cause}. Install a "
            "wheel that was built for your platform, or install a C++17 compiler (Debian: apt-get install g++; macOS: "
            "xcode-select --install), then run in a checkout of hf_ext: pip install --force-reinstall --no-deps . (to use "
            "the checkout itself: python setup.py build_ext --inplace)."
        ) from self._cause


try:
    import hf_ext._native as _native
except ImportError as error:
    _native = MissingExtension(error)  # type: ignore[assignment]

__all__ = ["FLOATS", "MANTISSA", "WIDTHS", "_native", "aligned", "as_numbers", "cast"]

#: The float types under their safetensors names, with their codes in C++ and in compressed files.
FLOATS = {"F32": 1, "F16": 2, "BF16": 3, "F64": 4}
#: Bytes of one value of each float type.
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
#: Bits of the mantissa of each float type.
MANTISSA = {"F32": 23, "F16": 10, "BF16": 7, "F64": 52}


def aligned(data: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the same bytes at an address that is a multiple of the float type's width, because their offset in a file may not
    be one."""
    return data if data.ctypes.data % WIDTHS[dtype] == 0 else data.copy()


def cast(data: np.ndarray, dtype: str, target: str) -> np.ndarray:
    """Converts floats, given as bytes, to another float type, rounding to nearest even. If the types are equal, returns the
    same bytes."""
    data = aligned(data, dtype)
    if dtype == target:
        return data
    out = np.empty(data.size // WIDTHS[dtype] * WIDTHS[target], np.uint8)
    _native.cast(data, FLOATS[dtype], out, FLOATS[target])
    return out


def as_numbers(data: np.ndarray, dtype: str) -> np.ndarray:
    """Returns floats, given as bytes, as an array of float32, or of float64 for F64."""
    data = aligned(data, dtype)
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = data.view(f"f{WIDTHS[dtype]}")
    return numbers.astype(np.float32) if dtype == "F16" else numbers
