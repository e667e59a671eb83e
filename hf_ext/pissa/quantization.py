"""Weights in bitsandbytes' formats, and QPiSSA's alternation between the adapter and the quantized residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from hf_ext.errors import HfExtError
from hf_ext.pissa.decomposition import energy, initial_factors, principal_components

# bitsandbytes has no types where it is not installed.
QuantizedWeight: TypeAlias = Any  # Params4bit or Int8Params
LinearLayer: TypeAlias = Any  # Linear4bit or Linear8bitLt, PyTorch's Linear or Transformers' Conv1D
QuantType: TypeAlias = Literal["nf4", "fp4", "int8"]

ROWS = 1024  # rows of a weight that are in float64 at a time
PIECE = 1 << 15  # values whose codes are looked up at a time, few enough for the cache
CELLS = 1024  # into which the range of 4-bit codes is divided, so that each cell contains at most one bound
WARM_ITERATIONS = 1  # rounds of subspace iteration that start from the block of the step before


@dataclass(frozen=True)
class Quantization:
    """The format in which bitsandbytes stores a weight.

    Attributes:
        quant_type: "nf4" or "fp4" (blockwise, 4 bits), or "int8" (by row).
        double: whether the blocks' scales are quantized too.
        storage: dtype in which the 4-bit codes are packed.
        blocksize: number of weights that share a scale.
        dtype: dtype of the dequantized weight.
    """

    quant_type: QuantType = "nf4"
    double: bool = True
    storage: torch.dtype = torch.uint8
    blocksize: int = 64
    dtype: torch.dtype = torch.float32

    @property
    def bits(self) -> int:
        return 8 if self.quant_type == "int8" else 4

    @classmethod
    def of(cls, layer: LinearLayer) -> Quantization | None:
        """Returns the quantization of a layer's weight, or None if bitsandbytes did not quantize it."""
        kind = type(layer.weight).__name__
        if kind == "Int8Params":
            return cls("int8", double=False, dtype=torch.float16)
        if kind != "Params4bit":
            return None
        weight, state = layer.weight, layer.weight.quant_state
        if getattr(state, "packing_format_for_cpu", False):  # see `unpacked`
            storage = getattr(state, "original_storage_type", torch.uint8)
            return cls(weight.quant_type, state.original_nested, storage, state.blocksize, state.original_dtype)
        return cls(weight.quant_type, state.nested, weight.dtype, state.blocksize, state.dtype)

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Quantizes a weight (out_features, in_features) of any float type. The result is on the same device."""
        bnb = bitsandbytes()
        if self.bits == 8:
            # In float16, as bitsandbytes' kernels read it.
            return bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False).to(weight.device)
        parameter = bnb.nn.Params4bit(
            weight.contiguous(),
            requires_grad=False,
            blocksize=self.blocksize,
            compress_statistics=self.double,
            quant_type=self.quant_type,
            quant_storage=self.storage,
        ).to(weight.device)
        parameter.quant_state.dtype = self.dtype
        return parameter

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantizes and dequantizes a weight: float32, the values of `dequantize(quantize(weight))`.

        On CPUs, bitsandbytes finds the 4-bit code of each value by bisection. Looking it up is faster.
        """
        if weight.device.type != "cpu" or self.bits == 8 or weight.numel() % self.blocksize:
            return dequantize(self.quantize(weight))
        functional = bitsandbytes().functional
        levels = functional.get_4bit_type(self.quant_type, device="cpu", blocksize=self.blocksize).sort().values
        blocks = weight.float().reshape(-1, self.blocksize)
        scales = blocks.abs().amax(dim=1)
        scaled = blocks * (1 / scales.clamp_min(1e-38))[:, None]
        codes = _intervals(scaled.flatten(), (levels[:-1] + levels[1:]) / 2)
        if self.double:
            offset = scales.mean()
            scales = functional.dequantize_blockwise(*functional.quantize_blockwise(scales - offset, blocksize=256)) + offset
        values = levels.index_select(0, codes).view(blocks.shape)
        return (values * scales[:, None]).to(self.dtype).float().reshape(weight.shape)


def _intervals(values: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Returns the number of bounds below each value, int32. Values and bounds are in [-1, 1], and no two bounds in one cell."""

    def cells(numbers: torch.Tensor) -> torch.Tensor:
        return ((numbers + 1) * (CELLS / 2)).int()

    before = torch.searchsorted(cells(bounds), torch.arange(CELLS + 1), out_int32=True)
    bound = torch.full((CELLS + 1,), torch.inf).index_put((cells(bounds),), bounds)
    intervals = torch.empty(values.shape, dtype=torch.int32)
    for part, out in zip(values.split(PIECE), intervals.split(PIECE)):
        index = cells(part)
        torch.add(before.index_select(0, index), part > bound.index_select(0, index), out=out)
    return intervals


def bitsandbytes() -> Any:
    """Imports bitsandbytes.

    Raises:
        HfExtError: it is not installed.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise HfExtError("Quantized layers require bitsandbytes: pip install bitsandbytes") from error
    return bitsandbytes


def unpacked(layer: LinearLayer) -> QuantizedWeight:
    """Brings the layer's 4-bit weight into its portable layout and returns it. For inference on some CPUs, bitsandbytes changes
    the layout."""
    weight = layer.weight
    if getattr(weight.quant_state, "packing_format_for_cpu", False):
        inverse = getattr(bitsandbytes().functional, "_convert_weight_packed_for_cpu_inverse", None)
        if inverse is None:
            raise HfExtError(
                "This version of bitsandbytes does not restore weights that it packed for a CPU. Load the model again, and "
                "save or decompose it before its first forward pass."
            )
        weight.data, weight.quant_state = inverse(weight.data, weight.quant_state)
    return weight


def dequantize(parameter: QuantizedWeight, state: Any = None) -> torch.Tensor:
    """Dequantizes a parameter of `Quantization.quantize` to (out_features, in_features), float32.

    Args:
        state: `state` of the layer, to which the first forward pass moves the scales of an 8-bit weight.
    """
    if type(parameter).__name__ == "Int8Params":
        scales = parameter.SCB if parameter.SCB is not None else state.SCB
        return parameter.data.float() * (scales.float()[:, None] / 127)
    return bitsandbytes().functional.dequantize_4bit(parameter.data, parameter.quant_state).float()


def residual(weight: torch.Tensor, B: torch.Tensor, A: torch.Tensor, scaling: float) -> torch.Tensor:
    """Returns W − scaling · B A, float32. It is computed in float64: the number of threads does not change the result."""
    return torch.cat(
        [
            (rows.double() - scaling * (left.double() @ A.double())).float()
            for rows, left in zip(weight.split(ROWS), B.split(ROWS))
        ]
    )


class QuantizedResidual(NamedTuple):
    """A weight as W ≈ dequantized(quantized) + scaling · B A.

    Attributes:
        B, A: the adapter at the start of training, (m, r) and (r, n).
        quantized: W − scaling · B A as bitsandbytes' parameter.
        error: Frobenius norm of the difference to W, relative to W's norm.
        energy: the adapter's share of W's squared Frobenius norm.
    """

    B: torch.Tensor
    A: torch.Tensor
    quantized: QuantizedWeight
    error: float
    energy: float


def quantized_residual(
    weight: torch.Tensor,
    rank: int,
    quantization: Quantization,
    iterations: int = 5,
    scaling: float = 1.0,
    niter: int | None = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> QuantizedResidual:
    """Decomposes a weight by QPiSSA (arXiv 2404.02948, algorithm 1) into an adapter and a quantized residual.

    The first decomposition takes twice the rounds. All others start from its subspace, and one round is enough for them.

    Args:
        weight: (m, n), float32.
        iterations: T in the paper; 1 is plain QPiSSA.
        niter: half the rounds of the first decomposition; None decomposes exactly in each iteration.
        dtype: dtype of the adapter. The residual is the difference to the factors in this dtype.
    """
    total = torch.linalg.norm(weight)
    rest = weight
    block: torch.Tensor | None = None
    for iteration in range(iterations):
        rounds = None if niter is None else WARM_ITERATIONS if iteration else 2 * niter
        components = principal_components(rest, rank, rounds, seed=seed, block=block)
        block = components.block
        B, A = (factor.to(dtype) for factor in initial_factors(components, scaling))
        if iteration < iterations - 1:
            rest = weight - quantization.round(torch.addmm(weight, B.float(), A.float(), alpha=-scaling))
    # Loading an adapter computes only this residual again.
    quantized = quantization.quantize(residual(weight, B, A, scaling))
    rest = weight - dequantize(quantized)
    error = torch.linalg.norm(rest - scaling * (B.float() @ A.float())) / total
    share = energy(B.float(), A.float(), scaling) / total.square()
    return QuantizedResidual(B, A, quantized, error.item(), share.item())
