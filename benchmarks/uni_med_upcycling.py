"""An upcycled projector beside the projector alone: what a mixture of experts adds, and when.

    git clone https://github.com/Shenggan/BCCD_Dataset
    python benchmarks/uni_med_upcycling.py --data BCCD_Dataset/BCCD --out runs         # half an hour on one core

A small vision-language model learns the five image tasks of examples/run_uni_med.py: a frozen vision tower, a projector of two
layers and a language model. Then tower and language model are frozen, and the trained projector learns on in four ways:

  projector    all its weights
  LoRA         a low-rank change, which is a mixture of one expert
  CMoE         CMoEConfig: five experts with low-rank changes, a soft router, a token for each task

  upcycling    all five tasks. Each way trains at four learning rates; the rate with the least loss on held-back images trains
               with three other seeds.
  when         the projector beside CMoE at these rates, three seeds: one, two or five tasks; two tasks that ask the same of
               the same cells and want the same words, other words or permuted words; a tower that trained a tenth as long

The loss is that of the answers' tokens on test images. "Exact" is the share of answers of which every token is the likeliest.
It leaves out boxes, whose 101 steps are finer than the cells. The result of each run is a file in OUT, and what is there is
not trained again.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from measuring import print_table, run_sections
from peft import get_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, LlamaForCausalLM, TrainingArguments, get_cosine_schedule_with_warmup
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from parts.blood_smears import CELLS, TASKS, load_photos, test_samples, training_samples, with_images  # noqa: E402
from parts.small_vision_language import HEIGHT, TOKENS, WIDTH, make_language_model, train_tower  # noqa: E402

from hf_ext import CMoEConfig, UniMedProcessor, uni_med  # noqa: E402
from hf_ext.uni_med.connector import resample  # noqa: E402

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = (1, 2, 3)
HELD_BACK = 40  # photos
WAYS: dict[str, dict | None] = {
    "projector": None,
    "LoRA, rank 16": {"num_experts": 1, "r": 16, "lora_alpha": 16, "router": "constant"},
    "CMoE, rank 16": {"num_experts": 5, "r": 16, "lora_alpha": 16, "tasks": TASKS},
    "CMoE, rank 64": {"num_experts": 5, "r": 64, "lora_alpha": 64, "tasks": TASKS},
}
WORDS = {kind: word for kind, word in zip(CELLS.values(), ("no", "one", "two"))}  # words of other tasks
NEXT = dict(zip(CELLS.values(), [*list(CELLS.values())[1:], *list(CELLS.values())[:1]]))

BENCHES: dict[int, "Bench"] = {}  # by the steps of their towers


@dataclass
class Sample:
    """A question on an image: its tokens, and what the tower sees, (visual tokens, size)."""

    features: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor
    task: str


class Reader(nn.Module):
    """The least vision-language model: features of a frozen tower, a projector and a language model."""

    def __init__(self, language_model: LlamaForCausalLM, vision_size: int, image_token_id: int):
        super().__init__()
        size = language_model.config.hidden_size
        self.projector = nn.Sequential(nn.Linear(vision_size, size), nn.GELU(), nn.Linear(size, size))
        self.language_model = language_model
        self.config = SimpleNamespace(image_token_id=image_token_id, to_dict=dict)

    def forward(
        self, features: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss of an answer's token, and which answers are exact."""
        pictures = input_ids == self.config.image_token_id
        embeddings = self.language_model.get_input_embeddings()(input_ids.masked_fill(pictures, 0))
        embeddings = embeddings.masked_scatter(pictures[:, :, None], self.projector(features))
        logits = self.language_model(inputs_embeds=embeddings).logits[:, :-1]
        wanted = labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=-100)
        return loss, ((logits.argmax(-1) == wanted) | (wanted == -100)).all(1)


class Bench:
    """The data, the trained base and the runs of one tower."""

    def __init__(self, args: argparse.Namespace, vision_steps: int):
        self.args, self.out = args, args.out / f"tower-{vision_steps}"
        self.out.mkdir(parents=True, exist_ok=True)
        self.photos, self.test_photos = (load_photos(args.data, split, (WIDTH, HEIGHT)) for split in ("trainval", "test"))
        vision, text = self.out / "vision", self.out / "text"
        if not (vision / "model.safetensors").exists():
            training = TrainingArguments(self.out, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=100)
            train_tower(self.photos, vision_steps, training, vision)
        rows = {task: training_samples(task, self.photos, args.views) for task in TASKS}
        make_language_model([row[part] for task in TASKS for row in rows[task] for part in ("text", "answer")], text)
        self.text = text
        self.tower = AutoModel.from_pretrained(vision).eval()
        self.processor = UniMedProcessor.from_vision_text_pretrained(vision, text, num_image_tokens=TOKENS // 4)
        self.train: dict[str, list[Sample]] = {}
        self.validation: dict[str, list[Sample]] = {}
        self.test: dict[str, list[Sample]] = {}
        for task in TASKS:
            held = [row for row in rows[task] if row["photo"] >= len(self.photos) - HELD_BACK]
            rest = [row for row in rows[task] if row["photo"] < len(self.photos) - HELD_BACK]
            self.train[task], self.validation[task] = self.samples(rest, self.photos), self.samples(held, self.photos)
            self.test[task] = self.samples(test_samples(task, self.test_photos), self.test_photos)

    @torch.no_grad()
    def samples(self, rows: list[dict], photos: list) -> list[Sample]:
        collate, data, made = uni_med.UniMedCollator(self.processor), with_images(rows, photos), []
        for start in range(0, len(rows), 64):
            batch = collate([data[i] for i in range(start, min(start + 64, len(rows)))])
            seen = self.tower(batch["pixel_values"]).last_hidden_state
            tokens = resample(seen.flatten(2).transpose(1, 2), tuple(seen.shape[2:]), "projection", 4)
            for i, row in enumerate(rows[start : start + 64]):
                there = batch["attention_mask"][i].bool()
                made.append(Sample(tokens[i], batch["input_ids"][i][there], batch["labels"][i][there], row["task"]))
        return made

    def relabelled(self, samples: list[Sample], task: str, words: dict[str, str]) -> list[Sample]:
        """Returns the samples as those of another task that wants other words. The question does not change."""
        tokenizer, made = self.processor.tokenizer, []
        for sample in samples:
            answer = sample.labels[sample.labels != -100]
            text = tokenizer.decode(answer, skip_special_tokens=True).strip()
            new = tokenizer(words[text], add_special_tokens=False, return_tensors="pt").input_ids[0]
            new = torch.cat([new, answer[-1:]])
            question = sample.ids[: len(sample.ids) - len(answer)]
            labels = torch.cat([torch.full_like(question, -100), new])
            made.append(Sample(sample.features, torch.cat([question, new]), labels, task))
        return made

    def batch(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        return {
            "features": torch.stack([sample.features for sample in samples]),
            "input_ids": pad_sequence([sample.ids for sample in samples], batch_first=True),
            "labels": pad_sequence([sample.labels for sample in samples], batch_first=True, padding_value=-100),
        }

    def fit(self, model: nn.Module, train: dict[str, list[Sample]], rate: float, steps: int, seed: int, tasks: bool) -> None:
        """Trains on as many samples of each task, at random."""
        rng = random.Random(seed)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
        schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
        model.train()
        for _ in range(steps):
            chosen = [rng.choice(train[rng.choice(list(train))]) for _ in range(self.args.batch_size)]
            extra = {"tasks": [sample.task for sample in chosen]} if tasks else {}
            model(**self.batch(chosen), **extra)[0].backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    @torch.no_grad()
    def measure(self, model: nn.Module, data: dict[str, list[Sample]], tasks: bool) -> dict[str, tuple[float, float]]:
        """Returns the loss and the share of exact answers of each task."""
        model.eval()
        results = {}
        for name, samples in data.items():
            samples = samples[: self.args.test_samples]
            parts = [samples[i : i + 100] for i in range(0, len(samples), 100)]
            made = [model(**self.batch(part), **({"tasks": [s.task for s in part]} if tasks else {})) for part in parts]
            losses = [loss.item() * len(part) for (loss, _), part in zip(made, parts)]
            results[name] = sum(losses) / len(samples), torch.cat([exact for _, exact in made]).float().mean().item()
        return results

    def base(self) -> Reader:
        """Returns the model whose projector, tower and language model know the five tasks."""
        torch.manual_seed(0)
        size = self.train[TASKS[0]][0].features.shape[1]
        model = Reader(LlamaForCausalLM.from_pretrained(self.text), size, self.processor.image_token_id)
        file = self.out / "base.pt"
        if not file.exists():
            self.fit(model, self.train, 1e-3, self.args.base_steps, 0, False)
            torch.save(model.state_dict(), file)
        model.load_state_dict(torch.load(file, weights_only=True))
        return model

    def run(self, name: str, way: str, rate: float, seed: int, train: dict, validation: dict, test: dict) -> dict:
        """Returns the figures of one way to train the projector on."""
        file = self.out / f"{name}, {way}, {rate:.0e}, seed {seed}.json"
        if not file.exists():
            model: nn.Module = self.base()
            torch.manual_seed(seed)
            options = WAYS[way]
            if options is None:
                model.language_model.requires_grad_(False)
            else:
                model = get_peft_model(model, CMoEConfig(connectors=["projector"], **options))
            tasks = options is not None and "tasks" in options
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            self.fit(model, train, rate, self.args.steps, seed, tasks)
            measured = {"validation": self.measure(model, validation, tasks), "test": self.measure(model, test, tasks)}
            file.write_text(json.dumps(measured | {"trained": trained}))
            print(f"{file.stem}: {mean_loss(measured['validation']):.4f}, test {mean_loss(measured['test']):.4f}", flush=True)
        return json.loads(file.read_text())


def bench_of(args: argparse.Namespace, vision_steps: int) -> Bench:
    if vision_steps not in BENCHES:
        BENCHES[vision_steps] = Bench(args, vision_steps)
    return BENCHES[vision_steps]


def mean_loss(measured: dict) -> float:
    return statistics.fmean(loss for loss, _ in measured.values())


def mean_exact(measured: dict) -> float:
    return statistics.fmean([exact for task, (_, exact) in measured.items() if task != "refer"] or [float("nan")])


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def best_rate(bench: Bench, way: str) -> float:
    def loss(rate: float) -> float:
        return mean_loss(bench.run("five", way, rate, 0, bench.train, bench.validation, bench.test)["validation"])

    rates = list(RATES)
    while True:
        best = min(rates, key=loss)
        if best == rates[0] and best > 1e-5:
            rates.insert(0, best / 3)
        elif best == rates[-1] and best < 0.1:
            rates.append(best * 3)
        else:
            return best


def upcycling(args: argparse.Namespace) -> dict:
    """Compares the four ways on all tasks, each at its own learning rate."""
    bench = bench_of(args, args.vision_steps)
    before = bench.measure(bench.base(), bench.test, False)
    rows = [["before", "", "", f"{mean_loss(before):.3f}", f"{mean_exact(before):.3f}"]]
    for way in WAYS:
        rate = best_rate(bench, way)
        runs = [bench.run("five", way, rate, seed, bench.train, bench.validation, bench.test) for seed in SEEDS]
        figures = [spread([measure(run["test"]) for run in runs]) for measure in (mean_loss, mean_exact)]
        rows.append([way, f"{runs[0]['trained']:,}", f"{rate:.0e}", *figures])
    print_table("Projector trained on, five tasks", ["", "trained", "rate", "test loss", "exact"], rows)
    return {"rows": rows}


def when(args: argparse.Namespace) -> dict:
    """Compares the projector and CMoE for other tasks, other words and another tower."""
    bench = bench_of(args, args.vision_steps)
    cases: dict[str, Callable[[dict], dict]] = {
        "one task": lambda data: {"identify": data["identify"]},
        "two tasks": lambda data: {task: data[task] for task in ("identify", "refer")},
        "five": lambda data: data,
    }
    kinds = {kind: kind for kind in CELLS.values()}
    for name, words in (("same words", kinds), ("other words", WORDS), ("permuted words", NEXT)):
        cases[name] = lambda data, words=words: {
            "cls": data["cls"],
            "vqa": bench.relabelled(data["cls"], "vqa", words),
        }
    rows = []
    ways = ("projector", "CMoE, rank 64")
    rates = {way: best_rate(bench, way) for way in ways}
    towers = [(name, case, bench) for name, case in cases.items()]
    towers.append(("five, weak tower", cases["five"], bench_of(args, args.vision_steps // 10)))
    for name, case, on in towers:
        data = [case(part) for part in (on.train, on.validation, on.test)]
        results = {way: [on.run(name.split(",")[0], way, rates[way], seed, *data)["test"] for seed in SEEDS] for way in ways}
        cells = [spread([measure(run) for run in results[way]]) for measure in (mean_loss, mean_exact) for way in ways]
        rows.append([name, *cells])
    header = ["", "loss: projector", "CMoE", "exact: projector", "CMoE"]
    print_table("When a mixture helps", header, rows)
    return {"rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder BCCD of github.com/Shenggan/BCCD_Dataset")
    parser.add_argument("--out", type=Path, required=True, help="gets the towers, the bases and a file for each run")
    parser.add_argument("--vision_steps", type=int, default=850, help="steps of the tower's training")
    parser.add_argument("--base_steps", type=int, default=600, help="steps of the base's training")
    parser.add_argument("--steps", type=int, default=200, help="steps in which the projector learns on")
    parser.add_argument("--batch_size", type=int, default=16, help="samples in a step")
    parser.add_argument("--views", type=int, default=6, help="views of each training image for each task")
    parser.add_argument("--test_samples", type=int, default=300, help="test samples of a task at most")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    run_sections(parser, {"upcycling": upcycling, "when": when})


if __name__ == "__main__":
    main()
