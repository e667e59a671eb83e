"""The C++ extension: which float types it knows, and arrays as it takes them."""

from __future__ import annotations

import numpy as np

try:
    from hf_ext import _native
except ImportError as error:
    raise ImportError(
        "The C++ extension of hf_ext is not built. Install the package with a C++17 compiler at hand (pip install .), or in a "
        "checkout run: python setup.py build_ext --inplace"
    ) from error

__all__ = ["FLOATS", "WIDTHS", "_native", "aligned", "as_numbers", "cast"]

# safetensors' names of the float types: their codes in C++ (and in compressed files), and their bytes.
FLOATS = {"F32": 1, "F16": 2, "BF16": 3, "F64": 4}
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


def aligned(data: np.ndarray, dtype: str) -> np.ndarray:
    """The same bytes where a processor reads whole values from; a file may hold them at any address."""
    return data if data.ctypes.data % WIDTHS[dtype] == 0 else data.copy()


def cast(data: np.ndarray, dtype: str, target: str) -> np.ndarray:
    """Floats, given as bytes, in another float type, rounded to nearest even; as they are if the types are the same."""
    data = aligned(data, dtype)
    if dtype == target:
        return data
    out = np.empty(data.size // WIDTHS[dtype] * WIDTHS[target], np.uint8)
    _native.cast(data, FLOATS[dtype], out, FLOATS[target])
    return out


def as_numbers(data: np.ndarray, dtype: str) -> np.ndarray:
    """Floats, given as bytes, as an array of numbers: of float32, or of float64 where they are."""
    data = aligned(data, dtype)
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = data.view(f"f{WIDTHS[dtype]}")
    return numbers.astype(np.float32) if dtype == "F16" else numbers
