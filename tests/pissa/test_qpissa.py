"""QPissaConfig on models in 4 bits: nearer to the original, rebuilt bit for bit, restored."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tiny_adapters import FP4_IN_FLOATS, NF4, difference, load, logits, moved, small_gpt2, small_llama, trainable, trained
from tiny_models import perturb, same_bits
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from hf_ext import BaseModelError, HfExtError, QPissaConfig, fm_delta
from hf_ext.pissa.kinds import PissaLinear
from hf_ext.pissa.quantization import dequantize
from hf_ext.pissa.quantized import QPissaLinear, ResidualLinear

KIMI = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank"), 64)
KIMI |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_local_experts", "linear_num_heads"), 4)
KIMI |= dict.fromkeys(("v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "linear_head_dim"), 16)
KIMI |= {"num_hidden_layers": 2, "num_experts_per_tok": 2, "vocab_size": 96, "pad_token_id": 0, "eos_token_id": 2}
TOLERANCE = 2e-6  # where sums are taken in another order
BASES = {"llama nf4": (small_llama, NF4), "llama fp4 in floats": (small_llama, FP4_IN_FLOATS), "gpt2": (small_gpt2, NF4)}
every_base = pytest.mark.parametrize(("build", "quantization"), BASES.values(), ids=BASES)
pytestmark = pytest.mark.filterwarnings("ignore:.*fan_in_fan_out")


def config(**options) -> QPissaConfig:
    return QPissaConfig(**({"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "iterations": 2} | options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[Callable[[], nn.Module]], Path]:
    """Returns the folder of a model, which is saved once."""

    @cache
    def saved(build: Callable[[], nn.Module]) -> Path:
        build().save_pretrained(folder := tmp_path_factory.mktemp("base"))
        return folder

    return saved


@pytest.fixture
def base(build, folders) -> Path:
    return folders(build)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, llama_base) -> Path:
    """A trained adapter of the Llama in NF4, and in `logits.pt` what the model computes with it."""
    model = trained(load(llama_base, NF4), config())
    model.save_pretrained(folder := tmp_path_factory.mktemp("adapter"))
    torch.save(logits(model), folder / "logits.pt")
    return folder


def layers(model: nn.Module) -> dict[str, QPissaLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QPissaLinear)}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weight of each layer's base: the residual and the factors that it has taken."""
    bases = {name: module.base_layer for name, module in layers(model).items()}
    return {name: (dequantize(base.weight) + base.scaling * (base.B @ base.A)).detach() for name, base in bases.items()}


def assert_same_residuals(model: nn.Module, other: nn.Module | dict[str, torch.Tensor]) -> None:
    residuals, expected = weights(model), other if isinstance(other, dict) else weights(other)
    assert residuals.keys() == expected.keys() and residuals
    assert all(torch.equal(residuals[name], expected[name]) for name in expected)


@every_base
def test_the_start_has_less_error_than_the_quantized_model(base, quantization):
    original, plain = load(base), load(base, quantization)
    start = weights(get_peft_model(load(base, quantization), config(iterations=5, lora_alpha=16)))
    errors = torch.zeros(2)
    for name, weight in start.items():
        dense, quantized = (model.get_submodule(name.removeprefix("base_model.model.")) for model in (original, plain))
        expected = (dense.weight.T if isinstance(dense, Conv1D) else dense.weight).detach()
        nears = (weight.cpu(), dequantize(quantized.weight).cpu())
        errors += torch.stack([torch.linalg.norm(near - expected) for near in nears])
    assert errors[0] < 0.9 * errors[1]


@every_base
def test_a_saved_adapter_rebuilds_the_model_bit_for_bit(tmp_path, base, quantization):
    model = trained(load(base, quantization), config(use_rslora=True, lora_alpha=6))
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(base, quantization), tmp_path / "adapter", is_trainable=True)
    assert_same_residuals(again, model)
    first, second = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (model, again))
    assert first.keys() == second.keys() and all(same_bits(first[name], second[name]) for name in first)
    assert trainable(model).keys() == trainable(again).keys()


@pytest.mark.filterwarnings("error:Unsupported layer type")  # of PEFT
@every_base
def test_disabling_gives_the_start_of_training_and_unloading_the_base(base, quantization):
    def parts(model: nn.Module) -> dict[str, tuple[type, dict]]:
        leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
        return {name: (type(module), copy.deepcopy(module.state_dict())) for name, module in leaves.items()}

    model = get_peft_model(load(base, quantization), config())
    start = logits(model)
    moved(model)
    assert difference(logits(model), start) > 1e-3
    with model.disable_adapter():
        assert difference(logits(model), start) < TOLERANCE
    untouched, unloaded = load(base, quantization), model.unload()
    before, after = parts(untouched), parts(unloaded)
    assert after.keys() == before.keys()
    for name, (kind, state) in before.items():
        assert after[name][0] is kind
        assert all(same_bits(after[name][1][key], tensor) for key, tensor in state.items() if isinstance(tensor, torch.Tensor))
    assert difference(logits(unloaded), logits(untouched)) < TOLERANCE


@every_base
def test_merging_is_exact_until_it_quantizes_again(base, quantization):
    model = trained(load(base, quantization), config())
    expected = logits(model)
    residuals = weights(model)
    dense = {name: weight + model.get_submodule(name).get_delta_weight("default") for name, weight in residuals.items()}
    model.merge_adapter(safe_merge=True)
    assert all(difference(weight, dense[name]) < 1e-6 for name, weight in weights(model).items())
    assert difference(logits(model), expected) < TOLERANCE
    model.unmerge_adapter()
    assert all(torch.equal(residuals[name], weight) for name, weight in weights(model).items())
    assert torch.equal(logits(model), expected)
    merged = model.merge_and_unload()
    for name, weight in dense.items():
        layer = merged.get_submodule(name.removeprefix("base_model.model."))
        assert torch.linalg.norm(dequantize(layer.weight) - weight) < 0.25 * torch.linalg.norm(weight)


def test_a_scaled_adapter_is_scaled_in_its_change_alone(llama_base):
    model = trained(load(llama_base, NF4), config())
    start, change = weights(model), {name: module.get_delta_weight("default") for name, module in layers(model).items()}
    for name, module in layers(model).items():
        module.scale_layer(0.5)
        x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0)).to(model.device)
        with torch.no_grad():
            assert difference(module(x), x @ (start[name] + 0.5 * change[name]).T) < 1e-4
    expected = logits(model)
    model.merge_adapter()
    assert difference(logits(model), expected) < 2e-6


def test_a_safe_merge_refuses_nans(llama_base):
    model = trained(load(llama_base, NF4), config())
    next(iter(layers(model).values())).lora_A["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite weights"):
        model.merge_adapter(safe_merge=True)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_it_loads_through_every_door(llama_base, adapter, low_cpu_mem_usage):
    expected = torch.load(adapter / "logits.pt")
    again = PeftModel.from_pretrained(load(llama_base, NF4), adapter, low_cpu_mem_usage=low_cpu_mem_usage)
    assert difference(logits(again), expected) < 2e-6
    again = AutoPeftModelForCausalLM.from_pretrained(adapter, quantization_config=BitsAndBytesConfig(**NF4))
    assert difference(logits(again), expected) < 2e-6


@pytest.mark.parametrize("quantization", [NF4, FP4_IN_FLOATS], ids=["nf4", "fp4"])
def test_layers_in_full_precision_get_plain_pissa(tmp_path, llama_base, quantization):
    left_out = quantization | {"llm_int8_skip_modules": ["q_proj", "lm_head"]}
    model = trained(load(llama_base, left_out), config(target_modules=["q_proj", "v_proj", "embed_tokens"]))
    linear = [type(module) for module in model.modules() if isinstance(module, PissaLinear)]
    assert linear == [PissaLinear, QPissaLinear] * 2
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(llama_base, left_out), tmp_path / "adapter")
    assert_same_residuals(again, model)
    assert difference(logits(again), logits(model)) < TOLERANCE


def test_a_base_in_full_precision_takes_the_change_alone(tmp_path, llama_base):
    from peft.tuners.lora.conversion import save_as_lora

    model = trained(load(llama_base, NF4), config())
    changes = {name: layer.get_delta_weight("default") for name, layer in layers(model).items()}
    model.save_pretrained(tmp_path / "adapter")
    save_as_lora(tmp_path / "lora", model, rank=16)  # PEFT's
    expected = load(llama_base)
    for name, change in changes.items():
        expected.get_submodule(name.removeprefix("base_model.model.")).weight.data += change.cpu()
    for kind in ("adapter", "lora"):
        again = PeftModel.from_pretrained(load(llama_base), tmp_path / kind)
        assert difference(logits(again), logits(expected)) < 1e-5


def test_a_copied_configuration_starts_an_adapter_too(llama_base):
    again = QPissaConfig(**config().to_dict())
    first, second = (get_peft_model(load(llama_base, NF4), options) for options in (config(), again))
    assert torch.equal(logits(first), logits(second))
    unloaded = get_peft_model(load(llama_base, NF4), config(init_lora_weights=False))
    with pytest.raises(HfExtError, match="load the adapter's weights first"):
        unloaded.merge_and_unload()


def test_adapters_share_a_residual_and_its_start(llama_base, adapter):
    model = trained(load(llama_base, NF4), config())
    first = logits(model)
    start = logits(get_peft_model(load(llama_base, NF4), config()))
    model.add_adapter("second", config())
    model.set_adapter("second")
    assert difference(logits(model), start) < 2e-6
    model.load_adapter(adapter, "third")
    model.set_adapter("third")
    assert torch.equal(logits(model), first)
    model.delete_adapter("default")
    assert torch.equal(logits(model), first)
    with pytest.raises(ValueError, match="rank 8 and scaling 1.0 in .*, not 4"):
        model.add_adapter("fourth", config(r=4))


def test_an_adapter_of_another_residual_is_an_error(llama_base, adapter):
    model = trained(load(llama_base, NF4), config(iterations=1))
    with pytest.raises(BaseModelError, match="another residual of"):
        model.load_adapter(adapter, "other")


def test_another_base_is_an_error(tmp_path, adapter):
    other = small_llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    other.save_pretrained(tmp_path)
    for quantization in (NF4, None):
        with pytest.raises(BaseModelError, match="trained on another base"):
            PeftModel.from_pretrained(load(tmp_path, quantization), adapter)


@pytest.mark.parametrize("changed", [{"bnb_4bit_quant_type": "fp4"}, {"bnb_4bit_use_double_quant": False}])
def test_another_4_bit_format_of_the_base_is_an_error(llama_base, adapter, changed):
    other = load(llama_base, NF4 | changed)
    with pytest.raises(BaseModelError, match="trained on nf4 in blocks of 64, double quantization. Load the base with"):
        PeftModel.from_pretrained(other, adapter)
    assert get_peft_model(other, QPissaConfig.from_pretrained(adapter))  # a new adapter of that format


def test_a_copy_and_a_pickle_compute_the_same(llama_base):
    model = trained(load(llama_base, NF4), config())
    expected = logits(model)
    again = copy.deepcopy(model)
    assert difference(logits(again), expected) < 2e-6
    original = next(iter(layers(model).values())).base_layer.original
    original.read(torch.device("cpu"))
    assert pickle.loads(pickle.dumps(original)).shape == original.shape
    assert difference(logits(again.unload()), logits(load(llama_base, NF4))) < 2e-6


def test_the_original_weights_may_stand_elsewhere_and_compressed(tmp_path, llama_base):
    """A base that is only stored in 4 bits, and its original as a compressed fine-tune."""
    tuned = perturb(small_llama())
    tuned.save_pretrained(tmp_path / "tuned")
    load(tmp_path / "tuned", NF4).save_pretrained(tmp_path / "nf4")
    fm_delta.compress_checkpoint(tmp_path / "tuned", llama_base, tmp_path / "small")
    with pytest.raises(BaseModelError, match=r"is quantized \(bitsandbytes\).* Name a folder or Hub id"):
        get_peft_model(load(tmp_path / "nf4"), config())
    model = get_peft_model(load(tmp_path / "nf4"), config(full_precision_model=str(tmp_path / "small")))
    expected = get_peft_model(load(tmp_path / "tuned", NF4), config())
    assert_same_residuals(model, expected)


@pytest.mark.skipif(not hasattr(transformers, "KimiLinearConfig"), reason="needs a model whose layers loading renames")
def test_original_weights_are_found_under_the_names_of_the_file(tmp_path):
    torch.manual_seed(0)
    transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**KIMI)).save_pretrained(tmp_path / "base")
    whole = load(tmp_path / "base")
    model = get_peft_model(load(tmp_path / "base", NF4), config(r=4))
    model.save_pretrained(tmp_path / "adapter")
    for one in (model, PeftModel.from_pretrained(load(tmp_path / "base", NF4), tmp_path / "adapter")):
        layers = [layer for layer in one.modules() if isinstance(layer, ResidualLinear)]
        assert len(layers) > 4
        for layer in layers:
            weight = whole.get_parameter(f"{layer.original.layer}.weight")
            assert torch.equal(layer.original.read(weight.device), weight.float())


@pytest.mark.parametrize(("place", "message"), [
    ("", "has no name"),
    ("/nowhere/at/all", "cannot be read"),
    (small_gpt2, "holds no weight for the quantized layer"),
    (lambda: perturb(small_llama()), "is not the one that the layer was quantized from"),
])  # fmt: skip
def test_original_weights_that_are_missing_or_others_are_an_error(folders, llama_base, place, message):
    model = load(llama_base, NF4)
    model.name_or_path = place if isinstance(place, str) else str(folders(place))
    with pytest.raises(BaseModelError, match=message):
        get_peft_model(model, config())


def test_impossible_targets_and_options_are_errors(llama_base):
    model = get_peft_model(load(llama_base, NF4), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="q_proj already has an adapter of another type"):
        get_peft_model(model.base_model.model, config())
    with pytest.raises(ValueError, match="Linear8bitLt.* is quantized"):
        get_peft_model(load(llama_base, {"load_in_8bit": True}), config())
    for options in ({"iterations": 0}, {"use_dora": True}, {"bias": "all"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            config(**options)
