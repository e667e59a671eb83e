"""What an adapter started from, as numbers, table and picture."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel, get_peft_model
from tiny_adapters import NF4, load, small_llama, trained
from tiny_models import llama

from hf_ext import HfExtError, PissaConfig, QPissaConfig, pissa
from hf_ext.pissa.layer import PissaLayer
from hf_ext.pissa.quantization import dequantize

OPTIONS = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def test_the_energy_is_that_of_the_principal_components():
    model = trained(llama(), PissaConfig(svd="exact", lora_alpha=7, **OPTIONS))
    for record in pissa.report(model).layers:
        squares = torch.linalg.svdvals(llama().get_submodule(record.layer).weight).square()
        assert record.energy == pytest.approx((squares[:4].sum() / squares.sum()).item(), rel=1e-4)
        assert (record.rank, record.error, record.plain_error) == (4, None, None)
    before = pissa.report(model)
    for module in model.modules():
        if isinstance(module, PissaLayer):
            module.scale_layer(0.5)
    assert pissa.report(model) == before


def test_the_errors_are_those_of_the_weights(tmp_path):
    small_llama().save_pretrained(tmp_path)
    plain, model = load(tmp_path, NF4), get_peft_model(load(tmp_path, NF4), QPissaConfig(**OPTIONS))
    for record in pissa.report(model).layers:
        weight = small_llama().get_submodule(record.layer).weight
        start = model.get_submodule(f"base_model.model.{record.layer}").base_layer.dequantized()
        for approximation, error in (
            (start, record.error),
            (dequantize(plain.get_submodule(record.layer).weight), record.plain_error),
        ):
            assert error == pytest.approx(
                (torch.linalg.norm(approximation - weight) / torch.linalg.norm(weight)).item(), rel=1e-3
            )


@pytest.mark.parametrize("kind", [PissaConfig, QPissaConfig])
def test_the_report_is_a_table_a_dictionary_and_a_picture(tmp_path, kind):
    report = pissa.report(get_peft_model(small_llama(), kind(**OPTIONS)))
    assert len(str(report).splitlines()) == 2 + 14 + 2
    assert ("quantization error" in report.summary()) is (kind is QPissaConfig)
    assert len(json.loads(json.dumps(report.to_dict()))["layers"]) == 14
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_on_the_active_adapter():
    model = get_peft_model(llama(), PissaConfig(**OPTIONS), adapter_name="first")
    model.add_adapter("second", PissaConfig(**OPTIONS | {"r": 2}))
    assert {layer.rank for layer in pissa.report(model).layers} == {4}
    model.set_adapter("second")
    assert {layer.rank for layer in pissa.report(model).layers} == {2}
    assert {layer.rank for layer in pissa.report(model, "first").layers} == {4}
    model.base_model.set_adapter(["first", "second"])
    with pytest.raises(HfExtError, match="Several adapters of the model are active: first, second"):
        pissa.report(model)
    with pytest.raises(HfExtError, match="no active LoRA or PiSSA adapter"):
        pissa.report(llama())


def test_a_model_without_the_training_form_is_an_error(tmp_path):
    trained(llama(), PissaConfig(**OPTIONS)).save_pretrained(tmp_path)
    with pytest.raises(HfExtError, match="loads as a LoRA"):
        pissa.report(PeftModel.from_pretrained(llama(), tmp_path))
