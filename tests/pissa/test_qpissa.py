"""QPissaConfig on models in 4 and 8 bits and in full precision: nearer to the original, rebuilt bit for bit, given back."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from pathlib import Path

import pytest
import torch
from hosts import adapters_of_transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from peft.utils import save_and_load
from safetensors import safe_open
from tiny_adapters import (
    FP4_IN_FLOATS,
    INT8,
    NF4,
    SAVED_RESIDUALS,
    difference,
    load,
    logits,
    moved,
    small_gpt2,
    small_llama,
    trained,
)
from tiny_models import perturb, same_bits, t5
from torch import nn
from transformers import AutoModelForSeq2SeqLM
from transformers.pytorch_utils import Conv1D

from hf_ext import BaseModelError, HfExtError, PissaConfig, QPissaConfig, fm_delta, pissa
from hf_ext.integration.compat import saves_only_lora_tensors
from hf_ext.pissa.kinds import PissaLinear
from hf_ext.pissa.model import QPissaLinear
from hf_ext.pissa.quantization import dequantize

FORMATS = {"nf4": NF4, "fp4 in floats": FP4_IN_FLOATS, "int8": INT8, "full precision": None}
# Where sums are taken in another order. In 8 bits that may move an activation to the next of its 127 steps.
TOLERANCE = {False: 2e-6, True: 1e-2}
every_format = pytest.mark.parametrize("quantization", FORMATS.values(), ids=FORMATS)
every_base = pytest.mark.parametrize(
    ("build", "quantization"),
    [
        *(pytest.param(small_llama, FORMATS[name], id=f"llama {name}") for name in FORMATS),
        pytest.param(small_gpt2, NF4, id="gpt2"),
    ],
)
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt", "ignore:.*fan_in_fan_out")


def config(**options) -> QPissaConfig:
    return QPissaConfig(**({"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "iterations": 2} | options))


@pytest.fixture
def base(build, tmp_path) -> Path:
    build().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def llama_base(tmp_path) -> Path:
    small_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def layers(model: nn.Module) -> dict[str, QPissaLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QPissaLinear)}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the layers stand for, without adapters in training."""
    return {name: module.base_layer.dequantized() for name, module in layers(model).items()}


def assert_same_residuals(model: nn.Module, other: nn.Module | dict[str, torch.Tensor]) -> None:
    residuals, expected = weights(model), other if isinstance(other, dict) else weights(other)
    assert residuals.keys() == expected.keys() and residuals
    assert all(torch.equal(residuals[name], expected[name]) for name in expected)


@every_base
def test_the_start_has_less_error_than_the_quantized_model(base, quantization):
    original, plain = load(base), load(base, quantization or NF4)
    start = weights(get_peft_model(load(base, quantization), config(iterations=5)))
    errors = torch.zeros(2)
    for name, weight in start.items():
        dense, quantized = (model.get_submodule(name.removeprefix("base_model.model.")) for model in (original, plain))
        expected = dense.weight.T if isinstance(dense, Conv1D) else dense.weight
        plain_weight = dequantize(quantized.weight, getattr(quantized, "state", None))
        errors += torch.stack([torch.linalg.norm(near - expected) for near in (weight, plain_weight)]).detach()
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.filterwarnings("error:Unsupported layer type")
def test_no_warning_calls_the_layers_unsupported(llama_base):
    get_peft_model(load(llama_base, NF4), config())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base's folder, and a function: by format, the folder of a trained adapter, its residuals and the model's logits."""
    folder = tmp_path_factory.mktemp("saved")
    small_llama().save_pretrained(folder / "base")

    @cache
    def adapter(name: str) -> tuple[Path, dict[str, torch.Tensor], torch.Tensor]:
        model = trained(load(folder / "base", FORMATS[name]), config())
        model.save_pretrained(folder / name)
        return folder / name, weights(model), logits(model)

    return folder / "base", adapter


@pytest.mark.parametrize(("kind", "onto"), [
    pytest.param(kind, onto, marks=[] if "nf4" in (kind, onto) or kind == onto else pytest.mark.slow)
    for kind in FORMATS for onto in FORMATS
])  # fmt: skip
def test_a_saved_adapter_fits_the_base_in_any_form(saved, kind, onto):
    base, adapter = saved
    folder, residuals, expected = adapter(kind)
    again = PeftModel.from_pretrained(load(base, FORMATS[onto]), folder)
    assert_same_residuals(again, residuals)
    assert difference(logits(again), expected) < TOLERANCE[kind == "int8"]


@every_base
def test_training_goes_on_bit_for_bit(tmp_path, base, quantization):
    model = trained(load(base, quantization), config(use_rslora=True, lora_alpha=6))
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(base, quantization), tmp_path / "adapter", is_trainable=True)
    for first, second in ((model.named_parameters(), again.named_parameters()), (model.named_buffers(), again.named_buffers())):
        first, second = dict(first), dict(second)
        assert first.keys() == second.keys()
        assert all(same_bits(first[name], second[name]) for name in first)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, p in again.named_parameters() if p.requires_grad
    }


@SAVED_RESIDUALS
@every_format
def test_a_saved_residual_needs_no_original(tmp_path, llama_base, quantization):
    model = trained(load(llama_base, quantization), config(save_residual=True))
    model.save_pretrained(tmp_path / "adapter")
    nameless = small_llama()  # a model in memory: nowhere to read weights from
    with torch.no_grad():
        for parameter in nameless.model.layers.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
    again = PeftModel.from_pretrained(nameless, tmp_path / "adapter")
    assert_same_residuals(again, model)
    assert difference(logits(again), logits(model)) < TOLERANCE[quantization == INT8]


@pytest.mark.skipif(not saves_only_lora_tensors(), reason="this version of PEFT saves residuals and biases")
@pytest.mark.parametrize("options", [{"save_residual": True}, {"bias": "all"}, {"bias": "lora_only"}])
def test_options_that_an_older_peft_cannot_save_are_refused(llama_base, options):
    with pytest.raises(HfExtError, match="Install peft>=0.21"):
        get_peft_model(load(llama_base, NF4), config(**options))


@SAVED_RESIDUALS
def test_the_saved_residual_is_what_it_costs(tmp_path, llama_base):
    sizes = {}
    for save_residual in (False, True):
        model = trained(load(llama_base, NF4), config(save_residual=save_residual))
        model.save_pretrained(tmp_path / str(save_residual))
        sizes[save_residual] = (tmp_path / str(save_residual) / "adapter_model.safetensors").stat().st_size
    count = sum(module.in_features * module.out_features for module in layers(model).values())
    assert count / 2 < sizes[True] - sizes[False] < count


@every_base
def test_disabling_gives_the_start_of_training(base, quantization):
    model = get_peft_model(load(base, quantization), config())
    start = logits(model)
    moved(model)
    assert difference(logits(model), start) > 1e-3
    with model.disable_adapter():
        assert difference(logits(model), start) < TOLERANCE[quantization == INT8]


@every_base
def test_unloading_gives_the_base_as_it_was(base, quantization):
    def parts(model: nn.Module) -> dict[str, tuple[type, dict]]:
        leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
        return {name: (type(module), copy.deepcopy(module.state_dict())) for name, module in leaves.items()}

    untouched = load(base, quantization)
    unloaded = trained(load(base, quantization), config()).unload()
    before, after = parts(untouched), parts(unloaded)
    assert after.keys() == before.keys()
    for name, (kind, state) in before.items():
        assert after[name][0] is kind
        assert all(same_bits(after[name][1][key], tensor) for key, tensor in state.items() if isinstance(tensor, torch.Tensor))
    assert difference(logits(unloaded), logits(untouched)) < TOLERANCE[quantization == INT8]


@every_base
def test_merging_is_exact_and_reports_its_quantization_error(base, quantization):
    model = trained(load(base, quantization), config())
    expected = logits(model)
    residuals = weights(model)
    dense = {name: weight + model.get_submodule(name).get_delta_weight("default") for name, weight in residuals.items()}
    model.merge_adapter(safe_merge=True)
    assert all(difference(weight, dense[name]) < 1e-6 for name, weight in weights(model).items())
    assert difference(logits(model), expected) < TOLERANCE[quantization == INT8]
    model.unmerge_adapter()
    assert all(torch.equal(residuals[name], weight) for name, weight in weights(model).items())
    assert torch.equal(logits(model), expected)
    merged = model.merge_and_unload()
    for name, weight in dense.items():
        layer = merged.get_submodule(name.removeprefix("base_model.model."))
        if quantization is None:
            assert difference(layer.weight.T if isinstance(layer, Conv1D) else layer.weight, weight) < 1e-6
        else:
            merged_weight = dequantize(layer.weight, getattr(layer, "state", None))
            assert torch.linalg.norm(merged_weight - weight) < 0.25 * torch.linalg.norm(weight)


def test_a_scaled_adapter_is_scaled_in_its_change_alone(llama_base):
    model = trained(load(llama_base, NF4), config())
    start, change = weights(model), {name: module.get_delta_weight("default") for name, module in layers(model).items()}
    for name, module in layers(model).items():
        module.scale_layer(0.5)
        x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert difference(module(x), x @ (start[name] + 0.5 * change[name]).T) < 1e-4
    expected = logits(model)
    model.merge_adapter()
    assert difference(logits(model), expected) < 2e-6


def test_a_safe_merge_refuses_nans():
    model = trained(small_llama(), config())
    next(iter(layers(model).values())).lora_A["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite weights"):
        model.merge_adapter(safe_merge=True)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_it_loads_through_every_door(tmp_path, llama_base, low_cpu_mem_usage):
    model = trained(load(llama_base, NF4), config())
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model)
    again = PeftModel.from_pretrained(load(llama_base, NF4), tmp_path / "adapter", low_cpu_mem_usage=low_cpu_mem_usage)
    assert difference(logits(again), expected) < 2e-6
    assert difference(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), expected) < 2e-6


@adapters_of_transformers
@pytest.mark.parametrize("kind", [PissaConfig, QPissaConfig])
def test_loading_by_transformers_is_refused_with_advice(tmp_path, llama_base, kind):
    options = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    trained(load(llama_base), kind(**options)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(HfExtError, match=f"cannot load an adapter of {kind.__name__}. Use PeftModel"):
        load(llama_base).load_adapter(tmp_path / "adapter", peft_config=kind.from_pretrained(tmp_path / "adapter"))
    if kind is QPissaConfig:
        with pytest.raises(HfExtError, match="Use PeftModel"):
            load(llama_base).load_adapter(str(tmp_path / "adapter"))
        with pytest.raises(HfExtError, match="Use PeftModel"):
            load(tmp_path / "adapter")


@pytest.mark.parametrize("quantization", [NF4, FP4_IN_FLOATS, INT8], ids=["nf4", "fp4", "int8"])
@pytest.mark.parametrize("save_residual", [False, pytest.param(True, marks=SAVED_RESIDUALS)])
def test_unquantized_layers_stay_in_full_precision(tmp_path, llama_base, quantization, save_residual):
    left_out = quantization | {"llm_int8_skip_modules": ["q_proj", "lm_head"]}
    options = config(target_modules=["q_proj", "v_proj"], save_residual=save_residual)
    model = trained(load(llama_base, left_out), options)
    assert [type(module) is PissaLinear for module in model.modules() if isinstance(module, PissaLinear)] == [True, False] * 2
    assert [layer.error is None for layer in pissa.report(model).layers] == [True, False] * 2
    model.save_pretrained(tmp_path / "adapter")
    for base in (load(llama_base, left_out), load(llama_base)):
        again = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert_same_residuals(again, model)
        assert [type(module) is PissaLinear for module in again.modules() if isinstance(module, PissaLinear)] == [
            True,
            False,
        ] * 2
    again = PeftModel.from_pretrained(load(llama_base, left_out), tmp_path / "adapter")
    assert difference(logits(again), logits(model)) < TOLERANCE[quantization == INT8]
    with pytest.raises(ValueError, match="is quantized, but was not when the adapter was trained"):
        PeftModel.from_pretrained(load(llama_base, quantization), tmp_path / "adapter")


@pytest.mark.skipif(not hasattr(save_and_load, "get_base_model_state_dict"), reason="this version of PEFT does not have it")
@every_format
def test_the_base_has_its_own_names_in_a_state_dict(llama_base, quantization):
    base = load(llama_base, quantization)
    names = set(base.state_dict())
    model = get_peft_model(base, config())
    state = save_and_load.get_base_model_state_dict(model)
    added = {name.rpartition(".weight.")[0] or name for name in state.keys() - names}  # by quantizing a base in full precision
    assert names <= state.keys() and added <= {name.removesuffix(".weight") for name in names} | names
    if quantization == INT8:
        return  # bitsandbytes loads no state dict into a layer in 8 bits
    expected = logits(model)
    save_and_load.set_base_model_state_dict(model, {name: tensor.clone() for name, tensor in state.items()})
    assert torch.equal(logits(model), expected)


def test_combining_by_weights_is_an_error(llama_base):
    model = trained(load(llama_base), config())
    expected = logits(model)
    with pytest.raises(ValueError, match=r"\['default'\] are of QPiSSA, which add_weighted_adapter cannot combine"):
        model.add_weighted_adapter(["default"], [0.5], "half", "cat")
    assert list(model.peft_config) == ["default"] and torch.equal(logits(model), expected)


def test_layers_that_transformers_keeps_in_float32_stay_there(tmp_path):
    model = t5(width=64)  # on CPUs with AVX-512, bitsandbytes 0.50 decodes rows shorter than a block wrong
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    start = get_peft_model(base, QPissaConfig(r=4, target_modules="all-linear"))
    assert {name.split(".")[-1] for name, module in start.named_modules() if type(module) is PissaLinear} == {"wo"}
    expected = logits(model)
    assert torch.linalg.norm(logits(start) - expected) < 0.3 * torch.linalg.norm(expected)


def test_a_base_changed_in_memory_is_refused(llama_base):
    base = load(llama_base)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter *= 1.3
    model = trained(base, config())
    with pytest.raises(BaseModelError, match="was only in memory"):
        model.unload()


def test_merging_into_a_base_in_full_precision_leaves_it_so(tmp_path, llama_base):
    model = trained(load(llama_base), config())
    expected = logits(model)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert difference(logits(load(tmp_path / "merged")), expected) < 1e-5


def test_a_copied_configuration_starts_an_adapter_too(llama_base):
    again = QPissaConfig(**config().to_dict())
    first, second = (get_peft_model(load(llama_base, NF4), options) for options in (config(), again))
    assert torch.equal(logits(first), logits(second))
    unloaded = get_peft_model(load(llama_base, NF4), config(init_lora_weights=False))
    with pytest.raises(HfExtError, match="load the adapter's weights first"):
        unloaded.merge_and_unload()


def test_adapters_share_a_residual_and_its_start(tmp_path, llama_base):
    model = trained(load(llama_base, NF4), config())
    first = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    start = logits(get_peft_model(load(llama_base, NF4), config()))
    model.add_adapter("second", config())
    model.set_adapter("second")
    assert difference(logits(model), start) < 2e-6
    for option in ("quant_type", "double_quant", "full_precision_modules"):
        assert getattr(model.peft_config["second"], option) == getattr(model.peft_config["default"], option)
    model.load_adapter(tmp_path / "adapter", "third")
    model.set_adapter("third")
    assert torch.equal(logits(model), first)
    model.delete_adapter("default")
    assert torch.equal(logits(model), first)
    with pytest.raises(ValueError, match="rank 8 and scaling 1.0 in .*, not 4"):
        model.add_adapter("fourth", config(r=4))


def test_an_adapter_of_another_residual_is_an_error(tmp_path, llama_base):
    trained(load(llama_base, NF4), config(seed=1, iterations=1)).save_pretrained(tmp_path / "other")
    model = trained(load(llama_base, NF4), config())
    with pytest.raises(BaseModelError, match="another residual of"):
        model.load_adapter(tmp_path / "other", "other")


def test_another_base_is_an_error(tmp_path, llama_base):
    trained(load(llama_base, NF4), config()).save_pretrained(tmp_path / "adapter")
    other = small_llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "other")
    for quantization in (NF4, None):
        with pytest.raises(BaseModelError, match="trained on another base"):
            PeftModel.from_pretrained(load(tmp_path / "other", quantization), tmp_path / "adapter")


def test_a_copy_and_a_pickle_compute_the_same(llama_base):
    model = trained(load(llama_base, NF4), config())
    expected = logits(model)
    again = copy.deepcopy(model)
    assert difference(logits(again), expected) < 2e-6
    original = next(iter(layers(model).values())).base_layer.original
    original.read(torch.device("cpu"))
    assert pickle.loads(pickle.dumps(original)).shape == original.shape
    assert difference(logits(again.unload()), logits(load(llama_base, NF4))) < 2e-6


def test_the_original_weights_may_stand_elsewhere_and_compressed(tmp_path):
    """A base that is only stored in 4 bits, and its original as a compressed fine-tune."""
    tuned = perturb(small_llama())
    small_llama().save_pretrained(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "tuned")
    load(tmp_path / "tuned", NF4).save_pretrained(tmp_path / "nf4")
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small")
    with pytest.raises(BaseModelError, match="is itself quantized, or of another model. Name a folder or Hub id"):
        get_peft_model(load(tmp_path / "nf4"), config())
    model = get_peft_model(load(tmp_path / "nf4"), config(full_precision_model=str(tmp_path / "small")))
    expected = get_peft_model(load(tmp_path / "tuned", NF4), config())
    assert_same_residuals(model, expected)


def test_other_original_weights_are_refused(tmp_path, llama_base):
    perturb(small_llama()).save_pretrained(tmp_path / "tuned")
    with pytest.raises(BaseModelError, match="is not the one that the layer was quantized from"):
        get_peft_model(load(llama_base, NF4), config(full_precision_model=str(tmp_path / "tuned")))


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "nowhere to be found"), ("/nowhere/at/all", "cannot be read"), ("gpt2", "holds no weight for the quantized layer")],
)
def test_original_weights_that_cannot_be_found_are_an_error(tmp_path, llama_base, name, message):
    small_gpt2().save_pretrained(tmp_path / "gpt2")
    model = load(llama_base, NF4)
    model.name_or_path = str(tmp_path / name) if name == "gpt2" else name
    with pytest.raises(BaseModelError, match=message):
        get_peft_model(model, config())


def test_the_adapter_records_how_the_residual_is_quantized(tmp_path, llama_base):
    trained(load(llama_base, FP4_IN_FLOATS), config()).save_pretrained(tmp_path / "adapter")
    again = QPissaConfig.from_pretrained(tmp_path / "adapter")
    assert (again.quant_type, again.double_quant, again.r, again.init_lora_weights) == ("fp4", False, 8, False)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert not any("base_layer" in name for name in file.keys())  # noqa: SIM118


def test_targets_without_a_quantized_form_are_errors(llama_base):
    with pytest.raises(ValueError, match="no adapter for Embedding"):
        get_peft_model(load(llama_base, NF4), config(target_modules=["embed_tokens"]))
    model = get_peft_model(load(llama_base), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="different peft types"):
        model.add_adapter("other", config())
    with pytest.raises(ValueError, match="already has an adapter"):
        get_peft_model(model.base_model.model, config())
    with pytest.raises(ValueError, match="r=33 is more than the 32 principal components"):
        get_peft_model(load(llama_base, NF4), config(r=33, target_modules=["k_proj"]))
    for options in ({"iterations": 0}, {"quant_type": "int4"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            config(**options)


def test_the_report_is_the_same_before_and_after_saving(tmp_path, llama_base):
    model = trained(load(llama_base, NF4), config())
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(llama_base, NF4), tmp_path / "adapter")
    for first, second in zip(pissa.report(model).layers, pissa.report(again).layers, strict=True):
        assert first.layer == second.layer and first.error < first.plain_error
        assert first.error == pytest.approx(second.error, rel=1e-4)
        assert first.plain_error == pytest.approx(second.plain_error, rel=1e-4)
        assert first.energy == pytest.approx(second.energy, rel=1e-4)
