"""What `make fuzz` starts from and what it has found decodes in both decoders alike; and no header leads the reader astray."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import reference_codec as reference
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import TORCH_DTYPES

from hf_ext import _native
from hf_ext.errors import BaseModelError, CorruptFileError
from hf_ext.storage.delta.codec import MAGIC, decode_raw, encode_raw, peek_header, read_header
from hf_ext.storage.native import FLOATS, WIDTHS, cast
from hf_ext.storage.safetensors_file import RawTensor

SEEDS = sorted((Path(__file__).parents[1] / "fuzz" / "seeds").iterdir())
CRASHES = sorted((Path(__file__).parent / "crashes").glob("*"))  # inputs that the decoder once did wrong with
NAMES = list(FLOATS)
FIXED = struct.Struct("<4sBBBBHHQQQ")

derandomized = settings(max_examples=400, derandomize=True, database=None, deadline=None)


def outcomes(data: bytes) -> list[bytes | None]:
    """What the two decoders make of an input of the fuzzer (tests/fuzz/decode.cpp has its layout); None where it is refused."""
    dtype, base_dtype, threads = NAMES[data[0] % 4], NAMES[data[0] // 4 % 4], 1 + data[0] // 16 % 2
    values, row_length, base_values = (int.from_bytes(data[i : i + 3], "little") for i in (1, 4, 7))
    source = np.frombuffer(data, np.uint8, base_values * WIDTHS[base_dtype], 10)
    body, base = data[10 + source.size :], cast(source, base_dtype, dtype)
    code, tensor = FLOATS[dtype], np.empty(values * WIDTHS[dtype], np.uint8)
    results: list[bytes | None] = [None, None]
    try:
        _native.decode(body, (tensor, base, code, row_length, base_values, threads))
        results[0] = tensor.tobytes()
    except (ValueError, TypeError):  # the first of the body, the second of the sizes
        pass
    try:
        bits = base.view(reference.TYPES[code].unsigned)
        results[1] = reference.decode_body(body, bits, code, values, row_length, base_values).tobytes()
    except (ValueError, ZeroDivisionError):
        pass
    return results


@pytest.mark.parametrize("path", SEEDS + CRASHES, ids=lambda path: path.name)
def test_both_decoders_make_the_same_of_what_the_fuzzer_starts_from_and_has_found(path: Path) -> None:
    native, slow = outcomes(path.read_bytes())
    assert native == slow
    assert native is not None or path not in SEEDS


# ---- headers ---------------------------------------------------------------------------------------------------------


def seal(fields: list, variable: bytes) -> bytes:
    """A payload of these fields under a checksum that is right."""
    fixed = FIXED.pack(*fields, 0)
    return fixed[:-8] + xxhash.xxh3_64_digest(fixed + variable)[::-1] + variable


counts = st.one_of(st.integers(0, 70), st.integers(0, 2**64 - 1))
dtypes = st.one_of(st.sampled_from(sorted(TORCH_DTYPES)), st.text(max_size=5)).map(str.encode)
texts = st.one_of(dtypes, st.binary(max_size=8))


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """A payload with the right checksum whose fields may say anything, mostly things that make sense one by one."""
    shape = draw(st.lists(counts, max_size=4))
    names = [draw(texts) for _ in range(4)]
    lengths = [min(len(name) + draw(st.sampled_from([0, 0, 0, 0, 1, 200])), 255) for name in names]
    mode, ndim = draw(st.sampled_from([0, 1, 1, 2])), max(len(shape) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 100])), 0)
    variable = struct.pack(f"<{len(shape)}Q", *shape) + b"".join(names) + draw(st.binary(max_size=80))
    return seal([MAGIC, mode, ndim, *lengths, draw(counts), draw(counts)], variable)


BASE = RawTensor("F32", (70,), np.random.default_rng(0).integers(0, 256, 280, np.uint8))


def read_or_refuse(payload: bytes) -> None:
    """A payload is refused with one of our errors, or gives a tensor of the checksum, type and shape that it names."""
    try:
        header = read_header(payload)
        tensor = decode_raw(payload, BASE)
    except (CorruptFileError, BaseModelError) as error:
        assert str(error)
        return
    assert (tensor.dtype, tensor.shape) == (header.dtype, header.shape)
    assert xxhash.xxh3_64_intdigest(tensor.data) == header.checksum


def test_the_forger_of_these_tests_makes_payloads_that_are_read() -> None:
    payload = seal([MAGIC, 0, 1, 2, 0, 0, 0, 0, xxhash.xxh3_64_intdigest(b"a")], struct.pack("<Q", 1) + b"U8a")
    assert decode_raw(payload).data.tobytes() == b"a"


@derandomized
@given(payloads())
def test_a_header_that_says_anything_is_refused_or_right(payload: bytes) -> None:
    read_or_refuse(payload)


@derandomized
@given(st.one_of(st.binary(max_size=60), st.binary(min_size=FIXED.size, max_size=200)), st.booleans())
def test_any_bytes_are_refused_or_right(data: bytes, sealed: bool) -> None:
    if sealed and len(data) >= FIXED.size:
        data = seal([MAGIC, *FIXED.unpack(data[: FIXED.size])[1:-1]], data[FIXED.size :])
    read_or_refuse(data)
    try:
        peek_header(memoryview(data))
    except (struct.error, ValueError):
        pass


@derandomized
@given(st.data())
def test_a_sound_payload_with_other_fields_is_refused_or_right(data: st.DataObject) -> None:
    tensor = RawTensor("F32", (70,), BASE.data ^ np.tile(np.array([7, 0, 0, 0], np.uint8), 70))
    payload = encode_raw(tensor, data.draw(st.sampled_from([BASE, None])), "a", "b")
    fields = list(FIXED.unpack(payload[: FIXED.size])[:-1])
    for index in data.draw(st.lists(st.integers(1, 7), max_size=2)):
        fields[index] = data.draw(st.integers(0, 255) if index < 7 else counts)
    variable = bytearray(payload[FIXED.size :])
    for index in data.draw(st.lists(st.integers(0, 20), max_size=2)):
        variable[index] = data.draw(st.integers(0, 255))
    read_or_refuse(seal(fields, bytes(variable)))
