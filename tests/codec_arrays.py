"""Floats as arrays of bits, for the tests of the C++ codec: usual weights, random bits, special values."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import reference_codec as reference

from hf_ext import _native

FP32, FP16, BF16, FP64 = 1, 2, 3, 4
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16", FP64: "fp64"}
SETS = _native.instruction_sets()

Base = np.ndarray | None

every_type = pytest.mark.parametrize("code", NAMES, ids=NAMES.values())


@contextmanager
def using(name: str) -> Iterator[None]:
    """Lets the codec use one instruction set in the block."""
    before = _native.use(name)
    try:
        yield
    finally:
        assert _native.use(before) == name


def unsigned(code: int) -> np.dtype:
    return reference.TYPES[code].unsigned


def floats(values: np.ndarray, code: int) -> np.ndarray:
    return reference.cast(np.asarray(values, "<f8").view("<u8"), FP64, code)


def weights(rng: np.random.Generator, size: int, code: int) -> np.ndarray:
    return floats(rng.normal(0, 0.02, size), code)


def random_bits(rng: np.random.Generator, size: int, code: int) -> np.ndarray:
    return rng.integers(0, np.iinfo(unsigned(code)).max, size, unsigned(code), endpoint=True)


def landmarks(code: int) -> np.ndarray:
    """Zero, one, the ends of the subnormals and of the finite values, infinity, NaNs with payloads; with both signs."""
    kind = reference.TYPES[code]
    least_normal, one = 1 << kind.mantissa, kind.exponent_bias << kind.mantissa
    quiet = kind.infinity | 1 << (kind.mantissa - 1)
    most = (1 << (kind.width - 1)) - 1
    around = [0, 1, least_normal - 1, least_normal, one - 1, one, one + 1, kind.infinity - 1, kind.infinity]
    positive = [*around, kind.infinity + 1, quiet, quiet + 5, most]
    return np.array([bits | sign for bits in positive for sign in (0, 1 << (kind.width - 1))], kind.unsigned)


def fine_tune(rng: np.random.Generator, size: int, code: int, change: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """Weights after a little training, and before."""
    values = rng.normal(0, 0.02, size)
    return floats(values + rng.normal(0, 0.02 * change, size), code), floats(values, code)


def encode(tensor: np.ndarray, base: Base, code: int, row_length: int, known: int | None = None, changes: tuple = ()) -> bytes:
    """Returns the body that every instruction set makes. The base has `known` values, all of its own unless given."""
    known = (0 if base is None else len(base)) if known is None else known
    bodies = set()
    for name in SETS:
        with using(name):
            bodies.add(_native.encode(tensor, base, code, row_length, known, 1, changes))
    (body,) = bodies
    return body


def decode(body: bytes, base: Base, code: int, values: int, row_length: int, known: int, threads: int = 1) -> np.ndarray:
    """Returns the tensor that every instruction set decodes. Raises ValueError if all of them refuse the body."""
    results: list[bytes | None] = []
    for name in SETS:
        tensor = np.full(values, 0x5A, unsigned(code))
        with using(name):
            try:
                _native.decode(body, (tensor, base, code, row_length, known, threads))
                results.append(tensor.tobytes())
            except ValueError:
                results.append(None)
    assert len(set(results)) == 1, "the instruction sets differ"
    if results[0] is None:
        raise ValueError("every instruction set refuses the body")
    return tensor


def assert_comes_back(
    tensor: np.ndarray,
    base: Base,
    code: int,
    row_length: int,
    known: int | None = None,
    changes: tuple = (),
    slow: bool = True,
) -> bytes:
    """Bit by bit, with every instruction set and, if `slow`, through the reference decoder. Returns the body."""
    body = encode(tensor, base, code, row_length, known, changes)
    shape = base, code, len(tensor), row_length, (0 if base is None else len(base)) if known is None else known
    for decoder in (decode, reference.decode_body)[: 1 + slow]:
        np.testing.assert_array_equal(decoder(body, *shape), tensor)
    return body


def outcome(body: bytes, base: Base, code: int, *sizes: int) -> bytes | None:
    """Returns the tensor of a body, or None if the codec refuses it. Fails if the reference decoder differs."""
    results: list[bytes | None] = []
    for decoder in (decode, reference.decode_body):
        try:
            results.append(decoder(body, base, code, *sizes).tobytes())
        except ValueError:
            results.append(None)
    assert results[0] == results[1]
    return results[0]
