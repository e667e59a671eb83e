"""Conversion of checkpoints of the authors' code (github.com/MSIIP/Uni-Med)."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig
from safetensors.torch import save_file

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.integration.cards import drop_card_for
from hf_ext.storage.files import staged_folder
from hf_ext.uni_med.configuration_uni_med import TASKS, UniMedConfig
from hf_ext.uni_med.modeling_uni_med import UniMedForConditionalGeneration
from hf_ext.uni_med.processing_uni_med import UniMedProcessor

Tensors = Mapping[str, torch.Tensor]

EXPERT = re.compile(r"(?:moe_layers|llm_proj)\.(\d+)\.(\d+)\.(weight|bias)")  # both names are in the files, for the same
LORA = re.compile(r"llm_model\.base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
ROUTER = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
BUFFER = re.compile(r"llm_model\..*rotary_emb\.inv_freq")
ROUTER_INPUT = {"router_task_token": "task_token", "router_token": "token", "router_task": "task"}
RESAMPLING = {"projection": "projection", "avgpool": "avg_pool", "maxpool": "max_pool"}
PEFT_PREFIX = "base_model.model."
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
LORA_ALPHA = 16  # the paper's, for checkpoints without the setting


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        options: the connector's options, fields of `UniMedConfig`.
        lora: rank and number of layers of the adapter; None without one.
    """

    out: str
    options: dict[str, Any]
    lora: tuple[int, int] | None

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.options.items())
        adapter = f"; a LoRA of rank {self.lora[0]} on {self.lora[1]} layers is in {self.out}/adapter" if self.lora else ""
        return f"{self.out} holds the model ({settings}){adapter}."


def convert_checkpoint(
    checkpoint: str | os.PathLike, out: str | os.PathLike, vision: str | os.PathLike, text: str | os.PathLike
) -> Converted:
    """Converts a checkpoint of the authors' code to a folder for `from_pretrained`, with a processor that makes their tokens
    (`prompt_format="authors"`). Its LoRA goes to `out`/adapter, for PEFT.

    Args:
        checkpoint: a .pth file with a dict `model` of tensors. No code from it is run.
        vision: folder or Hub id of the tower it was trained with, such as that of BLIP-2 with ViT-g.
        text: folder or Hub id of its language model, such as Llama-2-7B-chat.

    Raises:
        CorruptFileError: the file is not such a checkpoint.
        CheckpointError: it cannot be read, or its tensors do not fit the model: unknown names, missing tensors, or other
            shapes.
    """
    state, settings = _read(checkpoint)
    options, connector, adapter = split(state, settings)
    try:
        UniMedConfig(**options)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise CheckpointError(f"{checkpoint} has settings that do not fit together: {error}") from error
    model = UniMedForConditionalGeneration.from_vision_text_pretrained(vision, text, **options)
    _load(model, connector, checkpoint)
    layers = sorted({name.removeprefix(PEFT_PREFIX).rsplit(".lora_", 1)[0] for name in adapter})
    rank = len(adapter.get(f"{PEFT_PREFIX}{layers[0]}.lora_A.weight", ())) if layers else 0
    for layer in layers:
        _check_layer(model, layer, rank, adapter, checkpoint)
    stale = [] if layers else [Path("adapter", name) for name in ADAPTER_FILES]
    with staged_folder(out, stale) as stage:
        model.save_pretrained(stage)
        drop_card_for(Path(out), stage)
        processor = UniMedProcessor.from_vision_text_pretrained(vision, text, model, prompt_format="authors")
        processor.save_pretrained(stage)
    if not layers:
        return Converted(os.fspath(out), options, None)
    config = LoraConfig(
        r=rank,
        lora_alpha=settings.get("lora_alpha", LORA_ALPHA),
        lora_dropout=0.05,
        target_modules=layers,
        task_type="CAUSAL_LM",
        base_model_name_or_path=os.fspath(out),
        inference_mode=True,
    )
    with staged_folder(Path(out, "adapter")) as stage:
        save_file(adapter, stage / ADAPTER_FILES[0], metadata={"format": "pt"})
        config.save_pretrained(stage)
    return Converted(os.fspath(out), options, (rank, len(layers)))


def split(
    state: Tensors, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Splits a checkpoint into the connector's options (fields of `UniMedConfig`), its tensors, and the tensors of the LoRA,
    under the names of this package.

    Args:
        state: as the authors name them: llm_proj, moe_layers, router, task_tokens and llm_model with a LoRA.
        settings: the section `model` of their configuration; empty for that of their training script.

    Raises:
        CheckpointError: there are unknown tensors.
    """
    adapter, layers, rest = {}, {}, {}
    for name, tensor in state.items():
        if match := LORA.fullmatch(name):
            adapter[f"{PEFT_PREFIX}language_model.{match[1]}.lora_{match[2]}.weight"] = tensor.contiguous()
        elif match := EXPERT.fullmatch(name):
            layers[int(match[1]), int(match[2]), match[3]] = tensor
        elif not BUFFER.fullmatch(name):
            rest[name] = tensor
    tokens = {task: rest.pop(f"task_tokens.{task}") for task in TASKS if f"task_tokens.{task}" in rest}
    router = {name: rest.pop(f"router.{name}") for name in ROUTER if f"router.{name}" in rest}
    kinds = ("moe_linear", "moe_mlp") if layers else ("linear", "mlp")
    layers = layers or _projection(rest)
    if {layer for _, layer, _ in layers} not in ({0}, {0, 2}):  # the activation is layer 1
        raise CheckpointError("The checkpoint has no supported connector: linear, mlp2x_gelu, moe_linear or moe_mlp.")
    if rest:
        raise CheckpointError(
            f"The checkpoint has {len(rest)} unknown tensors, such as {', '.join(sorted(rest)[:3])}: only "
            "the connector, its router and task tokens, and a LoRA of the language model can be converted. The vision tower "
            "comes from --vision."
        )
    count = 1 + max(expert for expert, _, _ in layers)
    last = max(layer for _, layer, _ in layers)  # 0 if the experts are linear, or else 2
    options: dict[str, Any] = {
        "resampling": _named(settings, "resample_method", RESAMPLING, "projection"),
        "resampling_rate": settings.get("resample_rate", 4),
        "connector": kinds[last > 0],
    }
    connector = {
        "experts.down": _stacked(layers, count, last, "weight").transpose(1, 2),
        "experts.down_bias": _stacked(layers, count, last, "bias"),
    }
    if last > 0:
        connector["experts.up"] = _stacked(layers, count, 0, "weight")
        connector["experts.up_bias"] = _stacked(layers, count, 0, "bias")
    if "moe_mlp" in kinds:
        options["num_experts"] = count
        options["router"] = settings.get("router_type", "soft")
        options["num_experts_per_tok"] = settings.get("sparse_topk", 2)
        if options["router"] in ("soft", "sparse"):
            connector |= _router(router, tokens, settings, options)
    return options, {name: tensor.contiguous() for name, tensor in connector.items()}, adapter


def _projection(rest: dict[str, torch.Tensor]) -> dict[tuple[int, int, str], torch.Tensor]:
    """Removes the layers of a connector without a mixture from `rest`, and returns them as those of a single expert. Returns
    nothing if there are others, or parts of them."""
    tensors = {name: rest.pop(name) for name in list(rest) if name.startswith("llm_proj.")}
    for names in ({"llm_proj": 0}, {"llm_proj.0": 0, "llm_proj.2": 2}):
        keys = {f"{name}.{kind}": (0, layer, kind) for name, layer in names.items() for kind in ("weight", "bias")}
        if tensors.keys() == keys.keys():
            return {key: tensors[name] for name, key in keys.items()}
    return {}


def _router(router: Tensors, tokens: Tensors, settings: Mapping[str, Any], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the router and the task tokens, and adds their options."""
    if len(router) < len(ROUTER):
        raise CheckpointError(f"The checkpoint lacks the router, or part of it: it has {', '.join(router) or 'nothing of it'}.")
    options["router_input"] = _named(settings, "router_method", ROUTER_INPUT, "task_token")
    first, size = router["fc1.weight"], 0
    names = {"fc1.bias": "bias", "fc2.weight": "out_weight", "fc2.bias": "out_bias"}
    tensors = {f"router.{new}": router[old] for old, new in names.items()}
    if options["router_input"] != "token":
        shapes = {task: tuple(token.shape) for task, token in tokens.items()}
        if list(tokens) != list(TASKS) or len(set(shapes.values())) > 1 or shapes[TASKS[0]][:2] != (1, 1):
            raise CheckpointError(f"The router takes one task token of each of {', '.join(TASKS)}; there are {shapes}.")
        tensors["task_tokens"] = torch.cat([token[0] for token in tokens.values()])
        size = options["task_token_size"] = tensors["task_tokens"].shape[1]
        tensors["router.task_weight"] = first[:, :size]
    if options["router_input"] != "task":
        tensors["router.token_weight"] = first[:, size:]
    return tensors


def _read(path: str | os.PathLike) -> tuple[Tensors, dict[str, Any]]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read ({reason}); give the .pth of Uni-Med's authors.") from error
    except Exception as error:  # PyTorch's unpickler raises many types of errors for other files
        reason = str(error).partition("\n")[0]
        raise CorruptFileError(
            f"{path} is not a checkpoint that torch.load can read ({type(error).__name__}: {reason}); give the .pth of "
            "Uni-Med's authors."
        ) from error
    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CorruptFileError(f"{path} is not a checkpoint of Uni-Med's code: it has no dict 'model' of tensors.")
    for name, tensor in state.items():
        dims = 3 if str(name).startswith("task_tokens.") else 2 if str(name).endswith("weight") else 1
        if not (tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type == "cpu"):
            raise CorruptFileError(f"{path}: {name} does not hold floats ({tensor.dtype}, {tensor.layout}, {tensor.device}).")
        ours = str(name).startswith(("task_tokens.", "router.", "llm_proj.", "moe_layers.")) or LORA.fullmatch(str(name))
        if ours and tensor.dim() != dims:
            raise CorruptFileError(f"{path}: {name} has shape {tuple(tensor.shape)}, and {dims} dimensions are expected.")
    config = content.get("config")
    settings = config.get("model") if isinstance(config, dict) else None
    settings = settings if isinstance(settings, dict) else {}
    for name in ("resample_rate", "sparse_topk", "lora_alpha"):
        if not isinstance(settings.get(name, 1), int):
            raise CorruptFileError(f"{path}: its configuration says {name}={settings[name]!r}, which is not an integer.")
    return {str(name): tensor for name, tensor in state.items()}, settings


def _load(model: UniMedForConditionalGeneration, connector: Tensors, checkpoint: str | os.PathLike) -> None:
    expected = model.connector.state_dict()
    for name in sorted(expected.keys() | connector.keys()):
        shapes = [tuple(tensors[name].shape) if name in tensors else None for tensors in (connector, expected)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{checkpoint} does not fit these models: connector.{name} is {shapes[0]} there, and {shapes[1]} is expected."
            )
    model.connector.load_state_dict(connector)


def _check_layer(
    model: UniMedForConditionalGeneration, layer: str, rank: int, adapter: Tensors, checkpoint: str | os.PathLike
) -> None:
    B, A = (adapter.get(f"{PEFT_PREFIX}{layer}.lora_{which}.weight") for which in "BA")
    try:
        size = tuple(model.get_submodule(layer).weight.shape)
    except AttributeError as error:
        raise CheckpointError(f"{checkpoint} has a LoRA for {layer}, which the language model does not have.") from error
    if A is None or B is None or tuple(B.shape) != (size[0], rank) or tuple(A.shape) != (rank, size[1]):
        shapes = " and ".join("missing" if factor is None else str(tuple(factor.shape)) for factor in (B, A))
        raise CheckpointError(
            f"{checkpoint}: the LoRA's B and A of {layer} are {shapes}; its weight is {size}, the rank {rank}."
        )


def _stacked(layers: Mapping[tuple[int, int, str], torch.Tensor], count: int, layer: int, kind: str) -> torch.Tensor:
    """Stacks a tensor of all experts."""
    tensors: list[torch.Tensor] = []
    for expert in range(count):
        tensor = layers.get((expert, layer, kind))
        if tensor is None:
            raise CheckpointError(f"The checkpoint lacks llm_proj.{expert}.{layer}.{kind}.")
        tensors.append(tensor)
        if tensor.shape != tensors[0].shape:
            shapes = tuple(tensor.shape), tuple(tensors[0].shape)
            raise CheckpointError(f"llm_proj.{expert}.{layer}.{kind} has shape {shapes[0]}, and that of expert 0 {shapes[1]}.")
    return torch.stack(tensors)


def _named(settings: Mapping[str, Any], key: str, names: Mapping[str, str], default: str) -> str:
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, str) or value not in names:
        raise CheckpointError(f"The checkpoint's configuration says {key}={value!r}; it is one of {', '.join(names)}.")
    return names[value]
