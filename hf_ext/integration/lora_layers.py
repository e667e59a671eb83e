"""The parts of a saved model that a LoRA can carry, under the names that PEFT gives them, and the LoRA's configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from peft import LoraConfig, TaskType
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_ext.errors import CheckpointError
from hf_ext.integration.weight_plan import plan_of
from hf_ext.storage.config_file import CONFIG

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


class Pair(NamedTuple):
    """A tensor of the fine-tune and its counterpart in the base, by their names there. `twin` is empty if there is no
    counterpart; `transposed` means that the tensor is a linear layer's weight of inputs × outputs."""

    tensor: str
    twin: str
    transposed: bool = False


@dataclass
class LoraLayers:
    """The parts of a model, by the names of its modules and parameters.

    Attributes:
        model: the model, without weights.
        layers: the weights of linear layers, by module.
        whole: the tensors of modules that the adapter must hold whole, such as heads that the base does not have, by parameter.
        others: the tensors of all other parameters: norms, biases, embeddings, convolutions, experts, and whatever else has no
            LoRA. By parameter, or by the tensor's name where loading merges several tensors into one parameter.
        tokens: the tensors of embeddings and the rows that the adapter holds, by module.
    """

    model: PreTrainedModel
    layers: dict[str, Pair] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    others: dict[str, Pair] = field(default_factory=dict)
    tokens: dict[str, tuple[str, list[int]]] = field(default_factory=dict)

    @property
    def task(self) -> TaskType | None:
        """PEFT's type of task; None if the model's class has none."""
        name = type(self.model).__name__
        if name.endswith("ForConditionalGeneration") and self.model.config.is_encoder_decoder:
            return TaskType.SEQ_2_SEQ_LM
        return next((task for ending, task in TASKS.items() if name.endswith(ending)), None)

    @property
    def whole_modules(self) -> list[str]:
        """The modules that PEFT must hold whole, so that the parameters in `whole` are saved."""
        return sorted({self.head_of(name) or _module_of(name) for name in self.whole})

    @property
    def carried(self) -> list[str]:
        """The modules that the adapter holds whole, and the embeddings of which it holds rows, for people."""
        return [*self.whole_modules, *(f"{module} ({len(rows)} rows)" for module, (_, rows) in self.tokens.items())]

    def head_of(self, parameter: str) -> str | None:
        """Returns the module of a head that PEFT saves whole, if the parameter belongs to one."""
        parts = parameter.split(".")
        heads = HEADS.get(self.task, set())
        return next((".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if part in heads), None)

    def carry_others(self, changed: Iterable[str], rows: Callable[[str], list[int]]) -> None:
        """Moves the parameters of modules with a changed parameter from `others` to `whole`, except those of linear layers, of
        experts, of modules with parts of their own, and weights that are tied to others. Moves the changed rows of the input
        embedding to `tokens` if it is tied or most rows are unchanged.

        Args:
            changed: the names of parameters.
            rows: returns the indices of the rows of a parameter that changed.
        """
        tied = {*self.model.all_tied_weights_keys, *self.model.all_tied_weights_keys.values()}
        embedding, state = self.model.get_input_embeddings(), self.model.state_dict()
        modules = {_module_of(name) for name in changed if name in state} - self.layers.keys()
        for module in (module for module in modules if "experts" not in module):
            parameters = {name for name in self.others if name in state and _module_of(name) == module}
            if isinstance(embedding, nn.Embedding) and self.model.get_submodule(module) is embedding:
                (name,) = parameters
                indices = rows(name)
                if name in tied or len(indices) < embedding.num_embeddings // 2:
                    self.tokens[module] = (self.others.pop(name).tensor, indices)
                    continue
            if not tied & parameters and not any(self.model.get_submodule(module).children()):
                self.whole |= {name: self.others.pop(name).tensor for name in parameters}

    def config(self, ranks: Mapping[str, int], base: str) -> LoraConfig:
        """Returns the configuration of a LoRA with these ranks, by layer, and a scaling of 1.

        `r` is the largest rank: servers reserve memory for it.
        """
        linear = {name for name, module in self.model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        endings = {name.rpartition(".")[2] for name in ranks}
        all_of_endings = {name for name in linear if name.rpartition(".")[2] in endings}
        rank = max(ranks.values())
        patterns = {f"^{name}": number for name, number in ranks.items() if number != rank}
        kind = type(self.model)
        return LoraConfig(
            r=rank,
            lora_alpha=rank,
            rank_pattern=patterns,
            alpha_pattern=dict(patterns),
            target_modules=sorted(endings if all_of_endings == ranks.keys() else ranks),
            modules_to_save=self.whole_modules or None,
            trainable_token_indices={module: rows for module, (_, rows) in self.tokens.items()} or None,
            fan_in_fan_out=any(self.layers[name].transposed for name in ranks),
            task_type=self.task,
            auto_mapping=None if self.task else {"base_model_class": kind.__name__, "parent_library": kind.__module__},
            base_model_name_or_path=base,
            inference_mode=True,
        )


def lora_layers(folder: Path, tuned: Iterable[str], base: Iterable[str]) -> LoraLayers:
    """Sorts the parameters of a fine-tune by the way in which a LoRA can carry them.

    Args:
        folder: of the fine-tune, with its config.json.
        tuned, base: the names of the tensors in their checkpoints.

    Raises:
        CheckpointError: the configuration cannot be read, or names a class that is not one of Transformers.
    """
    model = _skeleton(folder)
    parts = LoraLayers(model)
    twins = {part.target: part.all_names() for part in plan_of(model, base)[0]}
    for part in plan_of(model, tuned)[0]:
        target, names = part.target, part.all_names()
        if target in model.all_tied_weights_keys:
            continue
        if part.converter is not None:  # loading merges several tensors into one parameter
            priors = twins.get(target, [])
            parts.others |= {name: Pair(name, priors[i] if len(priors) == len(names) else "") for i, name in enumerate(names)}
        elif target not in twins or parts.head_of(target):
            parts.whole[target] = names[0]
        elif target.endswith(".weight") and isinstance(layer := model.get_submodule(_module_of(target)), nn.Linear | Conv1D):
            parts.layers[_module_of(target)] = Pair(names[0], twins[target][0], isinstance(layer, Conv1D))
        else:
            parts.others[target] = Pair(names[0], twins[target][0])
    modules = {_module_of(name) for name in parts.whole}
    parts.whole |= {name: parts.others.pop(name).tensor for name in [*parts.others] if _module_of(name) in modules}
    return parts


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


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
