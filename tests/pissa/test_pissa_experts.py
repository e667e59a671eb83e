"""PiSSA for the weights of experts that one parameter holds (`target_parameters`): each expert's matrix is decomposed."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from tiny_adapters import difference, logits, needs_peft, trained
from tiny_models import gpt_oss, inputs, mixtral, qwen_moe, same_bits
from transformers import MixtralForCausalLM

from hf_ext import BaseModelError, HfExtError, PissaConfig, QPissaConfig, pissa
from hf_ext.cli.main import main
from hf_ext.pissa.decomposition import initial_factors, principal_components
from hf_ext.pissa.experts import PissaExperts

PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]

pytestmark = [
    needs_peft("0.21", "older versions have another layer for parameters"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]
every_model = pytest.mark.parametrize("build", [mixtral, qwen_moe, gpt_oss])  # gpt_oss keeps its weights transposed


def config(**options) -> PissaConfig:
    return PissaConfig(**({"r": 4, "target_modules": ["q_proj"], "target_parameters": PARAMETERS} | options))


def experts(model: torch.nn.Module) -> dict[str, PissaExperts]:
    return {module.name: module for module in model.modules() if isinstance(module, PissaExperts)}


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_starts_exactly_at_the_base(build, dtype):
    base = build().to(dtype)
    expected, weights = logits(base), {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, config())
    assert torch.equal(logits(model), expected)
    model(**inputs(model), labels=inputs(model)["input_ids"]).loss.backward()
    for layer in experts(model).values():
        assert layer.lora_A["default"].weight.grad.abs().max() > 0 and layer.lora_B["default"].weight.grad.abs().max() > 0
        assert layer.get_param().grad is None and not layer.initial_A["default"].requires_grad
    model = trained(build().to(dtype), config())
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    restored = model.unload()
    assert torch.equal(logits(restored), expected)
    assert all(same_bits(tensor, weights[name]) for name, tensor in restored.state_dict().items())


@every_model
def test_each_expert_starts_from_its_principal_components(build):
    model = get_peft_model(build(), config(svd="exact"))
    assert len(experts(model)) == 2 * model.config.num_hidden_layers
    for layer in experts(model).values():
        A, B = layer.by_expert(*layer.factors("default"))
        weight = layer.get_param().mT if layer.is_transposed() else layer.get_param()
        shares = []
        for i, matrix in enumerate(weight):
            expected_B, expected_A = initial_factors(principal_components(matrix, 4, None), 1.0)
            torch.testing.assert_close(B[i] @ A[i], expected_B @ expected_A)
            shares.append((expected_B @ expected_A).square().sum())
        report = layer.report("default", "")
        assert report.energy == pytest.approx(float(sum(shares) / weight.square().sum()), rel=1e-4)
    names = {layer.layer for layer in pissa.report(model).layers}
    assert experts(model).keys() < names and len(names) > len(experts(model))


@every_model
def test_a_saved_adapter_is_a_lora_and_resumes(tmp_path, build):
    model = trained(build(), config(rank_pattern={"down_proj": 3}))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert difference(logits(PeftModel.from_pretrained(build(), tmp_path)), expected) < 1e-5
    options = PissaConfig.from_pretrained(tmp_path)
    resumed = PeftModel.from_pretrained(build(), tmp_path, config=options, is_trainable=True)
    assert difference(logits(resumed), expected) < 1e-5
    with resumed.disable_adapter():
        assert torch.equal(logits(resumed), logits(build()))
    with pytest.raises(BaseModelError, match="not those of the weight of .*experts"):
        PeftModel.from_pretrained(with_other_experts(build()), tmp_path, config=PissaConfig.from_pretrained(tmp_path))


def with_other_experts(model: torch.nn.Module) -> torch.nn.Module:
    for name, weight in model.named_parameters():
        if "experts" in name:
            weight.data.normal_()
    return model


@every_model
def test_merging_changes_the_weights_of_all_experts(build):
    model = trained(build(), config())
    expected = logits(model)
    model.merge_adapter()
    assert difference(logits(model), expected) < 1e-5
    model.unmerge_adapter()
    assert difference(logits(model), expected) < 1e-5
    assert difference(logits(model.merge_and_unload(safe_merge=True)), expected) < 1e-5


def test_a_lora_lives_beside_it_and_both_can_be_active():
    model = trained(mixtral(), config())
    expected = logits(model)
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=PARAMETERS, init_lora_weights=False)
    model.add_adapter("lora", lora)
    assert torch.equal(logits(model), expected)
    model.base_model.set_adapter(["default", "lora"])
    both = logits(model)
    assert difference(both, expected) > 1e-3
    model.merge_adapter()
    assert difference(logits(model), both) < 1e-5
    model.unmerge_adapter()
    with pytest.raises(ValueError, match="does not support targeting nn.Parameter"):
        model.add_weighted_adapter(["default", "lora"], [1.0, 1.0], "sum")


def test_a_lora_of_experts_accepts_a_pissa_adapter():
    model = get_peft_model(mixtral(), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=PARAMETERS))
    expected = logits(model)
    pissa.accept_pissa(model)
    model.add_adapter("pissa", config())
    model.set_adapter("pissa")
    assert torch.equal(logits(model), expected) and len(pissa.report(model).layers) == 6


@pytest.mark.parametrize("rank", [None, 8, 5])
def test_it_converts_to_a_lora_of_any_rank(tmp_path, rank):
    model = trained(mixtral(), config())
    expected = logits(model)
    conversion = pissa.convert_to_lora(model, rank=rank)
    assert {layer.rank for layer in conversion.layers} == {rank or 8}
    conversion.save_pretrained(tmp_path)
    lora = PeftModel.from_pretrained(mixtral(), tmp_path)
    assert difference(logits(lora), expected) < (1e-2 if rank == 5 else 1e-5)
    if rank != 5:
        assert max(layer.error for layer in conversion.layers) < 1e-5


def test_the_command_converts_a_saved_adapter_of_experts(tmp_path):
    mixtral().save_pretrained(tmp_path / "base")
    base = MixtralForCausalLM.from_pretrained(tmp_path / "base")
    model = trained(base, config(task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    assert main(["convert-to-lora", str(tmp_path / "adapter"), "--out", str(tmp_path / "lora")]) == 0
    assert difference(logits(PeftModel.from_pretrained(mixtral(), tmp_path / "lora")), logits(model)) < 1e-5
    loaded = PeftModel.from_pretrained(mixtral(), tmp_path / "adapter")
    with pytest.raises(HfExtError, match=r"config=PissaConfig\.from_pretrained"):
        pissa.convert_to_lora(loaded)


@pytest.mark.parametrize("rank", [None, 6])
def test_a_router_with_few_experts_converts_too(tmp_path, rank):
    model = trained(mixtral(), config(target_modules="all-linear", target_parameters=None))
    conversion = pissa.convert_to_lora(model, rank=rank)
    routers = [layer for layer in conversion.layers if "gate." in layer.layer]
    assert len(routers) == 2
    for layer in routers:
        assert layer.rank == 4 and layer.error < 1e-6  # the weight is (4, 32)
    conversion.save_pretrained(tmp_path)
    lora = PeftModel.from_pretrained(mixtral(), tmp_path)
    assert difference(logits(lora), logits(model)) < (1e-5 if rank is None else 1e-1)


def test_experts_in_16_bits_keep_their_change(tmp_path):
    model = trained(mixtral().bfloat16(), config(target_modules=[]))
    model.save_pretrained(tmp_path)
    changes = {name: layer.get_delta_weight("default") for name, layer in experts(model).items()}
    lora = PeftModel.from_pretrained(mixtral().bfloat16(), tmp_path)
    for name, module in lora.named_modules():
        if isinstance(module, ParamWrapper):
            key = f"{name.removeprefix('base_model.model.').replace('.base_layer', '')}.{module.parameter_name}"
            change = module.get_delta_weight("default")
            assert torch.linalg.norm((change - changes[key]).float()) < 0.01 * torch.linalg.norm(changes[key].float())


def test_experts_among_all_linear_layers_take_it():
    expected = logits(mixtral())
    model = get_peft_model(mixtral(), config(target_modules="all-linear", target_parameters=None))
    assert torch.equal(logits(model), expected) and len(experts(model)) == 6  # with the routers


def test_a_large_rank_and_qpissa_are_errors():
    with pytest.raises(ValueError, match="r=40 is more than the 32 principal components .*experts.* has"):
        get_peft_model(mixtral(), config(r=40, target_modules=[]))
    with pytest.raises(ValueError, match="QPissaConfig does not support target_parameters"):
        QPissaConfig(target_parameters=PARAMETERS)
