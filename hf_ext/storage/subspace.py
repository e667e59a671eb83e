"""The leading singular components of a matrix, by subspace iteration (Halko, Martinsson, Tropp 2011)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

OVERSAMPLING = 8  # directions of the iteration beyond one and a quarter times the rank
TINY = 1e-6  # a share of the largest singular value; smaller ones are left out


class Components(NamedTuple):
    """The leading singular components of a matrix, U diag(S) Vh: as many as are not tiny."""

    values: np.ndarray  # S, in decreasing order
    left: torch.Tensor  # U, with orthonormal columns: rows × components
    right: torch.Tensor  # Vh, with orthonormal rows: components × columns

    def transposed(self) -> Components:
        """Returns the components of the transposed matrix."""
        return Components(self.values, self.right.T, self.left.T)

    def energy(self, rank: int) -> float:
        """Returns the sum of the squares of the first `rank` components."""
        return float(np.square(self.values[:rank]).sum())

    def factors(self, rank: int, scaling: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns U (S / scaling)^½ and (S / scaling)^½ Vh of the first `rank` components."""
        root = torch.from_numpy(np.sqrt(self.values[:rank] / scaling)).to(self.left)
        return self.left[:, :rank] * root, root[:, None] * self.right[:rank]


def block_width(rank: int, shape: tuple[int, ...]) -> int:
    """Returns the number of directions for components of this rank, at most the matrix's rows or columns."""
    return min(rank + rank // 4 + OVERSAMPLING, *shape)


def random_directions(rows: int, width: int, seed: int = 0, like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a matrix (rows × width) of Gaussian numbers; float32 on the CPU, or of the type and device of `like`."""
    device, dtype = (torch.device("cpu"), torch.float32) if like is None else (like.device, like.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=device, dtype=dtype)


Product: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def leading(product: Product, start: torch.Tensor, rounds: int) -> Components:
    """Returns as many of the leading singular components of a matrix M as `start` has columns; none if M is not finite.

    The last round decomposes the small Gram matrices of M start and Mᵀ M start instead of M. float64 makes up for the digits
    that squaring loses.

    Args:
        product: returns M start and Mᵀ M start.
        start: some directions, columns × width.
        rounds: number of products, at least one.
    """
    for _ in range(rounds - 1):
        start = torch.linalg.qr(product(start)[1]).Q
    images, back = product(start)
    lengths, turn = singular(gram(images))
    turn = turn.double() / torch.from_numpy(lengths).to(turn.device)  # makes the images orthonormal
    values, again = singular(turn.T @ gram(back) @ turn)
    turn = (turn @ again.double()).to(start.dtype)
    return Components(values, images @ turn, (back @ (turn / torch.from_numpy(values).to(turn))).T)


def singular(gram: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Returns the singular values of a matrix, in decreasing order, and its right singular vectors (float32), from its Gram
    matrix. Leaves out tiny ones, and all of a matrix that is not finite."""
    if not gram.isfinite().all():
        return np.empty(0), gram.new_empty(len(gram), 0).float()
    squares, turn = torch.linalg.eigh(gram)
    values = squares.clamp(min=0).sqrt().flip(0).cpu().numpy()
    values = values[values > TINY * values.max(initial=0)]
    return values, turn.flip(1)[:, : len(values)].float()


def gram(vectors: torch.Tensor) -> torch.Tensor:
    """Returns the products of all pairs of columns (float64)."""
    width = vectors.shape[1]
    products = torch.zeros(width, width, dtype=torch.float64, device=vectors.device)
    for part in vectors.split(1 << 14):
        products.addmm_(part.T.double(), part.double())
    return products
