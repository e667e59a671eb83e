"""Encodes a tensor approximately: the low-rank part of its change from the base, and the rest in steps of one size.

The error of a value is about half a step, and changes far below a step take almost no bits. With one step for a whole model,
each tensor and row therefore gets the bits that lower the error most (reverse water-filling; Cover, Thomas, section 10.3).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from hf_ext.storage.delta.change import Change
from hf_ext.storage.delta.codec import cast_base, encode_body, predicted_values
from hf_ext.storage.delta.low_rank import coarse_change, spacing
from hf_ext.storage.delta.payload import (
    CODED,
    STACKED,
    Body,
    Factors,
    has_long_rows,
    is_stack,
    matrix_of,
    row_length,
    write_matrices,
    write_payload,
)
from hf_ext.storage.native import FLOATS, _native, aligned
from hf_ext.storage.prefetch import in_threads
from hf_ext.storage.safetensors_file import RawTensor

SAMPLE = 1 << 14  # values on which thresholds are compared
GAP = 0.05
THRESHOLDS = np.arange(0.5, 0.96, GAP)  # in steps
LEAST_PART = 2.0**-30  # of the largest change: the smallest step in which it can be stored
LARGE = 1 << 12  # numbers from here on count as one number in the comparison
WORTH = math.log(2) / 6  # squared steps of error that one bit must save: what it saves where errors are small


class Coarse(NamedTuple):
    """A tensor that was encoded approximately."""

    payload: bytes  # for `decode_raw`
    tensor: RawTensor  # that it decodes to
    numbers: int  # of values that have a change of their own beside the low-rank part


class _Body(NamedTuple):
    mode: int
    base_values: int
    body: Body
    data: np.ndarray  # of the restored tensor
    numbers: int


def coarsened(
    tensor: RawTensor, base: RawTensor, step: float, gain: float = 1, name: str = "", base_name: str = "", threads: int = 1
) -> Coarse:
    """Compresses a tensor approximately.

    Values that the base predicts are restored with an error of about half a step, or of half their spacing where that is
    larger. Added rows, and float64, are exact.

    Args:
        tensor: of a float type.
        base: its counterpart in the base model, as for `encode_raw`.
        step: the smallest change of a single value, from 2^-100 to 2^100.
        gain: factor of the stored change, to make up for what is left out.
        name, base_name, threads: as for `encode_raw`.
    """
    tensor.require_bytes(name)
    base.require_bytes(base_name)
    encoded = (_stack if is_stack(tensor.dtype, tensor.shape) else _body)(tensor, base, step, gain, threads)
    texts = (tensor.dtype, base.dtype, name, base_name) if encoded.base_values else (tensor.dtype, "", name, "")
    checksum = xxhash.xxh3_64_intdigest(encoded.data)
    payload = write_payload(texts, tensor.shape, encoded.mode, encoded.base_values, checksum, encoded.body)
    return Coarse(payload, replace(tensor, data=encoded.data), encoded.numbers)


def _stack(tensor: RawTensor, base: RawTensor, step: float, gain: float, threads: int) -> _Body:
    shape, count = tensor.shape[-2:], math.prod(tensor.shape[:-2])
    predicted = predicted_values(tensor, base) // math.prod(shape)

    def encode(i: int) -> _Body:
        matrix = matrix_of(tensor, shape, i)
        if i < predicted:
            return _body(matrix, matrix_of(base, shape, i), step, gain, -(-threads // count))
        return _Body(*encode_body(matrix, None, 1, 1), matrix.data, 0)

    matrices = in_threads(encode, count, threads)
    table = [(part.mode, part.base_values, xxhash.xxh3_64_intdigest(part.data), part.body) for part in matrices]
    data = np.concatenate([part.data for part in matrices])
    return _Body(STACKED, predicted * math.prod(shape), write_matrices(table), data, sum(part.numbers for part in matrices))


def _body(tensor: RawTensor, base: RawTensor, step: float, gain: float, threads: int) -> _Body:
    values, dtype, shape = predicted_values(tensor, base), tensor.dtype, tensor.shape
    base_data = cast_base(base, dtype, values)
    if base_data is None or dtype == "F64":
        return _Body(*encode_body(tensor, base, threads, 1), tensor.data, 0)
    data, length, is_matrix = aligned(tensor.data, dtype), row_length(shape), has_long_rows(shape)
    change = Change(data[: base_data.size], base_data, dtype, length if is_matrix else values)
    step, gain = _bounded(change, step, gain)
    pair = coarse_change(change, step, gain, threads) if is_matrix else None
    plain, stretched = pair or (None, None)
    settings = step * gain, threshold(change, plain, step), stretched
    if gain != 1:
        data = np.concatenate([_stretch(change, plain, stretched, gain), data[base_data.size :]])
    body, numbers = _native.encode_coarse(data, base_data, FLOATS[dtype], length, values, threads, settings)
    restored = np.empty_like(data)
    _native.decode(body, (restored, base_data, FLOATS[dtype], length, values, threads))
    return _Body(CODED, values, body, restored, numbers)


def _bounded(change: Change, step: float, gain: float) -> tuple[float, float]:
    """Returns a step in which even the largest change can be stored, and a gain of at most what the values that fall below the
    step can take from the change's length: one huge value keeps its size."""
    if not math.isfinite(change.energy):
        return step, 1.0
    step = max(step, LEAST_PART * math.sqrt(change.energy))  # no change is longer than all together
    least = change.energy - math.prod(change.shape) * step**2
    return step, min(gain, math.sqrt(change.energy / least)) if least > 0 else gain


def _moved(base: torch.Tensor, factors: Factors | None, rows: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows of a base (float32) moved by a low-rank change, rounded to the tensor's type."""
    if factors is None:
        return base
    left, right = (torch.from_numpy(part).double() for part in (factors.rows[rows], factors.columns))
    return (base + (left @ right).mul_(2.0**-factors.exponent)).to(dtype).float()


def _stretch(change: Change, plain: Factors | None, stretched: Factors | None, gain: float) -> np.ndarray:
    """Returns the bytes of the tensor to encode: `gain` times the change. What remains beside the low-rank part is stretched
    after it was rounded, because the changes of 16-bit values are few multiples of their spacing."""
    parts = []
    for band in change.bands():
        rows = np.arange(band.start, band.stop)
        values, base = change.pair(rows)
        rest = values.float() - _moved(base, plain, rows, values.dtype)
        target = rest.mul_(gain).add_(_moved(base, stretched, rows, values.dtype)).to(values.dtype)
        parts.append(target.view(torch.uint8).numpy().reshape(-1))
    return np.concatenate(parts)


def threshold(change: Change, factors: Factors | None, step: float) -> float:
    """Returns the size, in steps, from which what remains of a value's change is worth its bits. A sample of rows decides."""
    rows = change.sample(SAMPLE)
    values, base = change.pair(rows)
    base = _moved(base, factors, rows, values.dtype)
    rest = np.nan_to_num((values.float() - base).numpy(), posinf=0, neginf=0)
    units = np.exp2(spacing(base.numpy(), change.dtype).astype(np.float32)) / np.float32(step)  # in steps
    fine, units = units <= 1, np.maximum(units, 1)
    sizes = np.abs(rest) / (step * units)

    def cost(least: float) -> float:
        numbers = np.floor(sizes + (1 - np.where(fine, least, 0.5)))
        counts = np.bincount(np.minimum(numbers, LARGE).astype(np.int64).ravel())
        counts = counts[counts > 0]
        bits = float(counts @ np.log2(numbers.size / counts)) + np.count_nonzero(numbers)  # and the signs
        return float(np.square((sizes - numbers) * units).sum()) + WORTH * bits

    costs = [cost(least) for least in THRESHOLDS]
    best = int(np.argmin(costs))
    if not 0 < best < len(costs) - 1 or not math.isfinite(sum(costs)):
        return float(THRESHOLDS[best])
    # The vertex of the parabola through three of them, so that the size falls evenly as the step grows.
    before, least, after = costs[best - 1 : best + 2]
    return float(THRESHOLDS[best] + GAP / 2 * (before - after) / max(before - 2 * least + after, 1e-9))
