"""The parts of a saved model that a LoRA can carry, under the names that PEFT gives them, and the LoRA's configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, TaskType, inject_adapter_in_model
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_ext.errors import CheckpointError
from hf_ext.integration.weight_plan import Loaded, plan_of
from hf_ext.storage.config_file import CONFIG, ENCODINGS, storage_settings

#: PEFT's types of task by the endings of Transformers' classes.
TASKS = {
    "ForCausalLM": TaskType.CAUSAL_LM,
    "LMHeadModel": TaskType.CAUSAL_LM,
    "ForSequenceClassification": TaskType.SEQ_CLS,
    "ForTokenClassification": TaskType.TOKEN_CLS,
    "ForQuestionAnswering": TaskType.QUESTION_ANS,
}
#: The heads that PEFT trains and saves whole for these types of task.
HEADS = {
    TaskType.SEQ_CLS: {"classifier", "score"},
    TaskType.TOKEN_CLS: {"classifier", "score"},
    TaskType.QUESTION_ANS: {"qa_outputs"},
}
PREFIX = "base_model.model."  # of all names in PEFT's files
TOKENS = "token_adapter.trainable_tokens_delta"  # the rows of an embedding there, after the module's name


@dataclass(frozen=True)
class Layer:
    """A linear layer: the name of its weight in the checkpoint and in the base, and whether that is inputs × outputs."""

    tensor: str
    twin: str
    transposed: bool


@dataclass(frozen=True)
class Experts:
    """A parameter with a matrix for each expert: its origin in the checkpoint and in the base, its shape, and whether the
    matrices are inputs × outputs."""

    tuned: Loaded
    base: Loaded
    shape: tuple[int, int, int]
    transposed: bool


@dataclass
class LoraLayers:
    """The parts of a model, by the names of its modules and parameters.

    Attributes:
        model: the model, without weights.
        layers: the linear layers, by module.
        experts: the experts' matrices, by parameter.
        whole: the tensors of modules that the adapter must hold whole, such as heads that the base does not have, by parameter.
        others: the tensors of all other parameters and their counterparts in the base, by parameter: norms, biases, embeddings,
            convolutions, and what else has no LoRA.
        tokens: the tensors of embeddings and the rows that the adapter holds, by module.
    """

    model: PreTrainedModel
    layers: dict[str, Layer] = field(default_factory=dict)
    experts: dict[str, Experts] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    others: dict[str, tuple[str, str]] = field(default_factory=dict)
    tokens: dict[str, tuple[str, list[int]]] = field(default_factory=dict)

    @property
    def task(self) -> TaskType | None:
        return task_of(self.model)

    def modules(self, parameters: Iterable[str]) -> list[str]:
        """Returns the modules that PEFT must hold whole, so that these parameters are saved."""
        return sorted({self._head(name) or name.rpartition(".")[0] for name in parameters})

    def carry_others(self, changed: Iterable[str], rows: Callable[[str], list[int]]) -> None:
        """Moves the parameters of modules with a changed parameter from `others` to `whole`, except those of linear layers, of
        modules with parts of their own, and weights that are tied to others. Moves the changed rows of the input embedding to
        `tokens` if it is tied or most rows are unchanged.

        Args:
            changed: the names of parameters.
            rows: returns the indices of the rows of a parameter that changed.
        """
        tied = {*self.model.all_tied_weights_keys, *self.model.all_tied_weights_keys.values()}
        embedding = self.model.get_input_embeddings()
        modules = {name.rpartition(".")[0] for name in changed if name in self.model.state_dict()} - self.layers.keys()
        modules -= {name.rpartition(".")[0] for name in self.experts}
        for module in modules:
            parameters = {name for name in self.others if name.rpartition(".")[0] == module}
            if isinstance(embedding, nn.Embedding) and self.model.get_submodule(module) is embedding:
                (name,) = parameters
                indices = rows(name)
                if name in tied or len(indices) < embedding.num_embeddings // 2:
                    self.tokens[module] = (self.others.pop(name)[0], indices)
                    continue
            if not tied & parameters and not any(self.model.get_submodule(module).children()):
                self.whole |= {name: self.others.pop(name)[0] for name in parameters}

    def config(self, ranks: Mapping[str, int], base: str) -> LoraConfig:
        """Returns the configuration of a LoRA with these ranks, by layer or parameter of experts, and a scaling of 1.

        `r` is the largest rank: servers reserve memory for it.
        """
        linear = {name for name, module in self.model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        layers = ranks.keys() - self.experts.keys()
        endings = {name.rpartition(".")[2] for name in layers}
        all_of_endings = {name for name in linear if name.rpartition(".")[2] in endings}
        rank = max(ranks.values())
        patterns = {f"^{name}": number for name, number in ranks.items() if number != rank}
        kind = type(self.model)
        return LoraConfig(
            r=rank,
            lora_alpha=rank,
            rank_pattern=patterns,
            alpha_pattern=dict(patterns),
            target_modules=sorted(endings if all_of_endings == layers else layers),
            target_parameters=sorted(ranks.keys() & self.experts.keys()) or None,
            modules_to_save=self.modules(self.whole) or None,
            trainable_token_indices={module: rows for module, (_, rows) in self.tokens.items()} or None,
            fan_in_fan_out=any(self.layers[name].transposed for name in layers),
            task_type=self.task,
            auto_mapping=None if self.task else {"base_model_class": kind.__name__, "parent_library": kind.__module__},
            base_model_name_or_path=base,
            inference_mode=True,
        )

    def places(self, config: LoraConfig) -> dict[str, str]:
        """Returns the modules that hold the LoRA of each parameter of experts in PEFT's model. Where a module has several
        parameters, PEFT nests them."""
        from peft.tuners.lora.layer import ParamWrapper  # here, so that models without experts do not depend on it

        model = inject_adapter_in_model(config, deepcopy(self.model))
        wrappers = {name: module for name, module in model.named_modules() if isinstance(module, ParamWrapper)}
        return {f"{name.replace('.base_layer', '')}.{module.parameter_name}": name for name, module in wrappers.items()}

    def _head(self, parameter: str) -> str | None:
        """Returns the module of a head that PEFT saves whole, if the parameter belongs to one."""
        parts = parameter.split(".")
        heads = HEADS.get(self.task, set())
        return next((".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if part in heads), None)


def task_of(model: PreTrainedModel) -> TaskType | None:
    """Returns PEFT's type of task for a model's class; None if it has none."""
    name = type(model).__name__
    if name.endswith("ForConditionalGeneration") and model.config.is_encoder_decoder:
        return TaskType.SEQ_2_SEQ_LM
    return next((task for ending, task in TASKS.items() if name.endswith(ending)), None)


def require_unquantized(folder: Path) -> None:
    """Raises CheckpointError if the weights of a model's folder are quantized."""
    method = storage_settings(folder).get("quant_method")
    if method is not None and method not in ENCODINGS:
        raise CheckpointError(f"{folder} is quantized ({method}). Give the model with its weights in 16 or 32 bits.")


def lora_layers(folder: Path, tuned: Iterable[str], base: Iterable[str], with_experts: bool = False) -> LoraLayers:
    """Sorts the parameters of a fine-tune by the way in which a LoRA can carry them.

    Args:
        folder: of the fine-tune, with its config.json.
        tuned, base: the names of the tensors in their checkpoints.
        with_experts: sort the matrices of experts as such, instead of among `others`.

    Raises:
        CheckpointError: the configuration cannot be read, or names a class that is not one of Transformers.
    """
    model = _skeleton(folder)
    parts = LoraLayers(model)
    prior, weights = {part.target: part for part in plan_of(model, base)[0]}, model.state_dict()
    twins = {target: part.all_names() for target, part in prior.items()}
    for part in plan_of(model, tuned)[0]:
        names, module = part.all_names(), part.target.rpartition(".")[0]
        if part.target in model.all_tied_weights_keys:
            continue
        if part.converter is None and (part.target not in twins or parts._head(part.target)):
            parts.whole[part.target] = names[0]
        elif (
            part.converter is None
            and part.target.endswith(".weight")
            and isinstance(layer := model.get_submodule(module), nn.Linear | Conv1D)
        ):
            parts.layers[module] = Layer(names[0], twins[part.target][0], isinstance(layer, Conv1D))
        elif with_experts and "experts" in module and part.target in prior and len(shape := weights[part.target].shape) == 3:
            transposed = bool(getattr(model.get_submodule(module), "is_transposed", False))
            parts.experts[part.target] = Experts(part, prior[part.target], tuple(shape), transposed)
        else:  # loading may merge several tensors into one parameter
            pairs = zip(names, twins.get(part.target, ()))
            parts.others |= {name if part.converter else part.target: (name, twin) for name, twin in pairs}
    modules = {name.rpartition(".")[0] for name in parts.whole}
    parts.whole |= {name: parts.others.pop(name)[0] for name in [*parts.others] if name.rpartition(".")[0] in modules}
    return parts


def _skeleton(folder: Path) -> PreTrainedModel:
    """Returns the model that a folder's config.json describes, without weights."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no {CONFIG} that Transformers can read: {error}") from error
    name = (config.architectures or ["AutoModel"])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise CheckpointError(f"The {CONFIG} of {folder} names the class {name}, which is no model class of Transformers.")
    with torch.device("meta"):
        return kind(config)
