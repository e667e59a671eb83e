"""Models that the methods write answer through pipelines, `transformers serve` and lm-eval as the plain model would."""

from __future__ import annotations

import base64
import copy
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_uni_med
import torch
from hosts import HAS_PISSA, host, pissa
from peft import PeftModel, get_peft_model
from servers import PROMPT, TASKS, Server
from tiny_adapters import NF4, moved
from tiny_models import perturb
from tiny_transfers import answer, build_tokenizer, inputs, llama, lora, settings
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig, pipeline

from hf_ext import CheckpointError, PissaConfig, QPissaConfig, TransLoraTrainer, UnsavedChangesError, emr, fm_delta

CONTINUATIONS = (" early", " late")


LORAS = ("trans-lora", *(["pissa"] if HAS_PISSA else []))
ADAPTERS = (*LORAS, *(["qpissa"] if HAS_PISSA else []))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, two fine-tunes of it, and what each method makes of them: compressed, merged, pissa, trans-lora."""
    folder = tmp_path_factory.mktemp("serving")
    tokenizer = build_tokenizer(311)
    torch.manual_seed(0)
    base = llama(tokenizer, intermediate_size=128)  # bitsandbytes takes multiples of 64
    with torch.no_grad():  # so that an untrained model has something to say
        for weight in base.parameters():
            weight.mul_(4) if weight.dim() > 1 else weight
    base.generation_config.pad_token_id = tokenizer.pad_token_id
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS, 1):
        tuned = perturb(perturb(base, seed), seed + 10)
        moved(tuned, seed).save_pretrained(folder / task)
    for each in ("base", *TASKS):
        tokenizer.save_pretrained(folder / each)
    fm_delta.compress_checkpoint(folder / "one", folder / "base", folder / "compressed")
    emr.merge(folder / "base", {task: folder / task for task in TASKS}, folder / "merged", method="emr")
    for task in TASKS:
        emr.extract(folder / "merged", task, folder / f"merged-{task}")

    def loaded():
        return AutoModelForCausalLM.from_pretrained(folder / "base")

    if HAS_PISSA:
        options = {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        moved(get_peft_model(loaded(), PissaConfig(**options))).save_pretrained(folder / "pissa")
        in_4_bits = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=BitsAndBytesConfig(**NF4))
        moved(get_peft_model(in_4_bits, QPissaConfig(**options))).save_pretrained(folder / "qpissa")
    teacher = get_peft_model(loaded(), lora("llama"))
    arguments = settings(folder / "trans-lora", filter="none", num_train_epochs=3, learning_rate=5e-2)
    trainer = TransLoraTrainer(
        loaded(), arguments, processing_class=tokenizer, teacher=teacher, teacher_processing_class=tokenizer,
        inputs={text: answer(text) for text in inputs(20)},
        peft_config=lora("llama"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    for each in ADAPTERS:
        tokenizer.save_pretrained(folder / each)
    return folder


def continuation(model, tokenizer, prompt: str = PROMPT, **options) -> str:
    """Returns the text that a model in memory continues the prompt with."""
    tokens = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**tokens, max_new_tokens=8, do_sample=False, **options)
    return tokenizer.decode(ids[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, str]:
    """Returns the continuations of plain models, without the code under test."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    load = AutoModelForCausalLM.from_pretrained
    texts = {name: continuation(load(folder / name), tokenizer) for name in ("base", "one", "merged-one", "merged-two")}
    for name in ADAPTERS:
        texts[name] = continuation(
            PeftModel.from_pretrained(load(folder / "base"), folder / name).merge_and_unload(), tokenizer
        )
    texts["compressed"] = texts["one"]
    assert len(set(texts.values())) == len(texts) - 1, texts  # else a test here could pass by chance
    return texts


@pytest.mark.parametrize("name", ["compressed", *(pytest.param(name, marks=host("peft>=0.19.1")) for name in LORAS)])
def test_a_pipeline_writes_what_the_plain_model_writes(folder, expected, name):
    pipe = pipeline("text-generation", str(folder / name))
    assert pipe(PROMPT, max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"] == expected[name]


def test_a_pipeline_of_a_merge_takes_a_task_in_each_call(folder, expected):
    pipe = pipeline("text-generation", str(folder / "merged"))
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    for task in ("two", "one", None, "two"):
        chosen = {"task": task} if task else {}
        assert pipe(PROMPT, **options, **chosen)[0]["generated_text"] == expected[f"merged-{task or 'one'}"]
        assert pipe.model.active_task == "one"
    with pytest.raises(CheckpointError, match="no task 'three'.*one, two"):
        pipe(PROMPT, **options, task="three")


def test_generate_takes_a_task_from_many_threads(folder, expected):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    model.set_task("two")
    assert continuation(model, tokenizer) == expected["merged-two"]
    in_settings = GenerationConfig(max_new_tokens=8, do_sample=False, task="one")
    tokens = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(**tokens, generation_config=in_settings)[0, tokens["input_ids"].shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True) == expected["merged-one"]
    assert model.active_task == "two"
    tasks = ["one", "two"] * 6
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda task: continuation(model, tokenizer, task=task), tasks))
    assert written == [expected[f"merged-{task}"] for task in tasks]


def test_a_copy_and_an_adapter_on_top_take_tasks_too(folder, expected):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder / "merged"))
    assert model.generate.model is model and continuation(model, tokenizer, task="two") == expected["merged-two"]
    adapted = get_peft_model(model, lora("llama"))  # which changes nothing yet
    assert continuation(adapted, tokenizer, task="two") == expected["merged-two"] and model.active_task == "one"


def test_generate_for_another_task_keeps_changed_weights(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    with torch.no_grad():
        model.lm_head.weight += 1
    before = model.lm_head.weight.clone()
    with pytest.raises(UnsavedChangesError):
        continuation(model, tokenizer, task="two")
    assert torch.equal(model.lm_head.weight, before) and continuation(model, tokenizer, task="one") == continuation(
        model, tokenizer
    )


@pytest.fixture(scope="module")
def server(folder):
    """`transformers serve` on loopback, started by `hf-ext run`."""
    command = [sys.executable, "-m", "hf_ext.cli", "run", "transformers", "serve", "--device", "cpu"]
    with Server(command, folder / "server.log", {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}) as server:
        yield server


def ask(server: Server, model: Path, call: str = "completions", **options) -> str:
    asked = {"prompt": PROMPT} if call == "completions" else {}
    status, reply = server.call(f"/v1/{call}", {"model": str(model), "max_tokens": 8, "temperature": 0} | asked | options)
    assert status == 200, reply
    (choice,) = reply["choices"]
    return choice["text"] if call == "completions" else choice["message"]["content"]


@pytest.mark.slow
def test_a_server_writes_what_the_plain_model_writes(folder, expected, server):
    assert ask(server, folder / "compressed") == expected["compressed"]


@pytest.mark.slow
def test_a_server_answers_each_request_as_the_task_that_it_names(folder, expected, server):
    for task in ("two", "one", None, "two", None):
        chosen = {"generation_config": json.dumps({"task": task})} if task else {}
        assert ask(server, folder / "merged", **chosen) == expected[f"merged-{task or 'one'}"]


@pytest.mark.slow
def test_a_server_refuses_a_task_that_is_not_there(folder, server):
    body = {"model": str(folder / "merged"), "prompt": PROMPT, "generation_config": json.dumps({"task": "three"})}
    status, reply = server.call("/v1/completions", body)
    assert status == 400 and reply["detail"].startswith("There is no task 'three' in ")


@pytest.mark.slow
def test_a_server_answers_about_an_image(server, tmp_path):
    model, processor = tiny_uni_med.uni_med(), tiny_uni_med.processor()
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    tiny_uni_med.image().save(tmp_path / "picture.png")
    picture = f"data:image/png;base64,{base64.b64encode((tmp_path / 'picture.png').read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "[cls] what is there ?"}]
    inputs = processor(images=tiny_uni_med.image(), text="what is there ?", task="cls", return_tensors="pt")
    expected = processor.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, -8:], skip_special_tokens=True)
    reply = ask(server, tmp_path / "model", "chat/completions", messages=[{"role": "user", "content": content}])
    assert reply.strip() == expected.strip()


@pissa
def test_a_pipeline_takes_a_peft_model(folder, expected):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "qpissa")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert pipe(PROMPT, max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"] == expected["qpissa"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_server_has_an_adapter_as_a_compressed_fine_tune(folder, expected, server, name):
    """As docs/serving.md says: merged, and stored as a difference, which is about as small as the adapter."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, folder / name).merge_and_unload()
    small = folder / f"{name}-small"
    fm_delta.enable(model, folder / "base").save_pretrained(small)
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(small)
    assert ask(server, small) == expected[name]


def lm_eval_scores(**names: Path) -> list[float]:
    """Returns lm-eval's scores of the prompt's two continuations."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(device="cpu", dtype="float32", **{key: str(path) for key, path in names.items()})
    requests = [Instance("loglikelihood", {}, (PROMPT, answer), 0) for answer in CONTINUATIONS]
    return [score for score, _ in model.loglikelihood(requests, disable_tqdm=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "plain"),
    [({"pretrained": "compressed"}, "one"), ({"pretrained": "merged"}, "merged-one")]
    + [({"pretrained": "base", "peft": name}, f"{name}-plain") for name in ADAPTERS],
)
def test_lm_eval_scores_as_the_plain_model_scores(folder, arguments, plain):
    if name := arguments.get("peft"):
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        PeftModel.from_pretrained(base, folder / name).merge_and_unload().save_pretrained(folder / plain)
        AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / plain)
    scores = lm_eval_scores(**{key: folder / name for key, name in arguments.items()})
    assert scores == pytest.approx(lm_eval_scores(pretrained=folder / plain), abs=1e-4)
    assert scores != pytest.approx(lm_eval_scores(pretrained=folder / "base"), abs=1e-3)


@pytest.mark.slow
def test_lm_evals_command_scores_a_compressed_model(folder, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({"prompt": PROMPT}))
    (tmp_path / "early.yaml").write_text(
        f"task: early\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.json}}}}\ntest_split: test\n"
        "doc_to_text: prompt\ndoc_to_choice: [early, late]\ndoc_to_target: 0\noutput_type: multiple_choice\n"
    )
    command = [sys.executable, "-m", "hf_ext.cli", "run", "lm_eval", "--model", "hf", "--device", "cpu", "--model_args"]
    command += [f"pretrained={folder / 'compressed'},dtype=float32", "--include_path", str(tmp_path), "--tasks", "early"]
    done = subprocess.run(
        [*command, "--log_samples", "--output_path", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_early_*.jsonl")
    scores = [float(score) for score, _ in json.loads(samples.read_text())["filtered_resps"]]
    assert scores == pytest.approx(lm_eval_scores(pretrained=folder / "one"), abs=1e-4)
