"""Tensors of 16-bit floats where few values changed: bodies that list the changes, and payloads applied in place."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import reference_codec as reference
import torch
import xxhash
from codec_arrays import BF16, FP16, assert_comes_back, decode, outcome, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import repeats

from hf_ext import _native, storage
from hf_ext.errors import BaseModelError
from hf_ext.storage.delta.byte_values import KINDS, encode_bytes
from hf_ext.storage.delta.payload import BYTES, BYTEWISE, CODES, DEFLATED, SIGNED_CODES, read_header, write_payload
from hf_ext.storage.safetensors_file import ITEMSIZE, RawTensor

FEW_CHANGES, LOW_RANK, UNTOUCHED_ROWS = 8, 4, 1
BLOCK = 256 * 1024
both_types = pytest.mark.parametrize("code", [FP16, BF16], ids=["fp16", "bf16"])


def step(rng: np.random.Generator, base: np.ndarray, code: int, rate: float) -> np.ndarray:
    """A training step: master weights that round to the base move by about the same distance each."""
    kind = reference.TYPES[code]
    numbers = reference.numbers_of(base, kind)
    spacing = np.exp2(np.floor(np.log2(np.maximum(np.abs(numbers), 1e-30))) - kind.mantissa)
    master = numbers + spacing * rng.uniform(-0.499, 0.499, len(base))
    moved = master + rate * rng.choice([-1, 1], len(base)) * rng.uniform(0.5, 1, len(base))
    return reference.cast(moved.astype("<f8").view("<u8"), 4, code)


def sprinkle(rng: np.random.Generator, base: np.ndarray, share: float) -> np.ndarray:
    """Any bits at some places."""
    bits = rng.integers(0, 1 << 16, len(base), np.uint16, endpoint=False)
    return np.where(rng.random(len(base)) < share, bits, base)


BYTE_TYPES = ["F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "I32", "I64"]


def bytes_of(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], share: float = 0.001) -> tuple[RawTensor, RawTensor]:
    """A tensor, and one of which a share of the bytes is one lower."""
    base = rng.integers(1, 256, math.prod(shape) * ITEMSIZE[dtype], np.uint8, endpoint=False)
    return RawTensor(dtype, shape, base - (rng.random(base.size) < share)), RawTensor(dtype, shape, base)


# ---- bodies ----------------------------------------------------------------------------------------------------------


@both_types
@pytest.mark.parametrize("row_length", [64, 100, 576, 20_000])
def test_steps_are_listed_and_come_back(code: int, row_length: int) -> None:
    rng = np.random.default_rng(row_length)
    base = weights(rng, 40_000, code)
    body = assert_comes_back(step(rng, base, code, 3e-6 if code == BF16 else 3e-7), base, code, row_length)
    assert body[1] & FEW_CHANGES


@both_types
def test_changes_at_the_ends_of_blocks_come_back(code: int) -> None:
    rng = np.random.default_rng(code)
    base = weights(rng, BLOCK + 5000, code)
    tensor = base.copy()
    tensor[[0, 63, 64, BLOCK - 1, BLOCK, len(base) - 1]] ^= 1
    body = assert_comes_back(tensor, base, code, 1000)
    assert body[1] & FEW_CHANGES and len(body) < 100
    np.testing.assert_array_equal(decode(body, base, code, len(base), 1000, len(base), threads=2), tensor)


def test_a_block_without_changes_takes_four_bytes() -> None:
    base = weights(np.random.default_rng(0), 3 * BLOCK, BF16)
    tensor = base.copy()
    none = assert_comes_back(tensor, base, BF16, 1024)
    tensor[5] ^= 1
    assert len(assert_comes_back(tensor, base, BF16, 1024)) - 20 < len(none) < 40


@both_types
def test_rows_without_a_base_come_back_beside_few_changes(code: int) -> None:
    rng = np.random.default_rng(code)
    base = weights(rng, 30_000, code)
    tensor = np.concatenate([sprinkle(rng, base, 0.01), weights(rng, 7_050, code)])
    assert assert_comes_back(tensor, base, code, 100)[1] & FEW_CHANGES


def test_untouched_rows_are_left_out_where_that_saves() -> None:
    rng = np.random.default_rng(0)
    base = weights(rng, 200 * 1000, BF16)
    tensor = step(rng, base, BF16, 3e-6)
    touched = rng.random(200) < 0.1
    tensor = np.where(np.repeat(touched, 1000), tensor, base)
    assert assert_comes_back(tensor, base, BF16, 1000)[1] & (FEW_CHANGES | UNTOUCHED_ROWS) == FEW_CHANGES | UNTOUCHED_ROWS
    few = base.copy()
    few[rng.integers(0, len(base), 300)] ^= 1
    assert assert_comes_back(few, base, BF16, 1000)[1] & (FEW_CHANGES | UNTOUCHED_ROWS) == FEW_CHANGES


def test_few_changes_of_a_moved_base_come_back() -> None:
    rng = np.random.default_rng(0)
    base = weights(rng, 200 * 300, BF16)
    rows, columns = rng.integers(-20, 20, (200, 2), np.int32), rng.integers(-20, 20, (2, 300), np.int32)
    change = np.ldexp((rows @ columns).ravel().astype("<f8"), -14)
    tensor = reference.move(base, change, False, reference.TYPES[BF16])
    tensor[rng.integers(0, len(tensor), 600)] ^= 1
    body = assert_comes_back(tensor, base, BF16, 300, changes=((rows, columns, 14),))
    assert body[1] & (FEW_CHANGES | LOW_RANK) == FEW_CHANGES | LOW_RANK
    assert _native.list_changes(body, base, BF16, 300) is None


@given(st.integers(0, 2**32), st.sampled_from([FP16, BF16]), st.integers(1, 400), st.floats(0, 0.12), st.floats(0, 0.5))
@settings(max_examples=40, deadline=None)
def test_few_changes_to_any_values_come_back(seed: int, code: int, row_length: int, share: float, wild: float) -> None:
    rng = np.random.default_rng(seed)
    size = 8192 + int(rng.integers(0, 3000))
    base = sprinkle(rng, weights(rng, size, code), wild)
    near = base + rng.integers(-3, 4, size).astype(np.uint16)
    tensor = np.where(rng.random(size) < share, sprinkle(rng, near, wild), base)
    assert_comes_back(tensor, base, code, row_length)


@both_types
def test_drawn_steps_take_little_more_than_their_entropy(code: int) -> None:
    rng = np.random.default_rng(0)
    base = weights(rng, 2 * BLOCK, code)
    kind = reference.TYPES[code]
    for rate in (1e-6, 3e-6, 1e-5):
        tensor = step(rng, base, code, rate if code == BF16 else rate / 10)
        change = reference.to_ordered(tensor, kind).astype(int) - reference.to_ordered(base, kind)
        entropy = 0.0
        exponents = kind.exponent_field(base)
        for exponent in np.unique(exponents):
            counts = np.unique(change[exponents == exponent], return_counts=True)[1]
            entropy -= (counts * np.log2(counts / counts.sum())).sum()
        body = _native.encode(tensor, base, code, 1024, len(base))
        assert 8 * len(body) < 1.2 * entropy


@repeats("rounds", 50, 300)
def test_damaged_lists_are_refused_or_decoded_alike(rounds: int) -> None:
    rng = np.random.default_rng(0)
    base = weights(rng, 20_000, BF16)
    body = assert_comes_back(step(rng, base, BF16, 3e-6), base, BF16, 500)
    assert body[1] & FEW_CHANGES
    refused = 0
    for _ in range(rounds):
        damaged = bytearray(body)
        damaged[rng.integers(1, len(damaged))] ^= 1 << rng.integers(8)
        refused += outcome(bytes(damaged), base, BF16, len(base), 500, len(base)) is None
    assert refused > rounds / 3


# ---- lists of changes ------------------------------------------------------------------------------------------------


def test_listed_changes_are_applied_in_place() -> None:
    rng = np.random.default_rng(0)
    base = weights(rng, BLOCK + 10_000, BF16)
    tensor = step(rng, base, BF16, 3e-6)
    body = _native.encode(tensor, base, BF16, 1000, len(base))
    listed = _native.list_changes(body, base, BF16, 1000, 2)
    assert listed is not None
    places, values = np.frombuffer(listed[0], np.uint32), np.frombuffer(bytearray(listed[1]), np.uint16)
    np.testing.assert_array_equal(places, np.flatnonzero(tensor != base))
    live, rows = base.copy(), np.zeros(-(-len(base) // 1000), bool)
    _native.exchange(live, places, values, 1000, rows)
    np.testing.assert_array_equal(live, tensor)
    np.testing.assert_array_equal(np.flatnonzero(rows), np.unique(np.flatnonzero(tensor != base) // 1000))
    _native.exchange(live, places, values, 1000, rows)
    np.testing.assert_array_equal(live, base)


def test_no_place_outside_the_tensor_is_exchanged() -> None:
    live, rows, two = np.arange(10, dtype=np.uint16), np.zeros(2, np.uint8), np.array([7, 7], np.uint16)
    with pytest.raises(TypeError, match="outside"):
        _native.exchange(live, np.array([1, 10], np.uint32), two, 5, rows)
    with pytest.raises(TypeError, match="16 bits"):
        _native.exchange(live, np.array([1], np.uint32), two, 5, rows)
    for row_length in (0, 4, 10):
        with pytest.raises(TypeError, match="rows"):
            _native.exchange(live, np.array([1, 2], np.uint32), two, row_length, rows)
    np.testing.assert_array_equal(live, np.arange(10))


# ---- payloads applied in place ---------------------------------------------------------------------------------------


def assert_applied(payload: bytes, tensor: RawTensor, base: RawTensor) -> None:
    """A payload gives the tensor, also in the place of its base, and says which rows it has changed."""
    np.testing.assert_array_equal(storage.decode_raw(payload, base).data, tensor.data)
    live = RawTensor(base.dtype, base.shape, base.data.copy())
    rows = storage.apply_raw(payload, live)
    np.testing.assert_array_equal(live.data, tensor.data)
    changed = (tensor.data != base.data).reshape(tensor.shape[0], -1).any(axis=1)
    np.testing.assert_array_equal(rows, np.flatnonzero(changed))


def fine_tuned(rate: float, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(200, 300, generator=generator)
    return master.to(dtype), (master + rate * torch.randn(200, 300, generator=generator)).to(dtype)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("rate", [0, 1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_payload_turns_the_base_into_the_tensor(rate: float, dtype: torch.dtype, level: int) -> None:
    base, tensor = fine_tuned(rate, dtype)
    base[50:] = tensor[50:]
    assert_applied(storage.encode(tensor, base, level=level), RawTensor.from_torch(tensor), RawTensor.from_torch(base))


def test_a_payload_that_does_not_fit_changes_nothing() -> None:
    base, tensor = fine_tuned(1e-6)
    payload = storage.encode(tensor, base)
    other = base.clone()
    other[7, 7] += 1
    before = other.clone()
    with pytest.raises(BaseModelError, match="another base model"):
        storage.apply(payload, other)
    assert torch.equal(other, before)
    for other in (base.clone()[:100], base.float()):
        with pytest.raises(BaseModelError, match="cannot take the place"):
            storage.apply(payload, other)


def test_only_contiguous_memory_is_changed_in_place() -> None:
    base, tensor = fine_tuned(1e-6)
    payload = storage.encode(tensor, base)
    numbers = torch.zeros(5, dtype=torch.complex64)
    for data, live in (
        (payload, base.t().contiguous().t()),
        (payload, torch._neg_view(-base)),
        (storage.encode(numbers + 1), numbers.conj()),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            storage.apply(data, live)


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_a_base_of_another_type_is_refused(rate: float) -> None:
    base, tensor = fine_tuned(rate)
    with pytest.raises(BaseModelError, match="compressed against a F32 tensor"):
        storage.apply(storage.encode(tensor, base.float()), base.clone())


def test_an_interruption_leaves_the_tensor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    base, tensor = fine_tuned(1e-6)
    payload = storage.encode(tensor, base)
    header, live = read_header(payload), base.clone()

    def interrupted(data: np.ndarray) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        storage.apply_raw(payload, RawTensor.from_torch(live), header)
    assert torch.equal(live, base)


def test_a_payload_without_a_base_replaces_the_tensor() -> None:
    base, tensor = fine_tuned(1.0)
    live = base.clone()
    assert len(storage.apply(storage.encode(tensor), live)) == 200
    assert torch.equal(live, tensor)


def test_data_at_an_odd_address_are_changed_too() -> None:
    base, tensor = fine_tuned(1e-6)
    room = np.empty(base.nbytes + 1, np.uint8)
    room[1:] = base.view(torch.uint8).numpy().ravel()
    storage.apply_raw(storage.encode(tensor, base), RawTensor("BF16", tuple(base.shape), room[1:]))
    np.testing.assert_array_equal(room[1:], tensor.view(torch.uint8).numpy().ravel())


# ---- bytes of other types ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.5, 1])
@pytest.mark.parametrize("shape", [(200, 100), (20_000,), (3, 70, 100), (1, 16_384)], ids=str)
@pytest.mark.parametrize("dtype", BYTE_TYPES)
def test_changed_bytes_of_other_types_come_back(dtype: str, shape: tuple[int, ...], share: float) -> None:
    tensor, base = bytes_of(np.random.default_rng(0), dtype, shape, share)
    payload = storage.encode_raw(tensor, base, "x", "y", level=1)
    if share == 0.001:
        assert read_header(payload).mode in BYTEWISE and len(payload) < 0.01 * tensor.data.size + 120
    assert_applied(payload, tensor, base)


@pytest.mark.parametrize("share", [0.01, 0.03])
@pytest.mark.parametrize("dtype", ["U8", "I32"])
@pytest.mark.parametrize(
    ("mode", "order"), [(CODES, range(16)), (SIGNED_CODES, [*range(15, 7, -1), *range(8)])], ids=["plain", "signed"]
)
def test_two_codes_in_a_byte_are_coded_apart(mode: int, order: Sequence[int], dtype: str, share: float) -> None:
    rng, order = np.random.default_rng(0), np.array(order, np.uint8)
    places = np.clip(np.rint(rng.normal(7.5, 3, (300, 800))), 0, 15).astype(int)
    moved = np.clip(places + rng.choice([-1, 1], places.shape) * (rng.random(places.shape) < share), 0, 15)
    shape = (300, 400 // ITEMSIZE[dtype])
    base, tensor = (RawTensor(dtype, shape, (order[x][:, ::2] | order[x][:, 1::2] << 4).ravel()) for x in (places, moved))
    payload = storage.encode_raw(tensor, base, level=1)
    assert read_header(payload).mode == mode
    assert len(payload) < 0.93 * len(encode_bytes(tensor, base, BYTES, 1))
    assert_applied(payload, tensor, base)


@pytest.mark.parametrize("share", [0, 0.001, 0.5])
@pytest.mark.parametrize("mode", BYTEWISE)
@pytest.mark.parametrize("dtype", BYTE_TYPES)
def test_each_mode_of_bytes_is_decoded_for_each_type(dtype: str, mode: int, share: float) -> None:
    tensor, base = bytes_of(np.random.default_rng(0), dtype, (60, 100), share)
    checksum = xxhash.xxh3_64_intdigest(tensor.data)
    body = encode_bytes(tensor, base, mode, 1)
    assert_applied(write_payload((dtype, dtype, "x", "y"), tensor.shape, mode, 6000, checksum, body), tensor, base)


@pytest.mark.parametrize("instructions", _native.instruction_sets())
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8"])
@pytest.mark.parametrize("mode", [CODES, SIGNED_CODES])
def test_codes_become_the_numbers_that_the_page_describes(mode: int, dtype: str, instructions: str) -> None:
    kind = KINDS[mode].get(dtype, KINDS[mode][""])
    base, codes = (x.ravel().astype(np.uint8) for x in np.meshgrid(np.arange(256), np.arange(256)))
    width, mantissa = (8, {"F8_E4M3": 3, "F8_E5M2": 2}.get(dtype)) if kind < 3 else (4, 1 if mode == SIGNED_CODES else None)
    sign = 1 << (width - 1)

    def numbers_of(codes: np.ndarray, base: np.ndarray) -> np.ndarray:
        def place(code: np.ndarray) -> np.ndarray:
            if mantissa is None:
                return code ^ sign if width == 8 else code
            return np.where(code & sign, 2 * sign - 1 - code, code + sign)

        exponent = np.maximum((base & (sign - 1)) >> mantissa, 1) if mantissa else 0 * base
        return 128 * (120 + exponent) + 64 + place(codes) - place(base)

    def parts(data: np.ndarray) -> np.ndarray:
        return data.astype(int) if width == 8 else np.stack([data & 15, data >> 4], 1).ravel().astype(int)

    before = _native.use(instructions)
    try:
        numbers, back = np.empty(len(parts(base)), np.uint16), np.empty_like(codes)
        _native.codes_to_numbers(kind, codes, base, numbers)
        _native.numbers_to_codes(kind, numbers, base, back)
    finally:
        _native.use(before)
    np.testing.assert_array_equal(numbers, numbers_of(parts(codes), parts(base)))
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8"])
def test_bytes_of_another_base_stay_as_they_are(dtype: str) -> None:
    rng = np.random.default_rng(0)
    tensor, base = bytes_of(rng, dtype, (100, 200))
    payload = storage.encode_raw(tensor, base, "x", "y", level=1)
    other = bytes_of(rng, dtype, (100, 200))[1]
    before = other.data.copy()
    for wrong in (other, RawTensor("I8", (100, 200), base.data), RawTensor(dtype, (200, 100), base.data)):
        with pytest.raises(BaseModelError):
            storage.apply_raw(payload, wrong)
        with pytest.raises(BaseModelError):
            storage.decode_raw(payload, wrong)
    np.testing.assert_array_equal(other.data, before)
    with pytest.raises(BaseModelError, match="needs the tensor 'y'"):
        storage.decode_raw(payload)


def test_unrelated_bytes_are_deflated_or_stored() -> None:
    rng = np.random.default_rng(0)
    tensor, base = RawTensor("U8", (100, 200), np.zeros(20_000, np.uint8)), bytes_of(rng, "U8", (100, 200))[1]
    header = read_header(storage.encode_raw(tensor, base, level=1))
    assert (header.mode, header.base_values) == (DEFLATED, 0)
