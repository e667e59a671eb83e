"""PissaConfig in PEFT: the base stays as it is, training starts where the paper's does, and other adapters live beside it."""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from itertools import cycle

import pytest
import torch
from hosts import adapters_of_transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from peft.utils.hotswap import hotswap_adapter
from peft.utils.other import ModulesToSaveWrapper
from tiny_adapters import (
    SAVED_BIASES,
    difference,
    load,
    logits,
    moved,
    small_llama,
    trainable,
    trained,
)
from tiny_models import MODELS, bert, gpt2, inputs, llama, same_bits, t5
from torch import nn
from transformers import AutoModelForCausalLM

from hf_ext import HfExtError, PissaConfig, QPissaConfig, pissa

EVERYWHERE = "all-linear"
CASES = {
    "llama": (llama, {"target_modules": EVERYWHERE}),
    "llama_bf16": (MODELS["llama_bf16"].build, {"target_modules": EVERYWHERE}),
    "gpt2": (gpt2, {"target_modules": EVERYWHERE}),  # Conv1D
    "bert": (bert, {"target_modules": EVERYWHERE, "exclude_modules": ["classifier"]}),
    "embeddings": (llama, {"target_modules": ["embed_tokens", "lm_head", "down_proj"]}),
    "rslora": (llama, {"target_modules": ["q_proj", "up_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 8}}),
    "patterns": (llama, {"target_modules": EVERYWHERE, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 12}}),
    "some layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
    "exact": (llama, {"target_modules": EVERYWHERE, "svd": "exact"}),
    "saved modules": (bert, {"target_modules": ["query"], "modules_to_save": ["classifier"]}),
}
BIASES = pytest.param(bert, {"target_modules": ["query"], "bias": "lora_only"}, id="biases", marks=SAVED_BIASES)
every_case = pytest.mark.parametrize(
    ("build", "options"), [*(pytest.param(*case, id=name) for name, case in CASES.items()), BIASES]
)
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Setting `save_embedding_layers`", ".*fan_in_fan_out", "Model with")
]


def config(**options) -> PissaConfig:
    return PissaConfig(**({"r": 4, "target_modules": EVERYWHERE} | options))


@every_case
def test_training_leaves_the_base_weights_unchanged(build, options):
    base = build()
    expected, weights = logits(base), copy.deepcopy(base.state_dict())
    model = get_peft_model(base, config(**options))
    assert torch.equal(logits(model), expected)
    moved(model)
    assert not torch.equal(logits(model), expected)
    state = {re.sub(r"base_layer\.|original_module\.", "", name): tensor for name, tensor in base.state_dict().items()}
    trained_biases = ".bias" if options.get("bias") else "\0"
    assert all(same_bits(state[name], tensor) for name, tensor in weights.items() if not name.endswith(trained_biases))


@every_case
def test_disabling_or_unloading_gives_the_original_exactly(build, options):
    expected = logits(build())
    model = get_peft_model(build(), config(**{**options, "bias": "none", "modules_to_save": None}))
    moved(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model.unload()), expected)


@every_case
def test_merging_and_taking_back_keep_what_the_model_computes(build, options):
    model = trained(build(), config(**options))
    tolerance = 3e-2 if next(model.parameters()).dtype == torch.bfloat16 else 2e-6
    expected = logits(model)
    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        assert difference(logits(model), expected) < tolerance
        model.unmerge_adapter()
        assert difference(logits(model), expected) < tolerance
    merged = model.merge_and_unload()
    assert difference(logits(merged), expected) < tolerance
    assert not any(isinstance(module, LoraLayer) for module in merged.modules())


@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("alpha", [4, 8])
def test_gradients_at_the_start_are_those_of_pefts_own_pissa(build, alpha):
    ours = get_peft_model(build(), config(svd="exact", lora_alpha=alpha))
    theirs = get_peft_model(build(), LoraConfig(r=4, lora_alpha=alpha, init_lora_weights="pissa", target_modules=EVERYWHERE))
    for model in (ours, theirs):
        tokens = inputs(model)["input_ids"]
        model.eval()(input_ids=tokens, labels=tokens).loss.backward()
    others = dict(theirs.named_parameters())
    for name, parameter in trainable(ours).items():
        # The sign of a singular vector is free.
        along = 1 if "lora_A" in name else 0
        sign = (parameter * others[name]).sum(along, keepdim=True).sign()
        torch.testing.assert_close(parameter.detach(), (sign * others[name]).detach(), atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(parameter.grad, sign * others[name].grad, atol=2e-5, rtol=1e-2)


def test_a_training_run_is_that_of_the_papers_form():
    """W x + s (BA − B₀A₀) x beside (W − s B₀A₀) x + s BA x, the same factors, AdamW."""
    ours = get_peft_model(llama(), config())
    theirs = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=4, target_modules=EVERYWHERE))
    with torch.no_grad():
        for name, mine in ours.named_modules():
            if isinstance(mine, LoraLayer):
                A, B = mine.factors("default")
                other = theirs.get_submodule(name)
                other.lora_A["default"].weight.copy_(A)
                other.lora_B["default"].weight.copy_(B)
                other.get_base_layer().weight -= B @ A
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-3)
        tokens = inputs(model)["input_ids"]
        for _ in range(10):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_the_start_is_the_same_in_every_run_and_follows_the_seed():
    first, second, other = (trainable(get_peft_model(llama(), config(seed=seed))) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_adapters_of_both_kinds_share_one_base():
    expected = logits(llama())
    model = trained(llama(), config())
    one = logits(model)
    model.add_adapter("other", config(r=6, seed=1))
    model.add_adapter("lora", LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    assert torch.equal(logits(model), one)
    model.set_adapter("other")
    assert torch.equal(logits(model), expected)
    model.set_adapter("lora")
    alone = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    assert difference(logits(model), expected) > 1e-3 and difference(logits(alone), expected) > 1e-3
    model.base_model.set_adapter(["default", "lora"])
    both = logits(model)
    assert difference(both, one) > 1e-3
    model.delete_adapter("lora")
    model.set_adapter("default")
    assert torch.equal(logits(model), one)
    model.delete_adapter("default")
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)


def test_a_batch_mixes_adapters():
    model = trained(llama(), config())
    model.add_adapter("lora", LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    tokens = inputs(model)["input_ids"][:1].repeat(3, 1)
    model.eval()
    with torch.no_grad():
        mixed = model(input_ids=tokens, adapter_names=["default", "lora", "__base__"]).logits
        expected = [model(input_ids=tokens[:1]).logits]
        model.set_adapter("lora")
        expected += [model(input_ids=tokens[:1]).logits]
        with model.disable_adapter():
            expected += [model(input_ids=tokens[:1]).logits]
    assert difference(mixed, torch.cat(expected)) < 2e-6


def test_a_mixed_model_takes_pissa_among_its_kinds():
    from peft import LoHaConfig

    expected = logits(llama())
    model = get_peft_model(llama(), config(), mixed=True)
    assert torch.equal(logits(model), expected)
    model.add_adapter("loha", LoHaConfig(r=2, target_modules=["up_proj"]))
    model.set_adapter(["default", "loha"])
    assert torch.equal(logits(model), expected)


def test_a_model_with_lora_adapters_accepts_pissa_on_request():
    model = trained(llama(), LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    before = logits(model)
    with pytest.raises(ValueError, match="accept_pissa"):
        model.add_adapter("pissa", config(target_modules=["q_proj", "v_proj", "embed_tokens"]))
    pissa.accept_pissa(model)
    assert torch.equal(logits(model), before)
    model.add_adapter("pissa", config(target_modules=["q_proj", "v_proj", "embed_tokens"]))
    model.set_adapter("pissa")
    assert torch.equal(logits(model), logits(llama()))
    model.set_adapter("default")
    assert torch.equal(logits(model), before)


def test_dropout_acts_on_the_change_alone_and_is_warned_of():
    expected = logits(llama())
    with pytest.warns(UserWarning, match="principal directions"):
        options = config(lora_dropout=0.5)
    model = get_peft_model(llama(), options).train()
    with torch.no_grad():
        assert torch.equal(model(**inputs(model)).logits, expected)


@adapters_of_transformers
def test_transformers_own_adapter_methods_take_it():
    model = llama()
    expected = logits(model)
    model.add_adapter(config(), "mine")
    assert torch.equal(logits(model), expected)
    assert any("lora_A.mine" in name for name in trainable(model))


def test_embeddings_of_a_model_that_scales_them():
    class Scaled(nn.Embedding):
        embed_scale = torch.tensor(3.0)

        def forward(self, tokens):
            return super().forward(tokens) * self.embed_scale

    model = nn.Sequential(Scaled(32, 16), nn.Linear(16, 4))
    model[0].scalar_embed_scale = 3.0
    tokens = torch.arange(32)
    adapted = trained(model, config(target_modules=["0"]))
    change = adapted.base_model.model[0].get_delta_weight("default")
    with torch.no_grad():
        merged = (model[0].base_layer.weight + change) * 3
        assert difference(adapted.base_model.model[0](tokens), merged) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "does not support use_dora"),
        ({"lora_bias": True}, "does not support lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "Set svd and niter instead"),
        ({"svd": "fast"}, "'randomized' or 'exact'"),
        ({"lora_alpha": 0}, "must be positive"),
        ({"alpha_pattern": {"q_proj": -1}}, "must be positive"),
    ],
)
@pytest.mark.parametrize("kind", [PissaConfig, QPissaConfig])
def test_unsupported_options_are_errors(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 49, "target_modules": ["query"]}, r"r=49 is more than the 48 principal components that .*query \(48 × 48\) has"),
        ({"target_modules": ["nowhere"]}, "nowhere"),
        ({"target_modules": ["LayerNorm"]}, "no adapter for LayerNorm .*LayerNorm"),
    ],
)
def test_an_impossible_target_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        get_peft_model(bert(), config(**options))


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32, torch.bfloat16])
def test_packed_weights_are_not_taken_for_floats(tmp_path, storage):
    llama().save_pretrained(tmp_path)
    model = load(tmp_path, {"load_in_4bit": True, "bnb_4bit_quant_storage": storage})
    with pytest.raises(ValueError, match="is quantized: PiSSA cannot start from it. Use QPissaConfig"):
        get_peft_model(model, config())


def test_weights_of_another_kind_are_not_taken_for_floats():
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="not a matrix of floats"):
        get_peft_model(nn.Sequential(layer), config(r=2, target_modules=["0"]))


COMBINATIONS = ["cat", "linear", "svd"] + [
    kind + end for kind in ("ties", "dare_linear", "dare_ties", "magnitude_prune") for end in ("", "_svd")
]


PAIRS = (["default", "plain"], ["default", "second"], ["plain", "default"], ["second"])


@pytest.fixture(scope="module")
def saved_as_loras(tmp_path_factory):
    """A model with three adapters, and a model with the LoRAs that they are saved as."""
    folder = tmp_path_factory.mktemp("adapters")
    model = trained(llama(), config(target_modules=["q_proj", "embed_tokens"]))
    model.add_adapter("second", config(target_modules=["q_proj", "v_proj"], seed=1))
    model.add_adapter("plain", LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.save_pretrained(folder, save_embedding_layers=False)
    loras = PeftModel.from_pretrained(llama(), folder)
    for name in ("plain", "second"):
        loras.load_adapter(folder / name, name)
    return model, loras


@pytest.mark.parametrize(("combination", "adapters"), [*zip(COMBINATIONS, cycle(PAIRS))])
def test_combining_by_weights_is_that_of_the_saved_loras(saved_as_loras, combination, adapters):
    model, loras = saved_as_loras
    expected, before = logits(model), model.state_dict()
    configs = dict(model.peft_config)
    options = {"combination_type": combination, "density": None if combination in ("cat", "linear", "svd") else 0.5}
    for one in saved_as_loras:
        torch.manual_seed(0)
        combine = partial(pissa.add_weighted_adapter, one) if combination == "cat" else one.add_weighted_adapter
        combine(adapters, [0.5, -2.0][: len(adapters)], "both", **options)
    states = [get_peft_model_state_dict(one, adapter_name="both", save_embedding_layers=False) for one in saved_as_loras]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert type(model.peft_config["both"]) is LoraConfig
    assert all(model.peft_config[name] is configs[name] for name in configs)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert torch.equal(logits(model), expected)
    for one in saved_as_loras:
        one.set_adapter("both")
    assert difference(logits(model), logits(loras)) < 2e-6
    for one in saved_as_loras:
        one.set_adapter("default")
        one.delete_adapter("both")
    assert torch.equal(logits(model), expected) and model.state_dict().keys() == before.keys()


def test_a_failed_combination_changes_no_adapter():
    model = trained(llama(), config())
    model.add_adapter("second", config(r=2))
    expected = logits(model)
    with pytest.raises(ValueError, match="same r value"):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both", "linear")
    assert list(model.peft_config) == ["default", "second"] and torch.equal(logits(model), expected)
    assert all(type(one) is PissaConfig for one in model.peft_config.values())


def test_plain_adapters_beside_pissa_are_combined_by_weights():
    options = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    model = trained(llama(), config(target_modules=["q_proj", "v_proj"]))
    model.add_adapter("one", LoraConfig(**options))
    model.add_adapter("two", LoraConfig(**options))
    model.add_weighted_adapter(["one", "two"], [0.5, 2.0], "both", "cat")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    combined, (one, two) = layer.get_delta_weight("both"), map(layer.get_delta_weight, ("one", "two"))
    assert difference(combined, 0.5 * one + 2.0 * two) < 1e-5


def test_an_adapter_put_in_by_hotswap_is_an_error(tmp_path):
    model = trained(llama(), config())
    model.save_pretrained(tmp_path)
    hotswap_adapter(model, tmp_path, "default")
    with pytest.raises(ValueError, match="does not support hotswapping"):
        logits(model)


def test_a_merged_model_takes_no_adapter_and_has_no_report():
    model = trained(llama(), config())
    model.merge_adapter()
    with pytest.raises(HfExtError, match="unmerge_adapter"):
        pissa.report(model)
    with pytest.raises(ValueError, match="unmerge_adapter"):
        model.add_adapter("other", config())


def test_encoder_decoders_take_it():
    expected = logits(t5())
    model = trained(t5(), config())
    assert difference(logits(model), expected) > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=["4 bits", "8 bits"])
def test_quantized_layers_with_a_lora_take_no_pissa(tmp_path, options):
    small_llama().save_pretrained(tmp_path)
    model = get_peft_model(load(tmp_path, options), LoraConfig(r=2, target_modules=["q_proj"]))
    pissa.accept_pissa(model)
    with pytest.raises(ValueError, match="accept_pissa"):
        model.add_adapter("other", config(target_modules=["q_proj"]))


def test_a_scaled_adapter_is_scaled_in_its_change_alone():
    model = trained(llama(), config())
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    change = {name: layer.get_delta_weight("default") for name, layer in layers.items()}
    state = model.state_dict()
    for layer in layers.values():
        layer.scale_layer(0.5)
    assert all(difference(layer.get_delta_weight("default"), 0.5 * change[name]) < 1e-6 for name, layer in layers.items())
    model.load_state_dict(state)


def test_a_configuration_holds_only_what_the_user_set():
    options = config()
    before = options.to_dict()
    model = trained(llama(), options)
    changed = {name for name, value in options.to_dict().items() if value != before[name]}
    assert changed <= {"target_modules", "base_model_name_or_path", "revision", "auto_mapping"}  # which PEFT fills in
    assert len(pissa.report(model).layers) == 14


def test_a_configuration_serves_several_models():
    options = config()
    first, second = (get_peft_model(llama(), options) for _ in range(2))
    assert torch.equal(logits(first), logits(second))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(first)


def test_the_saved_head_is_trained_too():
    model = trained(bert(), config(task_type="SEQ_CLS", target_modules=["query"]))
    assert any(isinstance(module, ModulesToSaveWrapper) for module in model.modules())


def test_codes_of_eight_bits_are_no_weights_to_decompose():
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"quantized to torch.float8_e4m3fn.*Load the base in bfloat16"):
        get_peft_model(model, PissaConfig(r=4, target_modules=["0"]))


def test_weights_that_are_offloaded_are_not_skipped(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map=places, offload_folder=tmp_path / "offload")
    with pytest.raises(ValueError, match="The weight of model.layers.1.self_attn.q_proj is offloaded"):
        get_peft_model(model, PissaConfig(r=4, target_modules=["q_proj"]))
