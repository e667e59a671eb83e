"""The randomized decomposition finds what the exact one finds, and factors stand for the matrices they are of."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.pissa.decomposition import initial_factors, is_of, principal_components
from hf_ext.storage.subspace import Components


def matrix(*shape: int, decay: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Of singular values 1, 2^-decay, 3^-decay …"""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, min(shape), generator=generator)).Q for n in shape)
    return (left * torch.arange(1, min(shape) + 1) ** -decay) @ right.T


def product(components: Components, rank: int) -> torch.Tensor:
    B, A = initial_factors(components, rank, 1.0)
    return B @ A


@pytest.mark.parametrize("shape", [(96, 96), (40, 120), (120, 40)])
def test_the_components_equal_the_exact_decomposition(shape):
    weight = matrix(*shape)
    exact, components = (principal_components(weight, 8, niter) for niter in (None, 6))
    for vectors in (components.left.T[:8], components.right[:8]):
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(8), atol=1e-4, rtol=0)
    assert components.values[:8] == pytest.approx(exact.values[:8], rel=1e-4)
    torch.testing.assert_close(product(components, 8), product(exact, 8), atol=2e-3, rtol=0)


def test_more_rounds_capture_more_energy_and_three_nearly_all():
    weight = matrix(256, 384, decay=0.5)
    captured = [principal_components(weight, 16, niter).energy(16) for niter in (0, 1, 2, 3, 8, None)]
    assert all(less <= more * (1 + 1e-6) for less, more in pairwise(captured)) and captured[3] > 0.99 * captured[-1]


def test_the_components_of_a_similar_matrix_save_rounds():
    weight = matrix(256, 256, decay=0.5)
    before = principal_components(weight, 16, 8)
    similar = weight + 1e-3 * torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    cold, warm = (principal_components(similar, 16, 1, similar=start).energy(16) for start in (None, before))
    assert warm > cold and warm > 0.999 * principal_components(similar, 16, None).energy(16)


def test_a_seed_determines_the_components():
    weight, state = matrix(96, 96), torch.get_rng_state()
    first, second = (principal_components(weight, 4, seed=3) for _ in range(2))
    assert torch.equal(first.left, second.left) and torch.equal(first.right, second.right)
    assert not torch.equal(first.left, principal_components(weight, 4, seed=4).left)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("weight", [torch.zeros(48, 64), matrix(48, 64)[:, :1] @ torch.ones(1, 64)], ids=["zero", "rank one"])
def test_a_matrix_of_too_small_a_rank_gives_finite_factors_of_it(weight):
    B, A = initial_factors(principal_components(weight, 8), 8, 2.0)
    assert B.isfinite().all() and A.isfinite().all()
    torch.testing.assert_close(2 * B @ A, weight, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=25)
@given(m=st.integers(1, 24), n=st.integers(1, 24), data=st.data())
def test_all_components_together_are_the_matrix(m, n, data):
    weight = matrix(m, n, seed=data.draw(st.integers(0, 99)))
    rank = min(m, n) + data.draw(st.integers(0, 4))
    B, A = initial_factors(principal_components(weight, rank, data.draw(st.sampled_from([None, 0, 3]))), rank, 1.0)
    assert A.shape == (rank, n) and not A[min(m, n) :].any()
    torch.testing.assert_close(B @ A, weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scaling", [0.5, 1.0, 4.0])
def test_the_scaled_factors_are_the_principal_part(scaling):
    weight = matrix(64, 48)
    components = principal_components(weight, 8, None)
    B, A = initial_factors(components, 8, scaling)
    torch.testing.assert_close(scaling * B @ A, product(components, 8))
    torch.testing.assert_close(B.norm(dim=0), A.norm(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_factors_of_another_matrix_are_recognized(shape, dtype):
    weight, other = matrix(*shape), matrix(*shape, seed=1)
    B, A = (factor.to(dtype) for factor in initial_factors(principal_components(weight, 8), 8, 0.5))
    assert is_of(B, A, 0.5, weight.to(dtype).float())
    assert not is_of(B, A, 0.5, other)
    assert not is_of(B, A, 2.0, weight)
