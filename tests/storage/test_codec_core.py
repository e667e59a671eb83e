"""With every instruction set the C++ codec writes the same bytes, keeps every bit, agrees with the reference decoder about any
body, and survives damaged ones."""

import struct

import numpy as np
import pytest
import reference_codec as reference
from codec_arrays import (
    BF16,
    FP16,
    FP32,
    FP64,
    NAMES,
    SETS,
    Base,
    assert_comes_back,
    decode,
    encode,
    every_type,
    fine_tune,
    floats,
    landmarks,
    outcome,
    random_bits,
    unsigned,
    using,
)
from hypothesis import strategies as st
from repeats import explores, repeats

from hf_ext import _native

HEADER = 14


# ---- round trips -----------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> tuple[np.ndarray, Base, int, int, int]:
    """A small tensor of any content, its base, and the other arguments of `encode`."""
    code = draw(st.sampled_from(list(NAMES)))
    row_length = draw(st.one_of(st.integers(1, 20), st.integers(1, 300)))
    size = draw(st.integers(0, 20)) * row_length % 300 + draw(st.integers(0, row_length)) % 40
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = 2.0 ** draw(st.one_of(st.integers(-8, 0), st.integers(-1070, 1000)))

    def content(kind: str) -> np.ndarray:
        if kind == "mixed":
            choice = rng.choice(4, size, p=[0.1, 0.1, 0.7, 0.1])
            return np.choose(choice, [content(kind) for kind in ("bits", "landmarks", "normal", "constant")])
        if kind == "bits":
            return random_bits(rng, size, code)
        if kind == "landmarks":
            return rng.choice(landmarks(code), size)
        if kind == "constant":
            return np.full(size, rng.choice(landmarks(code)))
        return floats(rng.normal(0, scale, size), code)

    tensor = content(draw(st.sampled_from(["bits", "landmarks", "constant", "normal", "mixed"])))
    relation = draw(st.sampled_from(["none", "equal", "some rows", "steps", "unrelated"]))
    if relation == "none":
        return tensor, None, code, row_length, 0
    base = content("mixed") if relation == "unrelated" else tensor.copy()
    if relation == "steps":
        base += rng.integers(-(2 ** draw(st.integers(0, 15))), 2 ** draw(st.integers(0, 15)), size).astype(base.dtype)
    elif relation == "some rows":
        changed = rng.random(size // row_length + 1) < 0.5
        base = np.where(changed[np.arange(size) // row_length], content("mixed"), base)
    rows = draw(st.one_of(st.just(None), st.integers(0, size // row_length)))
    return tensor, base, code, row_length, size if rows is None else rows * row_length


@explores(100, 600, tensors())
def test_any_bits_come_back_with_any_base(example: tuple[np.ndarray, Base, int, int, int]) -> None:
    assert_comes_back(*example)


ROW_LENGTHS = {size: (1, 16, 64, 1000) for size in (0, 1, 2, 63, 64, 65, 127, 128, 129)}
LONGER = {18_000: (1, 2, 7, 64, 4097, 50_000, 10**6)}


@repeats("row_lengths", ROW_LENGTHS | {18_000: (7, 10**6)}, LONGER, ids=["few", "many"])
@every_type
def test_tensors_and_rows_of_any_length_come_back(code: int, row_lengths: dict[int, tuple[int, ...]]) -> None:
    for size in row_lengths:
        tensor, base = fine_tune(np.random.default_rng(size), size, code)
        for row_length in row_lengths[size]:
            assert_comes_back(tensor, base, code, row_length)
            assert_comes_back(tensor, None, code, row_length)


@repeats("slow", False, True)
@every_type
def test_blocks_come_back_with_tails_and_escapes(code: int, slow: bool) -> None:
    for size in (1023, 16_383, 16_384, 18_001):  # the second is the largest block of one lane, for which the reference is slow
        rng = np.random.default_rng(size)
        tensor, base = fine_tune(rng, size, code)
        wild = np.where(rng.random(size) < 0.5, random_bits(rng, size, code), rng.choice(landmarks(code), size))
        tensor = np.where(rng.random(size) < 0.01, wild, tensor)
        for first, second in ((tensor, base), (base, tensor), (tensor, None)):
            assert_comes_back(first, second, code, 100, slow=slow or size != 16_383)


@repeats("slow", False, True)
@every_type
def test_a_tensor_of_several_blocks_comes_back(code: int, slow: bool) -> None:
    tensor, base = fine_tune(np.random.default_rng(code), 262_144 + 20_000, code)
    assert_comes_back(tensor, base, code, 1000, slow=slow)
    assert_comes_back(tensor, base, code, 700, 700 * 150, slow=slow or code == BF16)
    tensor, base = fine_tune(np.random.default_rng(code), 1_500_000, code)
    for base_values in (1_500_000, 4096 * 100, 0):
        assert_comes_back(tensor, base, code, 4096, base_values, slow=False)


@repeats("slow", False, True)
@every_type
def test_all_scales_of_floats_are_lossless(code: int, slow: bool) -> None:
    rng = np.random.default_rng(code)
    by_row, by_column = 2.0 ** np.linspace(-1074, 1023, 128), 2.0 ** np.linspace(-140, 120, 150)
    for rows, columns in ((by_row, np.ones(150)), (np.ones(128), by_column), (by_row, by_column)):
        with np.errstate(over="ignore"):
            values = rng.normal(0, 1, (128, 150)) * rows[:, None] * columns
        tensor = floats(values.ravel(), code)
        near = floats(rng.normal(1, 1e-3, values.size) * values.ravel(), code)
        for base in (None, near, np.zeros_like(tensor)):
            assert_comes_back(tensor, base, code, 150, slow=slow or base is near and columns is by_column)


@repeats("slow", False, True)
@every_type
def test_constant_tensors_come_back(code: int, slow: bool) -> None:
    for value in landmarks(code)[::5]:
        tensor = np.full(17_000, value)
        assert_comes_back(tensor, None, code, 100, slow=slow)
        assert_comes_back(tensor, floats(np.ones(17_000), code), code, 100, slow=slow or value == landmarks(code)[0])


# ---- sizes -----------------------------------------------------------------------------------------------------------


@every_type
def test_a_tensor_equal_to_its_base_costs_at_most_a_bit_a_row(code: int) -> None:
    tensor = random_bits(np.random.default_rng(code), 100_000, code)
    size = len(assert_comes_back(tensor, tensor.copy(), code, 100)) - HEADER
    assert size == (1000 // 8 if code in (FP32, FP64) else 5 + 4)


@every_type
def test_rows_that_did_not_change_cost_a_bit_each(code: int) -> None:
    rng = np.random.default_rng(code)
    tensor, base = fine_tune(rng, 200_000, code)
    changed = np.repeat(rng.random(2000) < 0.1, 100)
    some = assert_comes_back(np.where(changed, tensor, base), base, code, 100)
    only = encode(tensor[changed], base[changed], code, 100)
    assert len(some) <= len(only) + 2000 // 8


@pytest.mark.parametrize("code, share", [(FP32, 0.70), (FP16, 0.55), (BF16, 0.36), (FP64, 0.82)])
def test_a_fine_tune_shrinks(code: int, share: float) -> None:
    tensor, base = fine_tune(np.random.default_rng(code), 1 << 18, code)
    assert len(encode(tensor, base, code, 512)) < share * tensor.nbytes


@pytest.mark.parametrize("code", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("outlier", [1e20, 3e38, 2.0**87])
def test_one_huge_value_does_not_spoil_the_rest(code: int, outlier: float) -> None:
    tensor, base = fine_tune(np.random.default_rng(code), 1 << 17, code)
    for twin in (base, None):
        usual = len(encode(tensor, twin, code, 512))
        spoilt = tensor.copy()
        spoilt[70_000] = floats(np.array([outlier]), code)[0]
        assert len(encode(spoilt, twin, code, 512)) < 1.02 * usual


@every_type
def test_the_bytes_do_not_depend_on_the_number_of_threads(code: int) -> None:
    tensor, base = fine_tune(np.random.default_rng(code), 1_200_000, code)
    for base_values in (1_200_000, 600_000, 0):
        one, two, many = (_native.encode(tensor, base, code, 1000, base_values, threads) for threads in (1, 2, 7))
        assert one == two == many
        np.testing.assert_array_equal(decode(one, base, code, len(tensor), 1000, base_values, threads=2), tensor)


def test_the_default_tables_can_code_every_symbol_or_escape_it() -> None:
    tables = np.frombuffer(_native.default_tables()[0], np.uint16).reshape(reference.TABLES, reference.SYMBOLS)
    assert (tables.sum(axis=1) == 2048).all()
    assert (tables[:, reference.ESCAPE] > 0).all()
    assert (tables[:, 63] == 0).all()


# ---- instruction sets ------------------------------------------------------------------------------------------------


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


# ---- damaged bodies --------------------------------------------------------------------------------------------------


def damaged(code: int) -> list[tuple[bytes, tuple]]:
    """Bodies that together use every feature, with the other arguments of `decode`."""
    rng = np.random.default_rng(code)
    tensor, base = fine_tune(rng, 400, code)
    tensor[::37] = random_bits(rng, len(tensor[::37]), code)
    tensor[100:140] = base[100:140]
    long_base = floats(rng.normal(0, 0.02, 17_000), code)
    long = long_base + rng.choice([0, 3], 17_000).astype(long_base.dtype)
    long[:600] = long_base[:600]
    verbatim = random_bits(rng, 60, code)
    cases = [
        (tensor, base, 4, 400),
        (tensor, base, 25, 200),
        (tensor, None, 20, 0),
        (verbatim, None, 20, 0),
        (long, long_base, 170, 17_000),
    ]
    bodies = [encode(tensor, base, code, length, known) for tensor, base, length, known in cases]
    headers = [struct.unpack_from("<BBQI", body) for body in bodies]
    assert headers[0][1] == 3 and headers[-1][2], "flags and tables of the tensor's own must occur"
    return [
        (body, (base, code, len(tensor), length, known))
        for body, (tensor, base, length, known) in zip(bodies, cases, strict=True)
    ]


@repeats("stride", 11, 1)
@every_type
def test_a_flipped_byte_matches_the_reference(code: int, stride: int) -> None:
    rng = np.random.default_rng(code)
    refused = 0
    for body, shape in damaged(code):
        side = struct.unpack_from("<I", body, 10)[0]
        in_blocks = 3 if len(body) > 2000 else 60  # in a long body the reference is slow
        places = [*rng.integers(0, HEADER + side + 4, 60), *rng.integers(HEADER + side, len(body), in_blocks)]
        for at in [*range(HEADER + 8), *places, len(body) - 1][::stride]:
            flipped = bytearray(body)
            flipped[at] ^= 1 << rng.integers(8) if rng.random() < 0.5 else rng.integers(1, 256)
            refused += outcome(bytes(flipped), *shape) is None
    assert refused > 100 / stride


@every_type
def test_every_truncation_and_every_extension_is_refused(code: int) -> None:
    rng = np.random.default_rng(code)
    for body, shape in damaged(code):
        for length in {*range(min(len(body), 200)), *rng.integers(0, len(body), 100).tolist(), len(body) - 1}:
            with pytest.raises(ValueError):
                decode(body[:length], *shape)
        for tail in (b"\0", bytes(2), bytes(1000)):
            assert outcome(body + tail, *shape) is None


@every_type
def test_a_block_that_is_cut_anywhere_is_refused(code: int) -> None:
    rng = np.random.default_rng(code)
    base = floats(rng.normal(0, 0.02, 16_384), code)
    tensor = base + rng.integers(0, 40, 16_384).astype(base.dtype)
    tensor[::300] = random_bits(rng, len(tensor[::300]), code)
    body = encode(tensor, base, code, 128)
    at = HEADER + struct.unpack_from("<I", body, 10)[0]
    (entry,) = struct.unpack_from("<I", body, at)
    assert entry & 3 == 2, "it is an interleaved block"
    for missing in (2, 4, 30, 100, 300, 600, 1000, 3000):
        shorter = ((entry >> 2) - missing) << 2 | 2
        cut = body[:at] + struct.pack("<I", shorter) + body[at + 4 : len(body) - missing]
        with pytest.raises(ValueError):
            decode(cut, base, code, len(tensor), 128, len(tensor))


@repeats("rounds", 4, 30)
@every_type
def test_garbage_is_refused_or_decoded_as_the_reference_does(code: int, rounds: int) -> None:
    rng = np.random.default_rng(code)
    for body, shape in damaged(code)[:4]:
        for _ in range(rounds):
            begin, end = sorted(rng.integers(0, len(body), 2))
            garbage = body[:begin] + rng.bytes(end - begin) + body[end:]
            outcome(garbage, *shape)
    for length in (0, 1, 13, 14, 15, 100, 5000):
        assert outcome(rng.bytes(length), None, code, 50, 10, 0) is None


@every_type
def test_hostile_headers_are_refused(code: int) -> None:
    planes = reference.TYPES[code].planes
    for body, shape in damaged(code):
        plane, flags, own_tables, side = struct.unpack_from("<BBQI", body)
        headers = [(other, flags, own_tables, side) for other in range(256) if other not in planes]
        headers += [(plane, other, own_tables, side) for other in (4, 7, 128, 255)]
        headers += [(plane, flags, own_tables | 1 << bit, side) for bit in range(33, 64)]
        headers.append((plane, flags, 2**64 - 1, side))
        sizes = (2**32 - 1, 2**31, len(body), len(body) - HEADER + 1)
        headers += [(plane, flags, own_tables, other) for other in sizes]
        for header in headers:
            assert outcome(struct.pack("<BBQI", *header) + body[HEADER:], *shape) is None
        # Tables or scales that are not there, or a side information that holds more than it should.
        headers = [(plane, other, own_tables, side) for other in range(4) if other != flags]
        headers += [(plane, flags, own_tables ^ 1 << bit, side) for bit in range(33)]
        headers.append((plane, flags, 2**33 - 1, side))
        headers += [(plane, flags, own_tables, other) for other in (0, side // 2, side + 4, len(body) - HEADER)]
        for header in headers:
            outcome(struct.pack("<BBQI", *header) + body[HEADER:], *shape)


@repeats("bodies", 4, 5)  # the last one is long, and the reference is slow
@every_type
def test_blocks_that_lie_about_their_size_or_kind_are_refused(code: int, bodies: int) -> None:
    for body, shape in damaged(code)[:bodies]:
        at = HEADER + struct.unpack_from("<I", body, 10)[0]
        (entry,) = struct.unpack_from("<I", body, at)
        size = entry >> 2
        for other in (size - 2, size - 1, size + 1, size + 2, 2 * size, 2**29, 2**30 - 1, 0, 1):
            for kind in range(4):
                lie = body[:at] + struct.pack("<I", other << 2 | kind) + body[at + 4 :]
                assert outcome(lie, *shape) is None
        for kind in range(4):
            outcome(body[:at] + struct.pack("<I", size << 2 | kind) + body[at + 4 :], *shape)
        assert outcome(body[:at] + struct.pack("<I", size << 2 | 3) + body[at + 4 :], *shape) is None


@every_type
def test_a_body_of_another_shape_matches_the_reference(code: int) -> None:
    for body, (base, _, values, row_length, base_values) in damaged(code)[:4]:
        whole = base_values - base_values % (2 * row_length)
        shapes = [(values, row_length, 0), (values - 1, row_length, 0), (values + 1, row_length, 0), (0, 1, 0)]
        shapes += [(values, 1, base_values), (values, 2 * row_length, whole), (values, 10**6, 0)]
        shapes += [(2 * values, row_length, base_values)]
        for other in NAMES:
            twin = None if base is None else np.resize(base.view(np.uint8), 8 * values).view(unsigned(other))
            for shape in shapes:
                outcome(body, twin, other, *shape)


# ---- casts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("source", NAMES, ids=NAMES.values())
def test_a_cast_rounds_to_the_nearest_even_for_any_bits(source: int, target: int) -> None:
    rng = np.random.default_rng([source, target])
    # All 16-bit patterns, their neighbours and the ties between them, the ends of each range, and random bits.
    short = [reference.cast(np.arange(1 << 16, dtype="<u2"), code, source) for code in (FP16, BF16)]
    halves = [
        floats((pair.view("<f8")[:-1] + pair.view("<f8")[1:]) / 2, source)
        for code in (FP16, BF16)
        for pair in [reference.cast(np.sort(np.arange(reference.TYPES[code].infinity, dtype="<u2")), code, FP64)]
    ]
    ends = [reference.cast(landmarks(code), code, source) for code in NAMES] + [landmarks(source)]
    exact = np.concatenate([*short, *halves, *ends])
    near = [exact + np.array(step, unsigned(source)) for step in (0, 1, np.iinfo(unsigned(source)).max)]
    sign = unsigned(source).type(1 << (reference.TYPES[source].width - 1))
    bits = np.concatenate([*near, *(part ^ sign for part in near), random_bits(rng, 50_000, source)])
    expected = reference.cast(bits, source, target)
    for name in SETS:
        rounded = np.empty(len(bits), unsigned(target))
        with using(name):
            _native.cast(bits, source, rounded, target)
        np.testing.assert_array_equal(rounded, expected)


@pytest.mark.parametrize("code, values, expected", [
    (BF16, [1 + 2**-8, 1 + 3 * 2**-8, 2.0**-134, 3 * 2.0**-134, 1e39], [0x3F80, 0x3F82, 0, 2, 0x7F80]),
    (FP16, [1 + 2**-11, 1 + 3 * 2**-11, 2.0**-25, 65519.99, 65520], [0x3C00, 0x3C02, 0, 0x7BFF, 0x7C00]),
    (FP32, [1 + 2**-24, 2.0**-150, 1.5 * 2.0**-149, 1e39, -0.0], [0x3F800000, 0, 2, 0x7F800000, 0x80000000]),
])  # fmt: skip
def test_casts_have_the_results_that_ieee_754_gives(code: int, values: list[float], expected: list[int]) -> None:
    rounded = np.empty(len(values), unsigned(code))
    _native.cast(np.array(values), FP64, rounded, code)
    assert rounded.tolist() == expected


def test_a_cast_keeps_the_sign_of_a_nan_and_nothing_else() -> None:
    rounded = np.empty(2, "<u2")
    _native.cast(np.array([0x7F800001, 0xFFFFFFFF], "<u4"), FP32, rounded, BF16)
    assert rounded.tolist() == [0x7FC0, 0xFFC0]


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [
    (bytes(15), None, FP64, 1, 0),
    (bytes(3), None, BF16, 1, 0),
    (bytes(8), None, 0, 1, 0),
    (bytes(8), None, 5, 1, 0),
    (bytes(8), None, FP16, 0, 0),
    (bytes(8), None, FP16, 1, 4),
    (bytes(8), bytes(6), FP16, 1, 4),
    (bytes(8), bytes(10), FP16, 1, 5),
    (bytes(8), bytes(8), FP16, 1, -1),
    (bytes(8), bytes(8), FP16, 2, 3),
])  # fmt: skip
def test_buffers_of_wrong_sizes_raise_a_type_error(arguments: tuple) -> None:
    tensor, *rest = arguments
    with pytest.raises(TypeError):
        _native.encode(tensor, *rest, 1)
    with pytest.raises(TypeError):
        _native.decode(encode(np.zeros(4, "<u2"), None, FP16, 1), (bytearray(tensor), *rest, 1))


@pytest.mark.parametrize("arguments", [
    (bytes(8), FP32, bytearray(2), FP16),
    (bytes(8), FP32, bytearray(6), FP16),
    (bytes(8), 0, bytearray(4), FP16),
    (bytes(8), FP32, bytearray(4), 5),
])  # fmt: skip
def test_a_cast_to_another_length_raises_a_type_error(arguments: tuple) -> None:
    with pytest.raises(TypeError):
        _native.cast(*arguments)


def test_a_read_only_tensor_is_not_written_to() -> None:
    tensor = np.zeros(4, "<u2")
    with pytest.raises(BufferError):
        _native.decode(encode(tensor, None, FP16, 1), (tensor.tobytes(), None, FP16, 1, 0, 1))
    with pytest.raises(BufferError):
        _native.cast(tensor, FP16, tensor.tobytes(), BF16)
