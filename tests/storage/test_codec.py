"""A payload decodes to its tensor bit by bit, for every type, shape and base, and its header names what it requires."""

import math
import struct
import zlib

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import SAFETENSORS_DTYPES

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage import apply, apply_raw, decode, decode_raw, encode, encode_raw
from hf_ext.storage.delta.deflate import AT_ONCE, inflate
from hf_ext.storage.delta.narrow import NARROWER
from hf_ext.storage.delta.payload import (
    BYTEWISE,
    CODED,
    DEFLATED,
    MAX_EXPANSION,
    MIXED,
    STORED,
    is_payload,
    payload_shape,
    read_header,
)
from hf_ext.storage.native import FLOATS, WIDTHS, cast
from hf_ext.storage.safetensors_file import RawTensor, safetensors_dtype, torch_dtype

HEADER = 36  # bytes before the shape, see docs/fm_delta_format.md
FLOAT_DTYPES = [torch_dtype(name) for name in FLOATS]
SHAPES = [(), (0,), (1,), (1023,), (1025,), (3, 0, 2), (7, 300), (130, 33), (2, 3, 4, 5, 6)]

every_float = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES, ids=str)


def bits(tensor: torch.Tensor) -> bytes:
    return RawTensor.from_torch(tensor).data.tobytes()


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Every bit pattern: NaNs with payloads, subnormals, both zeros. Bools are 0 or 1."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 2 if dtype == torch.bool else 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return RawTensor(safetensors_dtype(dtype), shape, data).to_torch()


def trained(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0, change: float = 1e-4
) -> tuple[torch.Tensor, torch.Tensor]:
    """A fine-tuned tensor and its base."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.02
    return (base + torch.randn(shape, generator=generator, dtype=torch.float64) * change).to(dtype), base.to(dtype)


def assert_comes_back(tensor: torch.Tensor, base: torch.Tensor | None = None) -> bytes:
    payload = encode(tensor, base)
    decoded = decode(payload, base)
    assert (decoded.dtype, decoded.shape) == (tensor.dtype, tensor.shape)
    assert bits(decoded) == bits(tensor)
    return payload


# ---- round trips -----------------------------------------------------------------------------------------------------


@every_dtype
def test_every_type_and_shape_comes_back_bit_by_bit(dtype):
    for shape in SHAPES:
        tensor, base = random_bits(dtype, shape), random_bits(dtype, shape, seed=1)
        assert_comes_back(tensor)
        assert_comes_back(tensor, base)
        assert_comes_back(tensor, tensor.clone())
        if dtype in FLOAT_DTYPES:
            assert_comes_back(*trained(dtype, shape))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2, 1::3],
        lambda x: x[5:],
        lambda x: x.expand(3, *x.shape),
        lambda x: x.flip(0).transpose(0, 1),
        lambda x: x.requires_grad_(),
    ],
)
def test_a_tensor_need_not_be_contiguous(view):
    tensor, base = trained(torch.float32, (40, 60))
    assert_comes_back(view(tensor), view(base))


@every_float
@pytest.mark.parametrize("base_dtype", FLOAT_DTYPES, ids=str)
def test_a_base_of_another_float_type_predicts_too(dtype, base_dtype):
    tensor, base = trained(dtype, (100, 64))
    base = base.to(base_dtype)
    payload = assert_comes_back(tensor, base)
    header = read_header(payload)
    assert (header.base_dtype, header.base_values) == (safetensors_dtype(base_dtype), 6400)
    assert len(payload) < len(encode(tensor))
    strange = random_bits(base_dtype, (100, 64))
    assert_comes_back(tensor, strange)


@pytest.mark.parametrize(
    "dtype, shape",
    [(torch.float32, shape) for shape in ((6400,), (64, 100), (100, 64, 1), (100, 65), (), (0, 64))]
    + [(dtype, (100, 64)) for dtype in (torch.int32, torch.float8_e4m3fn, torch.complex64)],
    ids=str,
)
def test_a_base_that_cannot_predict_is_left_aside(dtype, shape):
    tensor, base = trained(torch.float32, (100, 64))[0], torch.zeros(shape).to(dtype)
    assert encode(tensor, base) == encode(tensor)
    assert bits(decode(encode(tensor, base))) == bits(tensor)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.bool], ids=str)
def test_other_types_are_deflated_and_a_base_of_their_type_helps(dtype):
    tensor, base = (values * (1 if dtype.is_floating_point else 500) for values in trained(torch.float32, (300, 64)))
    tensor, base = ((values > 0 if dtype == torch.bool else values.to(dtype)) for values in (tensor, base))
    alone, delta = assert_comes_back(tensor), assert_comes_back(tensor, base)
    headers = read_header(alone), read_header(delta)
    assert [(header.mode, header.base_values) for header in headers] == [(DEFLATED, 0), (headers[1].mode, tensor.numel())]
    assert headers[1].mode in (DEFLATED, *BYTEWISE)
    assert 2 * len(delta) < len(alone) < (0.93 if dtype.itemsize == 1 else 0.3) * len(bits(tensor))
    for other in (base[:200], base.float(), base.reshape(64, 300)):
        assert encode(tensor, other) == alone
    for wrong in (base[:200], base.flip(0), torch.cat([base.flip(0), base])):
        with pytest.raises(BaseModelError, match="base"):
            decode(delta, wrong)


@every_float
def test_a_stranger_as_base_is_left_aside(dtype):
    tensor, stranger = trained(dtype, (200, 64), seed=0)[0], trained(dtype, (200, 64), seed=9)[0] * 50
    assert len(assert_comes_back(tensor, stranger)) <= len(encode(tensor))


@every_float
@pytest.mark.parametrize(("rows", "base_rows"), [(100, 97), (97, 100), (100, 1), (1, 100), (300, 299)])
@pytest.mark.parametrize("row", [(64,), (8, 9), (5, 7), ()], ids=str)
def test_remaining_rows_of_resized_embeddings_are_predicted(dtype, rows, base_rows, row):
    tensor, base = trained(dtype, (max(rows, base_rows), *row))
    tensor, base = tensor[:rows], base[:base_rows]
    header = read_header(assert_comes_back(tensor, base))
    if row and base_rows > 1:  # a vector has no rows, and one row of a hundred saves next to nothing
        left_out = min(rows, base_rows) * math.prod(row) - header.base_values
        assert left_out == 0 or 0 < left_out < 1024 and math.prod(row) < 64  # short rows share a scale


def test_a_tensor_at_an_odd_address_comes_back():
    tensor, base = (RawTensor.from_torch(x) for x in trained(torch.float64, (70, 70)))

    def moved(raw):
        memory = np.empty(raw.data.size + 1, np.uint8)
        memory[1:] = raw.data
        return RawTensor(raw.dtype, raw.shape, memory[1:])

    payload = encode_raw(moved(tensor), moved(base))
    assert payload == encode_raw(tensor, base)
    shifted = np.frombuffer(b"\0" + payload, np.uint8)[1:]
    assert decode_raw(shifted, moved(base)).data.tobytes() == tensor.data.tobytes()


# ---- narrower types --------------------------------------------------------------------------------------------------

WIDENED = [(torch_dtype(wide), torch_dtype(narrow)) for wide in NARROWER for narrow in NARROWER[wide]]
widened_pairs = pytest.mark.parametrize(("wide", "narrow"), WIDENED, ids=str)


def every_value(wide: torch.dtype, narrow: torch.dtype) -> torch.Tensor:
    """All values of a narrow type of 16 bits, or many of float32, in another type: subnormals, zeros, infinities, NaNs."""
    data = np.arange(1 << 16, dtype="<u2") if narrow.itemsize == 2 else np.arange(0, 1 << 32, 65521, dtype="<u4")
    names = safetensors_dtype(narrow), safetensors_dtype(wide)
    return RawTensor(names[1], (len(data),), cast(data.view(np.uint8), *names)).to_torch()


@widened_pairs
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("shape", [(400, 64), (9, 5, 7), (300,)], ids=str)
def test_values_of_a_narrower_type_take_what_they_take_in_it(wide, narrow, with_base, shape):
    tensor, base = trained(narrow, shape)
    sizes = []
    for dtype in (narrow, wide):
        payload = assert_comes_back(tensor.to(dtype), base.to(dtype) if with_base else None)
        sizes.append(len(payload) - read_header(payload).body)
    assert sizes[0] == sizes[1] and read_header(payload).narrow == safetensors_dtype(narrow)


@widened_pairs
@pytest.mark.parametrize("with_base", [False, True])
def test_every_value_of_a_narrower_type_comes_back(wide, narrow, with_base):
    tensor = every_value(wide, narrow)
    assert read_header(assert_comes_back(tensor, tensor.flip(0) if with_base else None)).narrow == safetensors_dtype(narrow)


@widened_pairs
@pytest.mark.parametrize("at", [0, 1, 999, 63_999])
def test_one_value_that_a_narrower_type_does_not_hold_comes_back(wide, narrow, at):
    tensor, base = (values.to(wide) for values in trained(narrow, (64_000,)))
    for mask in (1, 1 << NARROWER[safetensors_dtype(wide)][safetensors_dtype(narrow)] - 1):
        other = tensor.clone()
        bits_of = other.numpy().view(f"<u{wide.itemsize}")
        bits_of[at] ^= mask
        assert read_header(assert_comes_back(other)).narrow != safetensors_dtype(narrow)
        assert_comes_back(other, base)
    infinity = int.from_bytes(bits(torch.tensor(math.inf, dtype=wide)), "little")
    bits_of[at] = infinity | infinity >> 2 & ~infinity  # a NaN whose payload no cast makes
    assert math.isnan(other[at]) and not read_header(assert_comes_back(other)).narrow


@widened_pairs
@pytest.mark.parametrize("shape", [(640, 64), (640, 8, 9), (641, 100)], ids=str)
def test_rows_of_a_narrower_type_are_coded_in_it(wide, narrow, shape):
    tensor = trained(wide, shape)[0]
    plain = len(encode(tensor))
    tensor[100:140] = tensor[100:140].to(narrow).to(wide)
    tensor[::3] = tensor[::3].to(narrow).to(wide)
    payload = assert_comes_back(tensor)
    header = read_header(payload)
    assert (header.mode, header.narrow, header.base_values) == (MIXED, safetensors_dtype(narrow), 0)
    saved = NARROWER[safetensors_dtype(wide)][safetensors_dtype(narrow)] / 8 * tensor[0].numel() * (214 + 27)
    assert plain - len(payload) > 0.9 * saved
    assert encode(tensor, threads=3) == payload and bits(decode(payload, threads=3)) == bits(tensor)
    out = np.zeros(tensor.nbytes, np.uint8)
    decode_raw(payload, out=out)
    assert out.tobytes() == bits(tensor)


def test_a_few_rows_of_a_narrower_type_are_not_coded_apart():
    tensor = trained(torch.float32, (640, 64))[0]
    tensor[7] = 0
    assert read_header(assert_comes_back(tensor)).mode == CODED


def test_a_step_of_widened_values_is_applied_in_place():
    tensor, base = (values.float() for values in trained(torch.bfloat16, (300, 64)))
    tensor[5:] = base[5:]
    payload = encode(tensor, base)
    assert read_header(payload).narrow == "BF16"
    assert apply(payload, base).tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(base, tensor)


shapes = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@st.composite
def tensors_and_bases(draw):
    """A tensor of any type and, perhaps, a base: any tensor, or the tensor with some values and rows changed."""
    dtype = draw(st.sampled_from(list(SAFETENSORS_DTYPES)))
    shape = draw(shapes)
    tensor = random_bits(dtype, shape, draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["none", "same", "near", "resized", "other"]))
    if kind == "none":
        return tensor, None
    if kind == "other":
        return tensor, random_bits(draw(st.sampled_from(list(SAFETENSORS_DTYPES))), draw(shapes), 5)
    base = tensor.clone()
    if kind == "near" and tensor.numel():
        flat = base.reshape(-1).view(torch.uint8)
        at = draw(st.lists(st.integers(0, len(flat) - 1), max_size=5))
        flat[at] = flat[at] ^ (1 if dtype == torch.bool else draw(st.integers(1, 255)))
    if kind == "resized" and tensor.dim():
        rows = draw(st.integers(0, 2 * shape[0]))
        base = torch.cat([base, random_bits(dtype, shape, 7)])[:rows]
    return tensor, base


@settings(max_examples=400, deadline=None, derandomize=True)
@given(tensors_and_bases())
def test_any_tensor_comes_back_with_any_base(pair):
    tensor, base = pair
    payload = assert_comes_back(tensor, base)
    assert len(payload) <= len(bits(tensor)) + HEADER + 8 * tensor.dim() + 16


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tensors_and_bases(), tensors_and_bases())
def test_a_payload_with_another_base_is_right_or_refused(pair, other):
    payload = encode(*pair)
    try:
        assert bits(decode(payload, other[1])) == bits(pair[0])
    except BaseModelError:
        assert read_header(payload).base_values > 0


# ---- sizes -----------------------------------------------------------------------------------------------------------


@every_float
@pytest.mark.parametrize("with_base", [False, True])
def test_incompressible_data_grows_by_less_than_a_thousandth(dtype, with_base):
    tensor = random_bits(dtype, (1000, 1000))
    payload = assert_comes_back(tensor, random_bits(dtype, (1000, 1000), 1) if with_base else None)
    assert len(payload) < 1.001 * len(bits(tensor))


@every_float
def test_the_decoder_limits_the_values_of_a_payload(dtype):
    for value in (0.0, 1.0, -1.5, math.inf, torch.finfo(dtype).smallest_normal):
        for shape in ((1 << 18,), (1, 1 << 18), (1 << 14, 16), (1, 1)):
            tensor = torch.full(shape, value, dtype=dtype)
            assert tensor.numel() < len(encode(tensor)) * MAX_EXPANSION / 16


# ---- the header ------------------------------------------------------------------------------------------------------


def test_the_header_has_the_layout_of_the_documentation():
    tensor = torch.tensor([[1, 2, 3]], dtype=torch.int16)
    payload = encode_raw(RawTensor.from_torch(tensor), name="a.ß")
    fixed = struct.pack("<4s4BHHQQ", b"FMD\x01", 0, 2, 3, 0, 4, 0, 0, xxhash.xxh3_64_intdigest(bits(tensor)))
    variable = struct.pack("<QQ", 1, 3) + "I16a.ß".encode() + bits(tensor)
    assert payload == fixed + struct.pack("<Q", xxhash.xxh3_64_intdigest(fixed + bytes(8) + variable)) + variable


def test_the_header_says_what_predicts_a_tensor():
    tensor, base = trained(torch.bfloat16, (90, 64))
    raw, twin = RawTensor.from_torch(tensor), RawTensor.from_torch(base[:80].float())
    header = read_header(encode_raw(raw, twin, "model.weight", "weight"))
    assert (header.name, header.dtype, header.shape, header.values) == ("model.weight", "BF16", (90, 64), 5760)
    assert (header.mode, header.base_name, header.base_dtype, header.base_values) == (CODED, "weight", "F32", 5120)
    assert header.checksum == xxhash.xxh3_64_intdigest(raw.data)
    assert header.body == HEADER + 16 + len("BF16" + "F32" + "model.weight" + "weight")


def test_a_tensor_that_the_base_does_not_help_names_no_base():
    raw = RawTensor.from_torch(random_bits(torch.int64, (5,)))
    twin = RawTensor.from_torch(random_bits(torch.int64, (5,), seed=1))
    header = read_header(encode_raw(raw, twin, "steps", "steps"))
    assert (header.mode, header.base_name, header.base_dtype, header.base_values) == (STORED, "", "", 0)


def test_names_and_dimensions_up_to_the_formats_limits_fit():
    one = np.zeros(1, np.uint8)
    name = "ä" * 32767
    assert read_header(encode_raw(RawTensor("U8", (1,) * 255, one), name=name), name).shape == (1,) * 255
    for dimensions, name in ((256, "a"), (1, "a" * 65536)):
        with pytest.raises(CheckpointError, match="too many dimensions or too long a name"):
            encode_raw(RawTensor("U8", (1,) * dimensions, one), name=name)


ODD_BYTES = {
    "short": lambda data: data[:-1],
    "long": lambda data: np.append(data, data[:1]),
    "twice": lambda data: np.append(data, data),
    "none": lambda data: data[:0],
    "rows": lambda data: data.reshape(8, -1),
    "reversed": lambda data: data[::-1],
    "strided": lambda data: np.repeat(data, 2)[::2],
    "signed": lambda data: data.view(np.int8),
    "words": lambda data: data.view(np.uint16),
    "bytes": lambda data: data.tobytes(),
}


@pytest.mark.parametrize("odd", ODD_BYTES.values(), ids=ODD_BYTES)
@pytest.mark.parametrize(
    ("dtype", "shape"), [("F32", (8, 30)), ("BF16", (2, 256, 256)), ("I8", (80,)), ("BOOL", (8, 1)), ("F8_E4M3", (8, 8))]
)
def test_bytes_that_do_not_fit_type_and_shape_are_refused(odd, dtype: str, shape: tuple[int, ...]):
    base, tensor = (RawTensor.from_torch(random_bits(torch_dtype(dtype), shape, seed)) for seed in (0, 1))
    payload = encode_raw(tensor, base, "a", "b")
    wrong, wrong_base = (RawTensor(dtype, shape, odd(raw.data)) for raw in (tensor, base))
    for call in (
        lambda: encode_raw(wrong, base, "a", "b"),
        lambda: encode_raw(tensor, wrong_base, "a", "b"),
        lambda: decode_raw(payload, wrong_base),
        lambda: decode_raw(payload, base, out=odd(np.empty_like(tensor.data))),
        lambda: apply_raw(payload, wrong_base),
    ):
        with pytest.raises(CheckpointError, match=r"Tensor '[ab]?' is .* Give its bytes as one contiguous"):
            call()


@pytest.mark.parametrize("shape", [(-8, -30), (2**63, 2), (8.0, 30), (8, 31), None, "ab"], ids=str)
def test_shapes_that_no_tensor_has_are_refused(shape: object):
    with pytest.raises(CheckpointError, match="Give its bytes"):
        encode_raw(RawTensor("F32", shape, np.zeros(960, np.uint8)))


def test_read_only_memory_is_not_changed_in_place():
    tensor, base = map(RawTensor.from_torch, trained(torch.float32, (80, 90)))
    payload, before = encode_raw(tensor, base), base.data.tobytes()
    base.data.flags.writeable = False
    with pytest.raises(CheckpointError, match="contiguous writable array"):
        apply_raw(payload, base)
    assert base.data.tobytes() == before


@pytest.mark.parametrize(
    "odd",
    [torch.empty(40, 60, device="meta"), torch.eye(40).to_sparse(), torch.eye(40).to_sparse_csr(), np.ones(3), [1.0]],
    ids=["meta", "sparse", "csr", "array", "list"],
)
def test_what_is_no_dense_tensor_with_values_is_refused(odd):
    tensor, base = trained(torch.float32, (40, 60))
    payload = encode(tensor, base)
    for call in (encode, lambda odd: encode(tensor, odd), lambda odd: decode(payload, odd), lambda odd: apply(payload, odd)):
        with pytest.raises(CheckpointError, match="dense tensors with values|Only a contiguous tensor"):
            call(odd)


@pytest.mark.parametrize("name", ["\ud800", None, b"a", 5])
def test_names_that_are_no_text_are_refused(name: object):
    for names in ({"name": name}, {"base_name": name}):
        tensor, base = map(RawTensor.from_torch, trained(torch.float32, (80, 90)))
        with pytest.raises(CheckpointError, match="no text that UTF-8 can hold"):
            encode_raw(tensor, base, **names)


@pytest.mark.parametrize("ndim", range(5))
def test_a_payload_never_has_as_many_dimensions_as_its_tensor(ndim):
    shape = payload_shape(ndim, 77)
    assert len(shape) != ndim and math.prod(shape) == 77


def test_a_payload_is_recognized_among_tensors():
    payload = torch.frombuffer(bytearray(encode(torch.randn(50))), dtype=torch.uint8)
    for shape in ((-1,), (1, -1)):
        assert is_payload(payload.reshape(shape)) and is_payload(payload.numpy().reshape(shape))
    assert not is_payload(payload[1:]) and not is_payload(payload[:20]) and not is_payload(payload[:0])
    others = [torch.randn(100), torch.randn(10, 10).bfloat16(), -torch.ones(100).int(), torch.full((100,), 10**6)]
    others.append(torch.zeros(100).bool())
    assert not any(map(is_payload, others)) and not is_payload(np.random.default_rng(0).random(100))


@pytest.mark.parametrize("size", [1, 1000, AT_ONCE - 1, AT_ONCE, 2 * AT_ONCE + 5])
def test_deflated_tensors_are_exact_in_length(size):
    for data in (np.zeros(size, np.uint8), np.random.default_rng(0).integers(0, 250, size, np.uint8)):
        stream = zlib.compress(data.tobytes(), 1)
        assert np.array_equal(inflate(np.frombuffer(stream, np.uint8), size), data)
        for bad, of in ((stream[:-1], size), (stream + b"\0", size), (stream, size + 1), (stream, size - 1)):
            with pytest.raises(ValueError, match="does not inflate"):
                inflate(np.frombuffer(bad, np.uint8), of)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_payload_is_refused_without_its_base():
    tensor, base = trained(torch.float32, (40, 40))
    payload = encode_raw(RawTensor.from_torch(tensor), RawTensor.from_torch(base), "a", "b")
    with pytest.raises(BaseModelError, match="'a' needs the tensor 'b'"):
        decode_raw(payload)
    for other in (base.half(), base.int(), base[:39], base.reshape(-1)[:100]):
        with pytest.raises(BaseModelError, match="'a' .* was compressed against a F32 tensor that predicts 1600 of its values"):
            decode_raw(payload, RawTensor.from_torch(other))


@every_float
def test_one_changed_value_of_the_base_is_noticed_wherever_it_is(dtype):
    tensor, base = trained(dtype, (40, 40))
    raw = RawTensor.from_torch(tensor)
    payload = encode_raw(raw, RawTensor.from_torch(base), "a", "b")
    for at in range(0, 1600, 23):
        for change in (lambda x: -x, lambda x: x * 1000, lambda x: torch.full_like(x, math.nan)):
            other = base.clone().reshape(-1)
            other[at] = change(other[at])
            with pytest.raises(BaseModelError, match="'b' of the base model has changed"):
                decode_raw(payload, RawTensor.from_torch(other.reshape(40, 40)))


def test_a_payload_under_another_name_is_refused():
    payload = encode_raw(RawTensor.from_torch(torch.randn(3)), name="a")
    assert read_header(payload, "a").name == "a"
    with pytest.raises(CorruptFileError, match="Tensor 'b' holds the data of 'a'"):
        read_header(payload, "b")


def test_widths_are_those_of_torch():
    assert {name: torch_dtype(name).itemsize for name in FLOATS} == WIDTHS
