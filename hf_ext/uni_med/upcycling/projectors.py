"""The projectors of vision-language models: which layers each class has, and how to find them in a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Layers:
    """Names of a projector's layers, within the projector."""

    hidden: tuple[str, ...]  # linear, from a visual token to hidden units, which only elementwise functions follow; gated: two
    output: str  # linear, to the embedding; or the parameter that the projector multiplies by instead
    token: str | None = None  # module whose output that parameter multiplies; None for a linear layer


#: The layers of the projectors of Transformers, each with the classes that have them.
_CLASSES = {
    Layers(("linear_1",), "linear_2"): (
        "LlavaMultiModalProjector", "LlavaNextMultiModalProjector", "LlavaNextVideoMultiModalProjector",
        "LlavaOnevisionMultiModalProjector", "VideoLlavaMultiModalProjector", "VipLlavaMultiModalProjector",
        "InternVLMultiModalProjector", "Lfm2VlMultiModalProjector", "Mistral3MultiModalProjector",
    ),
    Layers((), "mm_input_projection_weight", token="mm_soft_emb_norm"): ("Gemma3MultiModalProjector",),
    Layers((), "linear"): ("PaliGemmaMultiModalProjector",),
    Layers((), "linear_1"): ("Llama4MultiModalProjector",),
    Layers((), "modality_projection.proj"): ("Idefics3Connector", "SmolVLMConnector"),
    Layers(("mlp.0",), "mlp.2"): ("PatchMerger", "Qwen2_5_VLPatchMerger", "Qwen2_5OmniPatchMerger"),  # the first: Qwen2-VL
    Layers(("linear_fc1",), "linear_fc2"): (
        "Qwen3VLVisionPatchMerger", "Qwen3VLMoeVisionPatchMerger", "Qwen3_5VisionPatchMerger", "Qwen3_5MoeVisionPatchMerger",
    ),
    Layers(("gate_proj", "up_proj"), "down_proj"): ("Glm4vVisionPatchMerger", "Glm4vMoeVisionPatchMerger"),
}  # fmt: skip
PROJECTORS = {name: layers for layers, names in _CLASSES.items() for name in names}


def layers_of(projector: nn.Module, name: str) -> Layers:
    """Returns the layers of a projector, by its class or, for an unknown class, by its one or two linear layers."""
    if layers := PROJECTORS.get(type(projector).__name__):
        return layers
    linear = [name for name, module in projector.named_modules() if isinstance(module, nn.Linear)]
    if len(linear) not in (1, 2):
        raise ValueError(
            f"'{name}' ({type(projector).__name__}) has {len(linear)} linear layers, so it cannot become a mixture. Name a "
            "module with one linear layer, or with two and an elementwise activation in between."
        )
    return Layers(tuple(linear[:-1]), linear[-1])


def find_projectors(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Returns the names of a model's projectors: the modules of these names, whole or their ends, or else those of known
    classes."""
    modules = {name: module for name, module in model.named_modules() if not name.endswith(".base_layer")}
    if names is None:
        classes = {name: type(getattr(module, "base_layer", module)).__name__ for name, module in modules.items()}
        projectors = [name for name, class_name in classes.items() if class_name in PROJECTORS]
        if not projectors:
            raise ValueError(
                f"{type(model).__name__} has no projector of a known class ({', '.join(PROJECTORS)}). Name its module: "
                "CMoEConfig(connectors=[…])."
            )
        return projectors
    ends = tuple(f".{name}" for name in names)
    projectors = [name for name in modules if name in names or name.endswith(ends)]
    if missing := [name for name in names if not any(f".{projector}".endswith(f".{name}") for projector in projectors)]:
        raise ValueError(f"connectors={missing}: {type(model).__name__} has no such module.")
    return projectors


def weights_of(projector: nn.Module, layers: Layers) -> list[nn.Parameter]:
    """Returns the weight of each layer, those with hidden units first."""
    if layers.token is not None:
        return [projector.get_parameter(layers.output)]
    return [projector.get_submodule(name).weight for name in (*layers.hidden, layers.output)]  # type: ignore[misc]


def shapes_of(projector: nn.Module, layers: Layers) -> list[tuple[int, int]]:
    """Returns inputs and outputs of each layer, those with hidden units first. A quantized weight has another shape."""
    if layers.token is not None:
        inputs, outputs = projector.get_parameter(layers.output).shape
        return [(inputs, outputs)]
    linear: list[Any] = [projector.get_submodule(name) for name in (*layers.hidden, layers.output)]
    return [(layer.in_features, layer.out_features) for layer in linear]
