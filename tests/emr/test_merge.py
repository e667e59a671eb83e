"""Merging: what becomes of each task's tensors, configuration and files, and what cannot be merged."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import reference_election as reference
import torch
from hosts import adapters_of_transformers, host
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from repeats import some
from safetensors.torch import save_file
from tiny_adapters import logits, moved
from tiny_architectures import build
from tiny_checkpoints import contents, edit_config, fine_tune, weights, write_folder
from tiny_merges import METHODS, classifier, extracted, same_tensors, tensors_of, write_tasks
from tiny_models import MODELS, assert_same_weights, bert, gpt_oss, llama, perturb, tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertModel,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging

from hf_ext import BaseModelError, CheckpointError, HfExtError, emr, fm_delta
from hf_ext.emr import writing


def expected_task(base, tasks: dict, name: str, task: str, rescale: str = "tensor") -> np.ndarray:
    """A tensor of a task by the formula."""
    prior = base[name].numpy()
    elected, masks = reference.elect(prior, [tensors[name].numpy() for tensors in tasks.values()])
    index = list(tasks).index(task)
    scale = reference.rescaler(prior, tasks[task][name].numpy(), elected, masks[index])
    return reference.modulate(prior, elected, masks[index], scale)


def test_every_task_is_the_formula(tmp_path, base, tasks):
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    prior = {f"bert.{name}": tensor for name, tensor in tensors_of(base).items()}
    singles = {task: tensors_of(folder) for task, folder in tasks.items()}
    for task in tasks:
        written = extracted(tmp_path / "merged", task, tmp_path / task)
        assert written.keys() == singles[task].keys()
        for name, tensor in written.items():
            if name.startswith("classifier."):
                assert torch.equal(tensor, singles[task][name])
            else:
                assert np.allclose(tensor.numpy(), expected_task(prior, singles, name, task), rtol=1e-6, atol=1e-8), name


@pytest.mark.parametrize(("rescale", "total"), [("paper", np.sum), ("tensor_mean", np.mean)])
def test_a_rescaler_of_the_whole_model_sums_or_averages(tmp_path, base, tasks, rescale, total):
    emr.merge(base, tasks, tmp_path / "merged", rescale=rescale, method="emr")
    prior = {f"bert.{name}": tensor.numpy() for name, tensor in tensors_of(base).items()}
    singles = {task: tensors_of(folder) for task, folder in tasks.items()}
    for index, task in enumerate(tasks):
        moved = unified = 0.0
        for name, weight in prior.items():
            elected, masks = reference.elect(weight, [tensors[name].numpy() for tensors in singles.values()])
            moved += total(np.abs(singles[task][name].numpy().astype(float) - weight))
            unified += total(np.abs(masks[index] * (elected.astype(float) - weight)))
        report = emr.report(tmp_path / "merged").tasks[index]
        assert report.task == task and report.least_scale == report.largest_scale == pytest.approx(moved / unified)
        assert (report.scale == pytest.approx(moved / unified)) == (rescale == "paper")


def test_one_task_comes_back_bit_for_bit(tmp_path, base, tasks):
    emr.merge(base, {"trec": tasks["trec"]}, tmp_path / "merged", method="emr")
    same_tensors(extracted(tmp_path / "merged", "trec", tmp_path / "again"), tensors_of(tasks["trec"]))


def test_thirty_tasks(tmp_path):
    base, tasks = write_tasks(tmp_path / "in", {f"task-{i}": 2 + i % 5 for i in range(30)})
    report = emr.merge(base, tasks, tmp_path / "merged", method="emr")
    assert [task.task for task in report.tasks] == list(tasks)
    assert extracted(tmp_path / "merged", "task-29", tmp_path / "last")["classifier.weight"].shape == (6, 48)
    assert all(0 < task.cosine < 1 and 0 < task.density < 1 for task in report.tasks)


CODED = ("llama_tied", "mixtral", "t5")


@some(
    "name, method",
    [*((name, "emr") for name in MODELS), *((name, "switch") for name in CODED)],
    [(name, "switch") for name in MODELS if name not in CODED],
)
def test_every_model_merges_and_comes_apart(tmp_path, name, method):
    model = MODELS[name].build()
    model.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        perturb(model, seed).save_pretrained(tmp_path / f"t{seed}", max_shard_size="40KB" if seed == 2 else "50GB")
    tasks, options = (
        {"one": tmp_path / "t1", "two": tmp_path / "t2"},
        {"method": method} if method == "emr" else {"method": method, "bits": 8},
    )
    report = emr.merge(tmp_path / "base", tasks, tmp_path / "merged", max_shard_size="50KB", **options)
    assert method == "emr" or all(task.relative < 0.5 and task.step for task in report.tasks)
    assert method == "switch" or len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    for task, seed in (("one", 1), ("two", 2)):
        found, single = extracted(tmp_path / "merged", task, tmp_path / task), tensors_of(tmp_path / f"t{seed}")
        assert found.keys() == single.keys()
        base = tensors_of(tmp_path / "base")
        for key, tensor in found.items():
            assert (tensor.shape, tensor.dtype) == (single[key].shape, single[key].dtype)
            moved, off = (single[key].double() - base[key].double()).norm(), (tensor.double() - single[key].double()).norm()
            assert off < 1.1 * moved or moved == 0, key


def test_rows_that_no_task_touched_cost_next_to_nothing(tmp_path):
    base = {"embed.weight": torch.randn(20_000, 16)}
    write_folder(tmp_path / "base", base)
    for seed in (1, 2):
        tuned = base["embed.weight"].clone()
        tuned[:100] += 0.01 * torch.randn(100, 16)
        write_folder(tmp_path / f"t{seed}", {"embed.weight": tuned})
    report = emr.merge(tmp_path / "base", {"a": tmp_path / "t1", "b": tmp_path / "t2"}, tmp_path / "merged", method="emr")
    assert all(task.bits < 0.01 for task in report.tasks)


# ---- what is a task's own --------------------------------------------------------------------------------------------


KEPT = [
    "source.spm",
    "bpe.codes",
    "tokenizer.model.v3",
    "my notes.txt",
    "requirements (1).txt",
    "1_Pooling/config.json",
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
    "additional_chat_templates/tool.jinja",
]
LEFT = [
    "._tokenizer.json",
    ".git/HEAD",
    "README.md",
    "pytorch_model.bin",
    "optimizer.pt",
    "trainer_state.json",
    "train_results.json",
    "checkpoint-5/model.safetensors",
    "runs/events.out",
    "onnx/model.onnx",
]


def test_all_files_but_weights_and_training_state_are_kept(tmp_path, base, tasks):
    tasks = {task: shutil.copytree(tasks[task], tmp_path / "in" / task) for task in ("cr", "trec")}
    for task, folder in tasks.items():
        for name in [*KEPT, *LEFT]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{name} of {task}")
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    merged = tmp_path / "merged"
    assert (merged / "tokenizer.json").exists() and not (merged / "task-cr/tokenizer.json").exists()  # equal files: once
    for task, folder in tasks.items():
        emr.extract(merged, task, tmp_path / task)
        expected = {path: digest for path, digest in contents(folder).items() if path not in LEFT}
        written = contents(tmp_path / task)
        assert written.keys() == expected.keys() >= set(KEPT)
        assert all(written[name] == expected[name] for name in [*KEPT, "tokenizer.json"])
        config, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path / task, folder))
        assert config == original


@pytest.mark.parametrize("method", METHODS)
def test_added_tokens_and_resized_vocabularies(tmp_path, method):
    base, tasks = write_tasks(tmp_path / "in", {"same": 2, "more": 2, "most": 2, "less": 2})
    for task, words in {"more": 101, "most": 110, "less": 90}.items():
        model = classifier(2, words)
        model.resize_token_embeddings(words)
        model.save_pretrained(tasks[task])
        words_of = tokenizer()
        words_of.add_tokens([f"new{i}" for i in range(max(words - len(words_of), 0))])
        words_of.save_pretrained(tasks[task])
    emr.merge(base, tasks, tmp_path / "merged", **METHODS[method])
    name = "bert.embeddings.word_embeddings.weight"
    for task, folder in tasks.items():
        found, single = extracted(tmp_path / "merged", task, tmp_path / task)[name], tensors_of(folder)[name]
        assert found.shape == single.shape
        assert torch.equal(found[96:], single[96:])
        moved, off = (single[:90] - tensors_of(base)[name.removeprefix("bert.")][:90]).norm(), (found - single)[:90].norm()
        assert 0 < off < moved
        assert (tmp_path / task / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_tensors_of_some_tasks_and_buffers_of_any_type_return(tmp_path, method):
    base = weights() | {"bn.running_mean": torch.randn(8)}
    write_folder(tmp_path / "base", base | {"steps": torch.tensor(1), "mask": torch.eye(4, dtype=torch.bool)})
    extra = {
        "a": {"steps": torch.tensor(10), "mask": torch.eye(4, dtype=torch.bool), "only.a": torch.randn(3, 5).bfloat16()},
        "b": {"steps": torch.tensor(20), "mask": torch.ones(4, 4, dtype=torch.bool), "empty": torch.empty(0, 3)},
        "c": {"steps": torch.tensor(10), "only.c": torch.arange(7, dtype=torch.uint8)},
    }
    for seed, (task, own) in enumerate(extra.items(), 1):
        if method == "switch":
            own["bn.running_mean"] = torch.randn(8)
        tuned = fine_tune(base, seed) | own
        if task == "c":
            del tuned["model.norm.weight"]
        write_folder(tmp_path / task, tuned)
    emr.merge(tmp_path / "base", {task: tmp_path / task for task in extra}, tmp_path / "merged", **METHODS[method])
    for task, own in extra.items():
        written = extracted(tmp_path / "merged", task, tmp_path / f"{task}-again")
        assert written.keys() == tensors_of(tmp_path / task).keys()
        assert all(torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype for name, tensor in own.items())


def test_heads_of_the_bases_shape_and_of_another_merge(tmp_path):
    bert(3).save_pretrained(tmp_path / "base")
    for task, labels in {"three": 3, "five": 5, "again": 3}.items():
        model = classifier(labels, labels)
        model.classifier.weight.data.mul_(0.001)
        model.save_pretrained(tmp_path / task)
    tasks = {task: tmp_path / task for task in ("five", "three", "again")}
    emr.merge(tmp_path / "base", tasks, tmp_path / "merged", method="emr")
    five = extracted(tmp_path / "merged", "five", tmp_path / "out")
    assert torch.equal(five["classifier.weight"], tensors_of(tmp_path / "five")["classifier.weight"])


def test_a_base_of_another_float_type(tmp_path):
    base = weights()
    write_folder(tmp_path / "base", base)
    half = {name: tensor.bfloat16() for name, tensor in base.items()}
    for seed in (1, 2):
        tuned = {name: (t.float() + 0.01 * torch.randn(t.shape)).bfloat16() for name, t in half.items()}
        write_folder(tmp_path / f"t{seed}", tuned)
    report = emr.merge(tmp_path / "base", {"a": tmp_path / "t1", "b": tmp_path / "t2"}, tmp_path / "merged", method="emr")
    assert {tensor.dtype for tensor in extracted(tmp_path / "merged", "a", tmp_path / "a").values()} == {torch.bfloat16}
    assert all(0.5 < task.cosine < 1 for task in report.tasks)


# ---- what a task may be given as -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [["cr"], ["trec", "cr"]])
def test_a_compressed_checkpoint_is_as_good_as_the_plain_one(tmp_path, base, tasks, monkeypatch, compressed):
    monkeypatch.setattr(writing, "CHUNK", 1 << 10)
    emr.merge(base, tasks, tmp_path / "plain", method="emr")
    for task in compressed:
        fm_delta.compress_checkpoint(tasks[task], base, tmp_path / task)
    emr.merge(base, tasks | {task: tmp_path / task for task in compressed}, tmp_path / "merged", method="emr")
    assert contents(tmp_path / "merged") == contents(tmp_path / "plain")


def test_a_model_in_memory_is_as_good_as_its_folder(tmp_path, base, tasks, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))  # which may be small: copies go beside the result
    emr.merge(base, {"trec": classifier(6, 1), "cr": classifier(2, 2)}, tmp_path / "memory", method="emr")
    emr.merge(base, {"trec": tasks["trec"], "cr": tasks["cr"]}, tmp_path / "stored", method="emr")
    names = ["model.safetensors", "task-trec/config.json"]
    first, second = contents(tmp_path / "memory"), contents(tmp_path / "stored")
    assert [first[name] for name in names] == [second[name] for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory", "stored"]
    assert not list((tmp_path / "memory").glob(".*"))


def saved(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


LAYERS = {"target_modules": ["query", "dense"], "task_type": "SEQ_CLS"}
ADAPTERS = {
    "lora": (bert, LoraConfig(r=4, **LAYERS, rank_pattern={"query": 2}, use_rslora=True)),
    "dora": (bert, LoraConfig(r=4, use_dora=True, **LAYERS)),
    "ia3": (bert, IA3Config(feedforward_modules=["dense"], **LAYERS)),
    "bias": (bert, LoraConfig(r=2, bias="all", **LAYERS)),
    "embedding": (bert, LoraConfig(r=2, lora_alpha=1, target_modules=["word_embeddings", "value"], task_type="SEQ_CLS")),
    "input": (llama, LoraConfig(r=2, lora_alpha=1, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")),
    "norms": (llama, LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM")),
    "tied": (lambda: llama(tied=True), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")),
}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}  # of one module


@pytest.mark.parametrize(
    "kind, given",
    [*((kind, "folder") for kind in ADAPTERS), ("lora", "memory"), ("bias", "memory"), ("tied", "memory")]
    + [pytest.param("experts", given, marks=host("peft>=0.21")) for given in ("folder", "memory")],
)
def test_an_adapter_is_merged_as_the_weights_it_makes(tmp_path, kind, given):
    if kind == "experts":
        build, config = gpt_oss, LoraConfig(r=2, **EXPERTS, task_type="CAUSAL_LM")
    else:
        build, config = ADAPTERS[kind]
    model = build()
    base = saved(model.bert if build is bert else model, tmp_path / "base")  # the head is the task's own
    full = saved(perturb(model), tmp_path / "full")
    tuned = moved(get_peft_model(model, deepcopy(config)), 7)
    task = saved(tuned, tmp_path / "adapter") if given == "folder" else tuned
    emr.merge(base, {"alone": task}, tmp_path / "merged", method="emr")
    written = extracted(tmp_path / "merged", "alone", tmp_path / "alone")
    expected = deepcopy(tuned).merge_and_unload().state_dict()
    assert written.keys() == expected.keys() - (model.all_tied_weights_keys or {}).keys()
    for name, tensor in written.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
    assert json.loads((tmp_path / "alone/config.json").read_text())["architectures"] == [type(model).__name__]
    report = emr.merge(base, {"full": full, "other": task}, tmp_path / "merged", accept_conflicts=True, method="emr")
    assert [task.task for task in report.tasks] == ["full", "other"]


@pytest.mark.parametrize("layers", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head", "q_proj"]])
@pytest.mark.parametrize("apart", [False, True], ids=["tied", "apart"])
def test_an_adapter_of_tied_weights_changes_only_its_own(tmp_path, layers, apart):
    base = saved(llama(tied=True), tmp_path / "base")
    if apart:
        tensors = tensors_of(base)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.01
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(base)
    tuned = moved(get_peft_model(model, LoraConfig(r=2, lora_alpha=0.1, target_modules=layers, task_type="CAUSAL_LM")))
    emr.merge(base, {"a": saved(tuned, tmp_path / "adapter")}, tmp_path / "merged", method="emr")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(tuned))


@pytest.mark.parametrize("compressed", [False, True])
def test_an_adapter_beside_its_model_belongs_to_it(tmp_path, compressed):
    base, tuned = saved(llama(), tmp_path / "base"), saved(perturb(llama()), tmp_path / "both")
    if compressed:
        fm_delta.compress_checkpoint(tuned, base, tuned := tmp_path / "compressed")
    adapted = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight.data += 5  # however large
    moved(adapted).save_pretrained(tuned)
    expected = logits(AutoModelForCausalLM.from_pretrained(tuned))
    emr.merge(base, {"a": tuned}, tmp_path / "merged", method="emr")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected)
    model = fm_delta.switch(AutoModelForCausalLM.from_pretrained(base), tuned)
    torch.testing.assert_close(logits(model), expected)
    if not compressed:
        base = saved(perturb(llama()), tmp_path / "alone")
        fm_delta.extract_lora(tuned, base, tmp_path / "lora", rank=2)
        lora = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "lora")
        torch.testing.assert_close(logits(lora), expected, atol=1e-4, rtol=1e-4)
    (tuned / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no adapter_model.safetensors"):
        emr.merge(base, {"a": tuned}, tmp_path / "merged", method="emr")


def test_an_adapter_in_memory_keeps_what_else_is_in_memory(tmp_path):
    base, _ = write_tasks(tmp_path / "in", {"cr": 2})
    # Without task_type the adapter's folder is to have no head.
    tuned = get_peft_model(classifier(3, 4), LoraConfig(r=2, target_modules=["query"]))
    emr.merge(base, {"a": tuned}, tmp_path / "merged", method="emr")
    same_tensors(extracted(tmp_path / "merged", "a", tmp_path / "a"), tuned.merge_and_unload().state_dict())
    tuned = get_peft_model(classifier(3, 4), LoraConfig(r=2, target_modules=["query"]))
    tuned.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="nor the base .* has 'classifier.bias'"):
        emr.merge(base, {"a": tmp_path / "adapter"}, tmp_path / "out", method="emr")


@pytest.mark.parametrize(
    "changes",
    [
        {"task_type": None, "auto_mapping": {"base_model_class": "pipeline", "parent_library": "transformers"}},
        {"task_type": None, "auto_mapping": {"base_model_class": ["BertModel"], "parent_library": "transformers"}},
        {"task_type": None, "auto_mapping": "BertModel"},
        {"task_type": "NO_SUCH_TASK"},
        {"peft_type": "NO_SUCH_TYPE"},
        {"peft_type": None},
        {"r": "many"},
        {"r": -1},
        {"r": 0},
        {"lora_alpha": None},
        {"target_modules": 5},
        {"target_modules": ["no such module"]},
        {"target_modules": None},
        {"modules_to_save": 5},
        {"rank_pattern": [1]},
        {"base_model_name_or_path": 5},
    ],
    ids=str,
)
def test_an_adapter_with_forged_settings_is_one_clear_error(tmp_path, base, tasks, changes):
    saved(with_lora(AutoModelForSequenceClassification.from_pretrained(tasks["cr"])), tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(HfExtError):
        emr.merge(base, {"a": tmp_path / "adapter"}, tmp_path / "out", method="emr")
    assert not (tmp_path / "out").exists()


@adapters_of_transformers
@pytest.mark.parametrize("active", ["trec", "cr"])
def test_an_adapter_on_a_task_is_saved_alone_and_names_it(tmp_path, base, tasks, caplog, active):
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    model.set_task(active)
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=["query"], init_lora_weights=False, task_type="SEQ_CLS"))
    logging.get_logger().addHandler(caplog.handler)
    model.save_pretrained(tmp_path / "adapter")
    assert "weights of the model itself are not saved" in caplog.text and "plain checkpoint" not in caplog.text
    assert f"--task {active} " in caplog.text
    assert not list((tmp_path / "adapter").glob("model*"))
    recorded = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert recorded == str(tmp_path / "merged") + ("" if active == "trec" else "/task-cr")
    with pytest.raises(CheckpointError, match="an adapter of a task of the merge"):
        emr.merge(base, {"a": tmp_path / "adapter"}, tmp_path / "out", method="emr")
    # As the warning says:
    emr.extract(tmp_path / "merged", active, tmp_path / "plain")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    loaded.load_adapter(tmp_path / "adapter")
    words = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(words).logits, model.eval()(words).logits)


# ---- what cannot be merged -------------------------------------------------------------------------------------------


def small_llama(**changes) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig.from_dict(llama().config.to_dict() | changes))


def with_lora(model, **options):
    return get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["query"], "task_type": "SEQ_CLS"} | options))


def refusals(place: Path, base: Path, tasks: dict) -> Iterator[tuple]:
    """Yields bases, tasks that cannot be merged with them, and the messages of the errors."""
    yield base, {}, "no tasks"
    yield base, [*tasks.values()], "The tasks are a list; give a dict"
    for name in ("", "a/b", "..", "a b", ".hidden", 7):
        yield base, {name: tasks["cr"]}, "cannot be the name of a task"
    yield base, {"cr": {}}, "Task 'cr' is a dict"
    yield base, {"cr": "someone/something"}, "neither a folder nor a Hub repository"

    torch.manual_seed(99)
    yield saved(BertModel(bert().config), place / "stranger"), tasks, "times the base's own length: it is no fine-tune of this"
    yield write_folder(place / "names", {"nothing.alike": torch.randn(4, 4)}), tasks, "no fine-tune of this base"

    write_folder(place / "plain", weights())
    wide = write_folder(place / "wide", {name: torch.cat([tensor, tensor], -1) for name, tensor in weights().items()})
    yield place / "plain", {"wide": wide}, r"of task 'wide' is \[96, 32\], but \[96, 16\] in the base"
    of = [{f"layers.{i}.up.weight": torch.randn(8, 4) for i in range(n)} | {"norm.weight": torch.ones(4)} for n in range(4)]
    of = [write_folder(place / f"of-{n}", tensors) for n, tensors in enumerate(of)]
    for few, many in ((of[2], of[3]), (of[3], of[2]), (of[1], of[2])):  # down to a base of one layer
        name = f"layers.{int(max(few.name, many.name)[-1]) - 1}.up.weight"
        yield few, {"tuned": many}, f"'{name}' of .* is in a layer that .* does not have"

    base_llama = saved(llama(), place / "llama")
    yield base, tasks | {"llama": base_llama}, "Task 'llama' has architectures .*one class"
    yield base, {"llama": base_llama}, "no fine-tune of this base"
    narrow = saved(small_llama(num_key_value_heads=1), place / "narrow")  # which leaves the other dimensions as they are
    yield base_llama, {"narrow": narrow}, r"k_proj.weight' of task 'narrow' is \[16, 64\], but \[32, 64\] in the base"
    for count in (2, 3):
        tuned = with_lora(small_llama(num_hidden_layers=5 - count), target_modules=["q_proj"], task_type="CAUSAL_LM")
        other = saved(small_llama(num_hidden_layers=count), place / f"base-{count}")
        message = rf"Task 'a': .*does not fit the base '{other}'.*layers\.2\.self_attn\.q_proj\.lora_A"
        yield other, {"a": saved(tuned, place / f"on-{5 - count}")}, message

    text = saved(with_lora(small_llama(), target_modules=["q_proj"], task_type="CAUSAL_LM"), place / "text")
    clip = saved(build("CLIPModel"), place / "clip")
    yield clip, {"a": text}, "a model for AutoModelForCausalLM, and the base is a clip model"
    yield base, tasks | {"body": saved(bert().bert, place / "body")}, "architectures.*one class"
    yield base, tasks | {"half": saved(classifier(2, 3).bfloat16(), place / "half")}, "BF16 in task 'half' and F32 in 'trec'"
    broken = classifier(2, 2)
    broken.bert.pooler.dense.bias.data[3] = torch.nan
    message = "'bert.pooler.dense.bias' of task 'broken' .* has values that are infinite"
    yield base, tasks | {"broken": saved(broken, place / "broken")}, message
    for key, value in (("hidden_act", "relu"), ("num_hidden_layers", 1), ("tie_word_embeddings", False)):
        edit_config(shutil.copytree(tasks["cr"], place / key), **{key: value})
        yield base, tasks | {"other": place / key}, f"Task 'other' has {key} {value!r}.*cannot switch|has {key} "

    prompt = get_peft_model(bert(2), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
    yield base, {"a": saved(prompt, place / "prompt")}, "PROMPT_TUNING adapter, which cannot be merged"
    for options, message in (
        ({"init_lora_weights": "pissa"}, "started by pissa.*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "started by olora.*merge_and_unload"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices.*merge_and_unload"),
    ):
        yield base, {"a": saved(with_lora(classifier(2, 4), **options), place / "lora")}, message
    tied = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
    adapter = saved(with_lora(llama(tied=True), **tied), place / "adapter")
    yield saved(llama(tied=True), place / "tied"), {"a": adapter}, "tied"
    without_config = shutil.copytree(base, place / "without-config")
    (without_config / "config.json").unlink()
    adapter = saved(with_lora(classifier(2, 4)), place / "on-bert")
    yield without_config, {"a": adapter, "cr": tasks["cr"]}, r"config\.json"


def test_what_cannot_be_merged_is_named_and_nothing_is_written(tmp_path, base, tasks):
    for other, refused, message in refusals(tmp_path, base, tasks):
        with pytest.raises((BaseModelError, CheckpointError), match=message):
            emr.merge(other, refused, tmp_path / "merged", method="emr")
        assert not (tmp_path / "merged").exists(), message


@adapters_of_transformers
def test_a_model_with_adapters_inside_is_refused(tmp_path, base):
    inside = classifier(2, 3)
    inside.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(CheckpointError, match="with adapters inside"):
        emr.merge(base, {"a": inside}, tmp_path / "merged", method="emr")


def test_a_merge_is_not_decompressed(tmp_path, base, tasks):
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    with pytest.raises(CheckpointError, match="hf-ext extract"):
        fm_delta.decompress_checkpoint(tmp_path / "merged", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_a_merge_is_not_quantized_while_it_loads(tmp_path, base, tasks):
    pytest.importorskip("bitsandbytes")
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    with pytest.raises(CheckpointError, match="cannot be quantized while it loads.*hf-ext extract"):
        AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "merged", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
        )
    with pytest.raises(CheckpointError, match="merged' are compressed.*leave this argument out"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", quantization_config=None)


def test_nothing_but_the_older_merge_is_cleared_away(tmp_path, base, tasks):
    out = tmp_path / "out"
    emr.merge(base, tasks, out, max_shard_size="50KB", method="emr")
    (out / "task-notes").mkdir()
    (out / "task-notes" / "important.txt").write_text("important")
    (out / "task-cr" / "results.csv").write_text("important too")
    emr.merge(base, {"trec": tasks["trec"]}, out, method="emr")
    emr.merge(base, {"trec": tasks["trec"]}, tmp_path / "fresh", method="emr")
    merged, fresh = contents(out), contents(tmp_path / "fresh")
    assert merged.pop("README.md") and fresh.pop("README.md")  # a card that exists stays
    assert merged.keys() - fresh.keys() == {"task-notes/important.txt", "task-cr/results.csv"}
    assert all(merged[name] == fresh[name] for name in fresh)


def test_a_task_is_not_written_over(tmp_path, base, tasks):
    shutil.copytree(tasks["cr"], tmp_path / "task-cr")
    before = contents(tmp_path / "task-cr")
    with pytest.raises(CheckpointError, match="cannot be overwritten"):
        emr.merge(base, {"cr": tmp_path / "task-cr"}, tmp_path, overwrite=True, method="emr")
    emr.merge(base, {"trec": tmp_path / "task-cr"}, tmp_path, overwrite=True, method="emr")
    assert contents(tmp_path / "task-cr") == before


def conflicting(tmp_path: Path, strengths: Mapping[str, float], matrices: str) -> dict[str, Path]:
    """Writes a base, and tasks that move it by random changes of these strengths: the strongest moves all weights, the others
    those whose names contain `matrices`."""
    base, strongest = weights(), max(strengths.values())
    write_folder(tmp_path / "base", base)
    for seed, (task, strength) in enumerate(strengths.items()):
        torch.manual_seed(seed)
        moves = {name: strength * torch.randn_like(tensor) for name, tensor in base.items()}
        moves = {name: move for name, move in moves.items() if strength == strongest or matrices in name}
        write_folder(tmp_path / task, {name: tensor + moves.get(name, 0) for name, tensor in base.items()})
    return {task: tmp_path / task for task in strengths}


@pytest.mark.parametrize("matrices", ["", "up_proj"], ids=["all weights", "few matrices"])
@pytest.mark.parametrize("added", [False, True], ids=["merge", "add_task"])
def test_tasks_of_unequal_strength_stop_the_merge_with_their_figures_unless_accepted(
    tmp_path, caplog, monkeypatch, matrices, added
):
    tasks = conflicting(tmp_path, {"noise": 0.01, "strong": 0.0004, "weak": 0.0001}, matrices)
    merged, out = tmp_path / "merged", tmp_path / "out"
    first, rest = {"noise": tasks.pop("noise")}, tasks
    if added:
        rest = {"weak": tasks["weak"]}
        emr.merge(tmp_path / "base", first, merged, method="emr")

    def write(**options):
        if added:
            return emr.add_task(merged, {"weak": tasks["weak"]}, out, **options)
        return emr.merge(tmp_path / "base", first | rest, out, method="emr", **options)

    figures = ", ".join(f"'{task}' .[0-9.]+ % of the base's distance, cosine 0.[0-9]+." for task in rest)
    expected = f"the weights of {figures} would be farther .*--method switch.* hf-ext compress.*--accept-conflicts"
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=expected):
        patch.setattr(writing, "write_delta", None)  # a sample is enough
        write()
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=expected):
        patch.setattr(writing, "require_agreement", lambda *_: None)  # as if no sample showed it
        write()
    assert not out.exists()
    logging.get_logger().addHandler(caplog.handler)
    report = write(accept_conflicts=True)
    named = {task for task in ("noise", "strong", "weak") if f"'{task}' are farther from its own model" in caplog.text}
    assert {task.task for task in report.tasks if task.relative >= 1} == named == {*rest}


# ---- adding a task ---------------------------------------------------------------------------------------------------


def test_an_added_task_leaves_the_others_as_they_were(tmp_path, base, tasks):
    first = {task: tasks[task] for task in ("trec", "cr")}
    emr.merge(base, first, tmp_path / "merged", method="emr")
    close = classifier(3, 1)  # tuned as "trec" was, but for its head and a little more
    with torch.no_grad():
        close.bert.pooler.dense.weight += 1e-4
    close.save_pretrained(tmp_path / "close")
    added = {"subj": tmp_path / "close", "again": tasks["trec"]}
    emr.add_task(tmp_path / "merged", added, tmp_path / "more")
    assert [task.task for task in emr.report(tmp_path / "more").tasks] == ["trec", "cr", "subj", "again"]
    emr.add_task(tmp_path / "merged", {"subj": added["subj"]}, tmp_path / "three")
    emr.add_task(tmp_path / "three", {"again": added["again"]}, tmp_path / "four")
    assert contents(tmp_path / "four") == contents(tmp_path / "more")  # as one after the other
    for task in first:
        for folder in ("merged", "more"):
            emr.extract(tmp_path / folder, task, tmp_path / f"{folder}-{task}")
        assert contents(tmp_path / f"merged-{task}") == contents(tmp_path / f"more-{task}")
    added = extracted(tmp_path / "more", "subj", tmp_path / "subj")
    assert torch.equal(added["classifier.weight"], tensors_of(tmp_path / "close")["classifier.weight"])


def test_a_name_that_is_taken_and_a_folder_that_is_no_merge(tmp_path, base, tasks):
    emr.merge(base, {"cr": tasks["cr"]}, tmp_path / "merged", method="emr")
    with pytest.raises(CheckpointError, match="has a task 'cr' already"):
        emr.add_task(tmp_path / "merged", {"cr": tasks["subj"]}, tmp_path / "more")
    for call in (
        lambda: emr.add_task(tasks["cr"], {"subj": tasks["subj"]}, tmp_path / "more"),
        lambda: emr.extract(tasks["cr"], "cr", tmp_path / "more"),
        lambda: emr.report(tasks["cr"]),
    ):
        with pytest.raises(CheckpointError, match="holds no merge"):
            call()
    with pytest.raises(CheckpointError, match="its tasks are cr"):
        emr.extract(tmp_path / "merged", "sst2", tmp_path / "more")


def test_plain_weights_with_the_config_of_a_merge_load(tmp_path):
    base, tasks = write_tasks(tmp_path / "in", {"cr": 2, "subj": 2})
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tmp_path / "merged"))
    model.load_state_dict(AutoModelForSequenceClassification.from_pretrained(tasks["cr"]).state_dict())
    model.save_pretrained(tmp_path / "plain")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert_same_weights(loaded, model)
    assert not hasattr(loaded, "set_task")
    emr.merge(base, {"cr": tmp_path / "plain", "subj": tasks["subj"]}, tmp_path / "again", method="emr")
    assert_same_weights(*(AutoModelForSequenceClassification.from_pretrained(tmp_path / name) for name in ("merged", "again")))
