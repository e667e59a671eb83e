"""A LoRA of models with odd layers, ties and vocabularies: the report is of what PEFT loads, and names what it leaves out."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny_adapters import difference, loaded, logits, products
from tiny_architectures import build, inputs
from tiny_models import fine_tuned, llama, perturb, tokenizer
from tiny_vision_language_models import build as build_with_vision
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ext import fm_delta
from hf_ext.adapters.landing import layers_that_load

#: Models of which PEFT does not take every layer, or matches more than one would think, and a layer that the adapter must leave
#: out.
ODD = {
    "DeepseekV2ForCausalLM": "model.layers.0.mlp.up_proj.weight",
    "AfmoeForCausalLM": "model.layers.1.mlp.router.gate.weight",
    "CLIPModel": "logit_scale",
    "MambaForCausalLM": "backbone.layers.0.mixer.out_proj.weight",
    "WhisperForConditionalGeneration": None,
    "IdeficsForVisionText2Text": "lm_head.weight",
    "DistilBertForSequenceClassification": None,
    "LlamaModel": None,
    "LevitForImageClassification": "classifier.batch_norm.num_batches_tracked",
}
#: Settings of those that compute nothing with the sizes of `tiny_architectures`.
SETTINGS = {
    "DeepseekV2ForCausalLM": {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_group": 1,
        "n_routed_experts": 4, "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "IdeficsForVisionText2Text": {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "additional_vocab_size": 2, "cross_layer_interval": 1, "tie_word_embeddings": False,
        "vision_config": {"embed_dim": 32, "image_size": 8, "patch_size": 4, "intermediate_size": 48, "num_attention_heads": 4,
            "num_hidden_layers": 1}},
    "LevitForImageClassification": {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2] * 3,
        "depths": [1] * 3, "key_dim": [4] * 3},
}  # fmt: skip
MORE_INPUTS = {
    "CLIPModel": {"pixel_values": torch.ones(2, 3, 32, 32)},
    "IdeficsForVisionText2Text": {
        "pixel_values": torch.ones(2, 1, 3, 8, 8),
        "image_attention_mask": torch.ones(2, 6, 1, dtype=torch.long),
    },
    "LevitForImageClassification": {"pixel_values": torch.ones(1, 3, 64, 64)},
}
WITH_MODULES = ("IdeficsForVisionText2Text", "LevitForImageClassification")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_layer_of_a_deep_model_loads(dtype):
    """PEFT casts what it loads to the type of the base, which holds few whole numbers."""
    with torch.device("meta"):
        sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=40)).to(dtype)
    layers = {name: tuple(module.weight.shape[::-1]) for name, module in model.model.named_modules(prefix="model")
              if isinstance(module, torch.nn.Linear)}  # fmt: skip
    loading = layers_that_load(model, layers, lambda names: LoraConfig(r=1, target_modules=sorted(names)))
    assert len(loading) == 280


@pytest.mark.parametrize("name, modules_to_save", [*((name, False) for name in ODD), *((name, True) for name in WITH_MODULES)])
def test_the_report_is_of_what_peft_loads(tmp_path, name, modules_to_save):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SETTINGS[name])) if name in SETTINGS else build(name)
    tuned = perturb(model)
    for buffer_name, buffer in tuned.named_buffers():
        if "num_batches" in buffer_name:
            buffer += 5
    model.save_pretrained(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "tuned")
    report = fm_delta.extract_lora(
        tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=2, modules_to_save=modules_to_save
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        adapted = loaded(model, tmp_path / "lora")
    assert products(adapted).keys() == {layer.layer for layer in report.layers}
    wholes = tuple(f"{module.partition(' ')[0]}." for module in report.whole)
    carried = {f"{layer.layer}.weight" for layer in report.layers}
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "tuned"))
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert {key for key in changed if not key.startswith(wholes)} - carried <= report.omitted.keys()
    assert ODD[name] is None or modules_to_save or ODD[name] in report.omitted
    with torch.no_grad():
        adapted.eval()(**[*inputs(model)][-1 if model.config.is_encoder_decoder else 0] | MORE_INPUTS.get(name, {}))


@pytest.mark.parametrize("case", ["own head", "only the head", "both"])
def test_the_files_decide_which_weights_are_tied(tmp_path, case):
    base, tuned = llama(tied=True), fine_tuned(llama(tied=True), tmp_path)
    tensors = load_file(tmp_path / "tuned/model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding + 0.05 if case == "own head" else embedding.clone()
    if case == "only the head":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "tuned/model.safetensors", metadata={"format": "pt"})
    tuned = LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora")
    assert report.whole == (["lm_head"] if case == "own head" else []) and "model.embed_tokens.weight" in report.omitted
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "all", rank=64, modules_to_save=True)
    assert not report.omitted and not any("head" in layer.layer for layer in report.layers)
    adapted = loaded(base, tmp_path / "all")
    assert difference(logits(adapted), logits(tuned)) < 1e-4 < difference(logits(base), logits(tuned))
    assert difference(logits(adapted.merge_and_unload()), logits(tuned)) < 1e-4


def test_tensors_that_loading_ignores_are_named(tmp_path):
    fine_tuned(llama(), tmp_path)
    for folder, value in (("base", 0.0), ("tuned", 1.0)):
        path = tmp_path / folder / "model.safetensors"
        save_file(load_file(path) | {"value_head.weight": torch.full((1, 64), value)}, path, metadata={"format": "pt"})
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora")
    assert report.omitted["value_head.weight"] == 64


@pytest.mark.parametrize("tokens", [98, 90])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_another_number_of_tokens(tmp_path, tied, tokens):
    base = llama(tied)
    model = copy.deepcopy(base)
    model.resize_token_embeddings(tokens, mean_resizing=False)
    model = perturb(model)
    base.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "tuned")
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=64)
    assert loaded(base, tmp_path / "lora") and "model.embed_tokens.weight" in report.omitted
    assert ("2 added tokens" in report.summary()) == (tokens == 98)
    tokenizer().save_pretrained(tmp_path / "tuned")
    assert fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", texts=["w5 w6"]).losses
    options = {"rank": 64, "modules_to_save": True, "texts": ["w5 w6"]}
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "all", **options)
    assert report.losses["base + LoRA"] == pytest.approx(report.losses["fine-tune"], rel=1e-3)
    call = f"base.resize_token_embeddings({tokens})"
    assert call in report.summary() and call in (tmp_path / "all/README.md").read_text() and not report.omitted
    base.resize_token_embeddings(tokens, mean_resizing=False)
    ids = {"input_ids": torch.tensor([[3, 5, tokens - 1]])}
    with torch.no_grad():
        assert difference(loaded(base, tmp_path / "all")(**ids).logits, model(**ids).logits) < 1e-4


def test_targets_match_no_module_of_another_kind(tmp_path):
    """The linear layers "0" and "2" of a Sequential are not the blocks 0 and 2."""
    model, _ = build_with_vision("qwen2_vl")
    fine_tuned(model, tmp_path)
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=2)
    layers = {layer.layer for layer in report.layers}
    assert products(loaded(model, tmp_path / "lora")).keys() == layers and "model.visual.merger.mlp.2" in layers
