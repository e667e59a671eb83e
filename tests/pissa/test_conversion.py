"""Adapters as LoRAs of smaller ranks: the best ones, with the error that was announced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel
from safetensors.torch import load_file
from tiny_adapters import NF4, SAVED_BIASES, difference, load, logits, small_gpt2, small_llama, trained
from tiny_models import bert, llama
from torch import nn
from transformers import BertForSequenceClassification

from hf_ext import BaseModelError, HfExtError, PissaConfig, QPissaConfig, pissa
from hf_ext.cli.main import main
from hf_ext.pissa.quantization import dequantize

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Setting `save_embedding_layers`", ".*fan_in_fan_out", "Model with")
]
OPTIONS = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def deltas(model: nn.Module) -> dict[str, torch.Tensor]:
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    return {name: layer.get_delta_weight("default") for name, layer in layers.items()}


RSLORA = {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "lora_alpha": 3}


@pytest.mark.parametrize(("build", "options", "rank"), [
    *((llama, {}, rank) for rank in (None, 8, 1, 100)), (llama, RSLORA, None), (llama, RSLORA, 5), (small_gpt2, {}, 5),
])  # fmt: skip
def test_the_lora_is_the_best_of_its_rank(tmp_path, build, options, rank):
    model = trained(build(), PissaConfig(**(OPTIONS | options)))
    converted = pissa.convert_to_lora(model, rank)
    converted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(), tmp_path)
    assert type(loaded.peft_config["default"]) is LoraConfig
    changes = deltas(loaded)
    for record, (name, expected) in zip(converted.layers, deltas(model).items(), strict=True):
        singular = torch.linalg.svdvals(expected.double())
        best = (singular[record.rank :].square().sum() / singular.square().sum()).sqrt().item()
        error = (torch.linalg.norm(changes[name] - expected) / torch.linalg.norm(expected)).item()
        assert error == pytest.approx(best, abs=1e-4) and record.error == pytest.approx(best, abs=1e-4)
    if rank is None:
        assert difference(logits(loaded), logits(model)) < 2e-6


def test_a_layer_with_few_outputs_has_at_most_their_rank():
    model = trained(nn.Sequential(nn.Linear(32, 4)), PissaConfig(r=4, target_modules=["0"]))
    layer = pissa.convert_to_lora(model, rank=6).layers[0]
    assert layer.rank == 4 and layer.error < 1e-6


def test_the_active_adapter_is_converted():
    model = trained(llama(), PissaConfig(**OPTIONS))
    model.add_adapter("other", PissaConfig(**OPTIONS | {"r": 2}))
    assert {layer.rank for layer in pissa.convert_to_lora(model).layers} == {8}
    model.set_adapter("other")
    assert {layer.rank for layer in pissa.convert_to_lora(model).layers} == {4}
    assert {layer.rank for layer in pissa.convert_to_lora(model, adapter_name="default").layers} == {8}


def test_everything_else_of_the_adapter_comes_along(tmp_path):
    model = trained(bert(), PissaConfig(r=4, target_modules=["query", "word_embeddings"], task_type="SEQ_CLS"))
    pissa.convert_to_lora(model, 8).save_pretrained(tmp_path)
    assert difference(logits(PeftModel.from_pretrained(bert(), tmp_path)), logits(model)) < 2e-6


@SAVED_BIASES
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_come_along(tmp_path, bias):
    small_gpt2().save_pretrained(tmp_path / "base")
    model = trained(load(tmp_path / "base"), QPissaConfig(bias=bias, **OPTIONS))
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    assert difference(logits(again), logits(model)) < 2e-6
    pissa.convert_to_lora(model).save_pretrained(tmp_path / "lora")
    loaded = dict(PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "lora").named_parameters())
    biases = {name: p for name, p in model.named_parameters() if name.endswith("base_layer.layer.bias")}
    assert biases
    assert all(torch.equal(loaded[name.replace("base_layer.layer.", "base_layer.")], bias) for name, bias in biases.items())


def test_a_loaded_lora_is_cut_down_too(tmp_path):
    model = trained(llama(), PissaConfig(**OPTIONS))
    model.save_pretrained(tmp_path)
    direct = pissa.convert_to_lora(model, 3)
    loaded = pissa.convert_to_lora(PeftModel.from_pretrained(llama(), tmp_path), 3)
    assert [layer.error for layer in loaded.layers] == pytest.approx([layer.error for layer in direct.layers], abs=1e-4)
    assert "% of the adapter's change of the weights (Frobenius norm) in the mean" in str(loaded)


@pytest.fixture
def base(tmp_path) -> Path:
    small_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("onto", ["original", "quantized"])
def test_qpissa_becomes_a_lora_of_either_base_with_a_known_error(tmp_path, base, onto, rank):
    model = trained(load(base, NF4), QPissaConfig(**OPTIONS))
    converted = pissa.convert_to_lora(model, rank, onto=onto)
    converted.save_pretrained(tmp_path / "lora")
    loaded = PeftModel.from_pretrained(load(base, NF4 if onto == "quantized" else None), tmp_path / "lora")
    plain = load(base)
    for record in converted.layers:
        name = f"base_model.model.{record.layer}"
        ours, theirs = model.get_submodule(name), loaded.get_submodule(name)
        trained_weight = ours.base_layer.dequantized() + ours.get_delta_weight("default")
        start = dequantize(theirs.base_layer.weight) if onto == "quantized" else theirs.base_layer.weight
        missed = torch.linalg.norm(trained_weight - start - theirs.get_delta_weight("default"))
        expected = (missed / torch.linalg.norm(plain.get_submodule(record.layer).weight)).item()
        assert record.error == pytest.approx(expected, abs=1e-4)
        assert record.error < (0.15 if rank is None else 0.6)


@pytest.mark.parametrize(("config", "quantization"), [(PissaConfig, None), (QPissaConfig, NF4)], ids=["pissa", "qpissa"])
def test_the_command_converts_a_saved_adapter(tmp_path, base, capsys, config, quantization):
    model = trained(load(base, quantization), config(**OPTIONS))
    model.save_pretrained(tmp_path / "adapter")
    direct = pissa.convert_to_lora(model, 3)
    moved = base.rename(tmp_path / "moved")
    line = ["convert-to-lora", str(tmp_path / "adapter"), "--rank", "3", "--out", str(tmp_path / "lora"), "--json"]
    assert main([*line, "--base", str(moved)]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["error"] for layer in layers] == pytest.approx([layer.error for layer in direct.layers], abs=1e-4)
    loaded = PeftModel.from_pretrained(load(moved), tmp_path / "lora")
    assert type(loaded.peft_config["default"]) is LoraConfig and loaded.peft_config["default"].r == 3


def test_the_command_does_not_overwrite_the_adapter(tmp_path, base, capsys):
    folder = tmp_path / "adapter"
    trained(load(base), PissaConfig(**OPTIONS)).save_pretrained(folder)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["convert-to-lora", str(folder), "--rank", "1", "--out", f"{folder}/../adapter"]) == 1
    assert f"{folder} cannot be overwritten" in capsys.readouterr().err
    assert files == {path: path.read_bytes() for path in folder.iterdir()}


def test_the_command_keeps_the_head_of_the_adapter(tmp_path, capsys):
    bert().save_pretrained(tmp_path / "base")
    options = {"num_labels": 5, "ignore_mismatched_sizes": True}
    head = BertForSequenceClassification.from_pretrained(tmp_path / "base", **options)
    trained(head, PissaConfig(r=4, target_modules=["query"], task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    assert main(["convert-to-lora", str(tmp_path / "adapter"), "--out", str(tmp_path / "lora")]) == 0
    assert "layers, error 0.00 %" in capsys.readouterr().out
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "lora")]
    for name in weights[0]:
        if "classifier" in name:
            assert torch.equal(weights[0][name], weights[1][name]) and len(weights[0][name]) == 5


def test_unsupported_conversions_are_errors(base):
    model = trained(load(base), PissaConfig(**OPTIONS))
    with pytest.raises(HfExtError, match="no LoRA or PiSSA adapter 'other'"):
        pissa.convert_to_lora(model, adapter_name="other")
    with pytest.raises(HfExtError, match="rank=0"):
        pissa.convert_to_lora(model, 0)
    model.merge_adapter()
    with pytest.raises(HfExtError, match="unmerge_adapter"):
        pissa.convert_to_lora(model)
    with pytest.raises(HfExtError, match="'original' or 'quantized'"):
        pissa.convert_to_lora(trained(load(base), QPissaConfig(**OPTIONS)), onto="Original")
    for options in ({"init_lora_weights": "pissa"}, {"use_dora": True}, {"lora_bias": True}):
        other = trained(bert(), LoraConfig(r=2, target_modules=["query"], **options))
        with pytest.raises(HfExtError, match="nor a plain LoRA"):
            pissa.convert_to_lora(other)
    other = trained(bert(), AdaLoraConfig(target_modules=["query"], total_step=10))
    with pytest.raises(HfExtError, match="type ADALORA"):
        pissa.convert_to_lora(other)
    nameless = trained(small_llama(), QPissaConfig(**OPTIONS))
    with pytest.raises(BaseModelError, match="nowhere to be found"):
        pissa.convert_to_lora(nameless, 2)
