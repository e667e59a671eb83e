"""`from_pretrained` loads a compressed checkpoint bit-equal to the plain one, or raises an error that names the reason."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from hosts import adapters_of_transformers, host, pissa
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model, prepare_model_for_kbit_training
from processes import loads_without_plugin, python
from safetensors.torch import load_file, save_file
from tiny_checkpoints import assert_restored, contents, edit_config, edit_settings
from tiny_models import (
    MODELS,
    assert_same_weights,
    bert,
    fine_tuned,
    gpt_oss,
    in_own_memory,
    inputs,
    llama,
    mixtral,
    perturb,
    qwen_moe,
    t5,
    tokenizer,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BitsAndBytesConfig,
    LlamaForCausalLM,
)

from hf_ext import BaseModelError, CheckpointError, QPissaConfig, fm_delta
from hf_ext.integration.loading import quantizer
from hf_ext.storage import DeltaCheckpoint, prefetch
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.delta.payload import STACKED

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def compressed(model, folder: Path, **options) -> Path:
    """A folder with `base`, its fine-tune `tuned` (saved with `options`) and that compressed, `small`."""
    fine_tuned(model, folder, **options)
    fm_delta.compress_checkpoint(folder / "tuned", folder / "base", folder / "small")
    return folder


def assert_loads_the_same(auto, folder: Path, **options):
    """Loads the plain and the compressed folder, which may be to be written first, in the same way; also what they report must
    be the same."""
    if not (folder / "small").exists():
        fm_delta.compress_checkpoint(folder / "tuned", folder / "base", folder / "small")
    models = []
    for name in ("tuned", "small"):
        torch.manual_seed(0)  # of weights that are in neither
        models.append(auto.from_pretrained(folder / name, output_loading_info=True, **options))
    (plain, expected), (model, report) = models
    assert_same_weights(model, plain)
    assert report == expected
    assert model.dtype == plain.dtype and model.config.dtype == plain.config.dtype
    return model, plain


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folders of each model of `MODELS`, made once; tests do not write into them."""
    return cache(lambda name: compressed(MODELS[name].build(), tmp_path_factory.mktemp(name)))


# ---- bit-equal to the plain load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, auto", [*((name, None) for name in MODELS), ("llama", AutoModel), ("mixtral", AutoModel)])
def test_every_model_loads_bit_equal_decodes_once_and_is_an_ordinary_one(folder_of, tmp_path, monkeypatch, name, auto):
    read, requested, folder = DeltaCheckpoint.read, [], folder_of(name)

    def recorded(self, key, *arguments):
        requested.append((key, threading.current_thread() is threading.main_thread()))
        return read(self, key, *arguments)

    monkeypatch.setattr(DeltaCheckpoint, "read", recorded)
    monkeypatch.setattr(prefetch, "AHEAD", 1)  # a tensor that is not requested next would keep all others waiting
    model, plain = assert_loads_the_same(auto or MODELS[name].auto, folder)
    keys = [key for key, _ in requested]
    assert len(keys) == len(set(keys)) and not any(late for _, late in requested)
    assert vars(model).keys() == vars(plain).keys() and not model._load_state_dict_pre_hooks
    assert model.config.to_dict() | {"_name_or_path": None} == plain.config.to_dict() | {"_name_or_path": None}
    assert len(model._weight_conversions) == len(plain._weight_conversions)
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in model.parameters())
    for output, expected in zip(model(**inputs(model)).to_tuple(), plain(**inputs(plain)).to_tuple(), strict=True):
        if isinstance(output, torch.Tensor):
            torch.testing.assert_close(output, expected)
    assert (folder / "small/model.safetensors").stat().st_size < (folder / "tuned/model.safetensors").stat().st_size
    model.save_pretrained(tmp_path / "small")
    plain.save_pretrained(tmp_path / "tuned")
    assert contents(tmp_path / "small") == contents(tmp_path / "tuned")
    assert contents(tmp_path / "small").keys() >= {"config.json", "model.safetensors"}
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_weights(copied, plain)
    assert_same_weights(model.half(), plain.half())
    assert_same_weights(model.float().to(torch.bfloat16), plain.float().to(torch.bfloat16))


@pytest.mark.parametrize(
    "build", [gpt_oss, lambda: mixtral(256, 256), lambda: qwen_moe(256, 128)], ids=["gpt", "mixtral", "qwen"]
)
def test_experts_fused_on_disk_load_bit_equal(tmp_path, build):
    model = build().bfloat16()
    fine_tuned(model, tmp_path, save_original_format=False)
    model.save_pretrained(tmp_path / "base", save_original_format=False)
    assert_loads_the_same(AutoModelForCausalLM, tmp_path)
    file = CompressedFile(tmp_path / "small/model.safetensors")
    assert any(header.mode == STACKED and header.base_values for header in file.headers.values())
    assert_restored(tmp_path / "small", tmp_path / "tuned")
    report = fm_delta.inspect(tmp_path / "small")
    assert {tensor.how for tensor in report.tensors if "experts" in tensor.name and len(tensor.shape) > 2} == {"delta"}


@pytest.mark.parametrize(
    "base_class, tuned_class", [(BertModel, BertForSequenceClassification), (BertForSequenceClassification, BertModel)]
)
def test_base_and_task_models_predict_each_other(tmp_path, base_class, tuned_class):
    model = bert()
    tuned = perturb(model)
    (model if base_class is type(model) else model.bert).save_pretrained(tmp_path / "base")
    (tuned if tuned_class is type(model) else tuned.bert).save_pretrained(tmp_path / "tuned")
    for auto in (BertModel, BertForSequenceClassification, BertForMaskedLM):
        assert_loads_the_same(auto, tmp_path)
    tensors = fm_delta.inspect(tmp_path / "small").tensors
    assert all(tensor.how == "delta" for tensor in tensors if tensor.parameters > 1000)


@pytest.mark.parametrize("build", [llama, mixtral, lambda: llama(tied=True)], ids=["llama", "mixtral", "tied"])
def test_shards_load_bit_equal(tmp_path, build):
    folder = compressed(build(), tmp_path, max_shard_size="60KB")
    shards = {path.name for path in (folder / "tuned").glob("*-of-*.safetensors")}
    assert len(shards) > 2 and shards == {path.name for path in (folder / "small").glob("*.safetensors")}
    assert_loads_the_same(AutoModelForCausalLM, folder)


def test_a_sharded_base_equals_one_of_a_single_file(tmp_path, folder_of):
    folder = folder_of("llama")
    LlamaForCausalLM.from_pretrained(folder / "base").save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    fm_delta.compress_checkpoint(folder / "tuned", tmp_path / "shards", tmp_path / "small")
    one, other = (load_file(path / "small/model.safetensors") for path in (folder, tmp_path))
    assert one.keys() == other.keys() and all(torch.equal(one[name], tensor) for name, tensor in other.items())
    (tmp_path / "tuned").symlink_to(folder / "tuned")
    assert_loads_the_same(AutoModelForCausalLM, tmp_path)
    shutil.copytree(folder / "small", tmp_path / "small", dirs_exist_ok=True)  # compressed against the single file
    edit_settings(tmp_path / "small", base=str(tmp_path / "shards"))
    assert_loads_the_same(AutoModelForCausalLM, tmp_path)


def test_more_shards_load_than_files_may_be_open(tmp_path):
    fine_tuned(llama(), tmp_path)
    for name in ("base", "tuned"):
        LlamaForCausalLM.from_pretrained(tmp_path / name).save_pretrained(tmp_path / "shards" / name, max_shard_size="1KB")
    lines = (
        "import os, resource, sys",
        "from transformers import AutoModelForCausalLM",
        "from hf_ext import fm_delta",
        "os.chdir(sys.argv[1])",
        "load = AutoModelForCausalLM.from_pretrained",
        "plain = load('tuned')",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 16,) * 2)",
        "fm_delta.compress_checkpoint('tuned', 'base', 'small')",
        "model = load('small')",
        "assert all(model.state_dict()[name].equal(weight) for name, weight in plain.state_dict().items())",
        "fm_delta.decompress_checkpoint('small', 'plain')",
    )
    assert len(list((tmp_path / "shards" / "tuned").glob("*.safetensors"))) > 16
    result = python("-c", "\n".join(lines), tmp_path / "shards")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "name, options",
    [(name, {"dtype": dtype}) for name, dtype in (
        *(("llama_bf16", dtype) for dtype in (None, "auto", torch.float32)),
        ("mixtral", torch.bfloat16), ("t5", "auto"), ("t5", torch.float16),
    )] + [("llama_tied", {"device_map": "auto"}), ("mixtral", {"device_map": "cpu"}), ("bert", {"device_map": {"": "cpu"}})]
    + [("bert", {"num_labels": 7}), ("bert", {"num_labels": 7, "ignore_mismatched_sizes": True})]
    + [("llama", options) for options in (
        *({"dtype": dtype} for dtype in (None, "auto", *DTYPES, torch.int8)),
        {"dtype": "torch.bfloat16"},
        {"dtype": {"": "bfloat16"}},
        {"torch_dtype": "float16"},
        {"device_map": "nowhere"},
        {"variant": "none"},
        {"use_safetensors": False},
        {"revision": "none"},
        {"vocab_size": 50},
        {"vocab_size": 50, "ignore_mismatched_sizes": True},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"tie_word_embeddings": True},
        {"key_mapping": {"lm_head": "renamed"}},
        {"attn_implementation": "eager"},
        {"state_dict": {}},
        {"unknown": 1},
    )],
    ids=str,
)  # fmt: skip
def test_any_options_give_what_the_plain_load_gives(folder_of, name, options):
    auto, folder = MODELS[name].auto, folder_of(name)
    try:
        auto.from_pretrained(folder / "tuned", **options)
    except Exception as error:
        with pytest.raises(type(error)):
            auto.from_pretrained(folder / "small", **options)
    else:
        model, plain = assert_loads_the_same(auto, folder, **options)
        assert getattr(model, "hf_device_map", None) == getattr(plain, "hf_device_map", None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "mixed"], ids=str)
def test_dtype_auto_needs_no_dtype_in_config_json(tmp_path, dtype):
    model = t5().to(torch.float16 if dtype == "mixed" else dtype)
    if dtype == "mixed":  # most of the bytes are float32, the first tensor is not
        model.shared.float(), model.encoder.block.float()
    fine_tuned(model, tmp_path)
    edit_config(tmp_path / "tuned", dtype=None)
    assert_loads_the_same(AutoModelForSeq2SeqLM, tmp_path)
    assert_loads_the_same(AutoModelForSeq2SeqLM, tmp_path, dtype="auto")


@pytest.mark.parametrize(
    "first, second", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_base_and_fine_tune_may_differ_in_type(tmp_path, first, second):
    model = llama()
    model.to(first).save_pretrained(tmp_path / "base")
    perturb(model).to(second).save_pretrained(tmp_path / "tuned")
    model, _ = assert_loads_the_same(AutoModelForCausalLM, tmp_path)
    assert model.dtype == second
    assert all(tensor.how == "delta" for tensor in fm_delta.inspect(tmp_path / "small").tensors if tensor.parameters > 1000)


REST_OF_DECODER = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
OFFLOADS = {
    "llama": REST_OF_DECODER | {"model.layers": "disk", "lm_head": "disk"},
    "llama_tied": {"": "disk"},
    "t5": {"": "disk"},
    "mixtral": REST_OF_DECODER | {"model.layers": "disk", "lm_head": "cpu"},
    "bert": {"bert": "disk", "classifier": "cpu"},
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, "60KB" if name in ("llama", "t5") else "1GB", marks=host("accelerate>=1.15") if "" in blocks else ())
        for name, blocks in OFFLOADS.items()
    ],
)
def test_weights_offloaded_to_disk_are_the_decoded_ones(tmp_path, name, size):
    folder = compressed(MODELS[name].build(), tmp_path, max_shard_size=size)
    models = [
        MODELS[name].auto.from_pretrained(
            folder / kind, device_map=OFFLOADS[name], offload_folder=str(tmp_path / f"offload_{kind}")
        )
        for kind in ("tuned", "small")
    ]
    assert any(weight.device.type == "meta" for weight in models[1].parameters())
    plain, model = (m(**inputs(m)).logits for m in models)
    torch.testing.assert_close(model, plain)
    for kind, model in zip(("tuned", "small"), models, strict=True):
        model.save_pretrained(tmp_path / f"saved_{kind}")
    saved = [(tmp_path / f"saved_{kind}/model.safetensors").read_bytes() for kind in ("small", "tuned")]
    assert saved[0] == saved[1]


def test_new_tokens_and_labels_load_bit_equal(tmp_path):
    bert(labels=2).save_pretrained(tmp_path / "base")
    tuned = perturb(bert(labels=5))
    tuned.resize_token_embeddings(tuned.config.vocab_size + 8)
    tuned.save_pretrained(tmp_path / "tuned")
    assert_loads_the_same(AutoModelForSequenceClassification, tmp_path)
    how = {tensor.name: tensor.how for tensor in fm_delta.inspect(tmp_path / "small").tensors}
    assert how["bert.embeddings.word_embeddings.weight"] == "resized"


def test_integers_and_buffers_load_as_in_the_plain_load(tmp_path):
    fine_tuned(bert(), tmp_path)

    def add(weights):
        weights["bert.embeddings.position_ids"] = torch.arange(32)[None]
        weights["bert.nobody_expects"] = torch.arange(300)
        weights["bert.pooler.dense.bias"] = torch.arange(48, dtype=torch.int32)

    edit_weights(tmp_path / "tuned", add)
    assert_loads_the_same(AutoModelForSequenceClassification, tmp_path)
    assert_loads_the_same(AutoModelForSequenceClassification, tmp_path, dtype=torch.bfloat16)


def test_old_names_of_normalization_weights_load(tmp_path):
    fine_tuned(bert(), tmp_path)

    def rename(weights):
        for name in [name for name in weights if "LayerNorm" in name]:
            weights[name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")] = weights.pop(name)

    edit_weights(tmp_path / "tuned", rename)
    assert_loads_the_same(AutoModelForSequenceClassification, tmp_path)
    how = {tensor.name: tensor.how for tensor in fm_delta.inspect(tmp_path / "small").tensors}
    assert how["bert.embeddings.LayerNorm.gamma"] == "delta"


def test_subfolder_and_config_arguments_work_as_usual(folder_of, tmp_path):
    folder = folder_of("llama")
    for name in ("tuned", "small"):
        shutil.copytree(folder / name, tmp_path / name / "inner")
    assert_loads_the_same(AutoModelForCausalLM, tmp_path, subfolder="inner")
    config = AutoConfig.from_pretrained(folder / "small")
    assert_same_weights(
        LlamaForCausalLM.from_pretrained(folder / "small", config=config), LlamaForCausalLM.from_pretrained(folder / "tuned")
    )
    LlamaForCausalLM.from_pretrained(folder / "small", config=config)  # the first load has left the config as it was


# ---- an ordinary model -------------------------------------------------------------------------------------------------


def train_step(model) -> float:
    in_own_memory(model).train()
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    loss = model(**inputs(model), labels=inputs(model)["input_ids"]).loss
    loss.backward()
    optimizer.step()
    return loss.item()


@adapters_of_transformers
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_adapter_finds_its_compressed_base_model(folder_of, tmp_path, name):
    for kind in ("tuned", "small"):
        settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = AutoModelForCausalLM.from_pretrained(folder_of(name) / kind)
        torch.manual_seed(0)  # after loading: making the folders, the first time, takes random numbers too
        get_peft_model(model, settings).save_pretrained(tmp_path / kind)
    for auto in (AutoModelForCausalLM, AutoPeftModelForCausalLM):
        plain, small = (auto.from_pretrained(tmp_path / kind) for kind in ("tuned", "small"))
        assert_same_weights(small, plain)


# ---- quantized while it loads ------------------------------------------------------------------------------------------

QUANTIZATIONS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
}


def quantized(auto, folder: Path, kind: str, **options):
    return auto.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**QUANTIZATIONS[kind]), **options)


@pytest.mark.parametrize(
    "name, kind, options",
    [
        ("llama", "nf4", {}),
        ("llama", "nf4-twice", {"dtype": torch.bfloat16}),
        ("llama_bf16", "int8", {"dtype": "auto", "device_map": "auto"}),
        ("llama_tied", "fp4", {}),
        ("gpt2", "nf4", {}),
        ("mixtral", "nf4", {}),
    ],
)
def test_bitsandbytes_quantizes_the_decoded_weights(folder_of, tmp_path, name, kind, options):
    pytest.importorskip("bitsandbytes")
    plain, small = (quantized(AutoModelForCausalLM, folder_of(name) / form, kind, **options) for form in ("tuned", "small"))
    assert_same_weights(small, plain)
    assert small.hf_quantizer.quantization_config.to_dict() == plain.hf_quantizer.quantization_config.to_dict()
    assert small.config.to_dict() | {"_name_or_path": ""} == plain.config.to_dict() | {"_name_or_path": ""}
    for attribute in ("is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        assert getattr(small, attribute, None) == getattr(plain, attribute, None)
    small.save_pretrained(tmp_path / "again")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), plain)


@pytest.mark.parametrize("method", ["QLoRA", pytest.param("QPiSSA", marks=pissa)])
def test_a_quantized_compressed_base_takes_adapters(folder_of, method):
    pytest.importorskip("bitsandbytes")
    adapted = []
    for form in ("tuned", "small"):
        model = quantized(AutoModelForCausalLM, folder_of("llama") / form, "nf4")
        torch.manual_seed(0)
        if method == "QPiSSA":
            adapted.append(get_peft_model(model, QPissaConfig(r=4, target_modules=["q_proj", "v_proj"])))
        else:
            config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
            adapted.append(get_peft_model(prepare_model_for_kbit_training(model), config))
    if method == "QPiSSA":
        assert_same_weights(*adapted)
    else:
        plain, small = ([train_step(model) for _ in range(2)] for model in adapted)
        assert plain == small


# ---- errors ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(folder_of, tmp_path) -> Path:
    """The folders of a llama in a place of their own, free to be damaged."""
    for name in ("base", "tuned"):
        shutil.copytree(folder_of("llama") / name, tmp_path / name)
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small")
    return tmp_path


def test_an_expert_of_the_base_that_changed_between_samples_is_named(tmp_path):
    folder = compressed(mixtral(), tmp_path)
    tensors = fm_delta.inspect(folder / "small").tensors
    name = next(tensor.name for tensor in tensors if "experts" in tensor.name and tensor.original_bytes > 4096)

    def change(weights):
        weights[name].view(-1)[weights[name].numel() // 4] += 0.5

    edit_weights(folder / "base", change)
    with pytest.raises(BaseModelError, match=re.escape(name)):
        AutoModel.from_pretrained(folder / "small")


def test_a_config_that_names_no_base_loads_that_of_the_files(folder):
    settings = json.loads((folder / "small/config.json").read_text())["quantization_config"]
    edit_config(folder / "small", quantization_config={name: settings[name] for name in ("quant_method", "dtype")})
    assert_loads_the_same(AutoModelForCausalLM, folder)


def test_plain_weights_with_a_compressed_config_load(folder, monkeypatch):
    """As of a model that is made and saved with the configuration of a compressed checkpoint."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "small"))
    model.save_pretrained(folder / "plain")
    assert "quantization_config" in json.loads((folder / "plain/config.json").read_text())
    warned: list[str] = []
    monkeypatch.setattr(quantizer.logger, "warning", warned.append)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "plain")
    assert_same_weights(loaded, model)
    assert "are plain, although its config.json says that they are compressed" in warned[0]
    loaded.save_pretrained(folder / "again")
    assert "quantization_config" not in json.loads((folder / "again/config.json").read_text())
    fm_delta.compress_checkpoint(folder / "plain", folder / "base", folder / "plain-small")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder / "plain-small"), model)
    fm_delta.decompress_checkpoint(folder / "plain-small", folder / "restored")
    assert (folder / "restored/config.json").read_bytes() == (folder / "plain/config.json").read_bytes()
    fm_delta.enable(model, folder / "base").save_pretrained(folder / "enabled")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder / "enabled"), model)
    assert_same_weights(fm_delta.switch(loaded, folder / "small"), AutoModelForCausalLM.from_pretrained(folder / "tuned"))
    assert_same_weights(fm_delta.switch(loaded, folder / "plain"), model)


def test_a_compressed_checkpoint_is_not_loaded_from_a_state_dict(folder):
    config = AutoConfig.from_pretrained(folder / "small")
    with pytest.raises(CheckpointError, match="safetensors"):
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict=load_file(folder / "small/model.safetensors"))


def test_the_config_is_no_way_to_load_a_plain_checkpoint(folder):
    settings = fm_delta.FMDeltaConfig(str(folder / "base"))
    with pytest.raises(CheckpointError, match="enable"):
        AutoModelForCausalLM.from_pretrained(folder / "tuned", quantization_config=settings)


@pytest.mark.parametrize("dropped", ["argument", "entry", "config"])
def test_a_configuration_without_the_entry_is_refused(folder, dropped):
    """The usual `quantization_config=settings if quantize else None` makes the Auto classes drop it."""
    options: dict = {"quantization_config": None}
    if dropped != "argument":
        options = {"config": AutoConfig.from_pretrained(folder / ("small" if dropped == "entry" else "base"))}
    if dropped == "entry":
        options["config"].quantization_config = None
    with pytest.raises(CheckpointError, match=f"{folder / 'small'}.*leave this argument out"):
        AutoModelForCausalLM.from_pretrained(folder / "small", **options)
    plain = AutoModelForCausalLM.from_pretrained(folder / "tuned", quantization_config=None)
    if dropped == "argument":
        assert_same_weights(LlamaForCausalLM.from_pretrained(folder / "small", **options), plain)


def test_without_the_plugin_every_load_fails_loudly(folder_of):
    targets = [
        f"{auto.__name__}@{folder_of(name) / 'small'}" for name, tiny in MODELS.items() for auto in (tiny.auto, AutoModel)
    ]
    outcomes, printed = loads_without_plugin(*targets)
    assert outcomes == ["RuntimeError"] * len(targets) and "got hf_ext.fm_delta" in printed


def test_sentence_transformers_load_and_save_compressed_folders(tmp_path):
    SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    bert().bert.save_pretrained(tmp_path / "base")
    perturb(bert()).bert.save_pretrained(tmp_path / "tuned")
    for folder in ("base", "tuned"):
        tokenizer().save_pretrained(tmp_path / folder)
    plain = SentenceTransformer(str(tmp_path / "tuned"))
    plain.save(str(tmp_path / "tuned"))
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small", level=1)
    model = SentenceTransformer(str(tmp_path / "small"))
    assert_same_weights(model, plain)
    for function in (fm_delta.enable, fm_delta.switch):
        with pytest.raises(CheckpointError, match=r"not a SentenceTransformer\. .*model\[0\]\.auto_model"):
            function(model, tmp_path / "base")
    fm_delta.enable(model[0].auto_model, tmp_path / "base")
    model.save(str(tmp_path / "again"))
    assert "hf_ext" in (tmp_path / "again/config.json").read_text()
    again = SentenceTransformer(str(tmp_path / "again"))
    assert_same_weights(again, plain)
    fm_delta.switch(again[0].auto_model, tmp_path / "base")
    assert_same_weights(again[0].auto_model, AutoModel.from_pretrained(tmp_path / "base"))
