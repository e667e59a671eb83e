"""The principal singular components of weights, exactly and by randomised subspace iteration."""

from __future__ import annotations

from typing import NamedTuple

import torch

OVERSAMPLING = 8  # directions that the iteration carries along, beyond one and a quarter times the rank
# By how much Bᵀ W may differ from what it is for principal components of W. Quantisation in turns brings up to a third, a
# fine-tune of the base a few hundredths; another weight gives 1.
SAME_WEIGHT = 0.5


class Components(NamedTuple):
    """The r largest singular values of W (…, m, n) and their vectors, so that W ≈ U diag(S) Vh.

    Attributes:
        U: (…, m, r), orthonormal columns.
        S: (…, r), falling.
        Vh: (…, r, n), orthonormal rows.
        basis: (…, min(m, n), k), the subspace that they were found in, from which a similar matrix's are found sooner.
    """

    U: torch.Tensor
    S: torch.Tensor
    Vh: torch.Tensor
    basis: torch.Tensor


def principal_components(
    weight: torch.Tensor,
    rank: int,
    niter: int | None = 3,
    seed: int = 0,
    basis: torch.Tensor | None = None,
) -> Components:
    """The `rank` largest singular components of one matrix, or of each of a batch, where the weight lies.

    Randomised subspace iteration (Halko, Martinsson, Tropp 2011, algorithms 4.4 and 5.1): each round multiplies a block of
    somewhat more than rank directions by W Wᵀ and orthonormalises it. The block lives on the matrix's smaller side, and the
    last step decomposes its small Gram matrix instead of a long matrix.

    Args:
        weight: (…, m, n), float32 or float64.
        rank: r, at most min(m, n).
        niter: rounds; None for the exact decomposition (LAPACK's).
        seed: of the first directions. The same weight, seed and device give the same components.
        basis: that of a similar matrix of this shape, to start from instead of random directions.

    Raises:
        ValueError: the matrix has no `rank` components.
    """
    smaller = min(weight.shape[-2:])
    if not 0 < rank <= smaller:
        raise ValueError(f"A matrix of {weight.shape[-2]} × {weight.shape[-1]} has {smaller} components, not {rank}.")
    if weight.shape[-2] > weight.shape[-1]:
        found = principal_components(weight.mT, rank, niter, seed, basis)
        return Components(found.Vh.mT, found.S, found.U.mT, found.basis)
    width = min(rank + rank // 4 + OVERSAMPLING, smaller)
    if niter is None or width == smaller:
        U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
        return Components(U[..., :rank], S[..., :rank], Vh[..., :rank, :], U[..., :width])
    if basis is None:
        generator = torch.Generator(weight.device).manual_seed(seed)
        shape = (*weight.shape[:-1], width)
        basis = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
        niter = max(niter, 1)  # random directions have nothing of the weight yet
    for turn in range(niter):
        # (basisᵀ W)ᵀ is Wᵀ basis, but reads W row by row.
        basis = weight @ ((_conditioned(basis) if turn else basis).mT @ weight).mT
    basis = torch.linalg.qr(basis).Q
    projected = basis.mT @ weight
    # The squares of singular values lose half of the digits, which float64 has to spare.
    squares, rotation = torch.linalg.eigh(_gram(projected.mT))
    S = squares[..., -rank:].flip(-1).clamp_min(0).sqrt().to(weight.dtype)
    rotation = rotation[..., -rank:].flip(-1).to(weight.dtype)
    Vh = rotation.mT @ projected / S.clamp_min(torch.finfo(weight.dtype).tiny)[..., None]
    return Components(basis @ rotation, S, Vh, basis)


def _gram(block: torch.Tensor) -> torch.Tensor:
    block = block.double()
    return block.mT @ block


def _conditioned(block: torch.Tensor) -> torch.Tensor:
    """Nearly orthonormal columns that span the same: by Cholesky, faster than QR, which takes over where that cannot."""
    factor, failed = torch.linalg.cholesky_ex(_gram(block))
    if failed.any():
        return torch.linalg.qr(block).Q
    return torch.linalg.solve_triangular(factor.mT.to(block.dtype), block, upper=True, left=False)


def initial_factors(components: Components, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """PiSSA's adapter before training (arXiv 2404.02948, eq. 2 and 3): scaling · B A is the components' matrix.

    Returns:
        B = U (S / scaling)^½, (…, m, r), and A = (S / scaling)^½ Vh, (…, r, n).
    """
    root = (components.S / scaling).sqrt()
    return components.U * root[..., None, :], root[..., None] * components.Vh


def energy(B: torch.Tensor, A: torch.Tensor, scaling: float) -> torch.Tensor:
    """‖scaling · B A‖², Frobenius, without forming the product."""
    return scaling**2 * ((B.mT @ B) * (A @ A.mT)).sum()


def is_of(B: torch.Tensor, A: torch.Tensor, scaling: float, weight: torch.Tensor) -> bool:
    """Whether factors as `initial_factors` gives them are of this weight: then Bᵀ W = scaling · diag(|A's rows|²) A, up to
    SAME_WEIGHT in Frobenius norm."""
    found = B.mT.to(weight.dtype) @ weight
    A = A.to(weight.dtype)
    expected = scaling * A.square().sum(-1, keepdim=True) * A
    return bool(torch.linalg.norm(found - expected) <= SAME_WEIGHT * torch.linalg.norm(expected))


def truncate(B: torch.Tensor, A: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best approximation of the product B A (m × p, p × n) by one of a smaller rank, without forming the product.

    Returns:
        The factors, m × rank and rank × n, and all p singular values of the product (float64).
    """
    left, right = torch.linalg.qr(B.double()), torch.linalg.qr(A.double().mT)
    U, S, Vh = torch.linalg.svd(left.R @ right.R.mT)
    root = S[:rank].sqrt()
    return ((left.Q @ U[:, :rank]) * root).to(B.dtype), (root[:, None] * (Vh[:rank] @ right.Q.mT)).to(A.dtype), S
