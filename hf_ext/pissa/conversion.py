"""Conversion of a LoRA, PiSSA or QPiSSA adapter into a plain LoRA of any rank, with the error that the rank makes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from hf_ext.display import percent, table
from hf_ext.errors import HfExtError
from hf_ext.pissa.adapters import active_adapter
from hf_ext.pissa.config import PissaConfig
from hf_ext.pissa.decomposition import initial_factors, principal_components, truncate
from hf_ext.pissa.experts import PissaExperts
from hf_ext.pissa.layer import PRINCIPAL, PissaVariant
from hf_ext.pissa.model import RESIDUAL, QPissaLinear
from hf_ext.pissa.quantization import dequantize
from hf_ext.storage.files import staged_folder
from hf_ext.storage.prefetch import progress

Onto = Literal["original", "quantized"]


@dataclass(frozen=True)
class LayerConversion:
    """The error of a LoRA of `rank` in one layer.

    It is the Frobenius norm of the difference of the weights, relative to that of the adapter's change (PiSSA, LoRA) or of the
    weight (QPiSSA, where the error includes the base's quantization error).
    """

    layer: str
    rank: int
    error: float


@dataclass(frozen=True)
class LoraConversion:
    """A converted LoRA, ready to be saved. `str()` of it is a table of the error in each layer.

    Attributes:
        kind: type of the original adapter: "pissa", "qpissa" or "lora".
    """

    config: LoraConfig
    state_dict: dict[str, torch.Tensor]
    layers: list[LayerConversion]
    kind: str = "pissa"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [(layer.layer, str(layer.rank), percent(layer.error, 2)) for layer in self.layers]
        return f"{table(('layer', 'rank', 'error'), rows)}\n\n{self.summary()}"

    def summary(self) -> str:
        errors = [100 * layer.error for layer in self.layers]
        of = "weights" if self.kind == "qpissa" else "adapter's change of the weights"
        mean = sum(errors) / len(errors)
        return f"{len(errors)} layers, error {mean:.2f} % of the {of} (Frobenius norm) in the mean, at most {max(errors):.2f} %"

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes adapter_config.json and adapter_model.safetensors, both or none."""
        with staged_folder(save_directory) as stage:
            save_file(self.state_dict, stage / "adapter_model.safetensors", metadata={"format": "pt"})
            self.config.save_pretrained(stage)


@torch.no_grad()
def convert_to_lora(
    model: PeftModel, rank: int | None = None, adapter_name: str | None = None, onto: Onto = "original"
) -> LoraConversion:
    """Converts an adapter of a model (PiSSA, QPiSSA, or a LoRA of a larger rank) into the best LoRA of a rank.

    Args:
        rank: rank of the LoRA, at most 2r. Defaults to 2r, which loses nothing of a PiSSA adapter.
        adapter_name: defaults to the active adapter.
        onto: for QPiSSA, the base of the LoRA: "original" for the base in full precision, "quantized" for the base as
            `load_in_4bit` quantizes it. With "quantized" the LoRA also makes up for the difference of the two quantized
            weights, and every rank loses something. Both read the base's original weights.

    Raises:
        HfExtError: the model has no such adapter, or it is not a LoRA.
        BaseModelError: the base's original weights are required and cannot be read.
    """
    adapter_name = adapter_name or active_adapter(model)
    layers = _layers(model, adapter_name)
    config = model.peft_config[adapter_name]
    if onto not in ("original", "quantized"):
        raise HfExtError(f"onto={onto!r} is not supported. Use 'original' or 'quantized'.")
    if rank is not None and rank < 1:
        raise HfExtError(f"rank={rank} is not supported: a LoRA has at least rank 1.")
    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    state = {
        key: tensor
        for key, tensor in state.items()
        if RESIDUAL not in key or f"{RESIDUAL}lora_" in key or key.endswith(f"{RESIDUAL}bias")  # lora_ of several parameters
    }
    records = []
    with progress("Converting", len(layers)) as bar:
        for name, module in layers.items():
            a, b = (key for part in "AB" for key in state if key.startswith(f"{name}.lora_") and f"_{part}" in key[len(name) :])
            shapes = state[a].shape[1:], state[b].shape[2:]  # of a convolution's kernels
            A, B = state[a].flatten(1), state[b].flatten(1) * module.scaling[adapter_name]
            if B.shape[1] != len(A):
                raise HfExtError(f"{name} is a convolution with groups. Adapters of such layers cannot be converted.")
            layer, kept, error = name.removeprefix("base_model.model."), min(rank or len(A), len(A)), 0.0
            if isinstance(module, QPissaLinear):
                B, A, error = _quantized(module, B, A, rank, onto)
                kept = len(A)
            elif isinstance(module, PissaExperts):
                A, B, kept, error = module.truncated(A, B, rank)
                layer = module.name
            elif kept < len(A):
                B, A, singular = truncate(B, A, kept)
                kept = len(A)
                error = (singular[kept:].square().sum() / singular.square().sum().clamp_min(1e-300)).sqrt().item()
            state[a], state[b] = A.reshape(-1, *shapes[0]).contiguous(), B.reshape(*B.shape, *shapes[1]).contiguous()
            records.append(LayerConversion(layer, kept, error))
            bar.update()
    kind = "qpissa" if config.peft_type == "QPISSA" else "pissa" if isinstance(config, PissaConfig) else "lora"
    lora = _config(config, records)
    if lora.task_type is None:  # PEFT does the same when it saves
        base = type(model.get_base_model() if isinstance(model, PeftModel) else model)
        lora.auto_mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    return LoraConversion(lora, state, records, kind)


def _layers(model: PeftModel, adapter_name: str) -> dict[str, LoraLayer]:
    """Returns the layers of an adapter by name.

    Raises:
        HfExtError: there are none, the adapter is not a LoRA, or it is merged.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and adapter_name in module.scaling
    }
    if not layers:
        raise HfExtError(f"The model has no LoRA or PiSSA adapter '{adapter_name}' to convert.")
    config = model.peft_config[adapter_name]
    variants = {type(layer.lora_variant.get(adapter_name)) for layer in layers.values()} - {type(None), PissaVariant}
    start = config.init_lora_weights
    if config.target_parameters and not isinstance(config, PissaConfig):
        raise HfExtError(
            f"The adapter '{adapter_name}' is a LoRA with target_parameters, which cannot be converted. Load an adapter that "
            "PiSSA has saved with config=PissaConfig.from_pretrained(folder)."
        )
    if (
        config.peft_type not in ("LORA", "QPISSA")
        or variants
        or config.lora_bias
        or start not in (True, False, "gaussian", PRINCIPAL)
    ):
        raise HfExtError(
            f"The adapter '{adapter_name}' is neither of PiSSA or QPiSSA nor a plain LoRA (type {config.peft_type.value}, "
            f"init_lora_weights={start!r}). Other adapters cannot be converted."
        )
    if any(module.merged for module in layers.values()):
        raise HfExtError("The model has merged adapters. Call unmerge_adapter() before you convert one.")
    return layers


def _quantized(module: QPissaLinear, B: torch.Tensor, A: torch.Tensor, rank: int | None, onto: Onto):
    """Returns the factors for a QPiSSA layer and the relative error of the weight that they make."""
    base = module.base_layer
    trained = base.dequantized() + B.float() @ A.float()
    weight = base.original_weight()
    kept = min(rank or len(A), *weight.shape)
    if onto == "original":
        start = weight
        if kept < len(A):
            B, A, _ = truncate(B, A, kept)
    else:
        quantization = base.before or base.quantization
        start = dequantize(quantization.quantize(weight.to(quantization.dtype)))
        B, A = initial_factors(principal_components(trained - start, kept), 1.0)
    error = torch.linalg.norm(trained - start - B.float() @ A.float()) / torch.linalg.norm(weight)
    return B, A, error.item()


def _config(config: LoraConfig, layers: list[LayerConversion]) -> LoraConfig:
    """Returns the configuration of a LoRA with the ranks of these layers and a scaling of 1."""
    ranks = [layer.rank for layer in layers]
    rank = max(set(ranks), key=ranks.count)
    lora = config.to_lora_config() if isinstance(config, PissaConfig) else LoraConfig(**config.to_dict())
    lora.r = lora.lora_alpha = rank
    # A key without the anchor would also match layers whose names end in it.
    lora.rank_pattern = {f"^{layer.layer}": layer.rank for layer in layers if layer.rank != rank}
    lora.alpha_pattern = dict(lora.rank_pattern)
    lora.use_rslora, lora.init_lora_weights, lora.inference_mode = False, True, True
    return lora
