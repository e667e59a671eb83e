"""A loaded merge: one task at a time for a block or a call of `generate`, copies, and saving, which gives the same merge."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from datasets import Dataset
from hosts import adapters_of_transformers
from peft import AutoPeftModel, LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_architectures import build
from tiny_checkpoints import contents, edit_settings
from tiny_merges import METHODS, same_tensors, tensors_of, write_tasks
from tiny_models import assert_same_weights, bert, inputs, perturb, tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BlipForConditionalGeneration,
    Trainer,
    TrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
    pipeline,
)
from transformers.utils import logging

from hf_ext import CheckpointError, UnsavedChangesError, emr, fm_delta

Auto = AutoModelForSequenceClassification


def extract_all(merged, out) -> dict:
    """Every task as a plain folder."""
    tasks = [task.task for task in emr.report(merged).tasks]
    for task in tasks:
        emr.extract(merged, task, out / task)
    return {task: out / task for task in tasks}


@pytest.fixture(scope="module", params=METHODS)
def merged(tmp_path_factory, request):
    """A merge of three classifiers, and its tasks as plain folders."""
    folder = tmp_path_factory.mktemp("merge")
    emr.merge(*write_tasks(folder / "in", {"trec": 6, "cr": 2, "subj": 2}), folder / "merged", **METHODS[request.param])
    return folder / "merged", extract_all(folder / "merged", folder / "plain")


@pytest.fixture
def model(merged):
    return Auto.from_pretrained(merged[0])


@pytest.fixture
def own(tmp_path):
    """A merge that the test may write into."""
    emr.merge(*write_tasks(tmp_path / "in", {"cr": 2, "subj": 3}), tmp_path / "merged", method="emr")
    return tmp_path / "merged"


# ---- one task at a time ----------------------------------------------------------------------------------------------


def test_the_first_task_loads(merged, model):
    assert model.tasks == ["trec", "cr", "subj"] and model.active_task == "trec"
    assert_same_weights(model, Auto.from_pretrained(merged[1]["trec"]))
    assert AutoTokenizer.from_pretrained(merged[0]).vocab_size == tokenizer().vocab_size
    assert AutoConfig.from_pretrained(merged[0], subfolder="task-cr").num_labels == 2


def test_a_task_is_active_for_the_length_of_a_block(merged, model):
    with emr.task(model, "cr") as same:
        assert same is model and model.active_task == "cr"
        assert_same_weights(model, Auto.from_pretrained(merged[1]["cr"]))
    assert_same_weights(model, Auto.from_pretrained(merged[1]["trec"]))
    with pytest.raises(RuntimeError, match="inside"), emr.task(model, "cr"):
        raise RuntimeError("inside")
    assert model.active_task == "trec"
    with pytest.raises(KeyError), emr.task(model, "cr"):  # not the error of switching back
        model.bert.pooler.dense.bias.data += 1
        raise KeyError("inside")


def test_a_block_of_another_thread_waits(model):
    entered = threading.Event()

    def block():
        with emr.task(model, "subj"):
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with emr.task(model, "cr"):
            done = pool.submit(block)
            assert not entered.wait(0.3) and model.active_task == "cr"
        done.result(timeout=30)
    assert entered.is_set()


def merge_of_two(folder, base) -> dict:
    """A merge of two fine-tunes, in `merged`, and its tasks as plain folders."""
    base.save_pretrained(folder / "base")
    for seed, name in enumerate(("one", "two")):
        perturb(base, seed).save_pretrained(folder / name)
    emr.merge(folder / "base", {name: folder / name for name in ("one", "two")}, folder / "merged", method="emr")
    return extract_all(folder / "merged", folder / "plain")


def test_generate_takes_a_task_and_what_the_models_class_takes(tmp_path):
    plain = merge_of_two(tmp_path, build("BlipForConditionalGeneration"))
    load, image = BlipForConditionalGeneration.from_pretrained, torch.randn(1, 3, 32, 32)
    model = load(tmp_path / "merged")
    for name, folder in plain.items():
        expected = load(folder).generate(pixel_values=image, max_new_tokens=5)
        assert torch.equal(model.generate(pixel_values=image, max_new_tokens=5, task=name), expected)
        assert torch.equal(model.generate(image, max_new_tokens=5, task=name), expected)


def test_a_class_whose_generate_has_a_task_gets_it(tmp_path):
    speech = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
    sizes = {f"{part}_{size}": number for part in ("encoder", "decoder") for size, number in speech.items()}
    sizes |= {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20, "vocab_size": 96}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    tokens |= {"suppress_tokens": None, "begin_suppress_tokens": None}
    languages = {"lang_to_id": {"<|en|>": 10}, "task_to_id": {"transcribe": 12, "translate": 13}, "no_timestamps_token_id": 14}
    plain = merge_of_two(tmp_path, WhisperForConditionalGeneration(WhisperConfig(**sizes, **tokens)))
    load, sound = WhisperForConditionalGeneration.from_pretrained, torch.randn(1, 8, 40)
    model = load(tmp_path / "merged")
    for name, folder in reversed(plain.items()):
        model.set_task(name)
        outputs = []
        for either in (model, load(folder)):
            vars(either.generation_config).update(languages | {"is_multilingual": True})
            outputs.append(either.generate(sound, task="translate", language="en", max_new_tokens=4))
        assert torch.equal(*outputs)


def test_a_pipeline_serves_the_active_task(merged):
    pipe = pipeline("text-classification", model=str(merged[0]), tokenizer=tokenizer())
    for task in ("trec", "cr"):
        pipe.model.set_task(task)
        expected = pipeline("text-classification", model=str(merged[1][task]), tokenizer=tokenizer())
        scores = [{row["label"]: row["score"] for row in either("w1 w2 w3", top_k=None)} for either in (pipe, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-6)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_switch_on_their_own(merged, model, clone):
    model.set_task("cr")
    other = clone(model)
    other.set_task("subj")
    for either, task in ((model, "cr"), (other, "subj")):
        assert either.active_task == task
        assert_same_weights(either, Auto.from_pretrained(merged[1][task]))


def test_a_merge_and_its_base_can_move_together(own, tmp_path, monkeypatch):
    edit_settings(own, base="../in/base")
    (tmp_path / "new").mkdir()
    for name in ("in", "merged"):
        (tmp_path / name).rename(tmp_path / "new" / name)
    monkeypatch.chdir(tmp_path / "new")
    model = Auto.from_pretrained("merged")
    monkeypatch.chdir("/")
    model.set_task("subj")
    copy.deepcopy(model).set_task("cr")


# ---- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["trec", "subj"])
def test_saving_writes_the_merge_again(merged, model, tmp_path, task):
    emr.merge(*write_tasks(tmp_path / "in", {"old": 3}), tmp_path / "again", max_shard_size="50KB", method="emr")
    (tmp_path / "again/README.md").unlink()  # a card stays, but nothing else of the older merge
    model.set_task(task)
    model.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(merged[0])


def test_saving_warns_of_what_it_leaves_out(merged, model, tmp_path, caplog):
    logging.get_logger().addHandler(caplog.handler)
    model(**inputs(model), labels=torch.tensor([0, 1]))
    model.save_pretrained(tmp_path / "same")
    assert not caplog.records
    model.config.id2label = {i: f"name {i}" for i in range(6)}
    model.save_pretrained(tmp_path / "again", variant="fp16")
    assert "Changes of id2label in the configuration are not saved" in caplog.text
    assert "variant='fp16' has no effect" in caplog.text
    assert contents(tmp_path / "again") == contents(merged[0])


def test_a_saved_copy_finds_a_base_named_relative_to_the_merge(own, tmp_path):
    edit_settings(own, base="../in/base")
    model = Auto.from_pretrained(own)
    model.save_pretrained(tmp_path / "deeper/copy")
    model.set_task("subj")
    copied = Auto.from_pretrained(tmp_path / "deeper/copy")
    copied.set_task("subj")
    assert_same_weights(copied, model)
    model.save_pretrained(own)  # both can still move together
    assert json.loads((own / "config.json").read_text())["quantization_config"]["base"] == "../in/base"


def add_to_head(model) -> None:
    model.classifier.bias.data += 1


def add_adapter(model) -> None:
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))


@pytest.mark.parametrize("change", [add_to_head, pytest.param(add_adapter, marks=adapters_of_transformers)])
def test_saving_where_the_merge_is_does_not_destroy_it(own, change):
    before, model = contents(own), Auto.from_pretrained(own)
    model.set_task("subj")
    model.save_pretrained(own)
    assert contents(own) == before
    change(model)
    with pytest.raises(CheckpointError, match="belongs to the merge"):
        model.save_pretrained(own)
    assert contents(own) == before


def test_a_merge_that_was_replaced_on_disk_is_not_saved(own, tmp_path):
    model = Auto.from_pretrained(own)
    emr.merge(*write_tasks(tmp_path / "more", {"cr": 4}), own, method="emr")
    for use in (lambda: model.save_pretrained(tmp_path / "copy"), lambda: emr.extract(model, "cr", tmp_path / "copy")):
        with pytest.raises(CheckpointError, match="another merge than when"):
            use()


def test_a_changed_model_is_saved_plain(merged, model, tmp_path):
    (tmp_path / "notes.txt").write_text("not part of the save")
    assert "notes.txt" not in model.save_pretrained.save(tmp_path)  # these names are pushed
    add_to_head(model)
    assert model.save_pretrained.save(tmp_path) == ["config.json", "model.safetensors"]
    assert (tmp_path / "notes.txt").exists()
    assert_same_weights(Auto.from_pretrained(tmp_path), model)
    model.set_task("trec", discard_changes=True)
    model.save_pretrained(tmp_path / "plain", state_dict=model.state_dict())
    same_tensors(tensors_of(tmp_path / "plain"), tensors_of(merged[1]["trec"]))


def test_a_task_of_other_labels_is_not_switched_to_under_an_adapter_with_a_head(model):
    get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    with pytest.raises(CheckpointError, match="its own head .* for the labels of 'trec'"):
        model.set_task("cr")


def test_nothing_is_saved_into_the_folder_of_a_task(own):
    before = contents(own)
    model = Auto.from_pretrained(own / "task-subj")
    for change in (lambda: None, lambda: add_to_head(model)):
        change()
        with pytest.raises(CheckpointError, match="belongs to the merge"):
            model.save_pretrained(model.name_or_path)
    assert contents(own) == before
    with pytest.raises(CheckpointError, match="holds task 'subj' of a merge"):
        emr.verify(own / "task-subj")


def test_labels_that_were_chosen_when_loading_can_be_discarded(merged):
    for task, labels in (("trec", 6), ("cr", 2)):
        model = Auto.from_pretrained(merged[0], num_labels=7, ignore_mismatched_sizes=True)
        with pytest.raises(UnsavedChangesError):
            model.set_task("cr")
        model.set_task(task, discard_changes=True)
        assert model.config.num_labels == model.num_labels == model.classifier.out_features == labels
        assert_same_weights(model, Auto.from_pretrained(merged[1][task]))


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", [torch.float32, torch.float16, torch.float64], ids=str)
def test_a_cast_is_no_change(merged, loaded, cast):
    model = Auto.from_pretrained(merged[0], dtype=loaded).to(cast)
    for task in ("cr", "trec"):
        model.set_task(task)
        assert_same_weights(model, Auto.from_pretrained(merged[1][task], dtype=cast))
    model.to(loaded).bert.pooler.dense.bias.data[0] += 1
    with pytest.raises(UnsavedChangesError, match="pooler"):
        model.set_task("cr")


def test_what_a_task_has_no_tensors_for_may_change_its_type(tmp_path):
    base, tasks = write_tasks(tmp_path / "in", {"cr": 2, "subj": 2})
    tensors = tensors_of(tasks["cr"])
    save_file({name: tensors[name] for name in tensors if "classifier" not in name}, tasks["cr"] / "model.safetensors")
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    model = Auto.from_pretrained(tmp_path / "merged").half()
    for task in ("subj", "cr"):
        model.set_task(task)
    model.classifier.weight.data[0, 0] += 1
    with pytest.raises(UnsavedChangesError, match="classifier.weight"):
        model.set_task("subj")


def test_what_the_merge_has_no_tensors_for_is_saved_too(tmp_path):
    merge_of_two(tmp_path, bert().bert)
    model = Auto.from_pretrained(tmp_path / "merged", num_labels=3)  # with a new head
    model.set_task("two")
    model.save_pretrained(tmp_path / "same")
    assert contents(tmp_path / "same") == contents(tmp_path / "merged")
    add_to_head(model)
    model.save_pretrained(tmp_path / "head")
    assert_same_weights(Auto.from_pretrained(tmp_path / "head"), model)
    other = AutoModel.from_pretrained(tmp_path / "merged")
    other.extra = torch.nn.Linear(2, 2)
    other.save_pretrained(tmp_path / "extra")
    assert "extra.weight" in tensors_of(tmp_path / "extra")


def test_training_goes_on_from_the_active_task_and_saves_plainly(merged, model, tmp_path):
    model.set_task("cr")
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8, "labels": [0, 1] * 4})
    options = {"max_steps": 2, "save_steps": 2, "report_to": [], "use_cpu": True, "learning_rate": 1e-2}
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "run"), **options), train_dataset=dataset)
    trainer.train()
    with pytest.raises(UnsavedChangesError):
        model.set_task("trec")
    trainer.save_model(str(tmp_path / "tuned"))
    for folder in (tmp_path / "tuned", tmp_path / "run" / "checkpoint-2"):
        config = json.loads((folder / "config.json").read_text())
        assert "quantization_config" not in config and len(config["id2label"]) == 2
        assert_same_weights(model, Auto.from_pretrained(folder))
    emr.merge(
        merged[0].parent / "in/base", {"more": tmp_path / "tuned"}, tmp_path / "more", method="emr"
    )  # a task like any other
    assert_same_weights(model, Auto.from_pretrained(tmp_path / "more"))
    model.set_task("trec", discard_changes=True)
    assert_same_weights(model, Auto.from_pretrained(merged[1]["trec"]))


def test_a_task_is_compressed_alone_or_extracted(merged, model, tmp_path):
    model.set_task("cr")
    fm_delta.enable(model, merged[0].parent / "in" / "base").save_pretrained(tmp_path / "small")
    assert_same_weights(Auto.from_pretrained(tmp_path / "small"), Auto.from_pretrained(merged[1]["cr"]))
    fm_delta.disable(model).save_pretrained(tmp_path / "again")
    assert Auto.from_pretrained(tmp_path / "again").tasks == model.tasks
    emr.extract(model, "cr", tmp_path / "cr")
    assert contents(tmp_path / "cr") == contents(merged[1]["cr"])
    with pytest.raises(CheckpointError, match="not loaded from a merge"):
        emr.extract(bert(), "cr", tmp_path / "none")


@pytest.mark.parametrize("first", ["the task", "the adapter"])
@pytest.mark.parametrize("task", ["cr", "trec"])
def test_an_adapter_loads_onto_the_task_that_it_was_trained_on(merged, model, tmp_path, task, first):
    config = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    if first == "the task":
        model.set_task(task)
    adapted = get_peft_model(model, config)
    adapted.set_task(task)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModel.from_pretrained(tmp_path / "adapter")
    assert Auto.from_pretrained(merged[0], subfolder=f"task-{task}").name_or_path == model.name_or_path
    assert_same_weights(loaded, adapted)
    base = loaded.get_base_model()
    assert base.active_task == task and base.tasks == model.tasks
    loaded.unload()
    base.set_task("subj")
    assert_same_weights(base, Auto.from_pretrained(merged[0] / "task-subj"))
