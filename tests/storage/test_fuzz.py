"""Decodes the seeds and the findings of `make fuzz` with every decoder, and reads forged payloads."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import reference_codec as reference
import torch
import xxhash
from codec_arrays import SETS, using
from hypothesis import strategies as st
from repeats import explores
from tiny_checkpoints import TORCH_DTYPES

from hf_ext import _native
from hf_ext.errors import BaseModelError, CorruptFileError
from hf_ext.storage.delta.codec import decode_raw, encode_raw
from hf_ext.storage.delta.payload import CODED, DEFLATED, MAGIC, MIXED, peek_header, read_header
from hf_ext.storage.native import FLOATS, WIDTHS, cast
from hf_ext.storage.safetensors_file import RawTensor

SEEDS = sorted((Path(__file__).parents[1] / "fuzz" / "seeds").iterdir())
CRASHES = sorted((Path(__file__).parent / "crashes").glob("*"))  # inputs that the decoder once did wrong with
NAMES = list(FLOATS)
FIXED = struct.Struct("<4sBBBBHHQQQ")


def outcomes(data: bytes) -> list[bytes | None]:
    """Returns what each instruction set, then the reference decoder, makes of an input of the fuzzer (tests/fuzz/decode.cpp
    describes its layout): the tensor, or None if the decoder refuses the input."""
    dtype, base_dtype, threads = NAMES[data[0] % 4], NAMES[data[0] // 4 % 4], 1 + data[0] // 16 % 2
    values, row_length, base_values = (int.from_bytes(data[i : i + 3], "little") for i in (1, 4, 7))
    source = np.frombuffer(data, np.uint8, base_values * WIDTHS[base_dtype], 10)
    body, base = data[10 + source.size :], cast(source, base_dtype, dtype)
    code, results = FLOATS[dtype], list[bytes | None]()
    for name in SETS:
        tensor = np.full(values * WIDTHS[dtype], 0x5A, np.uint8)
        with using(name):
            try:
                _native.decode(body, (tensor, base, code, row_length, base_values, threads))
                results.append(tensor.tobytes())
            except (ValueError, TypeError):  # the first of the body, the second of the sizes
                results.append(None)
    try:
        bits = base.view(reference.TYPES[code].unsigned)
        results.append(reference.decode_body(body, bits, code, values, row_length, base_values).tobytes())
    except (ValueError, ZeroDivisionError):
        results.append(None)
    return results


@pytest.mark.parametrize("path", SEEDS + CRASHES, ids=lambda path: path.name)
def test_all_decoders_agree_on_the_seeds_of_the_fuzzer(path: Path) -> None:
    results = outcomes(path.read_bytes())
    assert len(set(results)) == 1
    assert results[0] is not None or path not in SEEDS


# ---- payloads --------------------------------------------------------------------------------------------------------


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
    mode = draw(st.sampled_from([0, 1, 1, 2, 3, 0x21, 0x31, 0x23]))
    ndim = max(len(shape) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 100])), 0)
    variable = struct.pack(f"<{len(shape)}Q", *shape) + b"".join(names) + draw(st.binary(max_size=80))
    return seal([MAGIC, mode, ndim, *lengths, draw(counts), draw(counts)], variable)


BASE = RawTensor("F32", (70,), np.random.default_rng(0).integers(0, 256, 280, np.uint8))


def result(payload: bytes, base: RawTensor | None, out: np.ndarray | None = None) -> tuple | str:
    """Returns the tensor of a payload, after a check of its type, shape and checksum, or the text of one of our errors."""
    try:
        header = read_header(payload)
        tensor = decode_raw(payload, base, out=out)
    except (CorruptFileError, BaseModelError) as error:
        return str(error)
    assert (tensor.dtype, tensor.shape) == (header.dtype, header.shape)
    assert xxhash.xxh3_64_intdigest(tensor.data) == header.checksum
    return tensor.dtype, tensor.shape, tensor.data.tobytes()


def read_or_refuse(payload: bytes, base: RawTensor | None = BASE) -> tuple | str:
    """Returns the result of a payload. Fails if two instruction sets give different results."""
    results = set()
    for name in SETS:
        with using(name):
            results.add(result(payload, base))
    (only,) = results
    assert only
    return only


def test_an_unchanged_forgery_is_decoded() -> None:
    payload = seal([MAGIC, 0, 1, 2, 0, 0, 0, 0, xxhash.xxh3_64_intdigest(b"a")], struct.pack("<Q", 1) + b"U8a")
    assert decode_raw(payload).data.tobytes() == b"a"


@explores(100, 400, payloads())
def test_any_header_fields_are_refused_or_right(payload: bytes) -> None:
    read_or_refuse(payload)


@explores(100, 400, st.one_of(st.binary(max_size=60), st.binary(min_size=FIXED.size, max_size=200)), st.booleans())
def test_any_bytes_are_refused_or_right(data: bytes, sealed: bool) -> None:
    if sealed and len(data) >= FIXED.size:
        data = seal([MAGIC, *FIXED.unpack(data[: FIXED.size])[1:-1]], data[FIXED.size :])
    read_or_refuse(data)
    with suppress(struct.error, ValueError):
        peek_header(memoryview(data))


def tensor_of(dtype: str, shape: tuple[int, ...], seed: int) -> RawTensor:
    """Returns numbers near 1. Those of two seeds differ by a few of the lowest bits, in some rows not at all."""
    rng, values = np.random.default_rng(seed), math.prod(shape)
    rows = np.arange(values) // 64
    if dtype == "I64":
        return RawTensor(dtype, shape, np.where(rows % 2, rows, rng.integers(0, 9, values)).astype("<i8").view(np.uint8))
    one = RawTensor.from_torch(torch.ones(values, dtype=TORCH_DTYPES[dtype])).data.view(f"<u{WIDTHS[dtype]}")
    return RawTensor(dtype, shape, (one + np.where(rows % 3, rng.integers(0, 9, values), 0).astype(one.dtype)).view(np.uint8))


TWINS = {(dtype, shape): tensor_of(dtype, shape, 0) for dtype in [*FLOATS, "I64"] for shape in [(6, 64), (4, 64), (384,)]}
BASES = [None, BASE, *TWINS.values()]
SOUND = [  # payloads of each type and mode, each with its base
    (encode_raw(tensor_of(dtype, shape, 1), base, "a", "b"), base)
    for dtype in [*FLOATS, "I64"]
    for shape in [(6, 64), (384,)]
    for base in [None, TWINS[dtype, shape], TWINS["BF16", shape], TWINS[dtype, (4, 64)]]
]
for dtype in ("F32", "F64"):  # all values are of a narrower type, or half of the rows
    wide, half = (tensor_of(kind, (6, 64), 2) for kind in (dtype, "F16"))
    narrow = RawTensor(dtype, (6, 64), cast(half.data, "F16", dtype))
    both = RawTensor(dtype, (6, 64), np.concatenate([narrow.data[: narrow.data.size // 2], wide.data[wide.data.size // 2 :]]))
    SOUND += [(encode_raw(narrow, base, "a", "b"), base) for base in (None, TWINS["F16", (6, 64)])]
    SOUND.append((encode_raw(both, None, "a", "b"), None))
dimensions = st.sampled_from([0, 1, 2, 4, 6, 63, 64, 65, 384, 1 << 32, 1 << 63])


@st.composite
def changed_payloads(draw: st.DrawFn) -> tuple[bytes, RawTensor | None]:
    """Returns a sound payload with changed fields or body, right lengths and a right checksum, and a base: often its own."""
    payload, base = draw(st.sampled_from(SOUND))
    header = read_header(payload)
    mode, shape, base_values = payload[4], list(header.shape), header.base_values
    names = [text.encode() for text in (header.dtype, header.base_dtype, header.name, header.base_name)]
    body = bytearray(payload[header.body :])
    for part in draw(st.lists(st.sampled_from(["mode", "shape", "name", "base values", "body", "size"]), max_size=2)):
        if part == "mode":
            mode = draw(st.integers(0, 4) | st.sampled_from([16 * code + mode for code in range(6) for mode in range(4)]))
        elif part == "shape":
            shape = draw(st.one_of(st.permutations(shape), st.lists(dimensions, max_size=3)))
        elif part == "name":
            names[draw(st.integers(0, 3))] = draw(texts)
        elif part == "base values":
            base_values = draw(st.one_of(dimensions, st.sampled_from([128, 256, 383, 385])))
        elif part == "size":
            body = body[: draw(st.integers(0, len(body)))] + draw(st.binary(min_size=1, max_size=9))
        else:
            for index in draw(st.lists(st.integers(0, 14) | st.integers(0, len(body) - 1), max_size=3)):
                body[index % len(body)] = draw(st.integers(0, 255))
    variable = struct.pack(f"<{len(shape)}Q", *shape) + b"".join(names) + body
    fields = [MAGIC, mode, len(shape), *map(len, names), base_values, header.checksum]
    return seal(fields, variable), draw(st.sampled_from([base] * 3 + BASES))


def with_checksum_of_its_tensor(payload: bytes, base: RawTensor | None) -> bytes:
    """Returns the payload with the checksum of what the first instruction set decodes: the last check then refuses nothing."""
    try:
        header = read_header(payload)
    except CorruptFileError:
        return payload
    if header.mode not in (CODED, MIXED):
        return payload
    tensor = np.zeros(header.size, np.uint8)
    with using(SETS[0]):
        result(payload, base, tensor)
    fields = FIXED.unpack(payload[: FIXED.size])[:-2]
    return seal([*fields, xxhash.xxh3_64_intdigest(tensor)], payload[FIXED.size :])


def test_the_payloads_to_change_are_sound() -> None:
    for payload, base in SOUND:
        assert isinstance(read_or_refuse(payload, base), tuple)


@pytest.mark.parametrize(("dtype", "narrower"), [("F32", (2, 3)), ("F64", (1, 2, 3)), ("F16", ()), ("BF16", ())])
def test_a_mode_with_a_type_that_is_not_narrower_is_refused(dtype: str, narrower: tuple[int, ...]) -> None:
    tensor = RawTensor.from_torch(torch.linspace(-1, 1, 384, dtype=torch.float64).cos().reshape(6, 64).to(TORCH_DTYPES[dtype]))
    payload = encode_raw(tensor)
    fields = list(FIXED.unpack(payload[: FIXED.size])[:-1])
    for mode in range(256):
        fields[1] = mode
        outcome = read_or_refuse(seal(fields, payload[FIXED.size :]), None)
        is_known = mode == DEFLATED or mode & 15 in (CODED, MIXED) and mode >> 4 in narrower
        assert isinstance(outcome, tuple) if mode == CODED else is_known != ("invalid header" in outcome)


@explores(100, 400, changed_payloads())
def test_a_changed_payload_with_any_base_is_refused_or_right(changed: tuple[bytes, RawTensor | None]) -> None:
    payload, base = changed
    read_or_refuse(payload, base)
    read_or_refuse(with_checksum_of_its_tensor(payload, base), base)


@explores(100, 400, st.data())
def test_a_sound_payload_with_other_fields_is_refused_or_right(data: st.DataObject) -> None:
    payload, base = data.draw(st.sampled_from(SOUND))
    fields = list(FIXED.unpack(payload[: FIXED.size])[:-1])
    for index in data.draw(st.lists(st.integers(1, 7), max_size=2)):
        fields[index] = data.draw(st.integers(0, 255) if index < 7 else counts)
    variable = bytearray(payload[FIXED.size :])
    for index in data.draw(st.lists(st.integers(0, 20), max_size=2)):
        variable[index] = data.draw(st.integers(0, 255))
    read_or_refuse(seal(fields, bytes(variable)), base)
