"""`fm_delta.switch` and a merge's `set_task` turn a model in memory into another one, bit-equal to `from_pretrained`, or leave
it as it was. Tests with `kind` or `models` hold for both."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from processes import python
from safetensors.torch import load_file, save_file
from tiny_checkpoints import contents, edit_config, edit_settings, flip_bit
from tiny_merges import METHODS, write_tasks
from tiny_models import MODELS, assert_same_weights, bert, inputs, llama, perturb, same_bits
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GenerationConfig,
    GPT2Config,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    PreTrainedModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    XGLMConfig,
    XGLMForCausalLM,
)

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, UnsavedChangesError, emr, fm_delta

Auto = AutoModelForSequenceClassification
KINDS = ("switch", "set_task")


@dataclass
class Models:
    """Fine-tunes of one base, stored for one kind of swap, and beside them what each must equal, as plain folders."""

    kind: str
    folder: Path
    auto: type

    def load(self, name: str, **options) -> PreTrainedModel:
        if self.kind == "switch":
            return self.auto.from_pretrained(self.folder / name, **options)
        model = self.auto.from_pretrained(self.folder / "merged", **options)
        model.set_task(name)
        return model

    def swap(self, model: PreTrainedModel, name: str, **options) -> None:
        if self.kind == "switch":
            assert fm_delta.switch(model, self.folder / name) is model
        else:
            model.set_task(name, **options)

    def plain(self, name: str, **options) -> PreTrainedModel:
        return self.auto.from_pretrained(self.folder / f"{name}-plain", **options)

    def follow(self, model: PreTrainedModel, *names: str, **options) -> None:
        """Swaps to each in turn."""
        for name in names:
            self.swap(model, name)
            assert_is(model, self.plain(name, **options))


def stored(kind: str, folder: Path, base: Path, tuned: Mapping[str, Path], auto: type = Auto, **options) -> Models:
    folder = folder / kind
    if kind == "set_task":
        emr.merge(base, tuned, folder / "merged", **{"method": "emr"} | options)
    for name, path in tuned.items():
        if kind == "set_task":
            emr.extract(folder / "merged", name, folder / f"{name}-plain")
        else:
            fm_delta.compress_checkpoint(path, base, folder / name)
            shutil.copytree(path, folder / f"{name}-plain")
    return Models(kind, folder, auto)


def write(folder: Path, base: PreTrainedModel, **tuned: PreTrainedModel) -> tuple[Path, dict[str, Path]]:
    """Plain folders of a base and its fine-tunes."""
    base.save_pretrained(folder / "base")
    for name, model in tuned.items():
        model.save_pretrained(folder / "tuned" / name)
    return folder / "base", {name: folder / "tuned" / name for name in tuned}


def two(folder: Path, base: PreTrainedModel) -> tuple[Path, dict[str, Path]]:
    return write(folder, base, first=perturb(base, 1), second=perturb(base, 2))


def assert_is(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Weights, configuration and what it computes are those of another model."""
    assert_same_weights(model, expected)
    names = {"_name_or_path": None, "dtype": None}
    assert model.config.to_dict() | names == expected.config.to_dict() | names
    if model.can_generate():
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    with torch.no_grad():
        for output, result in zip(model.eval()(**inputs(model))[0], expected(**inputs(expected))[0], strict=True):
            torch.testing.assert_close(output, result)


def addresses(model: PreTrainedModel) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in model.state_dict().items()}


def assert_refused(swap: Callable[[], object], model: PreTrainedModel, error: type[Exception], *parts: str) -> None:
    """The error has these words, and the model is as it was."""
    state, config = deepcopy(model.state_dict()), model.config.to_dict()
    with pytest.raises(error) as info:
        swap()
    assert type(info.value) is error and all(part in str(info.value) for part in parts), info.value
    after = model.state_dict()
    assert after.keys() == state.keys() and all(same_bits(after[name], state[name]) for name in state)
    assert model.config.to_dict() == config


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    return write_tasks(tmp_path_factory.mktemp("tasks"), {"trec": 6, "cr": 2, "subj": 2})


@pytest.fixture(scope="module")
def both(tasks, tmp_path_factory) -> dict[str, Models]:
    return {kind: stored(kind, tmp_path_factory.mktemp("both"), *tasks) for kind in KINDS}


@pytest.fixture
def models(both, kind) -> Models:
    """Three classifiers of six, two and two labels."""
    return both[kind]


# ---- what the model becomes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_follows_in_its_own_memory(tmp_path, name):
    base, tuned = two(tmp_path, MODELS[name].build())
    for kind in KINDS:
        models = stored(kind, tmp_path, base, tuned, MODELS[name].auto)
        model = models.load("first")
        places = addresses(model)
        models.follow(model, "second", "first", "second")
        assert addresses(model) == places
        body = Models(kind, models.folder, AutoModel)
        model = body.load("first")
        body.swap(model, "second")
        assert_same_weights(model, body.plain("second"))


def marian() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 1), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
    tokens = {"vocab_size": 96, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return MarianMTModel(MarianConfig(d_model=32, **sizes, **heads, **tokens))


def test_a_model_whose_positions_are_in_no_file_follows(tmp_path, kind):
    models = stored(kind, tmp_path, *two(tmp_path, marian()), MarianMTModel)
    models.follow(models.load("first"), "second", "first")


def test_a_plain_checkpoint_a_sharded_one_and_the_base_are_switched_to(tmp_path):
    base, tuned = two(tmp_path, llama())
    models = stored("switch", tmp_path, base, tuned, AutoModelForCausalLM)
    perturb(llama(), 3).save_pretrained(models.folder / "third-plain", max_shard_size="40KB")
    fm_delta.compress_checkpoint(models.folder / "third-plain", models.folder / "second", models.folder / "third")
    assert len(list((models.folder / "third").glob("*.safetensors"))) > 2
    shutil.copytree(base, models.folder / "base")
    shutil.copytree(base, models.folder / "base-plain")
    shutil.copytree(tuned["first"], models.folder / "first-plain-plain")
    models.follow(models.load("first"), "third", "base", "first-plain", "second")


def test_heads_and_labels_follow(models):
    model = models.load("cr")
    body, head = model.bert.pooler.dense.weight, model.classifier.weight
    head.requires_grad_(False)
    for name, labels in (("subj", 2), ("trec", 6), ("cr", 2)):
        before, version = model.classifier.weight, body._version
        models.follow(model, name)
        assert model.num_labels == model.classifier.out_features == len(model.config.id2label) == labels
        assert not model.classifier.weight.requires_grad and model.classifier.bias.requires_grad
        assert (model.classifier.weight is before) == (name == "subj")
        assert model.bert.pooler.dense.weight is body and body._version > version
        assert torch.isfinite(model(**inputs(model), labels=torch.tensor([0, labels - 1])).loss)


@pytest.mark.parametrize("tied", [False, True])
def test_resized_vocabularies_follow_and_stay_tied(tmp_path, kind, tied):
    counts = {"same": 96, "more": 104, "less": 88}
    tuned = {name: perturb(llama(tied=tied), seed) for seed, name in enumerate(counts)}
    for name, model in tuned.items():
        model.resize_token_embeddings(counts[name])
    models = stored(kind, tmp_path, *write(tmp_path, llama(tied=tied), **tuned), AutoModelForCausalLM)
    model = models.load("same")
    for name in ("more", "less", "same"):
        models.follow(model, name)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        sizes = {model.vocab_size, model.lm_head.out_features, model.model.embed_tokens.num_embeddings}
        assert sizes == {counts[name]}


def test_generation_settings_follow(tmp_path, kind):
    tuned = {name: perturb(llama(), seed) for seed, name in enumerate(("short", "long", "odd", "none"))}
    tuned["short"].generation_config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    tuned["long"].generation_config = GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.5)
    base, folders = write(tmp_path, llama(), **tuned)
    odd = {"do_sample": False, "temperature": 0.5, "top_k": 3}  # loads and saves again, with a warning
    (folders["odd"] / "generation_config.json").write_text(json.dumps(odd))
    (folders["none"] / "generation_config.json").unlink()
    models = stored(kind, tmp_path, base, folders, AutoModelForCausalLM)
    model = models.load("short")
    models.follow(model, "long", "short", "odd")
    model.generation_config.save_pretrained(tmp_path / "again")
    models.swap(model, "none")
    expected = models.plain("none").generation_config
    for setting in ("eos_token_id", "max_new_tokens", "do_sample"):
        assert getattr(model.generation_config, setting) == getattr(expected, setting)


@pytest.mark.parametrize(("name", "dtype"), [("t5", torch.float16), ("mixtral", torch.bfloat16), ("bert", torch.float64)])
def test_weights_keep_their_types(tmp_path, kind, name, dtype):
    models = stored(kind, tmp_path, *two(tmp_path, MODELS[name].build()), MODELS[name].auto)
    model = models.load("first", dtype=dtype)
    models.follow(model, "second", "first", dtype=dtype)
    assert model.config.dtype == dtype


def test_a_model_cast_after_loading_follows(models):
    model = models.load("cr", dtype="auto", device_map="cpu").bfloat16()
    if models.kind == "set_task":
        model.set_task("cr", discard_changes=True)  # its rounded weights
    models.swap(model, "trec")
    assert_same_weights(model, models.plain("trec").bfloat16())


def test_a_weight_untied_by_hand_is_set_like_its_twin(tmp_path, kind):
    models = stored(kind, tmp_path, *two(tmp_path, llama(tied=True)), AutoModelForCausalLM)
    model, expected = models.load("first"), models.plain("second").lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    models.swap(model, "second")
    assert same_bits(model.lm_head.weight, expected) and same_bits(model.model.embed_tokens.weight, expected)


def test_a_loss_of_one_kind_does_not_stick_to_the_next(tmp_path, kind):
    models = stored(kind, tmp_path, *write_tasks(tmp_path / "tasks", {"classes": 3, "number": 1}))
    model = models.load("classes")
    model(**inputs(model), labels=torch.tensor([0, 2]))
    models.swap(model, "number")
    labels, logits = torch.tensor([0.5, 0.25]), model(**inputs(model)).logits
    loss = model(**inputs(model), labels=labels).loss
    torch.testing.assert_close(loss, torch.nn.functional.mse_loss(logits.squeeze(), labels))


def test_a_swap_under_inference_mode_leaves_ordinary_weights(models):
    model = models.load("cr")
    with torch.inference_mode():
        models.swap(model, "trec")
    model(**inputs(model), labels=torch.tensor([0, 1])).loss.backward()
    models.follow(model, "subj")


def test_threads_swap_one_after_the_other(models):
    model = models.load("trec")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: models.swap(model, name), ["cr", "subj", "trec"] * 4))
    name = next(name for name in ("cr", "subj", "trec") if model.config.id2label == models.plain(name).config.id2label)
    assert_is(model, models.plain(name))


def test_an_offloaded_model_is_refused(models, tmp_path):
    devices = {"bert": "disk", "classifier": "cpu"}
    models = Models(models.kind, models.folder, Auto)
    first = "merged" if models.kind == "set_task" else "trec"
    model = Auto.from_pretrained(models.folder / first, device_map=devices, offload_folder=tmp_path)
    with pytest.raises(CheckpointError, match="offloaded"):
        models.swap(model, "cr")


# ---- switch only -------------------------------------------------------------------------------------------------------


def test_gradients_and_fields_of_the_previous_model_are_removed(tmp_path):
    named = perturb(bert(), 3)
    named.config.finetuning_task = "cola"
    models = stored("switch", tmp_path, *write(tmp_path, bert(), first=perturb(bert(), 1), named=named))
    model = models.load("first")
    model(**inputs(model)).logits.sum().backward()
    models.swap(model, "named")
    assert model.config.finetuning_task == "cola" and all(weight.grad is None for weight in model.parameters())
    models.swap(model, "first")
    assert "finetuning_task" not in model.config.to_dict()
    for part in (model, model.bert):
        assert part.name_or_path == part.config._name_or_path == str(models.folder / "first")


def test_a_switched_model_still_trains_and_saves_compressed(both, tasks, tmp_path):
    models = both["switch"]
    model = fm_delta.enable(models.load("cr"), tasks[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    models.swap(model, "subj")
    model.save_pretrained(tmp_path)
    assert contents(tmp_path)["model.safetensors"] == contents(models.folder / "subj")["model.safetensors"]
    model(**inputs(model), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    assert not same_bits(model.classifier.weight, models.plain("subj").classifier.weight)
    models.follow(fm_delta.disable(model), "subj")


def encoder_decoder(seed: int, **settings) -> VisionEncoderDecoderModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    decoder = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(image_size=16, patch_size=8, **sizes), decoder)
    config.update(settings)
    torch.manual_seed(seed)
    return VisionEncoderDecoderModel(config=config)


def test_settings_of_a_model_stay_out_of_its_parts(tmp_path):
    encoder_decoder(1, pad_token_id=0).save_pretrained(tmp_path / "first")
    encoder_decoder(2, pad_token_id=4, id2label={0: "cat", 1: "dog", 2: "cow"}).save_pretrained(tmp_path / "second")
    model, expected = (VisionEncoderDecoderModel.from_pretrained(tmp_path / name) for name in ("first", "second"))
    fm_delta.switch(model, tmp_path / "second")
    for part in ("config", "encoder.config", "decoder.config"):
        assert attrgetter(part)(model).to_dict() == attrgetter(part)(expected).to_dict()


MEMORY = """
import hf_ext
from hf_ext import fm_delta
from processes import peak_above
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("first")
fm_delta.switch(model, "first")  # before, its weights are not in memory but mapped from the file
print(sum(weight.nbytes for weight in model.parameters()))
print(peak_above(lambda: fm_delta.switch(model, "second")))
print(peak_above(lambda: AutoModelForCausalLM.from_pretrained("second")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_switching_holds_no_second_model_in_memory(tmp_path):
    config = llama().config
    config.update({"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 10, "head_dim": 96})
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "first")
    perturb(base).save_pretrained(tmp_path / "second-plain")
    fm_delta.compress_checkpoint(tmp_path / "second-plain", tmp_path / "first", tmp_path / "second", level=1)
    done = python("-c", MEMORY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    size, switching, loading = map(int, done.stdout.split())
    assert size > 40e6 and loading > 0.6 * size  # some of it takes memory that earlier work has freed
    assert switching < 0.4 * size


# ---- switch refuses, before anything has changed -----------------------------------------------------------------------


def other_bert(**changes) -> PreTrainedModel:
    return type(bert())(BertConfig(**bert().config.to_dict() | changes))


def xglm(pad_token_id: int) -> PreTrainedModel:
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 2, "max_position_embeddings": 32}
    return XGLMForCausalLM(XGLMConfig(vocab_size=96, pad_token_id=pad_token_id, **sizes))


def mobile_net(output_stride: int) -> PreTrainedModel:
    sizes = {"image_size": 64, "depth_multiplier": 0.25, "num_labels": 3}
    return MobileNetV2ForImageClassification(MobileNetV2Config(output_stride=output_stride, **sizes))


OTHERS = {
    "layers": (bert, lambda: other_bert(num_hidden_layers=3), ["num_hidden_layers", "3", "2"]),
    "width": (bert, lambda: other_bert(hidden_size=64), ["hidden_size", "64", "48"]),
    "activation": (bert, lambda: other_bert(hidden_act="relu"), ["hidden_act", "'relu'", "'gelu'"]),
    "architecture": (bert, llama, ["model_type", "'llama'", "'bert'"]),
    "class": (bert, lambda: BertForMaskedLM(bert().config), ["no tensor for", "BertForSequenceClassification"]),
    "positions": (lambda: xglm(1), lambda: xglm(5), ["embed_positions", "padding_idx"]),  # derived from the padding token
    "strides": (lambda: mobile_net(32), lambda: mobile_net(8), ["output_stride", "8", "32"]),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_another_structure_is_refused_by_its_first_difference(tmp_path, difference):
    build, other, parts = OTHERS[difference]
    model = build()
    other().save_pretrained(tmp_path)
    assert_refused(lambda: fm_delta.switch(model, tmp_path), model, CheckpointError, *parts)


def without_a_buffer(folder: Path) -> PreTrainedModel:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=96, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, **sizes)
    model = BartForConditionalGeneration(config)
    state = {name: weight for name, weight in model.state_dict().items() if name != "final_logits_bias"}
    model.save_pretrained(folder, state_dict=state)  # from_pretrained makes it zero
    model.final_logits_bias.normal_()
    return model


def with_another_head(folder: Path) -> PreTrainedModel:
    bert(5).save_pretrained(folder)
    bert(3).config.save_pretrained(folder)
    return bert(3)


def with_shared_memory(folder: Path) -> PreTrainedModel:
    perturb(llama(), 1).save_pretrained(folder)
    model = llama()
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.data)
    return model


def with_unreadable_settings(folder: Path) -> PreTrainedModel:
    llama().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"cache_implementation": "nope"}')
    return perturb(llama(), 1)


UNFIT = {
    without_a_buffer: ["no tensor for 'final_logits_bias'"],
    with_another_head: ["'classifier.bias'", "[5]", "[3]"],
    with_shared_memory: ["lm_head.weight", "one weight in this model"],
    with_unreadable_settings: ["generation_config.json", "cache_implementation"],
}


@pytest.mark.parametrize("build", UNFIT)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path, build):
    model = build(tmp_path)
    assert_refused(lambda: fm_delta.switch(model, tmp_path), model, CheckpointError, *UNFIT[build])


def test_two_tensors_for_one_weight_must_be_equal(tmp_path):
    tied = llama(tied=True)
    tied.save_pretrained(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    for name, head in (("equal", 1.0), ("other", 1.5)):
        tied.config.save_pretrained(tmp_path / name)
        heads = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * head}
        save_file(heads, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    parts = ["lm_head.weight", "one weight in this model"]
    assert_refused(lambda: fm_delta.switch(model, tmp_path / "other"), model, CheckpointError, *parts)
    fm_delta.switch(model, tmp_path / "equal")
    assert_same_weights(model, tied)


def test_an_unusable_checkpoint_is_named(both, tmp_path):
    models, model = both["switch"], both["switch"].load("cr")
    (tmp_path / "bare").mkdir()
    shutil.copy(models.folder / "cr-plain/model.safetensors", tmp_path / "bare")
    edit_config(shutil.copytree(models.folder / "cr-plain", tmp_path / "packed"), quantization_config={"quant_method": "gptq"})
    merged = both["set_task"].folder / "merged"
    for other, error, *parts in (
        (tmp_path / "nothing", CheckpointError, "nothing"),
        ("user/nothing", CheckpointError, "'user/nothing' is neither a folder nor a Hub repository"),
        (tmp_path / "bare", CheckpointError, "no config.json"),
        (tmp_path / "packed", CheckpointError, "quantized (gptq)"),
        (merged, CheckpointError, "hf-ext extract"),
        (f"{merged}#cr", CheckpointError, "is a task of a merge", "set_task('cr')", "hf-ext extract"),
        ("org/merged#cr", CheckpointError, "is a task of a merge"),
    ):
        assert_refused(lambda other=other: fm_delta.switch(model, other), model, error, *parts)


def test_a_merge_and_a_model_with_adapters_are_refused(both):
    models = both["switch"]
    with pytest.raises(CheckpointError, match="set_task"):
        models.swap(both["set_task"].load("cr"), "subj")
    model = models.load("cr")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(CheckpointError, match="PeftModel"):
        models.swap(wrapped, "subj")
    assert_refused(lambda: models.swap(model, "subj"), model, CheckpointError, "adapters")
    models.follow(wrapped.unload(), "subj")


def test_a_switch_that_fails_half_way_can_be_repeated(tmp_path):
    config = BertConfig(**bert().config.to_dict() | {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4})
    torch.manual_seed(0)
    base, tuned = two(tmp_path, BertForMaskedLM(config))
    models = stored("switch", tmp_path, base, tuned, AutoModelForMaskedLM)
    model = models.load("first")
    tensors = load_file(base / "model.safetensors")
    name = "bert.encoder.layer.2.intermediate.dense.weight"
    tensors[name].view(-1)[3000] += 1  # where the fingerprint takes no sample
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    before = model.config.to_dict()
    with pytest.raises(BaseModelError, match=f"(?s){name}.*The model is now a mix of both checkpoints.*Switch it again"):
        models.swap(model, "second")
    assert model.config.to_dict() == before
    fm_delta.switch(model, tuned["second"])
    assert_is(model, models.plain("second"))


# ---- set_task only: nothing of the user's is lost, all weights change or none -----------------------------------------------


def grow(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(120)


def untie(model: PreTrainedModel) -> None:
    model.bert.encoder.layer[1].output.dense.weight.data[3, 4] += 1  # which autograd does not see


def add(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.classifier.bias += 1


CHANGES = {grow: "word_embeddings", untie: "layer.1.output.dense.weight", add: "classifier.bias"}


@pytest.mark.parametrize("change", CHANGES)
def test_unsaved_changes_are_refused(both, change):
    models = both["set_task"]
    model = models.load("cr")
    change(model)
    parts = [CHANGES[change], "was changed since task 'cr' was loaded"]
    assert_refused(lambda: model.set_task("trec"), model, UnsavedChangesError, *parts)
    assert model.active_task == "cr"


@pytest.mark.parametrize("name", ["cr", "trec"])
def test_changes_are_discarded_on_demand(both, name):
    models = both["set_task"]
    model = models.load("cr")
    add(model)
    model.bert.pooler.dense.weight.data.zero_()
    models.swap(model, name, discard_changes=True)
    assert_is(model, models.plain(name))


def test_a_task_that_is_not_there_is_refused(both):
    model = both["set_task"].load("cr")
    parts = ["There is no task 'mpqa'", "its tasks are trec, cr, subj"]
    assert_refused(lambda: model.set_task("mpqa"), model, CheckpointError, *parts)


def test_a_changed_head_untied_from_its_embeddings_is_refused(tmp_path):
    models = stored("set_task", tmp_path, *two(tmp_path, llama(tied=True)), AutoModelForCausalLM)
    model = models.load("first")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    assert_refused(lambda: model.set_task("second"), model, UnsavedChangesError, "lm_head.weight")


def test_a_tensor_that_a_task_lacks_keeps_its_values(tmp_path, caplog):
    base, folders = write(tmp_path, bert(2), a=perturb(bert(2), 1), b=perturb(bert(2), 2))
    tensors = {name: tensor for name, tensor in load_file(folders["b"] / "model.safetensors").items() if "pooler" not in name}
    save_file(tensors, folders["b"] / "model.safetensors", metadata={"format": "pt"})
    models = stored("set_task", tmp_path, base, folders)
    model = models.load("a")
    before = model.bert.pooler.dense.weight.clone()
    models.swap(model, "b")
    assert torch.equal(model.bert.pooler.dense.weight, before)
    models.follow(model, "a")
    models.swap(model, "b")
    model.bert.pooler.dense.weight.data += 1
    assert_refused(lambda: model.set_task("a"), model, UnsavedChangesError, "pooler.dense.weight")


def test_the_weights_below_an_adapter_follow(both, tmp_path):
    models = both["set_task"]
    model = models.load("cr")
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    torch.nn.init.normal_(tuned.base_model.model.bert.encoder.layer[0].attention.self.query.lora_B.default.weight)
    tuned.save_pretrained(tmp_path)
    for name in ("cr", "subj"):
        tuned.set_task(name)
        assert tuned.active_task == name and tuned.tasks == model.tasks
        expected = PeftModel.from_pretrained(models.plain(name), tmp_path).eval()
        torch.testing.assert_close(tuned.eval()(**inputs(model)).logits, expected(**inputs(model)).logits)
    assert_same_weights(tuned.unload().bert, models.plain("subj").bert)


@pytest.fixture(scope="module", params=METHODS)
def merges(tmp_path_factory, request) -> Path:
    place = tmp_path_factory.mktemp("merges")
    base, folders = write_tasks(place, {"cr": 2, "subj": 3})
    emr.merge(base, folders, place / "merged", **METHODS[request.param])
    edit_settings(place / "merged", base="../base")
    return place


@pytest.fixture
def broken(merges, tmp_path) -> Path:
    """A merge beside its base, to damage."""
    return shutil.copytree(merges, tmp_path / "place") / "merged"


def overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(bytes(range(250)) * 16)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGED = {
    "overwritten base": ("../base/model.safetensors", overwrite, BaseModelError, "has changed or is damaged"),
    "cut base": ("../base/model.safetensors", cut, CorruptFileError, "was cut off"),
    "cut elected": ("model.safetensors", cut, CorruptFileError, "was cut off"),
    "cut active": ("task-cr/modulators.safetensors", cut, CorruptFileError, "was cut off"),
    "cut other": ("task-subj/modulators.safetensors", cut, CorruptFileError, "was cut off"),
    "damaged mask": ("task-subj/modulators.safetensors", lambda path: flip_bit(path, 0.99), CorruptFileError, "subj"),
    "no config": ("task-subj/config.json", Path.unlink, CorruptFileError, "is missing"),
    "damaged config": ("task-subj/config.json", flip_bit, CorruptFileError, "checksum mismatch"),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("discard", [False, True], ids=["checked", "discarding"])
def test_damage_while_the_merge_is_in_use_changes_no_weight(broken, damage, discard):
    name, change, error, message = DAMAGED[damage]
    model = Auto.from_pretrained(broken)
    if damage == "overwritten base":  # which is read at the first switch
        for task in ("subj", "cr"):
            model.set_task(task)
    change(broken / name)
    if damage == "overwritten base" and not discard and emr.report(broken).tasks[0].step is None:
        error, message = UnsavedChangesError, "was changed"  # or the base was: which of the two, the bits do not tell
    assert_refused(lambda: model.set_task("subj", discard_changes=discard), model, error, message)
    assert model.active_task == "cr"


def test_a_base_that_changes_in_use_leaves_no_wrong_weights(tmp_path):
    tuned = {name: perturb(bert(), seed).to(torch.bfloat16) for seed, name in enumerate(("one", "two"), 1)}
    base, folders = write(tmp_path, bert(), **tuned)
    models = stored("set_task", tmp_path, base, folders)
    model = models.load("two", dtype=torch.float32)  # so that weights are made anew at each switch
    model.set_task("one")
    overwrite(base / "model.safetensors")
    model.set_task("two", discard_changes=True)  # needs only what was read before
    assert_same_weights(model, models.plain("two", dtype=torch.float32))
    with pytest.raises(BaseModelError):
        emr.extract(model, "two", tmp_path / "extracted")  # which reads the base again
