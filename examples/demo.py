"""Fine-tune SmolLM2-135M with PiSSA, compress the result to a fraction of its size, load it, and compare the bits.

    python examples/demo.py                            # needs no Hub, two minutes on two cores
    python examples/demo.py --model HuggingFaceTB/SmolLM2-360M-Instruct --steps 100 --out names

The model learns to name a Python function from the first line of its docstring. It trains on functions of the standard library,
and the test is on built-in functions. The steps:

  1. PiSSA trains an adapter;
  2. merging it into the base gives an ordinary checkpoint in bf16;
  3. FM-Delta stores this checkpoint as its lossless difference from the base;
  4. from_pretrained loads what FM-Delta stored, and the script compares its bits with the ordinary checkpoint's.

The script writes the folders `base`, `fine-tune` and `compressed` to OUT, and a picture, demo.png. language_model.py and
merge_and_switch.py show more.
"""

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
import torch
from follow_training import docstrings
from language_model import asking, megabytes, smollm2
from parts.prompted_tasks import answers, encoded, learn, load_tokenizer
from peft import get_peft_model
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, HfArgumentParser, PreTrainedModel, set_seed
from transformers.utils import logging

from hf_ext import PissaConfig, fm_delta

SHOWN = ("abs", "hasattr", "hex", "isinstance", "len", "round")


@dataclass
class Arguments:
    model: str | None = field(default=None, metadata={"help": "Causal language model: a folder or a Hub id."})
    steps: int = field(default=30, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=3e-4, metadata={"help": "AdamW's learning rate at the start; it falls linearly."})
    out: str = field(default="demo-out", metadata={"help": "Folder for all results."})


def draw(curve: list[tuple[int, float]], sizes: dict[str, float], path: Path) -> None:
    """Draws the loss by step, and the size of each folder in MB."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    training, storing = figure.subplots(1, 2)
    training.plot(*zip(*curve), color="#ee6677")
    training.set(xlabel="optimizer step", ylabel="loss, nats per token", title="PiSSA learns to name functions")
    bars = storing.barh(list(sizes), list(sizes.values()), color=["#ee6677", "#4477aa"])
    storing.bar_label(bars, fmt="%.1f MB", padding=3)
    storing.set(title="FM-Delta stores the fine-tune", xlim=(0, 1.25 * max(sizes.values())))
    storing.invert_yaxis()
    figure.savefig(path, dpi=150)


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    import matplotlib  # noqa: F401  # an error now, if it is missing

    began, out = time.perf_counter(), Path(args.out)
    warnings.simplefilter("ignore", FutureWarning)  # PEFT's calls of Transformers
    logging.disable_progress_bar()
    set_seed(0)
    print("Reading the model …", flush=True)
    base = args.model or smollm2(out / "base")
    tokenizer = load_tokenizer(base)
    tests = [text.split("\nName: ") for text in docstrings(["builtins"])]
    pairs = [pair for pair in (text.split("\nName: ") for text in docstrings()) if pair not in tests]
    train, held_back = (encoded([(asking(text), name) for text, name in part], tokenizer, 64) for part in (pairs, tests))

    def test(model: PreTrainedModel) -> tuple[float, list[str]]:
        """Returns the loss of the tests' names, in nats per token, and the names that the model gives."""
        with torch.inference_mode():
            loss = model(**DataCollatorForSeq2Seq(tokenizer)(held_back)).loss.item()
        return loss, answers(model, tokenizer, [asking(text) for text, _ in tests], 64, max_new_tokens=8)

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = test(model)
    print(f"Training on the docstrings of {len(train)} functions …", flush=True)
    model = get_peft_model(model, PissaConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    options = {"learning_rate": args.learning_rate, "per_device_train_batch_size": 8, "logging_steps": 3}
    curve = learn(model, tokenizer, train, out / "trainer", max_steps=args.steps, **options)

    print("Merging, compressing and loading …", flush=True)
    model.merge_and_unload().to(torch.bfloat16).save_pretrained(out / "fine-tune")
    tokenizer.save_pretrained(out / "fine-tune")
    start = time.perf_counter()
    fm_delta.compress_checkpoint(out / "fine-tune", base, out / "compressed")
    seconds = time.perf_counter() - start
    original, loaded = (AutoModelForCausalLM.from_pretrained(out / name) for name in ("fine-tune", "compressed"))
    same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(original.parameters(), loaded.parameters())]
    after = test(loaded.float())

    rows = [("Docstring", "Function", "Before", "After")]
    rows += [(*pair, old, new) for pair, old, new in zip(tests, before[1], after[1]) if pair[1] in SHOWN]
    right = [sum(answer == name for answer, (_, name) in zip(written, tests)) for _, written in (before, after)]
    rows += [("Exact names of built-in functions", "", *(f"{count} of {len(tests)}" for count in right))]
    rows += [("Loss of these names, nats per token", "", *(f"{loss:.2f}" for loss, _ in (before, after)))]
    for text, *cells in rows:
        print(f"{text[:56]:57}", *(f"{cell[:18]:19}" for cell in cells))
    sizes = {name: megabytes(out / name) for name in ("fine-tune", "compressed")}
    draw(curve, sizes, out / "demo.png")
    print(f"\nThe fine-tune takes {sizes['fine-tune']:.1f} MB. Compressed, it takes {sizes['compressed']:.1f} MB.")
    speed = f"{seconds:.1f} s, {sizes['fine-tune'] / seconds:.0f} MB/s"
    print(f"Compressing took {speed}; docs/benchmarks.md has the times of other models.")
    print(f"from_pretrained gives the same bits for both: {sum(same)} of {len(same)} tensors are equal.")
    print(f"The picture is {out / 'demo.png'}. All of this took {time.perf_counter() - began:.0f} s.")
    if not all(same):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
