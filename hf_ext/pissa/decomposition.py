"""PiSSA's factors: the principal singular components of weights, computed exactly or by randomized subspace iteration."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hf_ext.errors import AdapterError
from hf_ext.storage.subspace import Components, block_width, gram, random_directions, singular

# Relative difference that Bᵀ W may have to its value for principal components of W. QPiSSA's iterations make up to a third,
# a fine-tune of the base a few hundredths, another weight 1.
SAME_WEIGHT = 0.5


def principal_components(
    weight: torch.Tensor, rank: int, niter: int | None = 3, seed: int = 0, similar: Components | None = None
) -> Components:
    """Computes the largest singular components of a matrix on its device: `rank` or somewhat more, or all that are not zero.

    The iteration (see `storage.subspace`) works on the matrix's smaller side, and multiplies by whole matrices.

    Args:
        weight: (m, n), float32 or float64.
        rank: r, at least one.
        niter: number of rounds of subspace iteration, at least one; None for LAPACK's exact decomposition.
        seed: seed of the random directions. The same weight, seed and device give the same components.
        similar: components of a similar matrix, from which the iteration starts instead of random directions.

    Raises:
        AdapterError: the weight has NaN or infinite values.
    """
    if not weight.isfinite().all():
        raise AdapterError("The weight has NaN or infinite values, so it has no principal components. Mend the base's weights.")
    if weight.shape[0] > weight.shape[1]:
        return principal_components(weight.T, rank, niter, seed, similar and similar.transposed()).transposed()
    width = block_width(rank, weight.shape)
    if niter is None or width == len(weight):
        U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
        return Components(S[:width].double().cpu().numpy(), U[:, :width], Vh[:width])
    block = similar.right if similar else random_directions(len(weight), width, seed, weight).T @ weight
    basis = weight @ block.T
    for _ in range(1, niter):
        # (basisᵀ W)ᵀ is Wᵀ basis, but reads W row by row.
        basis = weight @ (_conditioned(basis).T @ weight).T
    basis = torch.linalg.qr(basis).Q
    projected = basis.T @ weight
    values, rotation = singular(gram(projected.T))
    rotation = rotation.to(weight.dtype)
    return Components(values, basis @ rotation, (rotation / torch.from_numpy(values).to(rotation)).T @ projected)


def _conditioned(block: torch.Tensor) -> torch.Tensor:
    """Returns nearly orthonormal columns of the same span: by Cholesky, or by the slower QR if Cholesky fails."""
    factor, failed = torch.linalg.cholesky_ex(gram(block))
    if failed:
        return torch.linalg.qr(block).Q
    return torch.linalg.solve_triangular(factor.T.to(block.dtype), block, upper=True, left=False)


def initial_factors(components: Components, rank: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes PiSSA's adapter before training (arXiv 2404.02948, eq. 2 and 3). scaling · B A is the matrix of the components.

    Returns:
        B = U (S / scaling)^½, (m, r), and A = (S / scaling)^½ Vh, (r, n); zero beyond the components.
    """
    B, A = components.factors(rank, scaling)
    missing = rank - len(A)
    return pad(B, (0, missing)), pad(A, (0, 0, 0, missing))


def share_of_energy(B: torch.Tensor, A: torch.Tensor, scaling: float, weight: torch.Tensor) -> float:
    """Computes ‖scaling · B A‖² / ‖W‖² (Frobenius) without forming the product."""
    part = scaling**2 * ((B.mT @ B) * (A @ A.mT)).sum()
    return (part / weight.square().sum().clamp_min(torch.finfo(weight.dtype).tiny)).item()


def is_of(B: torch.Tensor, A: torch.Tensor, scaling: float, weight: torch.Tensor) -> bool:
    """Tells whether factors of `initial_factors` belong to this weight. Then Bᵀ W = scaling · diag(|A's rows|²) A, up to a
    relative difference of SAME_WEIGHT in Frobenius norm."""
    projected = B.mT.to(weight.dtype) @ weight
    A = A.to(weight.dtype)
    expected = scaling * A.square().sum(-1, keepdim=True) * A
    return bool(torch.linalg.norm(projected - expected) <= SAME_WEIGHT * torch.linalg.norm(expected))
