"""PissaConfig in PEFT: the base stays as it is, training starts where the paper's does, and adapters share one base."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import warnings
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraLayer
from tiny_adapters import Convolutions, difference, load, logits, moved, small_llama, trainable, trained
from tiny_models import MODELS, VOCABULARY, bert, gpt2, inputs, llama, same_bits, t5
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_ext import AdapterError, PissaConfig, QPissaConfig
from hf_ext.pissa.layer import PissaLayer

EVERYWHERE = "all-linear"
LAYERS = ["wide", "pointwise"]
CASES = {
    "llama": (llama, {}),
    "bf16": (MODELS["llama_bf16"].build, {}),
    "gpt2": (gpt2, {}),  # Conv1D
    "bert": (bert, {}),  # its classifier has fewer components than r
    "t5": (t5, {}),
    "embeddings": (llama, {"target_modules": ["embed_tokens", "lm_head", "down_proj"]}),
    "rslora": (llama, {"use_rslora": True, "rank_pattern": {"q_proj": 8}}),
    "patterns": (llama, {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 12}}),
    "some layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
    "exact": (llama, {"init_lora_weights": "pissa"}),
    "four rounds": (llama, {"init_lora_weights": "pissa_niter_4"}),
    "saved modules": (bert, {"target_modules": ["query"], "modules_to_save": ["classifier"]}),
    "biases": (bert, {"target_modules": ["query"], "bias": "lora_only"}),
    "DoRA": (llama, {"use_dora": True, "lora_alpha": 8}),
    "DoRA bf16": (MODELS["llama_bf16"].build, {"use_dora": True}),
    "DoRA gpt2": (gpt2, {"use_dora": True}),
    "DoRA embeddings": (llama, {"use_dora": True, "target_modules": ["embed_tokens", "down_proj"], "use_rslora": True}),
}
for dimensions in (1, 2, 3):
    for dora in (False, True):
        options = {"target_modules": LAYERS, "lora_alpha": 2, "use_dora": dora}
        CASES[f"{'DoRA ' if dora else ''}conv{dimensions}d"] = (partial(Convolutions, dimensions), options)
every_case = pytest.mark.parametrize(("build", "options"), CASES.values(), ids=CASES)
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Setting `save_embedding_layers`", ".*fan_in_fan_out", "Model with")
]


def config(**options) -> PissaConfig:
    return PissaConfig(**({"r": 4, "target_modules": EVERYWHERE} | options))


def tolerance(model: nn.Module) -> float:
    return 3e-2 if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()) else 1e-5


@every_case
def test_training_leaves_the_base_unchanged_and_disabling_gives_it_back(build, options):
    base = build()
    expected, weights = logits(base), copy.deepcopy(base.state_dict())
    model = get_peft_model(base, config(**options))
    assert torch.equal(logits(model), expected)
    moved(model)
    assert not torch.equal(logits(model), expected)
    state = {re.sub(r"base_layer\.|original_module\.", "", name): tensor for name, tensor in base.state_dict().items()}
    trained_biases = ".bias" if options.get("bias") else "\0"
    assert all(same_bits(state[name], tensor) for name, tensor in weights.items() if not name.endswith(trained_biases))
    if not {"bias", "modules_to_save"} & options.keys():
        with model.disable_adapter():
            assert torch.equal(logits(model), expected)
        assert torch.equal(logits(model.unload()), expected)


@every_case
def test_merging_and_unmerging_keep_what_the_model_computes(build, options):
    model = trained(build(), config(**options))
    expected = logits(model)
    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        assert difference(logits(model), expected) < tolerance(model)
        model.unmerge_adapter()
        assert difference(logits(model), expected) < tolerance(model)
    merged = model.merge_and_unload()
    assert difference(logits(merged), expected) < tolerance(merged)
    assert not any(isinstance(module, LoraLayer) for module in merged.modules())


@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("alpha", [4, 8])
def test_gradients_at_the_start_are_those_of_pefts_own_pissa(build, alpha):
    ours = get_peft_model(build(), config(init_lora_weights="pissa", lora_alpha=alpha))
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


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_start_from_the_principal_components(dimensions):
    base = Convolutions(dimensions)
    model = get_peft_model(Convolutions(dimensions), config(init_lora_weights="pissa", lora_alpha=8, target_modules=LAYERS))
    A, B = model.base_model.model.wide.factors("default")
    U, S, Vh = torch.linalg.svd(base.wide.weight.flatten(1), full_matrices=False)
    assert A.shape[:2] == (4, 3) and B.shape[:2] == (8, 4)
    assert difference(2 * B.flatten(1) @ A.flatten(1), U[:, :4] * S[:4] @ Vh[:4]) < 1e-6


@pytest.mark.parametrize("use_dora", [False, True])
def test_without_autocast_an_adapter_has_the_dtype_of_its_base(use_dora):
    base = MODELS["llama_bf16"].build()
    expected = logits(base)
    model = get_peft_model(base, config(use_dora=use_dora), autocast_adapter_dtype=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), expected)


def test_adapters_of_different_rank_share_one_base(tmp_path):
    expected = logits(llama())
    model = trained(llama(), config(), seed=1)
    one = logits(model)
    model.add_adapter("defaulted", config(r=6, use_dora=True))  # a name that begins with the other's
    assert torch.equal(logits(model), one)
    model.set_adapter("defaulted")
    assert torch.equal(logits(model), expected)
    moved(model, seed=2)
    other = logits(model)
    model.set_adapter("default")
    assert torch.equal(logits(model), one)
    model.base_model.set_adapter(["default", "defaulted"])
    both = logits(model)
    assert difference(both, one) > 1e-3 and difference(both, other) > 1e-3
    model.save_pretrained(tmp_path)
    for folder, rank, alone in ((tmp_path, 8, one), (tmp_path / "defaulted", 12, other)):
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == rank
        assert difference(logits(PeftModel.from_pretrained(llama(), folder)), alone) < 2e-6
    model.delete_adapter("default")
    model.set_adapter("defaulted")
    assert torch.equal(logits(model), other)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)


def test_a_batch_mixes_adapters():
    model = trained(llama(), config())
    model.add_adapter("second", config(r=2))
    model.set_adapter("second")
    moved(model, seed=2)
    tokens = inputs(model)["input_ids"][:1].repeat(3, 1)
    model.eval()
    with torch.no_grad():
        mixed = model(input_ids=tokens, adapter_names=["default", "second", "__base__"]).logits
        expected = [model(input_ids=tokens[:1]).logits]
        model.set_adapter("default")
        expected.insert(0, model(input_ids=tokens[:1]).logits)
        with model.disable_adapter():
            expected.append(model(input_ids=tokens[:1]).logits)
    assert difference(mixed, torch.cat(expected)) < 2e-6
    embedded = trained(llama(), config(target_modules=["embed_tokens"])).eval()
    with pytest.raises(ValueError, match="cannot mix adapters in a batch"):
        embedded(input_ids=tokens, adapter_names=["default"] * 3)


def test_dropout_acts_on_the_change_alone_and_is_warned_of():
    expected = logits(llama())
    with pytest.warns(UserWarning, match="principal directions"):
        options = config(lora_dropout=0.5)
    model = get_peft_model(llama(), options).train()
    with torch.no_grad():
        assert torch.equal(model(**inputs(model)).logits, expected)


@pytest.mark.parametrize("use_dora", [False, True])
def test_embeddings_of_a_model_that_scales_them(use_dora):
    class Scaled(nn.Embedding):
        embed_scale = torch.tensor(3.0)

        def forward(self, tokens):
            return super().forward(tokens) * self.embed_scale

    model = nn.Sequential(Scaled(32, 16), nn.Linear(16, 4))
    model[0].scalar_embed_scale = 3.0
    tokens = torch.arange(32)
    adapted = trained(model, config(target_modules=["0"], use_dora=use_dora))
    layer = adapted.base_model.model[0]
    with torch.no_grad():
        expected = layer(tokens)
        adapted.merge_adapter()
        assert difference(layer(tokens), expected) < 1e-5


@pytest.mark.parametrize(("options", "message"), [
    ({"lora_bias": True}, "does not support lora_bias"),
    ({"target_parameters": ["experts.down_proj"]}, "does not support target_parameters"),
    ({"init_lora_weights": "olora"}, "Use 'pissa'"),
    ({"init_lora_weights": "pissa_niter_many"}, "Use 'pissa'"),
    ({"init_lora_weights": None}, "Use 'pissa'"),
    ({"r": 0}, "r=0 is not supported"),
    ({"lora_alpha": 0}, "must be positive"),
    ({"alpha_pattern": {"q_proj": -1}}, "must be positive"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [PissaConfig, QPissaConfig])
def test_unsupported_options_are_errors(kind, options, message):
    with pytest.raises(AdapterError, match=message):
        kind(**options)


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32, torch.bfloat16])
def test_packed_weights_are_not_taken_for_floats(tmp_path, storage):
    llama().save_pretrained(tmp_path)
    model = load(tmp_path, {"load_in_4bit": True, "bnb_4bit_quant_storage": storage})
    with pytest.raises(ValueError, match="is quantized .*: PiSSA cannot start from it. Use QPissaConfig"):
        get_peft_model(model, config())


class PaddedConv(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.pad(x, (1, 1, 1, 1)))


class ScaledConv(nn.Conv2d):
    def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(x, 2 * weight, bias)


class Positions(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 2)


class Router(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


class Plain(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


def linear(dtype: torch.dtype = torch.float32, value: float = 0.0) -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(torch.full((64, 64), value).to(dtype), requires_grad=False)
    return layer


def compiled(name: str) -> nn.Module:
    model = llama()
    module = torch.compile(model.get_submodule(name), backend="eager")
    if name:
        model.set_submodule(name, module)
    return model if name else module


def partitioned() -> nn.Module:
    """As DeepSpeed's ZeRO-3 leaves it."""
    model = llama()
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    return model


OTHER_FORWARD = "^0: PiSSA has no adapter for {}, whose forward is not that of"
OTHER_CONV = "0: PiSSA does not support convolutions with groups, dilation or a padding_mode"
QUANTIZED = "is quantized .{}.*load the base in bfloat16"
NOT_FINITE = "^0: The weight has NaN or infinite values"
IMPOSSIBLE = {  # by name: the model, its targets and the error
    "no such layer": (bert, ["nowhere"], "nowhere"),
    "a norm": (bert, ["LayerNorm"], "LayerNorm: PiSSA has no adapter for LayerNorm"),
    "compiled": (lambda: compiled(""), ["q_proj"], "_orig_mod' is compiled, .* Call torch.compile after this"),
    "a compiled layer": (lambda: compiled("model.layers.1"), ["q_proj"], "_orig_mod' is compiled, .* Call torch.compile after"),
    "ZeRO-3": (partitioned, ["q_proj"], r"q_proj: The weight of .* is a shard of shape \(0,\).*ZeRO-3"),
}
for dtype in (torch.int8, torch.float8_e4m3fn):
    IMPOSSIBLE[str(dtype)] = (partial(linear, dtype), ["0"], QUANTIZED.format(dtype))
for value in (math.nan, math.inf):
    IMPOSSIBLE[str(value)] = (partial(linear, value=value), ["0"], NOT_FINITE)
for options in ({"groups": 2}, {"dilation": 2}, {"padding_mode": "circular"}):
    IMPOSSIBLE[str(options)] = (partial(nn.Conv2d, 4, 8, 3, padding=1, **options), ["0"], OTHER_CONV)
for kind, *sizes in ((PaddedConv, 3, 8, 3), (ScaledConv, 3, 8, 3), (Positions, 16, 8), (Router, 16, 8)):
    IMPOSSIBLE[kind.__name__] = (partial(kind, *sizes), ["0"], OTHER_FORWARD.format(kind.__name__))


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("start", [True, "pissa"])
def test_an_impossible_target_is_an_error_that_names_its_layer(name, start):
    build, targets, message = IMPOSSIBLE[name]
    model = build() if targets != ["0"] else nn.Sequential(build())
    with pytest.raises(ValueError, match=message):
        get_peft_model(model, config(target_modules=targets, init_lora_weights=start))


@pytest.mark.parametrize("layer", [Plain(16, 8), nn.Conv2d(8, 4, 1)], ids=repr)
def test_a_layer_that_only_looks_odd_is_adapted(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_peft_model(nn.Sequential(layer), config(target_modules=["0"]))


def test_an_offloaded_weight_is_an_error(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map=places, offload_folder=tmp_path / "offload")
    with pytest.raises(ValueError, match="layers.1.self_attn.q_proj: The weight of .* is offloaded"):
        get_peft_model(model, config(target_modules=["q_proj"]))


def moe() -> Qwen3MoeForCausalLM:
    """Its first layer is dense."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, mlp_only_layers=[0], num_experts=4, num_experts_per_tok=2))


def test_targets_that_peft_would_move_to_experts_are_an_error():
    model = moe()
    for targets in (["q_proj", "gate_proj", "up_proj"], r".*\.\w+_proj"):
        with pytest.raises(ValueError, match=r"factors of \d target_modules of this model, such as 'model.layers.0.mlp"):
            get_peft_model(model, config(target_modules=targets))
    assert get_peft_model(model, config(target_modules=["q_proj", "v_proj"]))


def test_all_linear_leaves_out_what_peft_would_move_to_experts(tmp_path):
    base = moe()
    model = trained(copy.deepcopy(base), config(target_modules="all-linear"))
    layers = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, PissaLayer)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits(again), logits(model))


def test_adapters_of_other_types_are_not_mixed_with_pissa():
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="different peft types"):
        model.add_adapter("other", config())
    with pytest.raises(ValueError, match="q_proj already has an adapter of another type"):
        get_peft_model(model.base_model.model, config(target_modules=["q_proj"]))
    inner = get_peft_model(llama(), config(target_modules=["q_proj"])).base_model.model
    with pytest.raises(ValueError, match="takes no adapter of LoraConfig. Save them, and load"):
        LoraModel(inner, LoraConfig(r=2, target_modules=["q_proj"]), "other")


def test_combining_by_weights_and_adding_to_a_merged_model_are_errors():
    model = trained(llama(), config())
    expected = logits(model)
    with pytest.raises(ValueError, match=r"\['default'\] are in PiSSA's training form"):
        model.add_weighted_adapter(["default"], [0.5], "half", "cat")
    assert list(model.peft_config) == ["default"] and torch.equal(logits(model), expected)
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        model.add_adapter("other", config())


def test_a_scaled_adapter_is_scaled_in_its_change_alone():
    model = trained(llama(), config())
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    change = {name: layer.get_delta_weight("default") for name, layer in layers.items()}
    for layer in layers.values():
        layer.scale_layer(0.5)
    assert all(difference(layer.get_delta_weight("default"), 0.5 * change[name]) < 1e-6 for name, layer in layers.items())


def test_a_configuration_holds_only_what_the_user_set():
    options = config()
    before = options.to_dict()
    first, second = (get_peft_model(llama(), options) for _ in range(2))
    assert torch.equal(logits(first), logits(second))
    changed = {name for name, value in options.to_dict().items() if value != before[name]}
    assert changed <= {"target_modules", "base_model_name_or_path", "revision", "auto_mapping"}  # which PEFT fills in
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(first)


def test_one_logged_line_says_how_much_energy_the_adapter_starts_with(caplog):
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model[0].weight.data = torch.diag(torch.tensor([4.0, 1, 1, 1, 1, 1, 1, 1]))
    with caplog.at_level(logging.INFO, "hf_ext.pissa.model"):
        get_peft_model(model, config(r=1, target_modules=["0"], init_lora_weights="pissa"))
    assert [record.message for record in caplog.records] == [
        "The adapter 'default' starts with 69.6 % of the weights' energy (mean over 1 layers)."
    ]


def test_one_warning_says_what_cannot_learn(caplog):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    model.layers[1].linear1.weight.data.zero_()
    with caplog.at_level(logging.WARNING, "hf_ext.pissa.model"):
        get_peft_model(copy.deepcopy(model), config(r=20))
        get_peft_model(model, config(target_modules=["layers.0.linear1"]))
    assert [record.message for record in caplog.records] == [
        "The adapter 'default' learns nothing in 2 layers, such as 'layers.0.self_attn.out_proj': nn.MultiheadAttention uses "
        "their weights without calling them. Name them in exclude_modules.",
        "40 components of the adapter 'default' are zero and learn nothing, in 6 layers, such as 'layers.0.self_attn.out_proj':"
        " the weight is zero or has fewer than r components. Lower r, or exclude them.",
    ]
    with pytest.warns(UserWarning, match="'pissa_niter_0' takes one round"):
        config(init_lora_weights="pissa_niter_0")


def test_peft_cuts_an_adapter_to_a_smaller_rank(tmp_path):
    from peft.tuners.lora.conversion import save_as_lora

    model = trained(small_llama(), config(task_type="CAUSAL_LM"))
    save_as_lora(tmp_path, model, rank=8)
    assert difference(logits(PeftModel.from_pretrained(small_llama(), tmp_path)), logits(model)) < 1e-5
