"""Measures the variety of texts, and the distance between two sets of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_ext.trans_lora.duplicates import jaccard, shingles, words_of


def distinct(texts: Sequence[str], n: int) -> float:
    """Returns distinct-n (Li et al., arXiv 1510.03055): the share of different runs among all runs of n words; 0 without
    any."""
    words = [words_of(text) for text in texts]
    runs = [row[i : i + n] for row in words for i in range(len(row) - n + 1)]
    return len(set(runs)) / len(runs) if runs else 0.0


def nearest(text: str, others: Sequence[str]) -> tuple[str, float]:
    """Returns the text among the others that is nearest to a text, and their Jaccard index of three-word shingles."""
    runs = shingles(text)
    return max(((other, jaccard(runs, shingles(other))) for other in others), key=lambda pair: pair[1])


def mmd(x: torch.Tensor, y: torch.Tensor, bandwidth: float | None = None) -> float:
    """Computes the maximum mean discrepancy of two samples under a Gaussian kernel (Gretton et al., JMLR 13, 2012; equation 5,
    biased).

    Args:
        x, y: (m, d) and (n, d).
        bandwidth: σ of exp(−‖a − b‖² / 2σ²); by default the median distance between all points of both.

    Returns:
        The discrepancy itself, not its square; from 0 to √2.
    """
    points = torch.cat([x, y]).double()
    squares = torch.cdist(points, points).square()
    if bandwidth is None:
        above = squares[torch.triu_indices(len(points), len(points), 1).unbind()]
        bandwidth = above.median().sqrt().item() or 1.0
    kernel = torch.exp(-squares / (2 * bandwidth**2))
    m = len(x)
    square = kernel[:m, :m].mean() + kernel[m:, m:].mean() - 2 * kernel[:m, m:].mean()
    return square.clamp_min(0).sqrt().item()


def plane(points: torch.Tensor) -> torch.Tensor:
    """Returns the two principal components of points, (n, d), as a map, (n, 2)."""
    centered = points.double() - points.double().mean(0)
    _, _, directions = torch.linalg.svd(centered, full_matrices=False)
    flat = centered @ directions[:2].T
    return torch.nn.functional.pad(flat, (0, 2 - flat.shape[1]))
