"""Principal singular components of weights, computed exactly or by randomized subspace iteration."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hf_ext.errors import AdapterError

OVERSAMPLING = 8  # directions of the iteration beyond one and a quarter times the rank
# Relative difference that Bᵀ W may have to its value for principal components of W. QPiSSA's iterations make up to a third,
# a fine-tune of the base a few hundredths, another weight 1.
SAME_WEIGHT = 0.5


class Components(NamedTuple):
    """The r largest singular values of W (…, m, n) and their vectors, so that W ≈ U diag(S) Vh.

    Attributes:
        U: (…, m, r), orthonormal columns.
        S: (…, r), in descending order.
        Vh: (…, r, n), orthonormal rows.
        block: (…, k, max(m, n)), the rows that the iteration ended with, k of them or all. The iteration of a similar matrix is
            shorter if it starts from them.
    """

    U: torch.Tensor
    S: torch.Tensor
    Vh: torch.Tensor
    block: torch.Tensor


def principal_components(
    weight: torch.Tensor,
    rank: int,
    niter: int | None = 3,
    seed: int = 0,
    block: torch.Tensor | None = None,
) -> Components:
    """Computes the `rank` largest singular components of a matrix or a batch of matrices, on the weight's device.

    This is randomized subspace iteration (Halko, Martinsson, Tropp 2011, algorithms 4.4 and 5.1). Each round multiplies a block
    of somewhat more than `rank` directions by W Wᵀ and orthonormalizes the block. The block belongs to the matrix's smaller
    side, and the last step decomposes the block's small Gram matrix instead of a long matrix.

    Args:
        weight: (…, m, n), float32 or float64.
        rank: r, at least one. Components beyond the matrix's min(m, n) are zero.
        niter: number of rounds, at least one; None for LAPACK's exact decomposition.
        seed: seed of the random directions. The same weight, seed and device give the same components.
        block: block of a similar matrix of this shape and rank, to start from instead of random directions.

    Raises:
        AdapterError: the weight has NaN or infinite values.
    """
    if not weight.isfinite().all():
        raise AdapterError("The weight has NaN or infinite values, so it has no principal components. Mend the base's weights.")
    smaller = min(weight.shape[-2:])
    if rank > smaller:
        U, S, Vh, block = principal_components(weight, smaller, niter, seed, block)
        missing = (0, rank - smaller)
        return Components(pad(U, missing), pad(S, missing), pad(Vh, (0, 0, *missing)), block)
    if weight.shape[-2] > weight.shape[-1]:
        transposed = principal_components(weight.mT, rank, niter, seed, block)
        return Components(transposed.Vh.mT, transposed.S, transposed.U.mT, transposed.block)
    width = min(rank + rank // 4 + OVERSAMPLING, smaller)
    if niter is None or width == smaller:
        U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
        return Components(U[..., :rank], S[..., :rank], Vh[..., :rank, :], Vh[..., :width, :])
    if block is None:
        generator = torch.Generator(weight.device).manual_seed(seed)
        shape = (*weight.shape[:-1], width)
        directions = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
        block = directions.mT @ weight
    basis = weight @ block.mT
    for _ in range(1, niter):
        # (basisᵀ W)ᵀ is Wᵀ basis, but reads W row by row.
        basis = weight @ (_conditioned(basis).mT @ weight).mT
    basis = torch.linalg.qr(basis).Q
    projected = basis.mT @ weight
    # Squaring the singular values loses half of the digits. float64 has enough of them.
    squares, rotation = torch.linalg.eigh(_gram(projected.mT))
    S = squares[..., -rank:].flip(-1).clamp_min(0).sqrt().to(weight.dtype)
    rotation = rotation[..., -rank:].flip(-1).to(weight.dtype)
    Vh = rotation.mT @ projected / S.clamp_min(torch.finfo(weight.dtype).tiny)[..., None]
    return Components(basis @ rotation, S, Vh, projected)


def _gram(block: torch.Tensor) -> torch.Tensor:
    block = block.double()
    return block.mT @ block


def _conditioned(block: torch.Tensor) -> torch.Tensor:
    """Returns nearly orthonormal columns of the same span: by Cholesky, or by the slower QR if Cholesky fails."""
    factor, failed = torch.linalg.cholesky_ex(_gram(block))
    if failed.any():
        return torch.linalg.qr(block).Q
    return torch.linalg.solve_triangular(factor.mT.to(block.dtype), block, upper=True, left=False)


def initial_factors(components: Components, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes PiSSA's adapter before training (arXiv 2404.02948, eq. 2 and 3). scaling · B A is the matrix of the components.

    Returns:
        B = U (S / scaling)^½, (…, m, r), and A = (S / scaling)^½ Vh, (…, r, n).
    """
    root = (components.S / scaling).sqrt()
    return components.U * root[..., None, :], root[..., None] * components.Vh


def share_of_energy(B: torch.Tensor, A: torch.Tensor, scaling: float, weight: torch.Tensor) -> float:
    """Computes ‖scaling · B A‖² / ‖W‖² (Frobenius) without forming the product."""
    part = scaling**2 * ((B.mT @ B) * (A @ A.mT)).sum()
    return (part / weight.square().sum().clamp_min(torch.finfo(weight.dtype).tiny)).item()


def is_of(B: torch.Tensor, A: torch.Tensor, scaling: float, weight: torch.Tensor) -> bool:
    """Tells whether factors of `initial_factors` belong to this weight.

    Then Bᵀ W = scaling · diag(|A's rows|²) A, up to a relative difference of SAME_WEIGHT in Frobenius norm.
    """
    projected = B.mT.to(weight.dtype) @ weight
    A = A.to(weight.dtype)
    expected = scaling * A.square().sum(-1, keepdim=True) * A
    return bool(torch.linalg.norm(projected - expected) <= SAME_WEIGHT * torch.linalg.norm(expected))
