"""PiSSA on convolutions: the weight is decomposed as a matrix, and the saved adapter is PEFT's LoRA of a convolution."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_adapters import difference, trained
from torch import nn
from torch.nn import functional

from hf_ext import PissaConfig, pissa

INPUTS = {1: (2, 3, 20), 2: (2, 3, 12, 12), 3: (2, 3, 6, 6, 6)}


class Convolutions(nn.Module):
    """Two convolutions of a number of dimensions, the second with a kernel of size 1."""

    def __init__(self, dimensions: int):
        super().__init__()
        torch.manual_seed(0)
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        self.wide, self.pointwise = kind(3, 8, 3, stride=2, padding=1), kind(8, 6, 1, bias=False)
        self.inputs = torch.randn(INPUTS[dimensions])

    def forward(self) -> torch.Tensor:
        return self.pointwise(functional.gelu(self.wide(self.inputs)))


every_kind = pytest.mark.parametrize("dimensions", INPUTS)


def config(**options) -> PissaConfig:
    return PissaConfig(**({"r": 4, "target_modules": ["wide", "pointwise"]} | options))


@torch.no_grad()
def outputs(model: nn.Module) -> torch.Tensor:
    return model.eval()()


@every_kind
def test_convolutions_start_from_the_principal_components(dimensions):
    base = Convolutions(dimensions)
    model = get_peft_model(Convolutions(dimensions), config(svd="exact", lora_alpha=8))
    assert torch.equal(outputs(model), outputs(base))
    layer = model.base_model.model.wide
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    U, S, Vh = torch.linalg.svd(base.wide.weight.flatten(1), full_matrices=False)
    best = U[:, :4] * S[:4] @ Vh[:4]
    assert A.shape[:2] == (4, 3) and B.shape[:2] == (8, 4)
    assert difference(2 * B.flatten(1) @ A.flatten(1), best) < 1e-6
    share = (S[:4].square().sum() / S.square().sum()).item()
    assert {one.layer: one for one in pissa.report(model).layers}["wide"].energy == pytest.approx(share, rel=1e-5)


@every_kind
def test_a_trained_layer_computes_the_papers_form(dimensions):
    base, model = Convolutions(dimensions), trained(Convolutions(dimensions), config(r=4, lora_alpha=2))
    for name in ("wide", "pointwise"):
        layer, weight = getattr(model.base_model.model, name), getattr(base, name).weight.data
        A, B = (factor.weight.flatten(1) for factor in (layer.lora_A["default"], layer.lora_B["default"]))
        A0, B0 = (getattr(layer, f"initial_{part}")["default"].flatten(1) for part in "AB")
        weight += ((B @ A - B0 @ A0) / 2).view_as(weight)
    assert difference(outputs(model), outputs(base)) < 1e-5
    merged = trained(Convolutions(dimensions), config(r=4, lora_alpha=2)).merge_and_unload(safe_merge=True)
    assert difference(outputs(merged), outputs(base)) < 1e-5


@every_kind
def test_the_saved_adapter_is_a_lora_and_goes_on_as_pissa(tmp_path, dimensions):
    model = trained(Convolutions(dimensions), config())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(Convolutions(dimensions), tmp_path)
    assert type(loaded.peft_config["default"]) is LoraConfig and loaded.peft_config["default"].r == 8
    assert difference(outputs(loaded), outputs(model)) < 1e-5
    again = PeftModel.from_pretrained(
        Convolutions(dimensions), tmp_path, config=PissaConfig.from_pretrained(tmp_path), is_trainable=True
    )
    assert difference(outputs(again), outputs(model)) < 1e-5
    again.save_pretrained(tmp_path / "again")
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    for name in first:
        torch.testing.assert_close(first[name], second[name])


@every_kind
@pytest.mark.parametrize("rank", [None, 3])
@torch.no_grad()
def test_a_converted_lora_misses_what_its_summary_says(tmp_path, dimensions, rank):
    model = trained(Convolutions(dimensions), config())
    converted = pissa.convert_to_lora(model, rank)
    converted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(Convolutions(dimensions), tmp_path)
    for record in converted.layers:
        exact = model.base_model.model.get_submodule(record.layer).get_delta_weight("default").flatten(1)
        layer = loaded.base_model.model.get_submodule(record.layer)
        product = layer.lora_B["default"].weight.flatten(1) @ layer.lora_A["default"].weight.flatten(1)
        assert record.rank == (rank or 8)
        assert torch.linalg.norm(product - exact) / torch.linalg.norm(exact) == pytest.approx(record.error, abs=1e-4)


@pytest.mark.parametrize("combination", ["cat", "linear", "svd"])
def test_adapters_are_combined_by_weights(combination):
    model = trained(Convolutions(2), config())
    model.add_adapter("second", config(seed=1, r=4, lora_alpha=8))
    layers = [model.base_model.model.wide, model.base_model.model.pointwise]
    expected = [2 * layer.get_delta_weight("default") - layer.get_delta_weight("second") for layer in layers]
    model.add_weighted_adapter(["default", "second"], [2.0, -1.0], "both", combination)
    assert model.peft_config["both"].r == {"cat": 16, "linear": 8, "svd": 6}[combination]  # one layer has six channels
    changes = [layer.get_delta_weight("both") for layer in layers]
    assert [one.shape for one in changes] == [layer.get_base_layer().weight.shape for layer in layers]
    if combination != "linear":  # which multiplies sums of factors
        assert difference(changes[1], expected[1]) < 1e-5


@pytest.mark.parametrize("options", [{"groups": 2}, {"dilation": 2}, {"padding_mode": "circular"}], ids=str)
def test_unsupported_convolutions_are_refused(options):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, **options), nn.Conv2d(8, 4, 1))
    with pytest.raises(ValueError, match="0 has groups, dilation or a padding_mode other than 'zeros'"):
        get_peft_model(model, config(target_modules=["0"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_peft_model(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)), config(target_modules=["1"]))


def test_a_convolution_with_a_plain_lora_takes_a_pissa_adapter():
    model = get_peft_model(Convolutions(2), LoraConfig(r=2, target_modules=["wide"], init_lora_weights=False))
    expected = outputs(model)
    pissa.accept_pissa(model)
    model.add_adapter("second", config(target_modules=["wide"]))
    assert torch.equal(outputs(model), expected)
    model.set_adapter("second")
    assert torch.equal(outputs(model), outputs(Convolutions(2)))
