"""Update a server during a fine-tune: after every step, it receives a delta and answers with the new weights.

    python examples/follow_training.py --model HuggingFaceTB/SmolLM2-135M-Instruct --plot bytes.png
    python examples/follow_training.py --model lm/base --steps 20 --vllm          # needs vLLM, in the same environment

The model learns to name a Python function from its docstring (those of the standard library). After each step, this script

  1. publishes the weights, in bf16, as their difference from the step before (hf_ext.weight_sync);
  2. updates a server to the step: a vLLM server in a process of its own or, without --vllm, a second copy of the model;
  3. checks that the server's weights are those of the training, bit for bit;
  4. asks the server for the name of one function.

vLLM keeps its weights in another form. To check them, this script makes vLLM load the trained checkpoint itself; the digests of
the weights must then stay the same.
"""

import inspect
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
import torch
from parts.vllm_server import RunningServer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_ext.weight_sync import PublishWeights, Subscriber, VLLMServer

MODULES = ("argparse", "ast", "base64", "calendar", "cmath", "codecs", "collections", "difflib", "functools", "glob", "inspect")
MODULES += ("locale", "math", "operator", "os", "os.path", "random", "shutil", "socket", "statistics", "tempfile", "textwrap")
MODULES += ("typing", "unicodedata")
PROMPT = "Return the absolute value of the argument.\nName:"


@dataclass
class Arguments:
    model: str = field(metadata={"help": "Causal language model: a folder or a Hub id."})
    steps: int = field(default=10, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=5e-5, metadata={"help": "AdamW's learning rate, constant."})
    batch_size: int = field(default=8, metadata={"help": "Texts in a step."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})
    place: str | None = field(default=None, metadata={"help": "Empty folder for the steps; a temporary one by default."})
    vllm: bool = field(default=False, metadata={"help": "Serve with vLLM."})
    plot: str | None = field(default=None, metadata={"help": "Draw the bytes of each step into this file."})


def docstrings(modules: Sequence[str] = MODULES) -> list[str]:
    """Returns the first lines of docstrings in modules, each with the name of its function."""
    texts = []
    for module in modules:
        for name, function in inspect.getmembers(import_module(module), inspect.isroutine):
            text = (inspect.getdoc(function) or "").split("\n")[0]
            if text and not name.startswith("_"):
                texts.append(f"{text}\nName: {name}")
    return texts


class SecondCopy:
    """Stands for a server: a copy of the model whose weights change in place."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, place: str):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.tokenizer = tokenizer
        self.subscriber = Subscriber(place)

    def update(self, step: int) -> None:
        self.subscriber.update(dict(self.model.named_parameters()), step)

    def holds(self, trained: PreTrainedModel) -> bool:
        weights = zip(self.model.parameters(), trained.parameters())
        return all(torch.equal(own.view(torch.int16), other.bfloat16().view(torch.int16)) for own, other in weights)

    def answer(self) -> str:
        tokens = self.tokenizer(PROMPT, return_tensors="pt")
        written = self.model.generate(**tokens, max_new_tokens=6, do_sample=False, pad_token_id=self.tokenizer.eos_token_id)
        return self.tokenizer.decode(written[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)

    def close(self) -> None:
        """Does nothing: there is nothing to close."""


class VLLM(RunningServer):
    """A vLLM server in a process of its own."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, place: str):
        super().__init__(model)
        self.server = VLLMServer(self.url, place)

    def update(self, step: int) -> None:
        self.server.update(step)

    def holds(self, trained: PreTrainedModel) -> bool:
        checkpoint = Path(self.folder.name, "trained")
        weights = {name: tensor.bfloat16() for name, tensor in trained.state_dict().items()}
        trained.save_pretrained(checkpoint, state_dict=weights)
        digests = self.call("/weight_checker", {"action": "checksum"})
        self.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})
        return digests == self.call("/weight_checker", {"action": "checksum"})

    def answer(self) -> str:
        answer = self.call("/v1/completions", {"model": "model", "prompt": PROMPT, "max_tokens": 6, "temperature": 0})
        return answer["choices"][0]["text"]


def plot(sizes: dict[int, int], whole: int, file: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(whole / 1e6, color="black", linestyle="--", label="all weights in bf16")
    axes.plot(list(sizes), [size / 1e6 for size in sizes.values()], marker="o", label="what a step sends")
    axes.set(xlabel="optimizer step", ylabel="MB", yscale="log", title="Weights of a training, sent to a server step by step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="center right")
    figure.savefig(file, dpi=150)
    print(f"The picture is in {file}.")


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    if args.plot:
        import matplotlib  # noqa: F401  # an error now, if it is missing
    set_seed(0)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    texts = [tokenizer(text + tokenizer.eos_token, truncation=True, max_length=args.max_length) for text in docstrings()]
    with ExitStack() as stack:
        place = args.place or stack.enter_context(tempfile.TemporaryDirectory())
        server = (VLLM if args.vllm else SecondCopy)(args.model, tokenizer, place)
        stack.callback(server.close)
        sizes: dict[int, int] = {}

        def on_step(step: int) -> None:
            files = list(Path(place).glob(f"*-{step:08d}-*"))
            sizes[step] = sum(path.stat().st_size for path in files if path.name.startswith("step" if step else "anchor"))
            began = time.perf_counter()
            server.update(step)
            seconds = time.perf_counter() - began
            same = "equal bits" if server.holds(model) else "DIFFERENT BITS"
            line = f"step {step:3}: {sizes[step] / 1e6:8.3f} MB, updated in {seconds:5.2f} s, {same}"
            print(f"{line}, answer {server.answer()!r}", flush=True)
            if same != "equal bits":
                raise SystemExit("The server does not hold the weights of the training.")

        arguments = TrainingArguments(
            tempfile.mkdtemp(dir=stack.enter_context(tempfile.TemporaryDirectory())),
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=args.batch_size,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        Trainer(model, arguments, collator, texts, callbacks=[PublishWeights(place, on_step=on_step)]).train()
        whole = sum(2 * parameter.numel() for parameter in model.parameters())
        steps = [size for step, size in sizes.items() if step]
        print(f"{len(steps)} steps took {sum(steps) / 1e6:.2f} MB; as whole weights {len(steps) * whole / 1e6:.0f} MB.")
        if args.plot:
            plot({step: size for step, size in sizes.items() if step}, whole, args.plot)


if __name__ == "__main__":
    main()
