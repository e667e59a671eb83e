"""Folders of tiny quantized models, each written by the library of its kind, or as files of the kind are laid out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_config
from tiny_models import gpt_oss
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, TorchAoConfig

BLOCK = 32  # rows and columns with one scale, in FP8
LARGEST = {("float", 8): 448.0, ("float", 4): 6.0, ("int", 8): 127.0, ("int", 4): 7.0}


def llama() -> PreTrainedModel:
    """In bfloat16, with layers wide enough for groups of 128."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96, tie_word_embeddings=False, dtype="bfloat16")
    return LlamaForCausalLM(config).to(torch.bfloat16)


def bitsandbytes(**options: Any) -> Callable[[PreTrainedModel, Path], None]:
    return lambda model, out: _requantized(model, out, BitsAndBytesConfig(**options))


def torchao(name: str) -> Callable[[PreTrainedModel, Path], None]:
    def write(model: PreTrainedModel, out: Path) -> None:
        from torchao import quantization

        _requantized(model, out, TorchAoConfig(getattr(quantization, name)()))

    return write


def _requantized(model: PreTrainedModel, out: Path, config: Any) -> None:
    plain = out.with_name(f"{out.name}-plain")
    model.save_pretrained(plain)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu").save_pretrained(out)


def compressed_tensors(scheme: str) -> Callable[[PreTrainedModel, Path], None]:
    def write(model: PreTrainedModel, out: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
            preset_name_to_scheme,
        )

        groups = {"group_0": preset_name_to_scheme(scheme, targets=["Linear"])}
        apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                _choose_scales(module)
                module.quantization_status = QuantizationStatus.FROZEN
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(out)
        compressor.update_config(out)

    return write


def _choose_scales(module: torch.nn.Module) -> None:
    weights, scale, kind = module.weight.data.float(), module.weight_scale, module.quantization_scheme.weights
    largest = LARGEST[str(getattr(kind.type, "value", kind.type)), kind.num_bits]
    size = (weights.reshape(weights.shape[0], scale.shape[-1], -1) if scale.dim() > 1 else weights).abs()
    size = size.amax(-1) if scale.dim() > 1 else size.max()
    if hasattr(module, "weight_global_scale"):
        whole = LARGEST["float", 8] * LARGEST["float", 4] / size.max()
        module.weight_global_scale.data.fill_(whole)
        size = size * whole
    scale.data.copy_((size / largest).reshape(scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.zero_()


def fp8(model: PreTrainedModel, out: Path) -> None:
    """One scale for a block of 32 × 32 weights, as the checkpoints of DeepSeek and Qwen have for 128 × 128."""

    def codes(name: str, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = (size // BLOCK for size in weights.shape)
        blocks = weights.float().view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST["float", 8]
        quantized = (blocks / scales).to(torch.float8_e4m3fn).view(weights.shape)
        return {f"{name}.weight": quantized, f"{name}.weight_scale_inv": scales.view(rows, columns).contiguous()}

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    _rewritten(model, out, settings, codes)


def packed(method: str) -> Callable[[PreTrainedModel, Path], None]:
    """Codes of 4 bits, eight in an integer, as GPTQ and AWQ pack them."""

    def codes(name: str, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = weights.float().abs().amax(1, keepdim=True) / LARGEST["int", 4]
        nibbles = ((weights.float() / scales).round() + 8).to(torch.int32).reshape(weights.shape[0], -1, 8)
        words = (nibbles << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1).to(torch.int32)
        return {f"{name}.qweight": words, f"{name}.scales": scales.half()}

    return lambda model, out: _rewritten(model, out, {"quant_method": method, "bits": 4, "group_size": -1}, codes)


def mxfp4(model: PreTrainedModel, out: Path) -> None:
    """The experts of gpt-oss: two codes of 4 bits in a byte, and an exponent for 32 of them. Their last bits are arbitrary."""

    def codes(name: str, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        if weights.dim() < 3:
            return {f"{name}.weight": weights}
        experts, inputs, outputs = weights.shape
        bits = weights.float().transpose(1, 2).contiguous().view(torch.int32)
        pairs = (bits >> 20 & 255).to(torch.uint8).view(experts, outputs, inputs // 32, 32)[..., :16].contiguous()
        scales = (bits >> 23 & 255).to(torch.uint8).view(experts, outputs, inputs // 32, 32).amax(-1)
        return {f"{name}_blocks": pairs, f"{name}_scales": scales.clamp(118, 124)}

    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _rewritten(model, out, {"quant_method": "mxfp4", "modules_to_not_convert": plain}, codes)


def _rewritten(
    model: PreTrainedModel, out: Path, settings: dict, codes: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
) -> None:
    """Saves a model, and replaces the weights of its projections."""
    model.save_pretrained(out)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(out / "model.safetensors").items():
        is_quantized = name.removesuffix(".weight").endswith("_proj") and tensor.dim() > 1
        tensors |= codes(name.removesuffix(".weight"), tensor) if is_quantized else {name: tensor}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    edit_config(out, quantization_config=settings)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == settings


#: By kind: how a model is written. Those of STORED_ONLY need libraries to load that have no build for this system.
KINDS: dict[str, Callable[[PreTrainedModel, Path], None]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "bitsandbytes-nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "bitsandbytes-int8": bitsandbytes(load_in_8bit=True),
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-fp8": torchao("Float8WeightOnlyConfig"),
    **{
        f"compressed-tensors-{scheme}": compressed_tensors(scheme)
        for scheme in ("FP8", "W4A16", "W8A8", "NVFP4A16", "MXFP4A16")
    },
    "gptq": packed("gptq"),
    "awq": packed("awq"),
}
STORED_ONLY = ("gptq", "awq")
LIBRARIES = ("bitsandbytes", "torchao", "compressed_tensors")


def model_for(kind: str) -> PreTrainedModel:
    return gpt_oss().to(torch.bfloat16) if kind == "mxfp4" else llama()


def library_of(kind: str) -> str | None:
    """The library that writes and reads a kind; None for Transformers alone."""
    return next((name for name in LIBRARIES if kind.replace("-", "_").startswith(name)), None)
