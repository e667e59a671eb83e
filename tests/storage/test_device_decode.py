"""The decoder for GPUs, run by Triton's interpreter on the CPU. The reference decoder and the CPU's are its judges."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import reference_codec as reference
import torch
import xxhash
from codec_arrays import BF16, FP16, FP32, NAMES, decode, encode, fine_tune, landmarks, random_bits, unsigned, weights
from golden_checkpoints import tensors
from interleaved import recoded
from safetensors.torch import save_file

from hf_ext import _native
from hf_ext.fm_delta import compress_checkpoint
from hf_ext.storage.delta import device_decode
from hf_ext.storage.delta.codec import encode_raw
from hf_ext.storage.delta.device_decode import Body, Request, bodies_of, decode_bodies, decode_onto
from hf_ext.storage.delta.payload import CODED, STACKED, Header, read_header, row_length
from hf_ext.storage.native import FLOATS
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.storage.stored import Stored

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")

CPU = torch.device("cpu")
BLOCK = 256 * 1024
TYPES = {code: name for name, code in FLOATS.items()}
LARGE = ("experts", "lora", "lora.F32", "low_rank")  # golden tensors that take the interpreter seconds
every_type = pytest.mark.parametrize("code", [BF16, FP16, FP32], ids=[NAMES[code] for code in (BF16, FP16, FP32)])
Case = tuple[np.ndarray, np.ndarray | None, int]  # a tensor, the base of its first values, and the length of its rows
Make = Callable[[np.random.Generator, int], Case]


@pytest.fixture(scope="module", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Replaces Triton's language once, not at each call of a function of a kernel."""
    scope = interpreter._patch_lang(triton.language.sum.fn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", lambda self, *args, **named: self.rewrite()(*args, **named))
        yield
    scope.restore()


def on_device(body: bytes, base: np.ndarray | None, code: int, length: int, checksum: int, values: int) -> np.ndarray | None:
    """Returns the bits that the kernels decode; None if their checksum differs."""
    shape, dtype = (values // length, length), TYPES[code]
    known = 0 if base is None else len(base)
    header = Header("", dtype, shape, CODED, "", "base" * bool(known), dtype * bool(known), known, checksum, 0)
    assert row_length(shape) == length
    before = None if base is None else RawTensor(dtype, (known // length, length), base.view(np.uint8).copy()).to_torch()
    (out,) = decode_onto([Request(header, [(header, np.frombuffer(body, np.uint8))], before)], CPU)
    return None if out is None else RawTensor.from_torch(out).data.view(reference.TYPES[code].unsigned)


def assert_same(tensor: np.ndarray, base: np.ndarray | None, code: int, length: int, body: bytes) -> None:
    """The kernels, the CPU and the reference decoder give the tensor."""
    known = 0 if base is None else len(base)
    decoded = on_device(body, base, code, length, xxhash.xxh3_64_intdigest(tensor), len(tensor))
    assert decoded is not None
    for other in (tensor, *(way(body, base, code, len(tensor), length, known) for way in (decode, reference.decode_body))):
        np.testing.assert_array_equal(decoded, other)


def with_landmarks(rng: np.random.Generator, bits: np.ndarray, code: int) -> np.ndarray:
    return np.where(rng.random(len(bits)) < 0.05, rng.choice(landmarks(code), len(bits)), bits)


def light(rng: np.random.Generator, code: int) -> Case:
    return *fine_tune(rng, 19 * 67, code, 0.003), 67


def full(rng: np.random.Generator, code: int) -> Case:
    tensor, base = fine_tune(rng, 10 * 100, code, 0.5)
    return with_landmarks(rng, tensor, code), with_landmarks(rng, base, code), 100


def noise(rng: np.random.Generator, code: int) -> Case:
    size = 5 * 64
    bits = weights(rng, size, code)
    return np.where(rng.random(size) < 0.1, random_bits(rng, size, code), bits), bits, 64


def alone(rng: np.random.Generator, code: int) -> Case:
    return with_landmarks(rng, weights(rng, 11 * 70, code), code), None, 70


def grown(rng: np.random.Generator, code: int) -> Case:
    tensor, base = fine_tune(rng, 12 * 65, code)
    touched = np.repeat(np.arange(12) % 3 == 1, 65)
    return np.concatenate([np.where(touched, tensor, base), weights(rng, 5 * 65, code)]), base, 65


def scaled_columns(rng: np.random.Generator, code: int) -> Case:
    tensor, base = fine_tune(rng, 16 * 128, code)
    quiet = np.tile(rng.random(128) < 0.5, 16)
    return np.where(quiet, base, tensor), base, 128


@every_type
@pytest.mark.parametrize("make", [light, full, noise, alone, grown, scaled_columns])
def test_interleaved_blocks_are_decoded(make: Make, code: int) -> None:
    tensor, base, length = make(np.random.default_rng(0), code)
    body = encode(tensor, base, code, length)
    body = recoded(body, 2, base, code, len(tensor), length, 0 if base is None else len(base))
    assert_same(tensor, base, code, length, body)


def test_blocks_of_one_lane_are_decoded() -> None:
    tensor, base = fine_tune(np.random.default_rng(1), 2 * 64, BF16, 0.1)
    assert_same(tensor, base, BF16, 64, encode(tensor, base, BF16, 64))


@pytest.mark.parametrize(
    "most, exponent, code", [(60, 20, BF16), (60, 20, FP16), (60, 20, FP32), (1 << 13, 34, BF16), (1 << 13, 34, FP32)]
)
def test_low_rank_changes_are_decoded(code: int, most: int, exponent: int) -> None:
    rng = np.random.default_rng(2)
    base = with_landmarks(rng, weights(rng, 17 * 130, code), code)
    rows, columns = (rng.integers(-most, most, shape, np.int32) for shape in ((17, 2), (2, 130)))
    change = np.ldexp((rows.astype(np.int64) @ columns).ravel().astype("<f8"), -exponent)
    tensor = reference.move(base, change, most > 60, reference.TYPES[code])
    tensor[130:260], tensor[7::97] = base[130:260], tensor[7::97] ^ 1
    body = encode(tensor, base, code, 130, changes=((rows, columns, exponent),))
    assert body[1] & 4
    assert_same(tensor, base, code, 130, recoded(body, 2, base, code, len(tensor), 130, len(base)))


@pytest.mark.parametrize("kind, code", [(1, BF16), (2, BF16), (2, FP16), (3, BF16)])
def test_lists_of_changes_are_decoded(kind: int, code: int) -> None:
    rng = np.random.default_rng(3)
    base = with_landmarks(rng, weights(rng, 85 * 100, code), code)
    tensor = np.concatenate([np.where(rng.random(len(base)) < 0.004, base ^ rng.integers(1, 9, len(base), np.uint16), base)])
    body = encode(tensor, base, code, 100)
    assert body[1] & 8
    assert_same(tensor, base, code, 100, recoded(body, kind, base, code, len(tensor), 100, len(base)))


def test_verbatim_blocks_are_decoded() -> None:
    base, tensor = (random_bits(np.random.default_rng(seed), 5 * 67, FP32) for seed in range(2))
    body = encode(tensor, base, FP32, 67)
    assert len(body) > tensor.nbytes
    assert_same(tensor, base, FP32, 67, body)


def test_several_lists_of_changes_are_decoded() -> None:
    base = random_bits(np.random.default_rng(4), BLOCK + 300, BF16)
    tensor = base.copy()
    tensor[[0, 3, 70, BLOCK, BLOCK + 9]] ^= 1
    assert_same(tensor, base, BF16, len(base), encode(tensor, base, BF16, len(base)))


@every_type
def test_coarse_changes_are_decoded(code: int) -> None:
    rng = np.random.default_rng(5)
    tensor, base = fine_tune(rng, 10 * 64, code, 0.2)
    base = with_landmarks(rng, base, code)
    body = _native.encode_coarse(tensor, base, code, 64, len(base), 1, (1e-3, 0.6, None))[0]
    body = recoded(body, 2, base, code, len(base), 64, len(base))
    assert_same(decode(body, base, code, len(base), 64, len(base)), base, code, 64, body)


@pytest.mark.parametrize(
    "is_large", [False, pytest.param(True, marks=pytest.mark.slow, id="large")], ids=lambda is_large: "small"
)
def test_golden_tensors_are_decoded_at_once_or_left_to_the_cpu(is_large: bool) -> None:
    bases, tuned = tensors(1)
    requests, expected = [], []
    for name, tensor in tuned.items():
        if (name in LARGE) != is_large:
            continue
        before = RawTensor.from_torch(bases[name]) if name in bases else None
        payload = np.frombuffer(encode_raw(RawTensor.from_torch(tensor), before), np.uint8)
        header = read_header(payload)
        if not (bodies := bodies_of(payload, header)):
            has_other_type = header.narrow or header.dtype == "F64" or header.base_dtype not in ("", header.dtype)
            assert header.mode not in (CODED, STACKED) or has_other_type
            continue
        code, begin, interleaved = FLOATS[header.dtype], 0, []
        for part, body in bodies:
            known = before.data.view(unsigned(code))[begin : begin + part.base_values] if part.base_values else None
            sizes = part.values, row_length(part.shape), part.base_values
            interleaved.append((part, np.frombuffer(recoded(body.tobytes(), 2, known, code, *sizes), np.uint8)))
            begin += part.values
        requests.append(Request(header, interleaved, bases[name].clone() if header.base_values else None))
        expected.append(RawTensor.from_torch(tensor).data)
    for decoded, data in zip(decode_onto(requests, CPU), expected, strict=True):
        assert decoded is not None
        np.testing.assert_array_equal(RawTensor.from_torch(decoded).data, data)


def test_a_wrong_base_is_not_decoded() -> None:
    tensor, base = fine_tune(np.random.default_rng(6), 5 * 64, BF16)
    body = recoded(encode(tensor, base, BF16, 64), 2, base, BF16, 320, 64, 320)
    assert on_device(body, base ^ 1, BF16, 64, xxhash.xxh3_64_intdigest(tensor), 320) is None


def test_damaged_bodies_never_give_another_tensor() -> None:
    rng = np.random.default_rng(7)
    tensor, base = fine_tune(rng, 5 * 64, BF16)
    body = recoded(encode(tensor, base, BF16, 64), 2, base, BF16, 320, 64, 320)
    for place in rng.integers(len(body), size=12):
        damaged = bytearray(body)
        damaged[place] ^= 1 << rng.integers(8)
        with suppress(ValueError):  # its sizes do not fit
            decoded = on_device(bytes(damaged), base, BF16, 64, xxhash.xxh3_64_intdigest(tensor), 320)
            assert decoded is None or np.array_equal(decoded, tensor)


def test_tensors_of_a_checkpoint_are_decoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, shapes = np.random.default_rng(8), {"a": (2, 64), "b": (1, 64), "short": (1, 64)}
    types = {"a": torch.bfloat16, "b": torch.float32, "short": torch.float16}
    base = {name: torch.from_numpy(rng.normal(0, 0.02, shape)).to(types[name]) for name, shape in shapes.items()}
    tuned = {
        name: tensor * torch.from_numpy(rng.normal(1, 1e-2, shapes[name])).to(tensor.dtype) for name, tensor in base.items()
    }
    tuned |= {"alone": torch.from_numpy(rng.normal(0, 0.02, (1, 64))).float(), "ids": torch.arange(300)}
    for folder, tensors_of_folder in (("base", base), ("tuned", tuned)):
        (tmp_path / folder).mkdir()
        save_file(tensors_of_folder, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text("{}")
    compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "packed")
    source, launches = Stored(tmp_path / "packed").tensors(), []

    def decode_some(parts: list[Body], device: torch.device) -> list[int]:
        """Decodes all in the first launch. In the second one, the first tensor is wrong."""
        launches.append(len(parts))
        return decode_bodies(parts, device) if len(launches) == 1 else [0]

    monkeypatch.setattr(device_decode, "_works", lambda device: True)
    monkeypatch.setattr(device_decode, "decode_bodies", decode_some)
    for names in [*tuned], ["b"]:
        for name, tensor in zip(names, source.read_on(names, CPU), strict=True):
            assert torch.equal(tensor, tuned[name]), name
    assert launches == [3, 1]


@pytest.mark.slow
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parents[1] / "compiled_kernels.py"
    subprocess.run([sys.executable, script], env=environment, check=True, timeout=300)


def test_triton_is_imported_only_where_it_is_used() -> None:
    code = "import sys, hf_ext.fm_delta, hf_ext.storage.delta.device_decode; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
