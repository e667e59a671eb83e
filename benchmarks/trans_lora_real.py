"""Measure Trans-LoRA between real models of two families: results and time of each stage, and accuracy of the new LoRA.

    python benchmarks/trans_lora_real.py --source SmolLM2-135M-Instruct --target gemma-3-270m --data DIR --out OUT

The task is TREC: to answer with one word which of six types the answer of a question has. DIR contains TREC.train.all and
TREC.test.all of harvardnlp/sent-conv-torch; 250 questions of the test set are used. Both models get a plain template. OUT
contains the result of each stage, so a killed run resumes. Seconds are CPU seconds on one thread.

  gate       accuracy of both bases (the likeliest of the six words) and of LoRAs that learn from the real data; also of the
             source model's LoRA on the target model, if that is a fine-tune of the source model
  transfer   the discriminator, the inputs that the target model writes, and LoRAs of the target that learn from them: filtered
             by the discriminator or not at all; and from the five seeds alone
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import print_table, run_sections
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from run_trans_lora import TEMPLATE, accuracy  # noqa: E402

from hf_ext import TransLoraConfig, TransLoraTrainer, trans_lora  # noqa: E402
from hf_ext.trans_lora.encoding import Encoder  # noqa: E402
from hf_ext.trans_lora.generation import ModelGenerator  # noqa: E402
from hf_ext.trans_lora.scoring import AnswerTrainer, answer_log_probs  # noqa: E402
from hf_ext.trans_lora.synthesis import counts  # noqa: E402
from hf_ext.trans_lora.teacher import Teacher  # noqa: E402

TYPES = ("description", "entity", "abbreviation", "person", "place", "number")  # TREC's classes 0 to 5
Pairs = list[tuple[str, str]]


def questions(path: Path, longest: int) -> Pairs:
    """Returns the questions of a file of TREC that have at most `longest` words, with the types of their answers."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(line[2:].strip(), TYPES[int(line[0])]) for line in lines if len(line.split()) <= longest + 1]


def task_data(args: argparse.Namespace) -> tuple[Pairs, Pairs]:
    """Returns the real data of the task, and the test."""
    test = random.Random(0).sample(questions(args.data / "TREC.test.all", args.longest), 250)
    tested = {text for text, _ in test}
    unseen = dict.fromkeys(pair for pair in questions(args.data / "TREC.train.all", args.longest) if pair[0] not in tested)
    return random.Random(0).sample(list(unseen), args.num_real), test


def load(name: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Returns a model in single precision, in which a processor computes fastest, and its tokenizer without chat template."""
    model, tokenizer = trans_lora.load_model(name)
    tokenizer.chat_template = None
    return model.float(), tokenizer


def lora(model: nn.Module) -> LoraConfig:
    """Returns a LoRA of the upper half of the layers, so that training stops halfway down."""
    count = model.config.num_hidden_layers
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    layers = list(range(count // 2, count))
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=modules, layers_to_transform=layers)


def recipe(args: argparse.Namespace) -> dict:
    """Returns the training options of all adapters."""
    training = {"max_steps": args.steps, "learning_rate": 1e-3, "per_device_train_batch_size": 16, "warmup_steps": 5}
    quiet = {"save_strategy": "no", "report_to": "none", "logging_steps": 10, "use_cpu": True, "seed": 0}
    return training | quiet | {"lr_scheduler_type": "linear", "train_sampling_strategy": "group_by_length"}


def settings(args: argparse.Namespace, folder: str, **options) -> TransLoraConfig:
    synthesis = {"num_samples": args.num_samples, "held_out_share": 0, "max_label_length": 4, "generation_batch_size": 16}
    templates = {"prompt_template": TEMPLATE, "teacher_prompt_template": TEMPLATE}
    return TransLoraConfig(output_dir=str(args.out / folder), **recipe(args) | synthesis | templates | options)


def learned(args: argparse.Namespace, name: str, data: Pairs, folder: str) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Returns a model with a LoRA that learned from real data, as it is in OUT."""
    model, tokenizer = load(name)
    if (args.out / folder / "adapter_config.json").exists():
        return PeftModel.from_pretrained(model, args.out / folder), tokenizer
    set_seed(0)
    model = get_peft_model(model, lora(model))
    train(model, tokenizer, data, args.out / folder, recipe(args))
    model.save_pretrained(args.out / folder)
    return model.eval(), tokenizer


def train(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: Pairs, folder: Path, options: dict) -> None:
    encoder = Encoder(tokenizer, model, TEMPLATE)
    samples = encoder.samples([encoder.prompt(text) for text, _ in data], [answer for _, answer in data])
    training = TrainingArguments(str(folder), remove_unused_columns=False, label_names=["labels"], **options)
    AnswerTrainer(model, training, encoder.batch, samples, processing_class=tokenizer).train()


def answers(model: nn.Module, tokenizer: PreTrainedTokenizerBase, test: Pairs) -> list[str]:
    encoder = Encoder(tokenizer, model, TEMPLATE)
    written = ModelGenerator(model, encoder, 125)([encoder.prompt(text) for text, _ in test], 4)
    return [answer.text.strip() for answer in written]


def preference(model: nn.Module, tokenizer: PreTrainedTokenizerBase, test: Pairs) -> float:
    """Returns the share of the questions of whose six types the right one is likeliest."""
    encoder = Encoder(tokenizer, model, TEMPLATE)
    prompts = [encoder.prompt(text) for text, _ in test]
    scores = [
        [row.sum() for row in answer_log_probs(model, encoder, encoder.samples(prompts, [word] * len(test), False), 50)]
        for word in TYPES
    ]
    return sum(TYPES[torch.tensor(row).argmax()] == answer for row, (_, answer) in zip(zip(*scores), test)) / len(test)


def shapes(name: str) -> dict[str, torch.Size]:
    return {key: weight.shape for key, weight in load(name)[0].named_parameters()}


def copied(args: argparse.Namespace, test: Pairs) -> float:
    """Returns the accuracy of the target model with the source model's LoRA as it is. Both models must have the same layers."""
    model, tokenizer = load(args.target)
    return accuracy(PeftModel.from_pretrained(model, args.out / "source-real"), tokenizer, test)


class Stages:
    """Results of stages by their names, in a file, each with the processor's seconds that it took."""

    def __init__(self, path: Path):
        self.path = path
        self.results = json.loads(path.read_text()) if path.exists() else {}

    def __call__(self, name: str, work: Callable, *given):
        if name not in self.results:
            start = time.process_time()
            value = work(*given)
            self.results[name] = {"value": value, "seconds": time.process_time() - start}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.results, indent=1))
            print(f"{name}: {value} ({self.results[name]['seconds']:.0f} s)", file=sys.stderr, flush=True)
        return self.results[name]["value"]


def gate(args: argparse.Namespace) -> dict:
    stages, (real, test) = Stages(args.out / "gate.json"), task_data(args)

    def train_it(name: str, folder: str) -> None:
        learned(args, name, real, folder)

    def test_it(name: str, folder: str) -> float:
        return accuracy(*learned(args, name, real, folder), test)

    majority = Counter(answer for _, answer in test).most_common(1)[0][1] / len(test)
    rows = [["always the commonest type", f"{100 * majority:.1f}", ""]]
    for what, name in (("source", args.source), ("target", args.target)):
        stages(f"training of the {what}'s LoRA", train_it, name, f"{what}-real")
        value = stages(f"{what} model with its LoRA", test_it, name, f"{what}-real")
        base = stages(f"{what} model alone", lambda name: preference(*load(name), test), name)
        seconds = stages.results[f"training of the {what}'s LoRA"]["seconds"]
        rows += [[f"{what} model, the likeliest of the six words", f"{100 * base:.1f}", ""]]
        rows += [[f"{what} model with a LoRA of {len(real)} real questions", f"{100 * value:.1f}", f"{seconds:.0f}"]]
    if shapes(args.source) == shapes(args.target):
        value = stages("target model with the source's LoRA", copied, args, test)
        rows += [["target model with the source's LoRA, copied", f"{100 * value:.1f}", "0"]]
    print_table(f"TREC, accuracy in % of {len(test)} questions", ["", "accuracy", "seconds of training"], rows)
    return stages.results


def transfer(args: argparse.Namespace) -> dict:
    return {seed: one_seed(args, seed) for seed in args.seeds}


class Students:
    """The target model's LoRAs of one seed, which learn from the source model's."""

    def __init__(self, args: argparse.Namespace, seed: int):
        self.args, self.seed, self.folder = args, seed, f"seed-{seed}"
        self.real, self.test = task_data(args)
        self.examples = [text for text, _ in self.real[:5]]
        self.teacher = learned(args, args.source, self.real, "source-real")
        self.stages, self.first = Stages(args.out / f"seed-{seed}.json"), Stages(args.out / "discriminator.json")
        self.metrics = self.first("discriminator", self.train_discriminator)
        self.discriminator = trans_lora.Discriminator.from_pretrained(args.out / "discriminator", *self.teacher)

    def train_discriminator(self) -> dict:
        model, tokenizer = load(self.args.source)
        discriminator = trans_lora.train_discriminator(
            model,
            tokenizer,
            [text for text, _ in self.real[: self.args.num_judged]],
            task="TREC",
            args=settings(self.args, "discriminator-run"),
            peft_config=lora(model),
            seeds=self.examples,
        )
        discriminator.save_pretrained(self.args.out / "discriminator")
        return discriminator.metrics

    def trainer(self, name: str, inputs: dict[str, str] | None = None, **options) -> TransLoraTrainer:
        model, tokenizer = load(self.args.target)
        teacher, teacher_tokenizer = self.teacher
        return TransLoraTrainer(
            model,
            settings(self.args, f"{self.folder}/{name}", seed=self.seed, **options),
            processing_class=tokenizer,
            teacher=teacher,
            teacher_processing_class=teacher_tokenizer,
            seeds=self.examples,
            discriminator=self.discriminator,
            peft_config=lora(model),
            inputs=inputs,
        )

    def training_data(self) -> dict[str, dict[str, str]]:
        """Returns the inputs with labels that each student learns from."""
        candidates = self.trainer("discriminator").synthesize()
        trained, _ = self.stages("labels of the kept", lambda: self.trainer("discriminator").label(candidates))
        judged = [candidate.input for candidate in candidates if candidate.score is not None]
        teacher = Teacher(*self.teacher, settings(self.args, self.folder))
        answered = self.stages("labels of all", teacher.answers, judged)
        labels = {text: label for text, label in zip(judged, answered) if label}
        examples = answers(*self.teacher, [(example, "") for example in self.examples])
        return {
            "discriminator": dict(trained),
            "not filtered": dict(list(labels.items())[: len(trained)]),
            "seeds alone": dict(zip(self.examples, examples)),
        }

    def learn(self, name: str, data: dict[str, str]) -> list[str]:
        """Returns the answers to the test of a student that learned from these inputs with labels."""
        steps = max(20, 5 * len(data) // 16)  # five epochs, but of five seeds more
        trainer = self.trainer(f"trained on {name}".replace(" ", "-"), data, max_steps=steps)
        trainer.train()
        return answers(trainer.model, trainer.processing_class, self.test)


def one_seed(args: argparse.Namespace, seed: int) -> dict:
    """Writes inputs, learns from them and prints what depends on one seed."""
    run = Students(args, seed)
    written = run.stages("writing and filtering", lambda: write_inputs(run.trainer("discriminator"), run.test))
    arms = run.training_data()
    taught = run.stages("the teacher's answers to the test", answers, *run.teacher, run.test)
    students = {name: run.stages(f"learned from: {name}", run.learn, name, data) for name, data in arms.items()}
    results = run.first.results | run.stages.results
    rows = [[name, f"{stage['seconds']:.0f}"] for name, stage in results.items()]
    print_table(f"seed {seed}: seconds of each stage", ["stage", "seconds"], rows)
    total = sum(written["counts"].values())
    rows = [[name, str(count), f"{100 * count / total:.0f}"] for name, count in written["counts"].items()]
    title = f"seed {seed}: inputs (the discriminator keeps {run.metrics})"
    print_table(title, ["", "inputs", "%"], [["written", str(total), ""], *rows])
    right = [answer for _, answer in run.test]
    rows = [[name, str(len(arm)), alike(students[name], right), alike(students[name], taught)] for name, arm in arms.items()]
    title = f"seed {seed}: accuracy and agreement with the teacher on the test, % (the teacher: {alike(taught, right)})"
    print_table(title, ["learned from", "inputs", "accuracy", "agreement"], rows)
    print("kept:", *written["kept"], sep="\n  ")
    return results


def write_inputs(writer: TransLoraTrainer, test: Pairs) -> dict:
    """Writes and filters inputs, and returns figures and examples of them."""
    candidates = writer.synthesize()
    kept = [candidate.input for candidate in candidates if candidate.kept]
    return {
        "counts": counts(candidates),
        "tokens": sum(writer.encoder.lengths([candidate.input for candidate in candidates])),
        "end with a question mark": sum(text.endswith("?") for text in kept) / len(kept),
        "test items": sum(text in dict(test) for text in kept),
        "kept": random.Random(0).sample(kept, min(10, len(kept))),
        "dropped by the discriminator": [candidate.input for candidate in candidates if candidate.reason == "filter"][:10],
    }


def alike(one: list[str], other: list[str]) -> str:
    return f"{100 * sum(map(str.__eq__, one, other)) / len(one):.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder or Hub id of the source model")
    parser.add_argument("--target", required=True, help="folder or Hub id of the target model")
    parser.add_argument("--data", type=Path, required=True, help="folder with TREC.train.all and TREC.test.all")
    parser.add_argument("--out", type=Path, default=Path("trans-lora-real"), help="folder that keeps the stages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the runs")
    parser.add_argument("--num_real", type=int, default=800, help="how much data the task has")
    parser.add_argument("--num_judged", type=int, default=200, help="how many of it the discriminator learns from")
    parser.add_argument("--num_samples", type=int, default=90, help="synthetic inputs to keep and learn from")
    parser.add_argument("--longest", type=int, default=10, help="words of a question")
    parser.add_argument("--steps", type=int, default=60, help="steps of the training on real data, and of the discriminator's")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    run_sections(parser, {"gate": gate, "transfer": transfer})
