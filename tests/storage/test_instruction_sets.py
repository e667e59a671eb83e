"""The C++ codec writes the same bytes and reads the same values with every instruction set."""

import numpy as np
import pytest
import reference_codec as reference
import torch
from codec_arrays import SETS, every_type, fine_tune, floats, landmarks, random_bits, using, weights

from hf_ext import _native

LOW_RANK = 4  # a flag of a body


def sprinkled(rng: np.random.Generator, tensor: np.ndarray, code: int) -> np.ndarray:
    """With a special value or random bits now and then: tails, escapes, and predictions that are not finite."""
    wild = np.where(
        rng.random(len(tensor)) < 0.5, random_bits(rng, len(tensor), code), rng.choice(landmarks(code), len(tensor))
    )
    return np.where(rng.random(len(tensor)) < 0.003, wild, tensor)


def encode(tensor, base, code, row_length, base_values, candidates=()) -> bytes:
    """The body that all instruction sets make."""
    bodies = []
    for name in SETS:
        with using(name):
            bodies.append(_native.encode(tensor, base, code, row_length, base_values, 1, candidates))
    assert len(set(bodies)) == 1
    return bodies[0]


def outcomes(body, base, code, values, row_length, base_values) -> list[bytes | None]:
    """What each instruction set makes of a body; None where it refuses."""
    results: list[bytes | None] = []
    for name in SETS:
        tensor = np.full(values, 0x5A, reference.TYPES[code].unsigned)
        with using(name):
            try:
                _native.decode(body, (tensor, base, code, row_length, base_values, 1))
                results.append(tensor.tobytes())
            except ValueError:
                results.append(None)
    return results


def assert_the_same(tensor, base, code, row_length, base_values, candidates=()) -> bytes:
    body = encode(tensor, base, code, row_length, base_values, candidates)
    assert outcomes(body, base, code, len(tensor), row_length, base_values) == [tensor.tobytes()] * len(SETS)
    return body


def low_rank(rng: np.random.Generator, code: int, rows: int, columns: int, rank: int, most: int, exponent: int):
    """A base, what factors of up to `most` make of it and a little noise, and the factors."""
    factors = [rng.integers(-most, most + 1, shape).astype(np.int32) for shape in ((rows, rank), (rank, columns))]
    values = rng.normal(0, 0.02, rows * columns)
    change = (factors[0].astype(float) @ factors[1]).ravel() * 2.0**-exponent
    noise = rng.normal(0, 1e-5, len(values))
    tensor, base = floats(values + change + noise, code), floats(values, code)
    return sprinkled(rng, tensor, code), sprinkled(rng, base, code), (*factors, exponent)


def test_the_best_instruction_set_is_the_default() -> None:
    assert SETS in (("scalar",), ("scalar", "avx2"), ("scalar", "avx2", "avx512"), ("scalar", "neon"))
    with using(SETS[0]):
        assert _native.use(SETS[-1]) == SETS[0]
        assert _native.use(SETS[0]) == SETS[-1]
    assert _native.use(SETS[-1]) == SETS[-1]


@pytest.mark.parametrize("name", ["sse", "", None, 1])
def test_an_unknown_instruction_set_is_refused(name) -> None:
    with pytest.raises(ValueError, match="no such instruction set"):
        _native.use(name)


@every_type
@pytest.mark.parametrize("size, row_length", [(1, 1), (63, 7), (16_384, 64), (20_011, 127), (270_017, 1000), (17_000, 20_000)])
def test_all_encode_a_fine_tune_to_the_same_bytes(code: int, size: int, row_length: int) -> None:
    rng = np.random.default_rng([code, size])
    for change in (1e-6, 1e-3, 0.3):
        tensor, base = fine_tune(rng, size, code, change)
        assert_the_same(tensor, base, code, row_length, size)
        assert_the_same(sprinkled(rng, tensor, code), sprinkled(rng, base, code), code, row_length, size)
    known = size // row_length // 2 * row_length
    assert_the_same(tensor, base, code, row_length, known)
    assert_the_same(tensor, None, code, row_length, 0)


@every_type
def test_all_encode_random_and_special_values_to_the_same_bytes(code: int) -> None:
    rng = np.random.default_rng(code)
    tensor, base = random_bits(rng, 20_000, code), random_bits(rng, 20_000, code)
    few = rng.choice(landmarks(code), 20_000)
    for first, second in ((tensor, base), (few, base), (few, rng.permutation(few)), (tensor, few)):
        assert_the_same(first, second, code, 100, 20_000)
        assert_the_same(first, None, code, 100, 0)


@every_type
def test_all_escape_rare_symbols_the_same(code: int) -> None:
    rng = np.random.default_rng(code)
    base = weights(rng, 40_000, code)
    steps = rng.choice([0, 3], len(base)).astype(base.dtype)
    rare = rng.choice([0, 1, 7, 30, 3000], len(base), p=[0.996, 0.001, 0.001, 0.001, 0.001]).astype(base.dtype)
    body = assert_the_same(base + steps + rare, base, code, 200, len(base))
    assert int.from_bytes(body[2:10], "little"), "it has tables of its own"


@every_type
@pytest.mark.parametrize("rows, columns", [(100, 300), (333, 97), (70, 4100)])
@pytest.mark.parametrize("rank, most, exponent", [(1, 5, 4), (9, 60, 12), (21, 30, 11), (5, 3000, 21), (3, 4_000_000, 40)])
def test_all_move_the_base_by_the_same_low_rank_change(
    code: int, rows: int, columns: int, rank: int, most: int, exponent: int
) -> None:
    rng = np.random.default_rng([code, rows, rank])
    tensor, base, factors = low_rank(rng, code, rows, columns, rank, most, exponent)
    body = assert_the_same(tensor, base, code, columns, len(tensor), (factors,))
    assert body[1] & LOW_RANK
    wide = rank * int(np.abs(factors[0]).max()) * int(np.abs(factors[1]).max()) >= 2**24
    assert wide == (most >= 3000), "both kinds of sums occur"


@every_type
def test_all_move_the_rows_that_changed_and_have_a_base(code: int) -> None:
    rng = np.random.default_rng(code)
    tensor, base, factors = low_rank(rng, code, 300, 200, 8, 60, 17)
    tensor[2000:9000] = base[2000:9000]
    known = 250 * 200
    factors = (factors[0][:250].copy(), *factors[1:])
    body = assert_the_same(tensor, base[:known].copy(), code, 200, known, (factors,))
    assert body[1] & LOW_RANK


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot flush denormals")
@every_type
def test_a_caller_that_flushes_denormals_gets_the_same(code: int) -> None:
    rng = np.random.default_rng(code)
    tensor, base, factors = low_rank(rng, code, 100, 200, 8, 60, 17)
    body = encode(tensor, base, code, 200, len(tensor), (factors,))
    torch.set_flush_denormal(True)
    try:
        assert outcomes(body, base, code, len(tensor), 200, len(tensor)) == [tensor.tobytes()] * len(SETS)
    finally:
        torch.set_flush_denormal(False)


@every_type
def test_all_refuse_the_same_damaged_bodies(code: int) -> None:
    rng = np.random.default_rng(code)
    tensor, base, factors = low_rank(rng, code, 90, 200, 4, 60, 17)
    refused = 0
    for candidates in ((), (factors,)):
        body = encode(tensor, base, code, 200, len(tensor), candidates)
        shape = (base, code, len(tensor), 200, len(tensor))
        places = [*range(20), *rng.integers(0, len(body), 60), len(body) - 1]
        damaged = [body[:at] + bytes([body[at] ^ 1 << rng.integers(8)]) + body[at + 1 :] for at in places]
        damaged += [body[:length] for length in rng.integers(0, len(body), 20)]
        damaged += [body + bytes(2), body + rng.bytes(600)]
        for each in damaged:
            first, *others = outcomes(each, *shape)
            assert others == [first] * len(others)
            refused += first is None
    assert refused > 80


@every_type
def test_a_block_that_is_cut_anywhere_is_refused(code: int) -> None:
    rng = np.random.default_rng(code)
    base = weights(rng, 16_384, code)
    tensor = sprinkled(rng, base + rng.integers(0, 40, 16_384).astype(base.dtype), code)
    body = encode(tensor, base, code, 128, len(tensor))
    side = int.from_bytes(body[10:14], "little")
    at = 14 + side
    entry = int.from_bytes(body[at : at + 4], "little")
    assert entry & 3 == 2, "it is an interleaved block"
    for missing in (2, 4, 30, 100, 300, 600, 1000, 3000):
        shorter = ((entry >> 2) - missing) << 2 | 2
        cut = body[:at] + shorter.to_bytes(4, "little") + body[at + 4 : len(body) - missing]
        assert outcomes(cut, base, code, len(tensor), 128, len(tensor)) == [None] * len(SETS)
