"""Weights in bitsandbytes' formats, and QPiSSA: adapter and quantised residual found in turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from hf_ext.errors import HfExtError
from hf_ext.pissa.decomposition import energy, initial_factors, principal_components

if TYPE_CHECKING:
    from torch import nn

ROWS = 1024  # of a weight that are worked on in float64 at a time
WARM_ITERATIONS = 1  # rounds of subspace iteration once a basis of the step before is there


@dataclass(frozen=True)
class Quantization:
    """How bitsandbytes stores a weight.

    Attributes:
        quant_type: "nf4" or "fp4" (blockwise, 4 bits), or "int8" (by row).
        double: whether the blocks' scales are quantised too.
        storage: type in which the 4-bit codes are packed.
        blocksize: weights that share a scale.
        dtype: of the dequantised weight.
    """

    quant_type: str = "nf4"
    double: bool = True
    storage: torch.dtype = torch.uint8
    blocksize: int = 64
    dtype: torch.dtype = torch.float32

    @property
    def bits(self) -> int:
        return 8 if self.quant_type == "int8" else 4

    @classmethod
    def of(cls, layer: nn.Module) -> Quantization | None:
        """That of a layer, whose weight stays as it is; None for one that bitsandbytes did not quantise."""
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

    def quantize(self, weight: torch.Tensor) -> nn.Parameter:
        """A weight (out_features, in_features) of any float type, as bitsandbytes' parameter on the same device."""
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


def bitsandbytes():
    try:
        import bitsandbytes
    except ImportError as error:
        raise HfExtError("Quantised layers need bitsandbytes: pip install bitsandbytes") from error
    return bitsandbytes


def unpacked(layer: nn.Module) -> nn.Parameter:
    """The layer's 4-bit weight in its portable layout, from which bitsandbytes departs for inference on some CPUs."""
    weight = layer.weight
    if getattr(weight.quant_state, "packing_format_for_cpu", False):
        inverse = bitsandbytes().functional._convert_weight_packed_for_cpu_inverse
        weight.data, weight.quant_state = inverse(weight.data, weight.quant_state)
    return weight


def dequantize(parameter: nn.Parameter, state: object = None) -> torch.Tensor:
    """The weight that a parameter of `Quantization.quantize` stands for, (out_features, in_features), float32.

    Args:
        state: of the layer, for 8-bit weights, whose scales move there in the first forward pass.
    """
    if type(parameter).__name__ == "Int8Params":
        scales = parameter.SCB if parameter.SCB is not None else state.SCB
        return parameter.data.float() * (scales.float()[:, None] / 127)
    return bitsandbytes().functional.dequantize_4bit(parameter.data, parameter.quant_state).float()


def residual(weight: torch.Tensor, B: torch.Tensor, A: torch.Tensor, scaling: float) -> torch.Tensor:
    """W − scaling · B A, float32. Worked out in float64, so that it does not depend on how a product is cut among threads."""
    return torch.cat(
        [
            (rows.double() - scaling * (left.double() @ A.double())).float()
            for rows, left in zip(weight.split(ROWS), B.split(ROWS))
        ]
    )


class QuantizedResidual(NamedTuple):
    """W ≈ dequantised(quantized) + scaling · B A.

    Attributes:
        B, A: the adapter at the start of training, (m, r) and (r, n).
        quantized: bitsandbytes' parameter of W − scaling · B A.
        error: Frobenius norm of what is missing from W, relative to W's.
        energy: the adapter's share of W's squared Frobenius norm.
    """

    B: torch.Tensor
    A: torch.Tensor
    quantized: nn.Parameter
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
    """QPiSSA (arXiv 2404.02948, algorithm 1): the principal components of what quantisation leaves, and the quantised rest.

    The first decomposition takes twice the rounds, as all others start from its subspace, for which one round is enough.

    Args:
        weight: (m, n), float32.
        iterations: T of the paper; 1 is plain QPiSSA.
        niter: of the first decomposition; None for exact decompositions throughout.
        dtype: of the adapter; the residual is taken against the factors as this type holds them.
    """
    total = torch.linalg.norm(weight)
    rest, basis = weight, None
    for iteration in range(iterations):
        rounds = None if niter is None else WARM_ITERATIONS if iteration else 2 * niter
        components = principal_components(rest, rank, rounds, seed=seed, basis=basis)
        basis = components.basis
        B, A = (factor.to(dtype) for factor in initial_factors(components, scaling))
        # Only the last one is made again when the adapter is loaded.
        exact = iteration == iterations - 1
        left = residual(weight, B, A, scaling) if exact else torch.addmm(weight, B.float(), A.float(), alpha=-scaling)
        quantized = quantization.quantize(left)
        rest = weight - dequantize(quantized)
    error = torch.linalg.norm(rest - scaling * (B.float() @ A.float())) / total
    share = energy(B.float(), A.float(), scaling) / total.square()
    return QuantizedResidual(B, A, quantized, error.item(), share.item())
