"""QPiSSA on single weights, with bitsandbytes' own kernels: quantization errors fall as the paper says."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch

from hf_ext.pissa.quantization import Quantization, dequantize, quantized_residual, residual

FORMATS = {
    "nf4": Quantization("nf4", double=False),
    "nf4 double": Quantization("nf4"),
    "fp4": Quantization("fp4"),
    "fp4 in floats": Quantization("fp4", storage=torch.float32, dtype=torch.bfloat16),
}
every_format = pytest.mark.parametrize("quantization", FORMATS.values(), ids=FORMATS)


def weight(rows: int = 96, columns: int = 128, seed: int = 0) -> torch.Tensor:
    """A few strong directions and noise, as trained weights have."""
    generator = torch.Generator().manual_seed(seed)
    strong = torch.randn(rows, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
    return 0.02 * (strong / 3 + torch.randn(rows, columns, generator=generator))


def nuclear(matrix: torch.Tensor) -> float:
    return torch.linalg.svdvals(matrix).sum().item()


def missing(matrix: torch.Tensor, start, scaling: float = 1.0) -> torch.Tensor:
    return matrix - dequantize(start.quantized) - scaling * start.B @ start.A


def by_the_paper(matrix: torch.Tensor, rank: int, quantization: Quantization, iterations: int) -> torch.Tensor:
    """What is missing after the authors' algorithm, with exact decompositions."""
    rest = matrix
    for _ in range(iterations):
        U, S, Vh = torch.linalg.svd(rest, full_matrices=False)
        part = (U[:, :rank] * S[:rank]) @ Vh[:rank]
        dequantized = dequantize(quantization.quantize(matrix - part))
        rest = matrix - dequantized
    return rest - part


@every_format
def test_a_layers_format_follows_from_its_weight(quantization):
    layer = bnb.nn.Linear4bit(128, 96)
    layer.weight = quantization.quantize(weight())
    assert Quantization.of(layer) == quantization


@every_format
def test_the_quantized_weight_is_bitsandbytes_own(quantization):
    matrix = weight()
    options = {"quant_type": quantization.quant_type, "compress_statistics": quantization.double}
    layer = bnb.nn.Linear4bit(128, 96, bias=False, **options)
    layer.load_state_dict({"weight": matrix})
    layer = layer.to("cpu")
    decoded = dequantize(quantization.quantize(matrix))
    expected = dequantize(layer.weight)
    # The storage differs, and a type of fewer bits rounds; the codes are the same.
    torch.testing.assert_close(decoded, expected, rtol=2**-8, atol=0)
    assert torch.linalg.norm(decoded - matrix) < 0.2 * torch.linalg.norm(matrix)


def test_the_error_is_at_most_that_of_the_authors_algorithm():
    matrix, quantization = weight(192, 256), FORMATS["nf4"]
    plain = nuclear(matrix - dequantize(quantization.quantize(matrix)))
    paper = 100 * (1 - nuclear(by_the_paper(matrix, 12, quantization, 5)) / plain)
    ours, more = (
        100 * (1 - nuclear(missing(matrix, quantized_residual(matrix, 12, quantization, count))) / plain) for count in (5, 15)
    )
    assert ours > paper - 0.5
    assert more > paper


def test_exact_decompositions_give_the_authors_algorithm():
    matrix, quantization = weight(), FORMATS["nf4"]
    start = quantized_residual(matrix, 8, quantization, 3, niter=None)
    torch.testing.assert_close(missing(matrix, start), by_the_paper(matrix, 8, quantization, 3), atol=2e-3, rtol=0)


def test_the_residual_is_of_the_rounded_factors():
    matrix, quantization = weight(), FORMATS["nf4"]
    start = quantized_residual(matrix, 8, quantization, 2, dtype=torch.bfloat16)
    assert start.B.dtype == start.A.dtype == torch.bfloat16
    again = quantization.quantize(residual(matrix, start.B.float(), start.A.float(), 1.0))
    assert torch.equal(again.data, start.quantized.data)


def test_the_residual_is_exact_whatever_its_size():
    matrix = weight(2500, 16)
    B, A = weight(2500, 4, seed=1), weight(4, 16, seed=2)
    expected = (matrix.double() - 0.3 * (B.double() @ A.double())).float()
    torch.testing.assert_close(residual(matrix, B, A, 0.3), expected, rtol=2**-22, atol=0)  # sums in another order


def test_a_weight_in_the_layout_for_inference_is_unpacked():
    layer = bnb.nn.Linear4bit(128, 96, bias=False, compute_dtype=torch.float32)
    quantization = FORMATS["nf4"]
    layer.weight = quantization.quantize(weight())
    codes = layer.weight.data.clone()
    layer.weight.data, layer.weight.quant_state = bnb.functional._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    assert not torch.equal(layer.weight.data, codes)
    assert Quantization.of(layer) == quantization
    assert torch.equal(layer.weight.data, codes)
