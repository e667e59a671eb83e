"""Coarse changes: all decoders agree, errors stay within a unit, and what the base does not predict is exact."""

import math

import numpy as np
import pytest
import reference_codec as reference
import torch
from codec_arrays import BF16, FP16, FP32, NAMES, SETS, decode, fine_tune, landmarks, outcome, random_bits, using
from hypothesis import given
from hypothesis import strategies as st
from repeats import repeats

from hf_ext import _native
from hf_ext.storage import encode_raw
from hf_ext.storage.delta.coarse import coarsened
from hf_ext.storage.delta.codec import decode_raw
from hf_ext.storage.safetensors_file import RawTensor

STEP = 1e-4
every_type = pytest.mark.parametrize("code", [FP32, FP16, BF16], ids=[NAMES[code] for code in (FP32, FP16, BF16)])


def encoded(tensor: np.ndarray, base: np.ndarray, code: int, length: int, step: float, factors: tuple | None = None) -> bytes:
    """Returns the body that every instruction set makes."""
    bodies = set()
    for name in SETS:
        with using(name):
            bodies.add(_native.encode_coarse(tensor, base, code, length, len(base), 1, (step, 0.6, factors))[0])
    (body,) = bodies
    return body


@st.composite
def tensors(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """A tensor of any content, its base, its type and the length of its rows."""
    code, length = draw(st.sampled_from([FP32, FP16, BF16])), draw(st.integers(1, 90))
    rng, rows = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(1, 9))
    kinds = {
        "usual": fine_tune(rng, rows * length, code),
        "bits": (random_bits(rng, rows * length, code), random_bits(rng, rows * length, code)),
        "special": (rng.choice(landmarks(code), rows * length), rng.choice(landmarks(code), rows * length)),
    }
    tensor, base = kinds[draw(st.sampled_from(list(kinds)))]
    known = draw(st.integers(1, rows)) * length
    return tensor, base[:known], code, length


@given(tensors(), st.floats(-100, 100))
def test_all_decoders_agree_about_any_tensor(example: tuple[np.ndarray, np.ndarray, int, int], exponent: float) -> None:
    tensor, base, code, length = example
    body = encoded(tensor, base, code, length, float(np.float32(2.0**exponent)))
    shape = base, code, len(tensor), length, len(base)
    restored = decode(body, *shape)
    np.testing.assert_array_equal(restored, reference.decode_body(body, *shape))
    np.testing.assert_array_equal(restored[len(base) :], tensor[len(base) :])


@repeats("places", 40, 300)
@every_type
def test_damaged_bodies_match_the_reference(code: int, places: int) -> None:
    rng = np.random.default_rng(0)
    (tensor, base), length = fine_tune(rng, 20 * 40, code), 40  # the reference is slow
    rows, columns = rng.integers(-9, 9, (20, 3), np.int32), rng.integers(-9, 9, (3, 40), np.int32)
    body = encoded(tensor, base, code, length, STEP, (rows, columns, 20))
    for at in range(0, len(body), 1 + len(body) // places):
        damaged = bytearray(body)
        damaged[at] ^= 1 << int(rng.integers(8))
        for changed in (bytes(damaged), body[:at]):
            outcome(changed, base, code, len(tensor), length, len(base))


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, math.inf, 1e-38])
def test_an_impossible_step_is_refused(step: float) -> None:
    tensor, base = fine_tune(np.random.default_rng(0), 640, FP32)
    with pytest.raises((ValueError, TypeError), match="step"):
        _native.encode_coarse(tensor, base, FP32, 64, 640, 1, (step, 0.5, None))


def raw(values: torch.Tensor) -> RawTensor:
    return RawTensor.from_torch(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300,), (200, 96), (3, 260, 256), (96, 3, 3, 3)])
def test_errors_are_below_a_step_or_the_spacing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    base = torch.randn(shape) * 0.02
    tensor = (
        base
        + torch.randn(shape) * 4 * STEP
        + torch.outer(torch.randn(shape[0]), torch.randn(base[0].numel())).reshape(shape) * STEP
    ).to(dtype)
    base = base.to(dtype)
    made = coarsened(raw(tensor), raw(base), STEP)
    restored = decode_raw(made.payload, raw(base))
    assert np.array_equal(restored.data, made.tensor.data)
    error = (restored.to_torch().double() - tensor.double()).abs()
    spacing = torch.finfo(dtype).eps * torch.maximum(tensor.double().abs(), base.double().abs())
    assert bool((error <= 1.3 * torch.maximum(2 * spacing, torch.tensor(STEP))).all())
    exact = len(encode_raw(raw(tensor), raw(base), level=1))
    assert made.numbers > 0 and (len(made.payload) < 0.6 * exact or dtype != torch.float32)


def test_a_change_of_low_rank_takes_few_numbers() -> None:
    torch.manual_seed(0)
    base = torch.randn(400, 300) * 0.02
    tensor = base + torch.randn(400, 2) @ torch.randn(2, 300) * 10 * STEP + torch.randn(400, 300) * 0.2 * STEP
    made = coarsened(raw(tensor), raw(base), STEP)
    assert made.numbers < 0.01 * tensor.numel() and 8 * len(made.payload) < 0.5 * tensor.numel()


@pytest.mark.parametrize("case", ["added rows", "float64", "another base"])
def test_what_cannot_be_coarse_is_exact(case: str) -> None:
    base, more = torch.randn(80, 70), torch.randn(5, 70)
    tensor = torch.cat([base, more])
    if case == "float64":
        base, tensor = base.double(), base.double() + 1e-3
    if case == "another base":
        base = base[:, :40]
    made = coarsened(raw(tensor), raw(base), 0.1)
    assert torch.equal(decode_raw(made.payload, raw(base)).to_torch(), tensor)
