"""Runs what pages of documentation show, as their readers would: each page in a folder of its own, block after block.

    python tests/pages.py results.json README.md docs/emr.md

Blocks marked `python` share one namespace a page. Of those marked `sh` the lines `hf-ext …` and `hf upload …` run. What readers
bring along (models, folders, data) is made here, tiny. Names of the Hub are looked for at HF_ENDPOINT; tiny models are pushed
there first.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tiny_diffusers
import tiny_medical_data
import tiny_models
import tiny_transfers
import tiny_uni_med
import tiny_vision_language_models
import torch
from datasets import Dataset, Features, Image, Value
from diffusers import DDPMScheduler, KandinskyV22Pipeline, VQModel
from peft import LoraConfig, PeftModel
from tiny_adapters import small_llama, trained
from tiny_merges import classifier
from tiny_training import examples
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertModel,
    BlipImageProcessorPil,
    CLIPImageProcessorPil,
    LlavaProcessor,
    TrainingArguments,
)

from hf_ext import UniMedForConditionalGeneration, UniMedProcessor
from hf_ext import emr as merging
from hf_ext.cli.main import main as hf_ext
from hf_ext.emr import options
from hf_ext.trans_lora import load_model

ROOT = Path(__file__).parent.parent
SHARED = tempfile.TemporaryDirectory()  # what is made once for several pages; gone with the process
options.BITS = 8  # by default: fewer would keep nothing of changes as random as these
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BERT, LLAMA, CHAT, BLIP2, LLAVA = (
    "google-bert/bert-base-uncased",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-2-7b-chat-hf",
    "Salesforce/blip2-opt-2.7b",
    "llava-hf/llava-1.5-7b-hf",
)
# What takes its time on real models is cut short here: texts of the pages, and options added to commands.
TRAINED = "max_steps=2, num_samples=8, per_device_train_batch_size=4, use_cpu=True"
MOVED = 'num_samples=4, max_attempts=400, max_steps=2, max_label_length=8, teacher_prompt_template="{input}", use_cpu=True'
SHORTER = {
    "--workers 4": "--workers 1",
    "max_steps=1000": "max_steps=1, use_cpu=True, per_device_train_batch_size=2",
    "num_train_epochs=5": TRAINED,
    "num_samples=1000": MOVED,
    # The tensors of the tiny models are smaller than their headers.
    "bits=0.1,": "",
}
MORE = {
    command: [word for option in text.split(", ") for word in shlex.split(f"--{option}".replace("=", " ", 1))]
    for command, text in (("train-discriminator", TRAINED), ("transfer", MOVED))
}


# Commands that do not end by themselves: tests/serving and with_vllm/test_weight_transfer.py run them.
ELSEWHERE = ("run", "follow")


@dataclass(frozen=True)
class Block:
    """Code in a page: the language behind its fence, the number of its first line, and its text."""

    language: str
    line: int
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(match[1], page[: match.start(2)].count("\n") + 1, match[2]) for match in FENCE.finditer(page)]


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words, without comments. A quoted text may have several lines."""
    lines, begun = [], ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        begun += line
        with contextlib.suppress(ValueError):  # a quotation that goes on
            lines.append(shlex.split(begun, comments=True))
            begun = ""
    assert not begun, f"a quotation does not end: {begun}"
    return [words for words in lines if words]


def shortened(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def run_page(path: Path, make: Callable[[], dict[str, Any]]) -> None:
    """Raises what the first block raises that does not run; its place in the page is the last of the traceback."""
    page, namespace = path.read_text(encoding="utf-8"), make()
    namespace["__name__"] = path.stem
    for block in blocks(page):
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.text
            exec(compile(shortened(code), str(path), "exec"), namespace)
        elif block.language == "sh":
            for words in commands(block.text):
                if words[0] == "hf-ext" and words[1] not in ELSEWHERE:
                    run_command(words[1:], f"{path}, in the block from line {block.line}")
                elif words[:2] == ["hf", "upload"]:
                    subprocess.run([Path(sys.executable).with_name("hf"), *words[1:]], check=True, capture_output=True)


def run_command(words: list[str], where: str) -> None:
    line = shortened(shlex.join(words))
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        code = hf_ext(shlex.split(line) + MORE.get(words[0], []))
    if code:
        raise AssertionError(f"{where}: hf-ext {line} ends with {code}: {printed.getvalue()[-2000:]}")


def publish() -> None:
    """Tiny models under the names that the pages use."""
    tiny_models.bert().bert.push_to_hub(BERT)
    tiny_models.tokenizer().push_to_hub(BERT)
    for name in (LLAMA, CHAT):
        small_llama().push_to_hub(name)
        tiny_uni_med.build_tokenizer().push_to_hub(name)
    tiny_uni_med.blip2().push_to_hub(BLIP2)
    BlipImageProcessorPil(size={"height": 32, "width": 32}).push_to_hub(BLIP2)


def classifiers(*names: str) -> None:
    """Folders of fine-tunes of the tiny BERT."""
    for seed, name in enumerate(names, 1):
        classifier(2 + seed % 3, seed).save_pretrained(name)
        tiny_models.tokenizer().save_pretrained(name)


def writers(*names: str) -> None:
    """Folders of fine-tunes of the tiny Llama."""
    for seed, name in enumerate(names):
        tiny_models.perturb(AutoModelForCausalLM.from_pretrained(LLAMA), seed).save_pretrained(name)
        AutoTokenizer.from_pretrained(LLAMA).save_pretrained(name)


def fm_delta() -> dict[str, Any]:
    classifiers("my-bert", "my-model", "my-models/first", "my-models/second")
    for name in ("bert-a", "my-base"):
        AutoModel.from_pretrained(BERT).save_pretrained(name)
    torch.manual_seed(9)
    BertModel(tiny_models.bert().config).save_pretrained("bert-b")
    classifier(3, 0).push_to_hub("me/my-bert")
    scheduler, coder = DDPMScheduler(), VQModel(block_out_channels=(4,), norm_num_groups=2)
    KandinskyV22Pipeline(tiny_diffusers.model("unet"), scheduler, coder).push_to_hub("org/stable-diffusion")
    KandinskyV22Pipeline(tiny_diffusers.tuned("unet"), scheduler, coder).save_pretrained("my-pipeline")
    return {"model": classifier(3, 5)}


def fm_delta_training() -> dict[str, Any]:
    model = classifier(3, 1)
    for step in (500, 1000, 1500):
        model = tiny_models.perturb(model, step)
        model.save_pretrained(f"my-run/checkpoint-{step}")
    return {"model": classifier(3, 5), "data": examples(8)}


def fm_delta_lora() -> dict[str, Any]:
    writers("my-llama")
    return {}


def emr() -> dict[str, Any]:
    classifiers("my-cola", "my-sst2")
    for folder in ("my-rte", "my-qnli"):  # moved as the first is, so that the others leave it enough
        classifiers(folder)
    model = AutoModelForSequenceClassification.from_pretrained(BERT, num_labels=3)
    trained(model, LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])).save_pretrained("my-mnli-lora")
    writers("my-sort", "my-trec")
    return {}


def pissa() -> dict[str, Any]:
    return {name: AutoModelForCausalLM.from_pretrained(LLAMA) for name in ("model", "base")}


@cache
def transfer() -> Path:
    """A folder with the files of a transfer."""
    folder = Path(tempfile.mkdtemp(dir=SHARED.name))
    tiny_transfers.save_files(folder)
    return folder


def files_of_a_transfer(*names: str) -> None:
    """The files of a transfer by these names: the old model, its adapter, the new model, real inputs and seeds."""
    for name, other in zip(("source", "adapter", "target", "real.jsonl", "seeds.jsonl"), names):
        copy = shutil.copytree if (transfer() / name).is_dir() else shutil.copy
        copy(transfer() / name, other)


def trans_lora() -> dict[str, Any]:
    files_of_a_transfer("S", "A", "T", "real.jsonl", "seeds.jsonl")
    (source, source_words), (target, target_words), (base, _) = (load_model(folder) for folder in "STS")
    teacher = PeftModel.from_pretrained(base, "A")
    return {
        **{"source_model": source, "source_tokenizer": source_words, "source_peft_model": teacher},
        **{"target_model": target, "target_tokenizer": target_words},
        **{"real_inputs": tiny_transfers.inputs(20), "five_inputs": tiny_transfers.SEEDS},
    }


def uni_med() -> dict[str, Any]:
    samples = {row["task"]: row for row in tiny_uni_med.rows()}
    samples["refer"] = samples["vqa"] | {"task": "refer", "answer": "{<10><20><30><40>}"}
    columns = Features({"image": Image(), **dict.fromkeys(("text", "task", "answer"), Value("string"))})
    data = {task: Dataset.from_list([row] * 4, columns) for task, row in samples.items()}
    return {
        **{"image": tiny_uni_med.image(), "vqa": data["vqa"], "refer": data["refer"], "questions": data["qa"]},
        **{f"test_{task}": [samples[task]] for task in ("vqa", "refer")},
    }


def uni_med_data() -> dict[str, Any]:
    model = UniMedForConditionalGeneration.from_vision_text_pretrained(BLIP2, CHAT)
    model.save_pretrained("my-uni-med")
    UniMedProcessor.from_vision_text_pretrained(BLIP2, CHAT).save_pretrained("my-uni-med")
    tiny_medical_data.save(Path("smears/1.png"), (640, 480))
    tiny_medical_data.save_all()
    return {}


def uni_med_cmoe() -> dict[str, Any]:
    model, _ = tiny_vision_language_models.build("llava")
    words = tiny_uni_med.build_tokenizer(pad_token="<unk>")
    words.add_tokens("<image>", special_tokens=True)
    model.resize_token_embeddings(len(words))
    model.config.image_token_id = len(words) - 1
    model.push_to_hub(LLAVA)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    LlavaProcessor(pixels, words, 4, "default", num_additional_image_tokens=1).push_to_hub(LLAVA)
    tiny_medical_data.save(Path("smears/1.png"))
    return {}


def serving() -> dict[str, Any]:
    classifiers("my-cola", "sst2")
    merging.merge(BERT, {"my-cola": "my-cola", "sst2": "sst2"}, "my-bert-merged", method="emr")
    writers("stories", "letters")
    merging.merge(LLAMA, {name: name for name in ("stories", "letters")}, "my-merge", method="emr")
    model = AutoModelForCausalLM.from_pretrained(LLAMA)
    trained(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained("my-adapter")
    return {"base": LLAMA}


def weight_sync() -> dict[str, Any]:
    model = tiny_models.llama()
    args = TrainingArguments("training", max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    server_model = tiny_models.llama(dtype=torch.bfloat16)
    server_model.save_pretrained("my-model")
    return {
        **{"model": model, "args": args, "data": examples(8, causal=True), "server_model": server_model},
        "load_weight": lambda name, tensor: server_model.get_parameter(name).data.copy_(tensor),
    }


def readme() -> dict[str, Any]:
    classifiers("my-bert", "my-cola", "my-sst2")
    files_of_a_transfer("old-model", "old-lora", "new-model", "inputs.jsonl", "five-inputs.jsonl")
    return pissa() | {"image": tiny_uni_med.image()}


METHODS = (fm_delta, emr, pissa, trans_lora, uni_med, weight_sync)
MAKERS = {"README.md": readme} | {
    f"{make.__name__}.md": make for make in (*METHODS, fm_delta_training, fm_delta_lora, serving, uni_med_data, uni_med_cmoe)
}


@contextlib.contextmanager
def another_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


def main(results: str, *pages: str) -> None:
    """Writes what each page came to: the traceback of what did not run, or nothing."""
    with another_folder():
        publish()
    outcomes = {}
    for page in pages:
        path = Path(page).resolve()
        with another_folder():
            try:
                run_page(path, MAKERS.get(path.name, dict))
                outcomes[page] = ""
            except BaseException:
                outcomes[page] = traceback.format_exc()
        Path(results).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*(str(Path(argument).absolute()) for argument in sys.argv[1:]))
