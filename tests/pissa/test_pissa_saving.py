"""A saved PiSSA adapter is a LoRA for everybody, and PiSSA again for who asks: with PEFT alone, over the Hub, bit for bit."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hosts import adapters_of_transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from processes import python
from safetensors.torch import load_file
from test_pissa import config, every_case, pytestmark, tolerance  # noqa: F401  # pytest reads pytestmark
from tiny_adapters import NF4, Hidden, difference, load, logits, moved, small_llama, trainable, trained
from tiny_models import llama, perturb
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_ext import AdapterError, BaseModelError, HfExtError, PissaConfig, QPissaConfig


def read_config(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def again(build, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(build(), folder, config=PissaConfig.from_pretrained(folder), is_trainable=True)


@every_case
def test_the_saved_adapter_is_an_equal_lora_of_twice_the_rank_and_resumes_as_pissa(tmp_path, build, options):
    model = trained(build(), config(**options))
    model.save_pretrained(tmp_path)
    saved = read_config(tmp_path)
    assert (saved["peft_type"], saved["r"], saved["init_lora_weights"]) == ("LORA", 8, True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Unexpected keyword")  # which PEFT says of options that it does not know
        lora = PeftModel.from_pretrained(build(), tmp_path)
    assert type(lora.peft_config["default"]) is LoraConfig
    resumed = again(build, tmp_path)
    for loaded in (lora, resumed):
        assert difference(logits(loaded), logits(model)) < tolerance(loaded)
    for kind in ("named_parameters", "named_buffers"):
        first, second = (dict(getattr(one, kind)()) for one in (model, resumed))
        assert first.keys() == second.keys()
        for name in first:
            torch.testing.assert_close(first[name], second[name])
        assert all(first[name].requires_grad == second[name].requires_grad for name in first)
    scalings = [[module.scaling for module in one.modules() if hasattr(module, "scaling")] for one in (model, resumed)]
    assert scalings[0] == scalings[1]
    resumed.save_pretrained(tmp_path / "again")
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    for name in first:
        torch.testing.assert_close(first[name], second[name])


@pytest.mark.parametrize(("kind", "quantization"), [(PissaConfig, None), (QPissaConfig, NF4)], ids=["PiSSA", "QPiSSA"])
def test_a_saved_configuration_starts_a_new_adapter(tmp_path, llama_base, kind, quantization):
    options = kind(r=4, target_modules="all-linear")
    trained(load(llama_base, quantization), options).save_pretrained(tmp_path)
    first, again = (get_peft_model(load(llama_base, quantization), one) for one in (options, kind.from_pretrained(tmp_path)))
    assert trainable(again).keys() == trainable(first).keys()
    assert all(torch.equal(parameter, trainable(first)[name]) for name, parameter in trainable(again).items())
    assert torch.equal(logits(again), logits(first))


@pytest.mark.parametrize("moved", [0.03, 0.003])
def test_rounding_it_to_bf16_keeps_a_small_change(tmp_path, moved):
    model = get_peft_model(llama(), config())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + moved * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    layers = [key.removesuffix("lora_A.weight") for key in state if key.endswith("lora_A.weight")]
    for layer in layers:
        A, B = (state[f"{layer}lora_{part}.weight"] for part in "AB")
        change, rounded = B @ A, B.bfloat16().float() @ A.bfloat16().float()
        assert torch.linalg.norm(rounded - change) < 0.01 * torch.linalg.norm(change)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_it_loads_through_every_door(tmp_path, llama_base, low_cpu_mem_usage):
    model = trained(load(llama_base), config())
    model.save_pretrained(tmp_path)
    expected = logits(model)
    options = {"config": PissaConfig.from_pretrained(tmp_path), "low_cpu_mem_usage": low_cpu_mem_usage}
    assert difference(logits(PeftModel.from_pretrained(load(llama_base), tmp_path, **options)), expected) < 2e-6
    beside = get_peft_model(load(llama_base), config(r=2))
    beside.add_adapter("second", PissaConfig.from_pretrained(tmp_path))
    beside.load_adapter(tmp_path, "second")
    beside.set_adapter("second")
    assert difference(logits(beside), expected) < 2e-6
    with pytest.raises(ValueError, match="different peft types"):
        beside.load_adapter(tmp_path, "third")  # as the LoRA that it is on the disk


@adapters_of_transformers
def test_a_model_of_transformers_saves_its_adapter_as_a_lora(tmp_path, llama_base):
    model = load(llama_base)
    start = logits(model)
    model.add_adapter(config(), "default")
    assert torch.equal(logits(model), start)
    moved(nn.ModuleList(module for module in model.modules() if "lora" in type(module).__module__))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    injected = load(llama_base)
    injected.load_adapter(str(tmp_path))
    for loaded in (PeftModel.from_pretrained(load(llama_base), tmp_path), injected, load(tmp_path)):
        assert difference(logits(loaded), expected) < 2e-6


WITHOUT = """
import sys, torch
sys.modules["hf_ext"] = None  # importing it now is an error
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder + "/base"), folder + "/adapter")
tokens = torch.arange(2 * 9).reshape(2, 9) * 5 % 96
with torch.no_grad():
    print((model(tokens).logits - torch.load(folder + "/expected.pt")).abs().max().item())
PeftConfig.from_pretrained(folder + "/qpissa")
"""


def test_plain_peft_loads_pissa_and_refuses_qpissa(tmp_path):
    small_llama().save_pretrained(tmp_path / "base")
    model = trained(load(tmp_path / "base"), config())
    model.save_pretrained(tmp_path / "adapter")
    trained(load(tmp_path / "base", NF4), QPissaConfig(r=4, target_modules="all-linear")).save_pretrained(tmp_path / "qpissa")
    torch.save(logits(model), tmp_path / "expected.pt")
    result = python("-c", WITHOUT, tmp_path)
    assert result.stdout and float(result.stdout) < 2e-6, result.stderr
    assert "Unexpected keyword" not in result.stderr
    assert result.returncode and "QPISSA" in result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("alpha", [4, 6.5, 16])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_configuration_comes_back_exactly(tmp_path, alpha, use_rslora):
    patterns = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": alpha / 2}}
    options = config(lora_alpha=alpha, use_rslora=use_rslora, use_dora=True, init_lora_weights="pissa", **patterns)
    options.save_pretrained(tmp_path / "adapter")
    for folder, options_of_loading in ((tmp_path / "adapter", {}), (tmp_path, {"subfolder": "adapter"})):
        loaded = PissaConfig.from_pretrained(folder, **options_of_loading)
        assert loaded == replace(options, init_lora_weights=False, inference_mode=None)  # loading decomposes nothing
    with pytest.raises(ValueError, match="LoRA of twice the rank"):
        PissaConfig(**options.to_dict())


def test_the_state_dict_is_the_loras_and_loads_into_two_models():
    model = trained(llama(), config())
    state = get_peft_model_state_dict(model)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    assert state[name.format("A")].shape == (8, 64) and state[name.format("B")].shape == (64, 8)
    fresh = get_peft_model(llama(), config(init_lora_weights=False))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), logits(model))
    before = {name: tensor.clone() for name, tensor in state.items()}
    first, second = (get_peft_model(llama(), config()) for _ in range(2))
    for one in (first, second):
        set_peft_model_state_dict(one, state)
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)
    moved(first)
    assert difference(logits(second), logits(model)) < 2e-6


@pytest.mark.parametrize(
    ("kind", "quantization", "more"),
    [(PissaConfig, None, {}), (PissaConfig, None, {"use_dora": True}), (QPissaConfig, NF4, {})],
    ids=["PiSSA", "DoRA", "QPiSSA"],
)
def test_a_wrapper_around_layers_changes_no_name(llama_base, kind, quantization, more):
    options = {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"} | more
    model = trained(load(llama_base, quantization), kind(**options))
    expected, again = get_peft_model_state_dict(model), get_peft_model(load(llama_base, quantization), kind(**options))
    for wrap in (checkpoint_wrapper, partial(torch.compile, backend="eager")):
        for one in (model, again):
            layers = one.base_model.model.model.layers
            for index, layer in enumerate(layers):
                layer.self_attn = wrap(layer.self_attn)
                layers[index] = wrap(layer)
        state = get_peft_model_state_dict(model)
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
        set_peft_model_state_dict(again, state)
        for name, tensor in get_peft_model_state_dict(again).items():
            torch.testing.assert_close(tensor, expected[name])


def test_options_of_pefts_own_pissa_and_hotswapping_are_errors(tmp_path):
    model = trained(llama(), config(target_modules=["q_proj"]))
    with pytest.raises(AdapterError, match="Save it without path_initial_model_for_weight_conversion"):
        model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    prepare_model_for_compiled_hotswap(model, target_rank=16)
    with pytest.raises(AdapterError, match="has rank 16, but started with rank 4: .* Load the adapters as LoRAs"):
        logits(model)


def test_an_unknown_wrapper_that_hides_layers_is_an_error(tmp_path):
    model = trained(llama(), config())
    model.base_model.model.model.layers[1] = Hidden(model.base_model.model.model.layers[1])
    with pytest.raises(HfExtError, match="under a wrapper whose name its state dict leaves out"):
        model.save_pretrained(tmp_path)


class Twice(nn.Module):
    """A block that is reached by two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.two = self.one

    def forward(self) -> torch.Tensor:
        return self.two(self.one(torch.ones(2, 16)))


def test_a_block_of_two_names_is_saved_once(tmp_path):
    model = trained(Twice(), config(target_modules=["0", "2"]))
    model.save_pretrained(tmp_path)
    assert all(".one." in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    for loaded in (PeftModel.from_pretrained(Twice(), tmp_path), again(Twice, tmp_path)):
        assert difference(logits(loaded), logits(model)) < 2e-6


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_reference_that_trl_copies_from_a_resumed_adapter_computes_the_same(tmp_path, use_dora):
    trained(llama(), config(use_dora=use_dora)).save_pretrained(tmp_path)
    model = again(llama, tmp_path)
    expected = logits(model)
    model.add_adapter("ref", model.peft_config["default"])
    for name, parameter in model.named_parameters():  # as trl.DPOTrainer does
        if ".default." in name:
            model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
    model.set_adapter("ref")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [(PissaConfig, None), (QPissaConfig, NF4), (QPissaConfig, NF4 | {"llm_int8_skip_modules": ["q_proj"]})],
    ids=["PiSSA", "QPiSSA", "QPiSSA beside float layers"],
)
def test_an_adapter_that_trl_casts_to_bf16_keeps_its_start(tmp_path, llama_base, kind, quantization):
    model = get_peft_model(load(llama_base, quantization), kind(r=4, target_modules="all-linear"))
    start, before = logits(model), dict(model.state_dict())
    for parameter in model.parameters():  # as TRL does on a quantized base
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    assert difference(logits(model), start) < 1e-2
    moved(model).save_pretrained(tmp_path)
    config = kind.from_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(load(llama_base, quantization), tmp_path, config=config)
    assert difference(logits(loaded), logits(model)) < 1e-2
    if kind is QPissaConfig:
        assert all(torch.equal(loaded.state_dict()[name], before[name]) for name in before if ".initial_" in name)


def test_another_base_is_an_error(tmp_path):
    model = trained(llama(), config())
    model.save_pretrained(tmp_path)
    torch.manual_seed(5)
    other = llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    with pytest.raises(BaseModelError, match="another base"):
        again(lambda: other, tmp_path)
    assert again(lambda: perturb(llama()), tmp_path)  # a fine-tune of the base is near enough


def test_an_adapter_of_another_kind_is_an_error(tmp_path):
    QPissaConfig(r=4, target_modules=["q_proj"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of type QPISSA"):
        PissaConfig.from_pretrained(tmp_path)
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no QPiSSA adapter"):
        QPissaConfig.from_pretrained(tmp_path)


def test_a_lora_that_never_was_pissa_is_an_error(tmp_path):
    for rank, message in ((3, "an even rank"), (4, "not by PiSSA")):
        trained(llama(), LoraConfig(r=rank, target_modules=["q_proj"])).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            again(llama, tmp_path)


@pytest.mark.parametrize("saved", [PissaConfig(r=2, target_modules=["q_proj"]), LoraConfig(r=4, target_modules=["q_proj"])])
def test_an_adapter_of_another_rank_is_not_loaded_into_pissa(tmp_path, saved):
    trained(llama(), saved).save_pretrained(tmp_path)
    model = get_peft_model(llama(), PissaConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(HfExtError, match="has rank 4 in .*q_proj.*, but PiSSA with r=4 saves rank 8"):
        model.load_adapter(tmp_path, "default", is_trainable=True)
    before = logits(model)
    parts = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name and "initial" not in name}
    model.load_state_dict(parts, strict=False)  # as DeepSpeed leaves out what is frozen
    assert torch.equal(logits(model), before)
