"""What this package puts on the Hub, one of each kind and small: how it is made, how it is loaded, and what it computes.

It runs in processes of its own, signed in (or not) to a `LocalHub`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import tiny_transfers
import tiny_uni_med
import torch
from hosts import HAS_PISSA
from huggingface_hub import HfApi
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tiny_adapters import NF4, moved, small_llama
from tiny_merges import write_tasks
from tiny_models import bert, inputs, perturb
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from hf_ext import PissaConfig, QPissaConfig, TransLoraTrainer, emr, fm_delta
from hf_ext.trans_lora import Discriminator
from hf_ext.trans_lora.discriminator import NAME

CARD = b"# Mine"  # on the second branch before anything is pushed to it
BASES = {"bert": bert, "body": lambda: bert().bert, "llama": small_llama}


class Artifact(NamedTuple):
    """`push` makes one of a seed and pushes it to a repository with options of `push_to_hub`; `load` takes those of
    `from_pretrained`; `computes` makes numbers of what either returns."""

    push: Callable[..., Any]
    load: Callable[..., Any]
    computes: Callable[[Any], torch.Tensor]


def logits(model: Any) -> torch.Tensor:
    return model.eval()(**inputs(model)).logits


def push_compressed(seed: int, repo: str, **options: Any) -> Any:
    model = fm_delta.enable(perturb(bert(), seed), "user/bert")
    model.add_model_tags("tiny")
    model.push_to_hub(repo, tags="mine", **options)
    return model


def push_merge(seed: int, repo: str, **options: Any) -> Any:
    folder = Path(mkdtemp())
    _, tasks = write_tasks(folder, {f"one-{seed}": 2 + seed, "two": 2})
    emr.merge("user/body", tasks, folder / "merged", method="emr")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "merged")
    model.add_model_tags("tiny")
    model.push_to_hub(repo, tags="mine", **options)
    return model


def tasks_logits(model: Any) -> torch.Tensor:
    outputs = []
    for task in model.tasks:
        model.set_task(task)
        outputs.append(logits(model).flatten())
    return torch.cat(outputs)


def adapter(config: type, **of_base: Any) -> Artifact:
    def push(seed: int, repo: str, **options: Any) -> Any:
        base = AutoModelForCausalLM.from_pretrained("user/llama", **of_base)
        model = moved(get_peft_model(base, config(r=4, target_modules="all-linear", task_type="CAUSAL_LM")), seed)
        model.push_to_hub(repo, **options)
        return model

    def load(repo: str, **options: Any) -> Any:
        """Loads it as everybody does, and checks that training resumes in its form."""
        model = AutoPeftModelForCausalLM.from_pretrained(repo, **options, **of_base)
        base = AutoModelForCausalLM.from_pretrained("user/llama", **of_base)
        again = PeftModel.from_pretrained(base, repo, config=config.from_pretrained(repo, **options), **options)
        torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=2e-6)
        return model

    return Artifact(push, load, logits)


def gpt2() -> Any:
    return AutoModelForCausalLM.from_pretrained("user/gpt2")


def push_discriminator(seed: int, repo: str, **options: Any) -> Discriminator:
    torch.manual_seed(seed)
    base, tokenizer = gpt2(), AutoTokenizer.from_pretrained("user/gpt2")
    model = moved(get_peft_model(base, tiny_transfers.lora("gpt2"), adapter_name=NAME), seed)
    made = Discriminator(model.eval(), tokenizer, "pick")
    made.save_pretrained(mkdtemp(), push_to_hub=True, repo_id=repo, **options)
    return made


def push_transfer(seed: int, repo: str, private: bool = True, **options: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained("user/gpt2")
    teacher = moved(get_peft_model(gpt2(), tiny_transfers.lora("gpt2")), seed)
    settings = tiny_transfers.settings(mkdtemp(), max_steps=1, seed=seed, hub_model_id=repo, hub_private_repo=private)
    trainer = TransLoraTrainer(
        gpt2(),
        settings,
        processing_class=tokenizer,
        teacher=teacher.eval(),
        teacher_processing_class=tokenizer,
        inputs=tiny_transfers.inputs(16),
        peft_config=LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )
    trainer.train()
    moved(trainer.model, seed)
    trainer.push_to_hub(**options)
    return trainer.model


def push_uni_med(seed: int, repo: str, **options: Any) -> Any:
    model = perturb(tiny_uni_med.uni_med(), seed)
    model.push_to_hub(repo, **options)
    tiny_uni_med.processor().push_to_hub(repo, **options)
    return model


def load_uni_med(repo: str, **options: Any) -> Any:
    assert AutoProcessor.from_pretrained(repo, **options).num_image_tokens == tiny_uni_med.TOKENS
    return AutoModelForImageTextToText.from_pretrained(repo, **options)


ARTIFACTS = {
    "fm_delta": Artifact(push_compressed, AutoModelForSequenceClassification.from_pretrained, logits),
    "emr": Artifact(push_merge, AutoModelForSequenceClassification.from_pretrained, tasks_logits),
    "discriminator": Artifact(
        push_discriminator, Discriminator.from_pretrained, lambda made: torch.tensor(made.score(tiny_transfers.SEEDS))
    ),
    "transfer": Artifact(push_transfer, AutoPeftModelForCausalLM.from_pretrained, logits),
    "uni_med": Artifact(push_uni_med, load_uni_med, lambda model: model.eval()(**tiny_uni_med.batch()).logits),
}
if HAS_PISSA:
    in_4_bits = BitsAndBytesConfig(**NF4)
    ARTIFACTS |= {"pissa": adapter(PissaConfig), "qpissa": adapter(QPissaConfig, quantization_config=in_4_bits)}


def push_bases() -> None:
    for name, build in BASES.items():
        build().push_to_hub(f"user/{name}")
    model, tokenizer = tiny_transfers.teacher("gpt2")
    model = model.merge_and_unload()  # its answers have an end
    model.push_to_hub("user/gpt2")
    tokenizer.push_to_hub("user/gpt2")


def push_all() -> dict[str, dict[str, list[float]]]:
    """Pushes each kind to a private repository of its name, and another one to its branch `second`; what they compute."""
    push_bases()
    computed: dict[str, dict[str, list[float]]] = {}
    for name, kind in ARTIFACTS.items():
        made = kind.push(1, f"user/{name}", private=True)
        HfApi().create_branch(f"user/{name}", branch="second")
        HfApi().upload_file(path_or_fileobj=CARD, path_in_repo="README.md", repo_id=f"user/{name}", revision="second")
        computed[name] = {"main": numbers(kind, made), "second": numbers(kind, kind.push(2, f"user/{name}", revision="second"))}
    return computed


def load_all(kinds: Iterable[str] = ARTIFACTS, **options: Any) -> dict[str, dict[str, list[float]]]:
    """What each of them computes once it is loaded."""
    return {
        name: {
            revision: numbers(ARTIFACTS[name], ARTIFACTS[name].load(f"user/{name}", revision=revision, **options))
            for revision in ("main", "second")
        }
        for name in kinds
    }


def refusals(kinds: Iterable[str] = ARTIFACTS, **options: Any) -> dict[str, str]:
    """How loading each of them fails."""
    errors = {}
    for name in kinds:
        try:
            ARTIFACTS[name].load(f"user/{name}", **options)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def numbers(kind: Artifact, made: Any) -> list[float]:
    with torch.no_grad():
        return kind.computes(made).flatten()[:300].tolist()
