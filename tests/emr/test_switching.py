"""A loaded merge: each task is what `extract` writes, switching is in place and loses nothing, saving gives the same merge."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from datasets import Dataset
from hosts import adapters_of_transformers
from peft import LoraConfig, PeftModel, get_peft_model
from processes import python
from tiny_checkpoints import contents, edit_settings
from tiny_merges import classifier, same_tensors, tensors_of, write_tasks
from tiny_models import MODELS, assert_same_weights, bert, inputs, llama, perturb, tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    GenerationConfig,
    Trainer,
    TrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
    pipeline,
)
from transformers.utils import logging

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, EMRConfig, UnsavedChangesError, emr, fm_delta
from hf_ext.emr.modulators import Modulated, TaskFile, copy_task

Auto = AutoModelForSequenceClassification
FREELY = {"suppress_tokens": None, "begin_suppress_tokens": None}
SPEECH = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
LANGUAGES = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 10},
    "task_to_id": {"transcribe": 12, "translate": 13},
    "no_timestamps_token_id": 14,
}


def extract_all(merged, out) -> dict:
    """Every task as a plain folder."""
    tasks = [task.task for task in emr.report(merged).tasks]
    for task in tasks:
        emr.extract(merged, task, out / task)
    return {task: out / task for task in tasks}


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A merge of four classifiers, two with two labels, and its tasks as plain folders."""
    folder = tmp_path_factory.mktemp("merge")
    base, tasks = write_tasks(folder / "in")
    emr.merge(base, tasks, folder / "merged")
    return folder / "merged", extract_all(folder / "merged", folder / "plain")


@pytest.fixture
def model(merged):
    return Auto.from_pretrained(merged[0])


@cache
def loaded(auto, folder, **options):
    return auto.from_pretrained(folder, **options)


def check(model, folder, auto=Auto, **options) -> None:
    """The model is what the plain folder loads as: weights, shapes, configuration and what it computes."""
    expected = loaded(auto, folder, **options)
    assert_same_weights(model, expected)
    assert vars(model.config).keys() == vars(expected.config).keys()
    for key, value in vars(expected.config).items():
        assert key in ("_name_or_path", "dtype") or getattr(model.config, key) == value, key
    found, right = (m.eval()(**inputs(m)).logits for m in (model, expected))
    torch.testing.assert_close(found, right)


# ---- loading and switching -------------------------------------------------------------------------------------------


def test_the_first_task_loads_and_all_others_can_be_had(merged, model):
    assert model.tasks == ["trec", "cr", "subj", "sst2"] and model.active_task == "trec"
    check(model, merged[1]["trec"])
    for task in ("cr", "sst2", "trec", "subj", "trec"):
        model.set_task(task)
        assert model.active_task == task
        check(model, merged[1][task])
        assert model.num_labels == model.classifier.out_features == len(model.config.id2label)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_loads_and_switches(tmp_path, name):
    tiny = MODELS[name]
    base = tiny.build()
    base.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        perturb(base, seed).save_pretrained(tmp_path / f"t{seed}")
    emr.merge(tmp_path / "base", {"one": tmp_path / "t1", "two": tmp_path / "t2"}, tmp_path / "merged", max_shard_size="50KB")
    plain = extract_all(tmp_path / "merged", tmp_path / "plain")
    model = tiny.auto.from_pretrained(tmp_path / "merged")
    for task in ("one", "two", "one"):
        model.set_task(task)
        check(model, plain[task], tiny.auto)
    model.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "merged")
    body = AutoModel.from_pretrained(tmp_path / "merged")
    body.set_task("two")
    assert_same_weights(body, AutoModel.from_pretrained(plain["two"]))


def test_switching_is_in_place(model):
    weight, classifier = model.bert.pooler.dense.weight, model.classifier.weight
    address, version = weight.data_ptr(), weight._version
    model.set_task("cr")
    assert model.bert.pooler.dense.weight is weight and weight.data_ptr() == address and weight._version > version
    second = model.classifier.weight
    assert second is not classifier and isinstance(second, torch.nn.Parameter) and second.requires_grad
    model.set_task("subj")
    assert model.classifier.weight is second  # of the same shape


def test_a_task_for_the_length_of_a_block(merged, model):
    with emr.task(model, "cr") as same:
        assert same is model and model.active_task == "cr"
        check(model, merged[1]["cr"])
    check(model, merged[1]["trec"])
    with pytest.raises(RuntimeError, match="inside"), emr.task(model, "cr"):
        raise RuntimeError("inside")
    assert model.active_task == "trec"


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
    emr.merge(folder / "base", {name: folder / name for name in ("one", "two")}, folder / "merged")
    return extract_all(folder / "merged", folder / "plain")


def test_generate_takes_what_that_of_the_models_class_takes(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    words = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}
    parts = {"text_config": sizes | words | {"encoder_hidden_size": 32}}
    parts |= {"vision_config": sizes | {"image_size": 16, "patch_size": 8}}
    plain = merge_of_two(tmp_path, BlipForConditionalGeneration(BlipConfig(**parts, projection_dim=16)))
    load, image = BlipForConditionalGeneration.from_pretrained, torch.randn(1, 3, 16, 16)
    model = load(tmp_path / "merged")
    for name, folder in plain.items():
        expected = load(folder).generate(pixel_values=image, max_new_tokens=5)
        assert torch.equal(model.generate(pixel_values=image, max_new_tokens=5, task=name), expected)
        assert torch.equal(model.generate(image, max_new_tokens=5, task=name), expected)


def test_a_task_of_generates_own_is_left_to_it(tmp_path):
    sizes = {f"{part}_{size}": number for part in ("encoder", "decoder") for size, number in SPEECH.items()}
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    sizes |= {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}
    plain = merge_of_two(tmp_path, WhisperForConditionalGeneration(WhisperConfig(vocab_size=96, **sizes, **words, **FREELY)))
    load, sound = WhisperForConditionalGeneration.from_pretrained, torch.randn(1, 8, 40)
    model = load(tmp_path / "merged")
    for name, folder in reversed(plain.items()):
        model.set_task(name)
        said = []
        for one in (model, load(folder)):
            vars(one.generation_config).update(LANGUAGES)
            said.append(one.generate(sound, task="translate", language="en", max_new_tokens=4))
        assert torch.equal(*said)


def test_a_task_that_is_not_there(model):
    with pytest.raises(CheckpointError, match="There is no task 'mpqa'.*its tasks are trec, cr, subj, sst2"):
        model.set_task("mpqa")
    assert model.active_task == "trec"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_another_type_gives_what_the_plain_task_gives(merged, dtype):
    model = Auto.from_pretrained(merged[0], dtype=dtype)
    for task in ("trec", "cr", "trec"):
        model.set_task(task)
        check(model, merged[1][task], dtype=dtype)


def test_a_model_cast_after_loading_still_switches(merged, model):
    model.set_task("cr")
    model.bfloat16()
    model.set_task("sst2")
    assert_same_weights(model, Auto.from_pretrained(merged[1]["sst2"]).bfloat16())


def test_dtype_auto_and_a_device_map(merged):
    model = Auto.from_pretrained(merged[0], dtype="auto", device_map="cpu")
    model.set_task("cr")
    check(model, merged[1]["cr"])


def test_offloaded_weights_cannot_switch_and_say_so(merged, tmp_path):
    device_map = {"bert": "disk", "classifier": "cpu"}
    model = Auto.from_pretrained(merged[0], device_map=device_map, offload_folder=tmp_path)
    with pytest.raises(CheckpointError, match="is offloaded"):
        model.set_task("cr")


def test_resized_vocabularies_and_tied_embeddings_switch(tmp_path):
    base = llama(tied=True)
    base.save_pretrained(tmp_path / "base")
    words = {"same": 96, "more": 104, "less": 88}
    for seed, (task, count) in enumerate(words.items(), 1):
        tuned = perturb(base, seed)
        tuned.resize_token_embeddings(count)
        tuned.save_pretrained(tmp_path / task)
    emr.merge(tmp_path / "base", {task: tmp_path / task for task in words}, tmp_path / "merged")
    plain = extract_all(tmp_path / "merged", tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for task in ("more", "less", "same", "more"):
        model.set_task(task)
        expected = AutoModelForCausalLM.from_pretrained(plain[task])
        assert_same_weights(model, expected)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.config.vocab_size == model.vocab_size == words[task]
        assert model.lm_head.out_features == model.model.embed_tokens.num_embeddings == words[task]


def test_generation_settings_follow_the_task(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    for seed, length in ((1, 5), (2, 9)):
        tuned = perturb(base, seed)
        tuned.generation_config = GenerationConfig(max_new_tokens=length, do_sample=False, pad_token_id=0)
        tuned.save_pretrained(tmp_path / f"t{seed}")
    perturb(base, 3).save_pretrained(tmp_path / "t3")
    (tmp_path / "t3" / "generation_config.json").unlink()
    tasks = {"a": tmp_path / "t1", "b": tmp_path / "t2", "none": tmp_path / "t3"}
    emr.merge(tmp_path / "base", tasks, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for task, length in (("a", 5), ("b", 9), ("a", 5)):
        model.set_task(task)
        assert model.generate(**inputs(model)).shape[1] <= 9 + length and model.generation_config.max_new_tokens == length
    model.set_task("none")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "t3").generation_config
    assert model.generation_config.eos_token_id == expected.eos_token_id


def test_a_tensor_that_a_task_lacks_keeps_its_values_and_says_so(tmp_path, caplog):
    bert(2).save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        tuned = perturb(bert(2), seed)
        state = {name: tensor for name, tensor in tuned.state_dict().items() if seed == 1 or "pooler" not in name}
        tuned.save_pretrained(tmp_path / f"t{seed}", state_dict=state)
    emr.merge(tmp_path / "base", {"a": tmp_path / "t1", "b": tmp_path / "t2"}, tmp_path / "merged")
    model = Auto.from_pretrained(tmp_path / "merged")
    before = model.bert.pooler.dense.weight.clone()
    model.set_task("b")
    assert torch.equal(model.bert.pooler.dense.weight, before)
    model.set_task("a")
    check(model, extract_all(tmp_path / "merged", tmp_path / "plain")["a"])


def test_a_pipeline_serves_the_active_task(merged):
    words = tokenizer()
    pipe = pipeline("text-classification", model=str(merged[0]), tokenizer=words)
    for task in ("trec", "cr", "subj"):
        pipe.model.set_task(task)
        expected = pipeline("text-classification", model=str(merged[1][task]), tokenizer=words)
        found, right = ({row["label"]: row["score"] for row in one("w1 w2 w3", top_k=None)} for one in (pipe, expected))
        assert found == pytest.approx(right, abs=1e-6)


def test_tokenizers_and_configurations_load_from_a_merge(merged):
    assert AutoTokenizer.from_pretrained(merged[0]).vocab_size == tokenizer().vocab_size
    assert AutoConfig.from_pretrained(merged[0], subfolder="task-cr").num_labels == 2


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_changed_weights_are_not_lost_by_switching(merged, model):
    model.set_task("cr")
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.weight[3, 4] += 1
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsavedChangesError, match=r"layer.1.output.dense.weight' was changed since task 'cr' was loaded"):
        model.set_task("trec")
    assert model.active_task == "cr"
    same_tensors(model.state_dict(), before)
    model.set_task("trec", discard_changes=True)
    check(model, merged[1]["trec"])


def test_a_changed_head_is_a_change_too(model):
    with torch.no_grad():
        model.classifier.bias += 1
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsavedChangesError, match="'classifier.bias'"):
        model.set_task("cr")
    same_tensors(model.state_dict(), before)


def test_changes_behind_autograds_back_are_seen(model):
    model.bert.pooler.dense.weight.data[0, 0] += 1
    with pytest.raises(UnsavedChangesError):
        model.set_task("cr")


def test_discarding_changes_gives_the_active_task_back(merged, model):
    with torch.no_grad():
        model.bert.pooler.dense.weight.zero_()
    model.set_task("trec", discard_changes=True)
    check(model, merged[1]["trec"])


def test_a_resized_model_does_not_switch(model):
    model.resize_token_embeddings(120)
    with pytest.raises(UnsavedChangesError, match="word_embeddings"):
        model.set_task("cr")


def dataset():
    return Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8, "labels": [0, 1] * 4})


def test_training_goes_on_from_the_active_task_and_saves_plainly(merged, model, tmp_path):
    model.set_task("cr")
    options = {"max_steps": 2, "save_steps": 2, "report_to": [], "use_cpu": True, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(tmp_path / "run"), **options)
    trainer = Trainer(model, arguments, train_dataset=dataset())
    trainer.train()
    with pytest.raises(UnsavedChangesError):
        model.set_task("trec")
    trainer.save_model(str(tmp_path / "tuned"))
    for folder in (tmp_path / "tuned", tmp_path / "run" / "checkpoint-2"):
        config = json.loads((folder / "config.json").read_text())
        assert "quantization_config" not in config and len(config["id2label"]) == 2
        assert_same_weights(model, Auto.from_pretrained(folder))
    # The trained model is a task like any other.
    emr.merge(merged[0].parent / "in/base", {"cr-more": tmp_path / "tuned"}, tmp_path / "more")
    assert_same_weights(model, Auto.from_pretrained(tmp_path / "more"))
    model.set_task("trec", discard_changes=True)
    assert_same_weights(model, Auto.from_pretrained(merged[1]["trec"]))


def test_a_loss_of_one_kind_does_not_stick_to_the_next_task(tmp_path):
    base, tasks = write_tasks(tmp_path / "in", {"classes": 3, "number": 1})
    emr.merge(base, tasks, tmp_path / "merged")
    model = Auto.from_pretrained(tmp_path / "merged")
    model(**inputs(model), labels=torch.tensor([0, 2]))
    model.set_task("number")
    labels, logits = torch.tensor([0.5, 0.25]), model(**inputs(model)).logits
    loss = model(**inputs(model), labels=labels).loss
    torch.testing.assert_close(loss, torch.nn.functional.mse_loss(logits.squeeze(), labels))


def test_an_adapter_on_top_of_a_task(merged, model, tmp_path):
    model.set_task("cr")
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    torch.nn.init.normal_(tuned.base_model.model.bert.encoder.layer[0].attention.self.query.lora_B.default.weight)
    tuned.save_pretrained(tmp_path / "adapter")
    assert tuned.active_task == "cr" and tuned.tasks == model.tasks
    plain = PeftModel.from_pretrained(Auto.from_pretrained(merged[1]["cr"]), tmp_path / "adapter").eval()
    torch.testing.assert_close(tuned.eval()(**inputs(model)).logits, plain(**inputs(model)).logits)
    tuned.set_task("subj")  # the weights below the adapter
    other = PeftModel.from_pretrained(Auto.from_pretrained(merged[1]["subj"]), tmp_path / "adapter").eval()
    torch.testing.assert_close(tuned(**inputs(model)).logits, other(**inputs(model)).logits)
    bare = tuned.unload()
    state = Auto.from_pretrained(merged[1]["subj"]).bert.state_dict()
    same_tensors(bare.bert.state_dict(), state)


def test_switching_under_inference_mode_leaves_ordinary_weights(merged, model):
    with torch.inference_mode(), emr.task(model, "cr"):
        model(**inputs(model))
    with torch.inference_mode():
        model.set_task("subj")
    model(**inputs(model), labels=torch.tensor([0, 1])).loss.backward()
    model.set_task("sst2")
    check(model, merged[1]["sst2"])


def test_an_error_inside_a_block_is_not_replaced(model):
    with pytest.raises(KeyError), emr.task(model, "cr"):
        model.bert.pooler.dense.bias.data += 1
        raise KeyError("inside")


def test_what_the_merge_knows_nothing_of_is_not_lost_on_saving(tmp_path):
    base = bert().bert
    base.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        perturb(base, seed).save_pretrained(tmp_path / f"t{seed}")
    emr.merge(tmp_path / "base", {"a": tmp_path / "t1", "b": tmp_path / "t2"}, tmp_path / "merged")
    model = Auto.from_pretrained(tmp_path / "merged", num_labels=3)  # with a new head
    model.set_task("b")
    model.save_pretrained(tmp_path / "same")
    assert contents(tmp_path / "same") == contents(tmp_path / "merged")
    model.classifier.weight.data += 1
    model.save_pretrained(tmp_path / "head")
    assert_same_weights(Auto.from_pretrained(tmp_path / "head"), model)
    other = AutoModel.from_pretrained(tmp_path / "merged")
    other.extra = torch.nn.Linear(2, 2)
    other.save_pretrained(tmp_path / "extra")
    assert "extra.weight" in tensors_of(tmp_path / "extra")


def test_many_threads_switch_one_after_the_other(merged, model):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(model.set_task, model.tasks * 15))
    model.set_task("cr")
    check(model, merged[1]["cr"])


# ---- copies and saves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_switch_on_their_own(merged, model, clone):
    model.set_task("cr")
    other = clone(model)
    other.set_task("sst2")
    check(model, merged[1]["cr"])
    check(other, merged[1]["sst2"])
    assert (model.active_task, other.active_task) == ("cr", "sst2")


@pytest.mark.parametrize("task", ["trec", "sst2"])
def test_saving_writes_the_merge_again(merged, model, tmp_path, task):
    model.set_task(task)
    model.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(merged[0])


def test_saving_warns_that_an_edited_configuration_is_lost(merged, model, tmp_path, caplog):
    logging.get_logger().addHandler(caplog.handler)
    model(**inputs(model), labels=torch.tensor([0, 1]))
    model.save_pretrained(tmp_path / "same")
    assert not caplog.records
    model.config.id2label = {i: f"name {i}" for i in range(6)}
    model.save_pretrained(tmp_path / "again")
    assert "Changes of id2label in the configuration are not saved" in caplog.text
    assert contents(tmp_path / "again") == contents(merged[0])


def test_saving_warns_that_a_variant_has_no_effect(model, tmp_path, caplog):
    logging.get_logger().addHandler(caplog.handler)
    model.save_pretrained(tmp_path / "copy", variant="fp16")
    assert "variant='fp16' has no effect" in caplog.text and Auto.from_pretrained(tmp_path / "copy").tasks == model.tasks


def test_saving_over_an_older_merge_leaves_nothing_of_it(merged, model, tmp_path):
    base, tasks = write_tasks(tmp_path / "in", {"old": 3})
    emr.merge(base, tasks, tmp_path / "merged", max_shard_size="50KB")
    model.save_pretrained(tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(merged[0])


def test_a_copy_of_a_merge_finds_a_base_named_relative_to_it(tmp_path):
    base, tasks = write_tasks(tmp_path / "in", {"cr": 2, "subj": 2})
    emr.merge(base, tasks, tmp_path / "merged")
    edit_settings(tmp_path / "merged", base="../in/base")
    model = Auto.from_pretrained(tmp_path / "merged")
    model.save_pretrained(tmp_path / "deeper/copy")
    model.set_task("subj")
    copied = Auto.from_pretrained(tmp_path / "deeper/copy")
    copied.set_task("subj")
    assert_same_weights(copied, model)
    model.save_pretrained(tmp_path / "merged")  # both can still move together
    assert json.loads((tmp_path / "merged/config.json").read_text())["quantization_config"]["base"] == "../in/base"


def test_saving_where_the_merge_is_does_not_destroy_it(broken):
    before, model = contents(broken), Auto.from_pretrained(broken)
    model.set_task("subj")
    model.save_pretrained(broken)
    assert contents(broken) == before
    with torch.no_grad():
        model.classifier.bias += 1
    with pytest.raises(CheckpointError, match="one model, whose .* would replace files of its tasks"):
        model.save_pretrained(broken)
    assert contents(broken) == before


@adapters_of_transformers
def test_an_adapter_is_not_saved_where_the_merge_is(broken):
    before, model = contents(broken), Auto.from_pretrained(broken)
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(CheckpointError, match="an adapter there would replace files of its tasks"):
        model.save_pretrained(broken)
    assert contents(broken) == before


def test_only_what_a_save_has_written_is_named_to_be_pushed(merged, model, tmp_path):
    (tmp_path / "notes.txt").write_text("not part of the save")
    assert "notes.txt" not in model.save_pretrained.save(tmp_path)
    model.classifier.bias.data += 1
    assert model.save_pretrained.save(tmp_path) == ["config.json", "model.safetensors"]
    assert (tmp_path / "notes.txt").exists()


def test_saving_a_state_dict_is_plain(merged, model, tmp_path):
    model.save_pretrained(tmp_path / "plain", state_dict=model.state_dict())
    same_tensors(tensors_of(tmp_path / "plain"), tensors_of(merged[1]["trec"]))


def test_one_task_can_be_compressed_on_its_own(merged, model, tmp_path):
    model.set_task("cr")
    base = merged[0].parent / "in" / "base"
    fm_delta.enable(model, base).save_pretrained(tmp_path / "small")
    assert_same_weights(Auto.from_pretrained(tmp_path / "small"), Auto.from_pretrained(merged[1]["cr"]))
    fm_delta.disable(model).save_pretrained(tmp_path / "again")
    assert Auto.from_pretrained(tmp_path / "again").tasks == model.tasks


def test_an_adapter_names_the_task_that_it_was_trained_on(merged, model, tmp_path):
    for task, name in (("cr", f"{merged[0]}#cr"), (model.tasks[0], str(merged[0]))):
        model.set_task(task)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["query"]))
        adapted.save_pretrained(tmp_path / task)
        assert json.loads((tmp_path / task / "adapter_config.json").read_text())["base_model_name_or_path"] == name
        adapted.unload()


def test_a_task_is_extracted_from_a_model(merged, model, tmp_path):
    emr.extract(model, "cr", tmp_path / "cr")
    assert contents(tmp_path / "cr") == contents(merged[1]["cr"])
    with pytest.raises(CheckpointError, match="not loaded from a merge"):
        emr.extract(bert(), "cr", tmp_path / "none")


def test_a_merge_and_its_base_can_move_together(tmp_path):
    base, tasks = write_tasks(tmp_path / "old", {"cr": 2, "subj": 2})
    emr.merge(base, tasks, tmp_path / "old" / "merged")
    config = tmp_path / "old" / "merged" / "config.json"
    config.write_text(config.read_text().replace(json.dumps(str(base)), '"../base"'))
    (tmp_path / "old").rename(tmp_path / "new")
    model = Auto.from_pretrained(tmp_path / "new" / "merged")
    model.set_task("subj")
    copy.deepcopy(model).set_task("cr")


# ---- what must not load ----------------------------------------------------------------------------------------------


WITHOUT_THE_PLUGIN = """
import sys
from transformers import AutoModel, AutoModelForSequenceClassification
for auto in (AutoModel, AutoModelForSequenceClassification):
    try:
        auto.from_pretrained(sys.argv[1])
    except Exception as error:
        print(type(error).__name__)
    else:
        print("loaded")
"""


def test_without_the_plugin_it_fails_loudly(merged):
    result = python("-c", WITHOUT_THE_PLUGIN, merged[0])
    assert result.stdout.split() == ["RuntimeError", "RuntimeError"]
    assert "emr" in result.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    base, tasks = write_tasks(folder / "in", {"cr": 2, "subj": 3})
    emr.merge(base, tasks, folder / "merged")
    return folder


@pytest.fixture
def broken(whole, tmp_path):
    """A merge of its own, to damage, and beside it what it was made from."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "merged/config.json"
    config.write_text(config.read_text().replace(json.dumps(str(whole / "in/base")), json.dumps(str(tmp_path / "in/base"))))
    return tmp_path / "merged"


@pytest.mark.parametrize("damage", ["overwritten", "cut off"])
def test_a_base_that_changes_while_it_is_in_use_is_noticed(broken, damage):
    model = Auto.from_pretrained(broken)
    model.set_task("subj")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    path = broken.parent / "in/base/model.safetensors"
    with open(path, "r+b") as file:
        if damage == "overwritten":
            file.seek(-4000, os.SEEK_END)
            file.write(bytes(range(250)) * 16)
        else:
            file.truncate(path.stat().st_size // 2)
    error, words = {"overwritten": (BaseModelError, "has changed or is damaged"), "cut off": (CorruptFileError, "was cut off")}[
        damage
    ]
    with pytest.raises(error, match=words):
        model.set_task("cr", discard_changes=True)
    assert model.active_task == "subj" and all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_base_that_changes_in_use_leaves_no_wrong_weights(tmp_path):
    bert().save_pretrained(tmp_path / "base")
    tasks = {name: tmp_path / name for name in ("one", "two")}
    for seed, folder in enumerate(tasks.values(), start=1):
        perturb(bert(), seed).to(torch.bfloat16).save_pretrained(folder)
    emr.merge(tmp_path / "base", tasks, tmp_path / "merged")
    emr.extract(tmp_path / "merged", "two", tmp_path / "plain")
    model = Auto.from_pretrained(tmp_path / "merged", dtype=torch.float32)  # so that weights are made anew at each switch
    model.set_task("two")
    model.set_task("one")
    path = tmp_path / "base/model.safetensors"
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(range(250)) * 16)
    model.set_task("two", discard_changes=True)  # needs only what was read before
    assert_same_weights(model, Auto.from_pretrained(tmp_path / "plain", dtype=torch.float32))


@pytest.mark.parametrize("name", ["model.safetensors", "task-cr/modulators.safetensors", "task-subj/modulators.safetensors"])
@pytest.mark.parametrize("left", [0, 5000])
def test_a_file_that_is_cut_off_while_in_use_is_noticed(broken, name, left):
    model = Auto.from_pretrained(broken)
    os.truncate(broken / name, left)
    for discard in (False, True):
        with pytest.raises(CorruptFileError, match="was cut off"):
            model.set_task("subj", discard_changes=discard)
    assert model.active_task == "cr"


def test_every_damaged_byte_of_the_modulators_is_found(broken):
    path = broken / "task-subj" / "modulators.safetensors"
    good = path.read_bytes()
    header = int.from_bytes(good[:8], "little")
    places = [*range(8, 8 + header, 211), *range(8 + header, len(good), 97), len(good) - 1]
    for place in places:
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x15]) + good[place + 1 :])
        with pytest.raises(CorruptFileError, match="subj"):
            emr.verify(broken)
    for cut in (0, 7, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(CorruptFileError, match="subj"):
            Auto.from_pretrained(broken)
    path.unlink()
    with pytest.raises(CorruptFileError, match="is missing"):
        Auto.from_pretrained(broken)


def test_a_damaged_mask_is_found_before_a_weight_changes(broken):
    path = broken / "task-subj" / "modulators.safetensors"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    model = Auto.from_pretrained(broken)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CorruptFileError, match="subj"):
        model.set_task("subj")
    same_tensors(model.state_dict(), before)
    assert model.active_task == "cr"


def test_files_of_two_merges_are_not_mixed(broken, tmp_path):
    _, tasks = write_tasks(tmp_path / "more", {"cr": 2, "subj": 3})
    other = perturb(bert(), 9)
    other.bert.save_pretrained(tmp_path / "unused")
    classifier(2, 9).save_pretrained(tasks["cr"])
    emr.merge(tmp_path / "in" / "base", tasks, tmp_path / "second")
    theirs = tmp_path / "second" / "task-subj" / "modulators.safetensors"
    (broken / "task-subj" / "modulators.safetensors").write_bytes(theirs.read_bytes())
    with pytest.raises(CorruptFileError, match="belongs to another merge"):
        Auto.from_pretrained(broken)
    first = broken / "task-cr" / "modulators.safetensors"
    (broken / "task-subj" / "modulators.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(CorruptFileError, match="belongs to task 'cr', not"):
        Auto.from_pretrained(broken)


@pytest.mark.parametrize("lost", ["cr", "subj"])
def test_a_task_that_the_config_has_lost_is_noticed(broken, lost):
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["tasks"].remove(lost)
    (broken / "config.json").write_text(json.dumps(config))
    for use in (Auto.from_pretrained, lambda folder: emr.extract(folder, "subj", folder.parent / "out")):
        with pytest.raises(CorruptFileError, match=f"does not list the task '{lost}'"):
            use(broken)


def test_a_task_of_an_earlier_merge_may_lie_beside(broken, tmp_path):
    _, tasks = write_tasks(tmp_path / "more", {"cr": 2, "subj": 3})
    classifier(2, 9).save_pretrained(tasks["cr"])
    emr.merge(tmp_path / "in" / "base", tasks, tmp_path / "second")
    shutil.copytree(tmp_path / "second" / "task-subj", broken / "task-older")
    assert Auto.from_pretrained(broken).tasks == ["cr", "subj"]


def test_a_file_of_no_task_may_lie_beside(broken):
    (broken / "task-notes").mkdir()
    (broken / "task-notes" / "modulators.safetensors").write_text("garbage")
    assert Auto.from_pretrained(broken).tasks == ["cr", "subj"]


def test_merging_over_a_damaged_merge_leaves_none_of_its_tasks(broken, tmp_path):
    _, tasks = write_tasks(tmp_path / "again", {"cr": 2, "subj": 3})
    emr.add_task(broken, "more", tasks["cr"], tmp_path / "larger")
    (tmp_path / "larger" / "config.json").unlink()
    emr.merge(tmp_path / "in" / "base", tasks, tmp_path / "larger")
    assert not (tmp_path / "larger" / "task-more").exists()
    assert Auto.from_pretrained(tmp_path / "larger").tasks == ["cr", "subj"]


def test_another_base_is_refused(broken, tmp_path):
    perturb(bert(), 5).bert.save_pretrained(tmp_path / "in" / "base")
    with pytest.raises(BaseModelError, match="is another model or revision"):
        Auto.from_pretrained(broken)
    (tmp_path / "in" / "base" / "model.safetensors").unlink()
    with pytest.raises(BaseModelError, match="is needed to read this checkpoint"):
        Auto.from_pretrained(broken)


def test_modulators_of_tensors_that_are_not_there_are_refused(broken):
    path = broken / "task-subj" / "modulators.safetensors"
    record = TaskFile(path).record
    for change in (
        {"modulated": record.modulated | {"not.there": Modulated(1.0, "b0")}},
        {"modulated": record.modulated | {"classifier.weight": Modulated(1.0, "b0")}},
        {"shared": ["not.there"]},
    ):
        copy_task(TaskFile(path), tmp := path.with_name("other.safetensors"), **change)
        tmp.replace(path)
        with pytest.raises(CorruptFileError, match="does not fit the elected weights and the base"):
            Auto.from_pretrained(broken)


@pytest.mark.parametrize("text", [None, "", "{}", "{", '{"model_type": "gpt2"}'])
def test_a_task_without_its_config_is_refused(broken, text):
    path = broken / "task-subj" / "config.json"
    path.unlink() if text is None else path.write_text(text)
    for read in (emr.verify, lambda folder: emr.extract(folder, "subj", folder.parent / "out")):
        with pytest.raises(CorruptFileError, match="is missing|checksum mismatch"):
            read(broken)
    model = Auto.from_pretrained(broken)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CorruptFileError, match="is missing|checksum mismatch"):
        model.set_task("subj")
    assert model.active_task == "cr"
    same_tensors(model.state_dict(), before)
    model.set_task("cr", discard_changes=True)


def test_a_merge_that_was_replaced_on_disk_is_not_saved(broken, tmp_path):
    model = Auto.from_pretrained(broken)
    base, tasks = write_tasks(tmp_path / "more", {"cr": 4})
    emr.merge(base, tasks, broken)
    with pytest.raises(CheckpointError, match="another merge than when"):
        model.save_pretrained(tmp_path / "copy")


def test_a_relative_folder_still_serves_from_elsewhere(broken, monkeypatch):
    monkeypatch.chdir(broken.parent)
    model = Auto.from_pretrained(broken.name)
    monkeypatch.chdir("/")
    model.set_task("subj")
    copy.deepcopy(model).set_task("cr")


@pytest.mark.parametrize("tasks", ["cr", [], [3], ["../../etc"], None, ["cr", "gone"]])
def test_a_config_with_impossible_tasks_is_refused(broken, tasks):
    path = broken / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["tasks"] = tasks
    path.write_text(json.dumps(config))
    with pytest.raises(CorruptFileError):
        Auto.from_pretrained(broken)


def test_a_file_of_a_later_version_says_update(broken):
    path = broken / "task-cr" / "modulators.safetensors"
    data = path.read_bytes()
    assert data.count(b'\\"version\\": 1') == 1
    path.write_bytes(data.replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    with pytest.raises(CorruptFileError, match="format version 9.*update hf_ext"):
        Auto.from_pretrained(broken)


def test_the_config_is_no_way_to_load_a_plain_checkpoint(merged):
    with pytest.raises(CheckpointError, match="not a merge"):
        Auto.from_pretrained(merged[1]["cr"], quantization_config=EMRConfig(base="somewhere"))
