"""Quantized checkpoints: stored against a base of the same kind, restored byte for byte, loaded by their own quantizer."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_checkpoints import assert_restored, edit_config
from tiny_models import perturb
from tiny_quantized import KINDS, STORED_ONLY, library_of, model_for, packed
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PretrainedConfig,
)

from hf_ext import emr, fm_delta
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError, HfExtError
from hf_ext.fm_delta.base_search import require_related
from hf_ext.storage.config_file import add_settings, forget_encoding, quantization_of, remove_settings

LOADED = [kind for kind in KINDS if kind not in STORED_ONLY]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind: base, tuned, small. Tests do not write into them."""

    @cache
    def written(kind: str) -> SimpleNamespace:
        if library := library_of(kind):
            pytest.importorskip(library)
        root = tmp_path_factory.mktemp(kind)
        KINDS[kind](model_for(kind), root / "base")
        KINDS[kind](perturb(model_for(kind)), root / "tuned")
        report = fm_delta.compress_checkpoint(root / "tuned", root / "base", root / "small", verify=True)
        return SimpleNamespace(base=root / "base", tuned=root / "tuned", small=root / "small", report=report)

    return written


def parts_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model, and those that its quantized parameters consist of, as bytes."""
    parts = {}
    for name, tensor in model.state_dict().items():
        inner = getattr(tensor, "tensor_data_names", None)
        parts |= {f"{name}.{part}": getattr(tensor, part) for part in inner} if inner else {name: tensor}
    return {name: part.detach().contiguous().reshape(-1).view(torch.uint8) for name, part in parts.items() if part is not None}


def load(folder: Path, **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_restored(folders, kind):
    folder = folders(kind)
    assert folder.report.compressed_bytes < 0.6 * folder.report.original_bytes
    assert (folder.small / "config.json").read_text().count('"quantization_config":') == 1
    assert_restored(folder.small, folder.tuned)


@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {}) for kind in LOADED),
        ("fp8", {"quantization_config": FineGrainedFP8Config(dequantize=True)}),
        ("mxfp4", {"quantization_config": Mxfp4Config(dequantize=True)}),
        ("compressed-tensors-W4A16", {"quantization_config": CompressedTensorsConfig(run_compressed=False)}),
    ],
)
def test_its_own_quantizer_loads_it(folders, kind, options):
    folder = folders(kind)
    plain, model = (load(path, **options) for path in (folder.tuned, folder.small))
    expected, parts = parts_of(plain), parts_of(model)
    assert parts.keys() == expected.keys() and all(torch.equal(parts[name], expected[name]) for name in parts)
    assert type(getattr(model, "hf_quantizer", None)) is type(getattr(plain, "hf_quantizer", None))
    assert type(getattr(model.config, "quantization_config", None)) is type(getattr(plain.config, "quantization_config", None))
    assert model.config.to_dict() | {"_name_or_path": ""} == plain.config.to_dict() | {"_name_or_path": ""}


@pytest.mark.parametrize("method", ["gptq", "unknown"])
def test_transformers_says_what_it_cannot_load(tmp_path, method):
    packed(method)(model_for(method), tmp_path / "base")
    fm_delta.compress_checkpoint(tmp_path / "base", None, tmp_path / "small")
    with pytest.raises((ImportError, ValueError), match=f"(?i){method}"):
        load(tmp_path / "small")


@pytest.mark.parametrize("kind", ["bitsandbytes-nf4", "compressed-tensors-W4A16"])
def test_a_quantized_model_saves_compressed(folders, tmp_path, kind):
    folder = folders(kind)
    if kind == "bitsandbytes-nf4":  # which Transformers cannot save again once it is loaded
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        model = load(folder.tuned.with_name("tuned-plain"), quantization_config=BitsAndBytesConfig(**options))
    else:
        model = load(folder.small)
    fm_delta.enable(model, folder.base).save_pretrained(tmp_path / "small")
    assert fm_delta.inspect(tmp_path / "small").base == str(folder.base)
    expected, parts = parts_of(load(folder.tuned)), parts_of(load(tmp_path / "small"))
    assert all(torch.equal(parts[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["bitsandbytes", "torchao"])
def test_models_of_diffusers_load_by_their_own_quantizer(tmp_path, kind):
    pytest.importorskip(kind)
    diffusers = pytest.importorskip("diffusers")
    from tiny_diffusers import KINDS as MODELS

    if kind == "bitsandbytes":
        if not torch.cuda.is_available():
            pytest.skip("diffusers quantizes with bitsandbytes on GPUs only")
        config = diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        from torchao.quantization import Int8WeightOnlyConfig

        config = diffusers.TorchAoConfig(Int8WeightOnlyConfig())
    flux = MODELS["flux"]
    for name, model in (("base", flux.build()), ("tuned", perturb(flux.build()))):
        model.save_pretrained(tmp_path / "plain")
        flux.model.from_pretrained(tmp_path / "plain", quantization_config=config).save_pretrained(tmp_path / name)
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small", verify=True)
    plain, model = (flux.model.from_pretrained(tmp_path / name) for name in ("tuned", "small"))
    expected, parts = parts_of(plain), parts_of(model)
    assert parts.keys() == expected.keys() and all(torch.equal(parts[name], expected[name]) for name in parts)
    assert type(model.hf_quantizer) is type(plain.hf_quantizer)
    assert dict(model.config) | {"_name_or_path": "", "quantization_config": None} == dict(plain.config) | {
        "_name_or_path": "",
        "quantization_config": None,
    }
    assert_restored(tmp_path / "small", tmp_path / "tuned")


def test_the_base_is_found_among_others(folders):
    folder, other = folders("fp8"), folders("gptq")
    report = fm_delta.find_base(folder.tuned, [other.base, folder.base])
    assert report.require().name == str(folder.base)


def test_an_unrelated_base_is_refused(folders, tmp_path):
    folder, stranger = folders("fp8"), model_for("fp8")
    with torch.no_grad():
        for weight in stranger.parameters():
            weight.copy_(torch.randn_like(weight) * 0.02)
    KINDS["fp8"](stranger, tmp_path / "stranger")
    assert fm_delta.find_base(folder.tuned, [tmp_path / "stranger"]).verdict == "none"
    with pytest.raises(BaseModelError, match="same shapes, other weights"):
        require_related(folder.tuned, tmp_path / "stranger")


def test_without_a_base(folders, tmp_path):
    folder = folders("fp8")
    report = fm_delta.compress_checkpoint(folder.tuned, None, tmp_path / "small", verify=True)
    assert report.ratio < 1
    assert parts_of(load(tmp_path / "small")).keys() == parts_of(load(folder.tuned)).keys()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_base_in_another_form_is_refused(folders, tmp_path):
    folder, other = folders("fp8"), folders("gptq")
    model_for("fp8").save_pretrained(tmp_path / "plain")
    for src, base, message in (
        (folder.tuned, tmp_path / "plain", r"plain' is not quantized, but the model is quantized \(fp8\)"),
        (folder.tuned, other.base, r"is quantized \(gptq\), but the model is quantized \(fp8\)"),
        (tmp_path / "plain", folder.base, r"is quantized \(fp8\). Give"),
    ):
        with pytest.raises(BaseModelError, match=message):
            fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_merges_and_loras_of_quantized_models_are_refused(folders, tmp_path):
    folder = folders("fp8")
    with pytest.raises(HfExtError, match="16 or 32 bits"):
        emr.merge(folder.base, {"a": folder.tuned, "b": folder.small}, tmp_path / "out", method="emr")
    for fine_tune in (folder.tuned, folder.small):
        with pytest.raises(HfExtError, match="16 or 32 bits"):
            fm_delta.extract_lora(fine_tune, folder.base, tmp_path / "out")
    shutil.copytree(folder.tuned, tmp_path / "adapted")
    adapter = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(model_for("fp8"), adapter).save_pretrained(tmp_path / "adapted")
    for fine_tune in (folder.small, tmp_path / "adapted"):
        with pytest.raises(HfExtError, match="16 or 32 bits"):
            fm_delta.switch(model_for("fp8"), fine_tune)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("entry", ["gptq", 7, ["fp8"]])
def test_a_damaged_entry_is_named(folders, tmp_path, entry):
    folder = folders("fp8")
    fm_delta.compress_checkpoint(folder.tuned, folder.base, tmp_path / "small")
    settings = json.loads((tmp_path / "small/config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "small", quantization_config=settings | {"quantization": entry})
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        load(tmp_path / "small")
    (tmp_path / "small/config.json").write_text(add_settings("{}", settings | {"cut": entry}))
    with pytest.raises(CorruptFileError, match=r"config\.json is damaged"):
        fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")
    assert not (tmp_path / "back").exists()


# ---- config.json -----------------------------------------------------------------------------------------------------

FP8 = '{"quant_method": "fp8", "fmt": "e4m3"}'
TEXTS = {
    "first": f'{{"quantization_config": {FP8}, "a": 1}}\n',
    "last": f'{{\n  "a": [1, {{"b": "}}"}}],\n  "quantization_config" : {FP8}\n}}',
    "alone": f'{{ "quantization_config":{FP8} }}',
    "twice": f'{{"quantization_config": null, "a": "\\"quantization_config\\": 3", "quantization_config": {FP8}}}',
    "empty": '{"a": 1, "quantization_config": {}, "b": 2}',
    "nested": f'{{"text_config": {{"quantization_config": {FP8}}}, "a": 1}}',
}


@pytest.mark.parametrize("place", TEXTS)
def test_the_entry_is_cut_out_and_put_back(place):
    text = TEXTS[place]
    stored = add_settings(text, {"quant_method": "hf_ext.fm_delta"})
    assert len(json.loads(stored, object_pairs_hook=lambda pairs: [key for key, _ in pairs])) == len(json.loads(stored))
    assert quantization_of(json.loads(stored)) == quantization_of(json.loads(text)) == (None if place == "empty" else "fp8")
    assert remove_settings(stored) == text
    config = PretrainedConfig(**json.loads(stored))
    forget_encoding(config)  # as for a server's weights in memory
    assert getattr(config, "quantization_config", None) == json.loads(text).get("quantization_config")
    rewritten = json.dumps(json.loads(stored), sort_keys=True)
    assert json.loads(remove_settings(rewritten)) == json.loads(text)


def test_a_nested_entry_serves_the_loading(folders):
    stored = json.loads(add_settings(TEXTS["nested"], {"quant_method": "hf_ext.fm_delta"}))
    assert stored["quantization_config"]["quantization"] == json.loads(FP8)
    assert AutoConfig.from_pretrained(folders("fp8").small).quantization_config["quantization"]["quant_method"] == "fp8"
