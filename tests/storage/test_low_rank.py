"""The codec approximates a low-rank change by integer factors and codes the rest of the change, without loss."""

import sys
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
import reference_codec as reference
import torch
from codec_arrays import (
    BF16,
    FP16,
    FP32,
    FP64,
    assert_comes_back,
    decode,
    encode,
    every_type,
    fine_tune,
    floats,
    landmarks,
    outcome,
    random_bits,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import python
from repeats import repeats
from test_codec import FLOAT_DTYPES, bits, trained

from hf_ext import _native, storage
from hf_ext.storage.delta import LEVELS, low_rank, weighted_fit
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.storage.subspace import leading

ROWS, COLUMNS = 96, 128
EXPONENTS = st.integers(-100, 100)


def factors(rng: np.random.Generator, rows: int, columns: int, rank: int, most: int, exponent: int) -> low_rank.Factors:
    left = rng.integers(-most, most, (rows, rank), np.int32, endpoint=True)
    right = rng.integers(-most, most, (rank, columns), np.int32, endpoint=True)
    return low_rank.Factors(left, right, exponent)


def predicted(
    rng: np.random.Generator, code: int, rank: int = 5, most: int = 60, exponent: int = 20
) -> tuple[np.ndarray, np.ndarray, low_rank.Factors]:
    """A tensor that factors make of its base, the base, and the factors."""
    base = weights(rng, ROWS * COLUMNS, code)
    change = factors(rng, ROWS, COLUMNS, rank, most, exponent)
    return moved(base, change, code), base, change


def moved(base: np.ndarray, change: low_rank.Factors, code: int) -> np.ndarray:
    """What the factors make of a base, by the reference."""
    sums = (change.rows.astype(np.int64) @ change.columns.astype(np.int64)).ravel()
    most = change.rows.shape[1] * int(np.abs(change.rows).max()) * int(np.abs(change.columns).max())
    values = np.ldexp(sums.astype("<f8"), -change.exponent)
    return reference.move(base, values, most >= 1 << 24 or code == FP64, reference.TYPES[code])


def assert_moved(
    tensor: np.ndarray, base: np.ndarray, code: int, columns: int, change: low_rank.Factors, slow: bool = True
) -> bytes:
    """The change is taken, and decoding gives the tensor."""
    body = assert_comes_back(tensor, base, code, columns, changes=(change,), slow=slow)
    assert body[1] & 4
    return body


@repeats("slow", False, True)
@every_type
@pytest.mark.parametrize("most, exponent", [(1, 9), (60, 20), (1 << 10, 27), (1 << 15, 38), (1 << 22, 55)])
def test_a_predicted_tensor_takes_little_more_than_the_factors(code, most, exponent, slow):
    tensor, base, change = predicted(np.random.default_rng(0), code, 5, most, exponent)
    assert (tensor != base).mean() > 0.5
    body = assert_moved(tensor, base, code, COLUMNS, change, slow or most == 60)
    planes = {FP64: 5}.get(code, 0)  # low bytes that travel as they are
    assert len(body) - planes * len(tensor) < 5 * (ROWS + COLUMNS) * (np.log2(most) + 3) / 8 + 0.1 * len(tensor)


@repeats("examples", 15, 60)
@every_type
def test_any_base_is_moved_alike_by_both_decoders(code, examples):
    """Everything that a base may hold, NaNs and subnormals among it, and factors of every size."""

    @settings(max_examples=examples, deadline=None)
    @given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 150), st.integers(1, 9), st.integers(0, 23), EXPONENTS)
    def is_moved_alike(seed, rows, columns, rank, magnitude, exponent):
        rng = np.random.default_rng(seed)
        change = factors(rng, rows, columns, rank, 2**magnitude, exponent)
        size = rows * columns
        base = np.where(rng.random(size) < 0.3, rng.choice(landmarks(code), size), random_bits(rng, size, code))
        tensor = moved(base, change, code)
        tensor[rng.random(size) < 0.1] ^= 1
        assert_comes_back(tensor, base, code, columns, changes=(change,))

    is_moved_alike()


# Bytes: rows up to 127, columns up to 63, sums up to 2^15 - 1. Words: factors up to 2^15 - 1, sums up to 2^31 - 1.
@repeats("slow", False, True)
@every_type
@pytest.mark.parametrize(
    "rank, row, column",
    [(1, 127, 63), (1, 128, 63), (1, 127, 64), (4, 127, 63), (5, 127, 63), (7, 93, 50), (2, 127, 129)]
    + [(1, 32_767, 32_767), (2, 32_767, 32_767), (3, 32_767, 32_767), (1, 32_768, 1), (1, 1, 32_768), (5, 3000, 900)],
)
def test_sums_are_exact_at_the_limits_of_each_size_of_factors(code, rank, row, column, slow):
    rng = np.random.default_rng([code, rank, row])
    rows, columns = 97, 141
    left = rng.choice([-row, row], (rows, rank)).astype(np.int32)
    right = rng.choice([-column, column], (rank, columns)).astype(np.int32)
    left[0], right[:, 0], right[:, 1] = row, column, -column  # the largest sum and the smallest
    change = low_rank.Factors(left, right, (rank * row * column).bit_length() + 4)
    base = weights(rng, rows * columns, code)
    base[rng.random(len(base)) < 0.02] = rng.choice(landmarks(code))
    tensor = moved(base, change, code)
    assert_moved(tensor, base, code, columns, change, slow)


@every_type
@pytest.mark.parametrize("most", [3, 300])
@pytest.mark.parametrize("rows, columns", [(300, 1000), (4100, 65), (65, 4100)])
def test_blocks_that_begin_and_end_within_a_row_are_moved(code, rows, columns, most):
    rng = np.random.default_rng([rows, code, most])
    base = weights(rng, rows * columns, code)
    change = factors(rng, rows, columns, 3, most, 2 * most.bit_length() + 5)
    tensor = moved(base, change, code)
    tensor[5 * columns : 8 * columns] = base[5 * columns : 8 * columns]  # untouched rows have no factors
    assert assert_moved(tensor, base, code, columns, change, slow=False)[1] & 1


@every_type
@pytest.mark.parametrize("few", [False, True])
def test_factors_are_read_without_the_base(code, few):
    rng = np.random.default_rng(code)
    tensor, base, change = predicted(rng, code)
    if not few:
        tensor[rng.random(len(tensor)) < 0.7] ^= 1
    tensor[5 * COLUMNS : 8 * COLUMNS] = base[5 * COLUMNS : 8 * COLUMNS]
    body = encode(tensor, base, code, COLUMNS, changes=(change,))
    rows, columns, exponent = _native.factors(body, code, len(tensor), COLUMNS, len(tensor))
    left = np.frombuffer(rows, np.int32).reshape(ROWS, -1)
    assert not left[5:8].any() and np.array_equal(np.delete(left, range(5, 8), 0), np.delete(change.rows, range(5, 8), 0))
    assert columns == change.columns.tobytes() and exponent == change.exponent


def test_a_body_may_have_no_factors(code=FP32):
    tensor, base = fine_tune(np.random.default_rng(0), ROWS * COLUMNS, code)
    body = encode(tensor, base, code, COLUMNS)
    assert _native.factors(body, code, len(base), COLUMNS, len(base)) is None


@pytest.mark.parametrize("values", [-1, 0, COLUMNS, ROWS * COLUMNS * 1000, 1 << 60])
def test_factors_of_a_forged_size_are_errors(values):
    tensor, base, change = predicted(np.random.default_rng(0), FP32)
    body = encode(tensor, base, FP32, COLUMNS, changes=(change,))
    with pytest.raises((ValueError, TypeError)):
        _native.factors(body, FP32, values, COLUMNS, values)
    for end in (0, 1, 5, 30, 100):
        if end > 1:
            with pytest.raises(ValueError):
                _native.factors(body[:end], FP32, len(base), COLUMNS, len(base))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda change: None, TypeError),
        (lambda change: change._replace(rows=change.rows[1:]), TypeError),
        (lambda change: change._replace(rows=np.tile(change.rows, (3, 1))), TypeError),
        (lambda change: change._replace(columns=change.columns[:, 1:].copy()), TypeError),
        (lambda change: change._replace(exponent=101), ValueError),
        (lambda change: change._replace(exponent=-101), ValueError),
        (lambda change: change._replace(rows=change.rows << 24, columns=change.columns << 24), ValueError),
    ],
)
def test_factors_that_do_not_fit_or_are_not_exact_are_refused(wrong, error):
    tensor, base, change = predicted(np.random.default_rng(0), FP32)
    with pytest.raises(error):
        encode(tensor, base, FP32, COLUMNS, changes=(wrong(change),))


@pytest.mark.parametrize(("code", "most"), [(FP32, 2), (FP16, 200), (BF16, 40_000), (FP64, 200), (FP32, 40_000)])
@repeats("rank", 1024, 1023)
def test_a_thousand_components_are_summed(code, rank, most):
    rng = np.random.default_rng([rank, most])
    rows, columns = 310, 420
    change = factors(rng, rows, columns, rank, most, 2 * most.bit_length() + 7)
    change.columns[7:-3] = 0  # zeros take one bit
    change.rows[:, 7:-3] = 0
    base = weights(rng, rows * columns, code)
    tensor = moved(base, change, code)
    assert_moved(tensor, base, code, columns, change, slow=False)


@every_type
def test_untouched_rows_have_no_factors(code):
    rng = np.random.default_rng(1)
    tensor, base, change = predicted(rng, code, 3, 50, 18)
    tensor[: 40 * COLUMNS] = base[: 40 * COLUMNS]
    whole = np.concatenate([tensor, weights(rng, 7 * COLUMNS + 3, code)])
    assert assert_moved(whole, base, code, COLUMNS, change)[1] & 1


def test_a_body_may_have_factors_for_no_row_at_all():
    rank, length = 2, 64
    factor_lists = "00000" + ("00000" + "0" * length)  # of a component: parameter and numbers for no rows, then for the columns
    bits = "11" + f"{rank:016b}"[::-1] + "0" * 16 + rank * factor_lists  # all rows untouched, the rank, an exponent of 0
    side = int(bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")
    body = bytes([0, 1 | 4]) + bytes(8) + len(side).to_bytes(4, "little") + side
    base = random_bits(np.random.default_rng(0), 2 * length, BF16)
    for decoder in (decode, reference.decode_body):
        np.testing.assert_array_equal(decoder(body, base, BF16, len(base), length, len(base)), base)


def test_the_cheapest_candidate_is_taken_or_none():
    rng = np.random.default_rng(2)
    tensor, base = fine_tune(rng, ROWS * COLUMNS, BF16)
    useless = factors(rng, ROWS, COLUMNS, 4, 100, 20)
    plain = encode(tensor, base, BF16, COLUMNS)
    assert encode(tensor, base, BF16, COLUMNS, changes=(useless,)) == plain and not plain[1] & 4
    good = factors(rng, ROWS, COLUMNS, 2, 100, 22)
    target = moved(base, good, BF16)
    best = encode(target, base, BF16, COLUMNS, changes=(good,))
    assert encode(target, base, BF16, COLUMNS, changes=(useless, good)) == best


@every_type
def test_sums_do_not_depend_on_how_the_caller_rounds(code):
    rng = np.random.default_rng(3)
    base = rng.choice(landmarks(code), 64 * 64)  # subnormals among them
    change = factors(rng, 64, 64, 2, 3, 100)
    tensor = np.where(rng.random(len(base)) < 0.01, base, moved(base, change, code))
    body = encode(tensor, base, code, 64, changes=(change,))
    before = torch.set_flush_denormal(True)
    try:
        np.testing.assert_array_equal(decode(body, base, code, 64 * 64, 64, 64 * 64), tensor)
        assert encode(tensor, base, code, 64, changes=(change,)) == body
    finally:
        torch.set_flush_denormal(False)
    assert before  # else this machine cannot flush, and nothing was tested


def test_a_forged_rank_asks_for_no_memory():
    tensor, base, change = predicted(np.random.default_rng(6), BF16, 1, 50, 17)
    body = bytearray(assert_moved(tensor, base, BF16, COLUMNS, change))

    for place in range(14, len(body)):
        forged = (bytes(body[:place]) + b"\xff\xff" + bytes(body[place + 2 :]))[: len(body)]
        with suppress(ValueError):
            decode(forged, base, BF16, len(base), COLUMNS, len(base))
        if place % 32 == 0:  # the reference takes its time
            outcome(forged, base, BF16, len(base), COLUMNS, len(base))


# ---- from a change to factors ----------------------------------------------------------------------------------------


def low_rank_pair(dtype: torch.dtype, rank: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A base and what a low-rank change and some noise make of it."""
    draw = torch.Generator().manual_seed(7)
    base = (torch.randn(192, 256, generator=draw) * 0.05).to(dtype)
    change = torch.randn(192, rank, generator=draw) @ torch.randn(rank, 256, generator=draw) * 2e-3
    return (base.double() + change + noise * torch.randn(192, 256, generator=draw)).to(dtype), base


def change_of(tensor: torch.Tensor, base: torch.Tensor) -> low_rank.Change:
    raw, twin = RawTensor.from_torch(tensor), RawTensor.from_torch(base)
    return low_rank.Change(raw.data, twin.data, raw.dtype, tensor.shape[1])


def fine_grid() -> low_rank.Grid:
    return low_rank.Grid(np.array([1e-20]), np.array([1.0]))


def test_the_decomposition_finds_the_leading_components():
    tensor, base = low_rank_pair(torch.float32, 6, 1e-5)
    start = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
    change = change_of(tensor, base)
    components = leading(change.product, start, 2)
    exact = torch.linalg.svd(tensor - base)
    np.testing.assert_allclose(components.values[:6], exact.S[:6], rtol=1e-4)
    assert np.square(components.values[:12]).sum() == pytest.approx(exact.S[:12].square().sum().item(), rel=1e-4)
    assert np.count_nonzero(change.energies) == 192 and change.energy == pytest.approx(exact.S.square().sum().item(), rel=1e-5)
    for vectors in (components.left.T[:12], components.right[:12]):
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(12), atol=1e-4, rtol=0)
    left, right = components.factors(6)
    torch.testing.assert_close(left @ right, tensor - base, atol=6e-5, rtol=0)


def test_the_rank_is_that_of_the_change_where_the_rest_is_noise():
    tensor, base = low_rank_pair(torch.float32, 6, 1e-4)
    noise = torch.randn(192, 256, generator=torch.Generator().manual_seed(8))
    start = torch.randn(256, 72, generator=torch.Generator().manual_seed(1))
    for change, rank in ((change_of(tensor, base), 6), (change_of(noise, torch.zeros_like(noise)), 0)):
        components = leading(change.product, start, 2)
        assert low_rank.best_rank(components.values, change.energy, change.shape, fine_grid()) == rank


@pytest.mark.parametrize("rank", [0, 1, 6, 14, 40])
def test_a_sample_of_the_rows_shows_about_the_rank(rank):
    """The first look is at 64 rows, the next ones at more. Some more vectors than pay are returned."""
    draw = torch.Generator().manual_seed(9)
    tensor = torch.randn(3000, rank, generator=draw) @ torch.randn(rank, 256, generator=draw) * 2e-3
    tensor += torch.randn(3000, 256, generator=draw) * 1e-3
    start = low_rank.glance(change_of(tensor, torch.zeros_like(tensor)), fine_grid(), low_rank.MAX_RANK)
    assert (start is None) if rank == 0 else rank < start.shape[1] <= rank + 10


def test_no_more_than_a_sample_is_read_where_nothing_pays(monkeypatch):
    """Changes of single values by one step, as the last steps of a training make them, and changes without structure."""

    def bands(change: low_rank.Change):
        raise AssertionError("all rows were read")

    draw = torch.Generator().manual_seed(11)
    base = (torch.randn(2048, 256, generator=draw) * 0.05).bfloat16()
    few = torch.where(torch.rand(2048, 256, generator=draw) < 0.02, (base.view(torch.int16) + 1).view(torch.bfloat16), base)
    white = (base.float() + torch.randn(2048, 256, generator=draw) * 1e-3).bfloat16()
    monkeypatch.setattr(low_rank.Change, "bands", bands)
    for tensor in (few, white, base):
        raw, twin = RawTensor.from_torch(tensor), RawTensor.from_torch(base)
        assert low_rank.changes(raw.data, twin.data, "BF16", 256, 2) == []


@every_type
@pytest.mark.parametrize("by_columns", [False, True])
def test_the_fit_of_one_side_solves_weighted_least_squares(code, by_columns):
    """As many steps as there are components find the solution. The weight grows by 4 with each exponent below `top`."""
    draw, shape, most = np.random.default_rng(16), (67, 29), 3
    exponents = draw.integers(-3, 3, shape)
    numbers, others = (draw.choice([-1.5, -1.0, 1.0, 1.25], shape) * 2.0**powers for powers in (exponents, exponents - 2))
    weights = 4.0 ** np.clip(1 - exponents, 0, most)
    fixed = draw.normal(size=(shape[0] if by_columns else shape[1], 3)).astype(np.float32)
    expected = [
        np.linalg.lstsq(fixed * np.sqrt(row)[:, None], change * np.sqrt(row), rcond=None)[0]
        for row, change in zip(*(matrix.T if by_columns else matrix for matrix in (weights, numbers - others)))
    ]
    inverse = np.linalg.inv(fixed.T @ fixed)
    top = 1 - {FP32: 23, FP16: 10, BF16: 7, FP64: 52}[code]
    tensor, base = (floats(matrix.ravel(), code) for matrix in (numbers, others))
    for instructions, threads in product(_native.instruction_sets(), (1, 2)):
        own, before = np.zeros((len(expected), 3), np.float32), _native.use(instructions)
        try:
            _native.fit_rows(tensor, base, code, shape[1], top, most, by_columns, fixed, inverse, own, 3, threads)
        finally:
            _native.use(before)
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-3)


def test_sides_of_the_wrong_size_are_refused():
    matrix, side = np.zeros((4, 6), np.uint16), np.zeros((6, 2), np.float32)
    for sizes in ((5, 2, 4), (6, 3, 4), (6, 2, 5), (0, 2, 4)):
        arrays = (np.zeros((size, 2), np.float32) for size in sizes)
        with pytest.raises(TypeError, match="wrong sizes"):
            _native.fit_rows(matrix, matrix, BF16, 6, 0, 6, False, *arrays, 1)
    with pytest.raises(TypeError, match="wrong type or size"):
        _native.fit_rows(matrix, matrix[1:], BF16, 6, 0, 6, False, side, side[:2], side[:4], 1)
    with pytest.raises(TypeError, match="impossible"):
        _native.fit_rows(matrix, matrix, BF16, 6, 0, 61, False, side, side[:2], side[:4], 1)


@pytest.mark.parametrize("rank", [1, 5, 24])
def test_the_fit_finds_factors_that_rounding_hides(rank):
    """The exact values are known to the rounding of a bf16, which is coarser for large values."""
    draw = torch.Generator().manual_seed(14)
    base = (torch.randn(400, 300, generator=draw) * 0.05).bfloat16()
    exact = torch.randn(400, rank, generator=draw) @ torch.randn(rank, 300, generator=draw) * 1e-3
    change = change_of((base.float() + exact).bfloat16(), base)
    part = change.rows(slice(None))[0]
    left, values, right = torch.linalg.svd(part, full_matrices=False)
    start = left[:, :rank] * values[:rank].sqrt(), right[:rank] * values[:rank].sqrt()[:, None]
    before = float((start[0] @ start[1] - exact).square().mean())
    left, right = weighted_fit.fit(change, *start, spacings=np.arange(-17, -10), level=2)
    assert float((left @ right - exact).square().mean()) < 0.7 * before


@pytest.mark.parametrize("rank, period", [(32, 32), (64, 48), (64, 64)])
def test_the_fit_suits_columns_that_differ_with_a_period(rank, period):
    """The columns of a projection of attention heads do, for instance."""
    draw = torch.Generator().manual_seed(17)
    base = (torch.randn(768, 768, generator=draw) * 0.03).bfloat16()
    exact = torch.randn(768, rank, generator=draw) @ torch.randn(rank, 768, generator=draw) * 2e-4
    exact[:, torch.arange(768) % period < 16] *= 0.1
    tensor = (base.float() + exact).bfloat16()
    assert len(storage.encode(tensor, base)) < 0.4 * len(storage.encode(tensor, base, level=1))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_part_that_does_not_pay_is_left_out_of_a_large_tensor(dtype):
    """One row holds nearly all the energy of the change. The candidates are compared on a sample of the rows."""
    tensor, base = trained(dtype, (2048, 128))
    tensor[1000] += (torch.randn(128, generator=torch.Generator().manual_seed(15)) * 3).to(dtype)
    assert size_of(tensor, base) <= 1.001


def tall_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """An embedding and a merged LoRA of rank 8 of it."""
    draw = torch.Generator().manual_seed(12)
    base = (torch.randn(65536, 128, generator=draw) * 0.05).bfloat16()
    change = torch.randn(65536, 8, generator=draw) @ torch.randn(8, 128, generator=draw) * 1e-3
    return base + change.bfloat16(), base


def test_a_matrix_of_many_rows_has_a_low_rank_change():
    tensor, base = tall_pair()
    whole = storage.encode(tensor, base)
    assert len(whole) < 0.7 * len(storage.encode(tensor, base, level=1)) and bits(storage.decode(whole, base)) == bits(tensor)


def test_the_rows_that_a_fit_samples_may_all_be_unchanged():
    tensor, base = tall_pair()
    tensor[::2] = base[::2]
    assert len(storage.encode(tensor, base)) < 0.7 * len(storage.encode(tensor, base, level=1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the memory from /proc")
def test_memory_for_a_matrix_of_many_rows_is_bounded():
    """The change of the whole matrix would take 256 MB as float32."""
    script = """
import re
import torch
from hf_ext.storage.delta import low_rank

def memory(what):
    with open("/proc/self/status") as status:
        return int(re.search(what + r":\\s+(\\d+) kB", status.read())[1]) / 1000

draw = torch.Generator().manual_seed(12)
base = torch.empty(1 << 19, 128, dtype=torch.bfloat16)
tensor, columns = torch.empty_like(base), torch.randn(2, 128, generator=draw) * 2e-4
for band in range(0, len(base), 1 << 14):
    part = slice(band, band + (1 << 14))
    base[part] = torch.randn(1 << 14, 128, generator=draw) * 0.05
    tensor[part] = base[part] + (torch.randn(1 << 14, 2, generator=draw) @ columns).bfloat16()
data, prediction = (part.view(torch.uint8).reshape(-1).numpy() for part in (tensor, base))
low_rank.changes(data[: 1 << 18], prediction[: 1 << 18], "BF16", 128, 2)
before = memory("VmRSS")
assert len(low_rank.changes(data, prediction, "BF16", 128, 2)) == 1
print(memory("VmHWM") - before)
"""
    run = python("-c", script, hosts=False)
    assert float(run.stdout) < 160, run.stderr


def size_of(tensor: torch.Tensor, base: torch.Tensor, **options) -> float:
    """Returns the size of a payload as a part of that at level 1, after a check that it decodes to the tensor."""
    payload = storage.encode(tensor, base, **options)
    assert bits(storage.decode(payload, base)) == bits(tensor)
    return len(payload) / len(storage.encode(tensor, base, level=1))


every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("noise", [0.0, 2e-4])
def test_payloads_are_smaller_and_come_back(dtype, noise):
    tensor, base = low_rank_pair(dtype, 4, noise)
    plain, good, best = (size_of(tensor, base, level=level) for level in LEVELS)
    assert plain == 1 and good < (0.93 if noise or dtype == torch.float64 else 0.6) and best < 1.02 * good


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_merged_adapter_leaves_few_values_to_correct(dtype):
    """A merge rounds twice: the change, then the sum."""
    draw = torch.Generator().manual_seed(9)
    base = (torch.randn(256, 256, generator=draw) * 0.05).to(dtype)
    change = torch.randn(256, 3, generator=draw) @ torch.randn(3, 256, generator=draw) * 1e-3
    merged = base + change.to(dtype)
    assert size_of(merged, base) < 0.2


@every_dtype
def test_a_change_without_structure_is_left_as_it_is(dtype):
    tensor, base = trained(dtype, (150, 200))
    assert storage.encode(tensor, base) == storage.encode(tensor, base, level=1)


@every_dtype
def test_a_change_below_the_types_resolution_is_left(dtype):
    for level, exponent in product(LEVELS, range(-18, -1)):
        tensor, base = trained(dtype, (96, 128), change=10.0**exponent)
        assert size_of(tensor, base, level=level) <= 1


@every_dtype
def test_special_values_do_no_harm(dtype):
    tensor, base = low_rank_pair(dtype, 4, 0.0)
    tensor[3, 5], tensor[7, 7], base[9, 9], base[100, 3] = float("nan"), float("inf"), float("-inf"), float("nan")
    assert size_of(tensor, base) < 1


def test_only_rows_that_changed_are_decomposed():
    tensor, base = low_rank_pair(torch.bfloat16, 4, 0.0)
    tensor[64:128] = base[64:128]
    assert size_of(tensor, base) < 0.8


def test_an_unknown_level_is_refused():
    tensor, base = low_rank_pair(torch.float32, 4, 0.0)
    with pytest.raises(ValueError, match="level"):
        storage.encode(tensor, base, level=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_process_changes_nothing(dtype):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(192, 256, generator=generator).bfloat16()
    left, right = torch.randn(192, 4, generator=generator), torch.randn(4, 256, generator=generator)
    tuned = (base.float() + left @ right / 64).bfloat16()
    expected = storage.encode(tuned, base, level=2)
    try:
        torch.set_default_dtype(dtype)
        assert storage.encode(tuned, base, level=2) == expected
    finally:
        torch.set_default_dtype(torch.float32)
