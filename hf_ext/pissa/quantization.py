"""Weights in bitsandbytes' 4-bit formats, and QPiSSA's alternation between the adapter and the quantized residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from hf_ext.errors import HfExtError
from hf_ext.pissa.decomposition import initial_factors, principal_components

# bitsandbytes has no types where it is not installed.
QuantizedWeight: TypeAlias = Any  # Params4bit

ROWS = 1024  # rows of a weight that are in float64 at a time
WARM_ITERATIONS = 1  # rounds of subspace iteration that start from the components of the step before


@dataclass(frozen=True)
class Quantization:
    """The format in which bitsandbytes stores a 4-bit weight."""

    quant_type: str = "nf4"  # "nf4" or "fp4", blockwise
    double: bool = True  # the blocks' scales are quantized too
    storage: torch.dtype = torch.uint8  # in which the 4-bit codes are packed
    blocksize: int = 64  # number of weights that share a scale
    dtype: torch.dtype = torch.float32  # of the dequantized weight

    @classmethod
    def of(cls, layer: Any) -> Quantization:
        """Returns the quantization of a `Linear4bit`, whose weight this brings into its portable layout: for inference on some
        CPUs, bitsandbytes changes the layout."""
        layer.state_dict()
        state = layer.weight.quant_state
        return cls(layer.weight.quant_type, state.nested, layer.weight.dtype, state.blocksize, state.dtype)

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Quantizes a weight (out_features, in_features) of any float type. The result is on the same device."""
        options: dict[str, Any] = {"blocksize": self.blocksize, "compress_statistics": self.double, "requires_grad": False}
        options |= {"quant_type": self.quant_type, "quant_storage": self.storage}
        parameter = bitsandbytes().nn.Params4bit(weight.contiguous(), **options).to(weight.device)
        parameter.quant_state.dtype = self.dtype
        return parameter


def bitsandbytes() -> Any:
    """Imports bitsandbytes. Raises HfExtError if it is not installed."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise HfExtError("QPiSSA requires bitsandbytes: pip install bitsandbytes") from error
    return bitsandbytes


def format_of(parameter: QuantizedWeight) -> str:
    """Returns the format of a 4-bit parameter, which a residual depends on."""
    double = ", double quantization" if parameter.compress_statistics else ""
    return f"{parameter.quant_type} in blocks of {parameter.blocksize}{double}"


def dequantize(parameter: QuantizedWeight) -> torch.Tensor:
    """Dequantizes a parameter of `Quantization.quantize` to (out_features, in_features), float32."""
    return bitsandbytes().functional.dequantize_4bit(parameter.data, parameter.quant_state).float()


def residual(weight: torch.Tensor, B: torch.Tensor, A: torch.Tensor, scaling: float) -> torch.Tensor:
    """Returns W − scaling · B A, float32. It is computed in float64: the number of threads does not change the result."""
    parts = zip(weight.split(ROWS), B.split(ROWS))
    return torch.cat([(rows.double() - scaling * (left.double() @ A.double())).float() for rows, left in parts])


class QuantizedResidual(NamedTuple):
    """A weight as W ≈ dequantized(quantized) + scaling · B A."""

    B: torch.Tensor  # the adapter at the start of training, (m, r)
    A: torch.Tensor  # (r, n)
    quantized: QuantizedWeight  # W − scaling · B A as bitsandbytes' parameter


def quantized_residual(
    weight: torch.Tensor,
    rank: int,
    quantization: Quantization,
    iterations: int = 5,
    scaling: float = 1.0,
    niter: int | None = 3,
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
    rest, components = weight, None
    for iteration in range(iterations):
        rounds = None if niter is None else WARM_ITERATIONS if iteration else 2 * niter
        components = principal_components(rest, rank, rounds, similar=components)
        B, A = (factor.to(dtype) for factor in initial_factors(components, rank, scaling))
        if iteration < iterations - 1:
            rest = weight - dequantize(quantization.quantize(torch.addmm(weight, B.float(), A.float(), alpha=-scaling)))
    # Loading an adapter computes only this residual again.
    return QuantizedResidual(B, A, quantization.quantize(residual(weight, B, A, scaling)))
