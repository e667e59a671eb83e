"""The parts of a saved model that a LoRA can carry, under the names that PEFT gives them, and the LoRA's configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import torch
from peft import LoraConfig, TaskType
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_ext.adapters.landing import PREFIX, layers_that_load, lost
from hf_ext.errors import CheckpointError
from hf_ext.integration import compat
from hf_ext.integration.loading.weight_plan import Loaded, plan_of, skeleton_of
from hf_ext.storage.config_file import CONFIG, read_config
from hf_ext.storage.layout import ADAPTER
from hf_ext.storage.source import TensorSource

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
#: The arguments that PEFT's models of all types of task give to the forward of the base.
ARGUMENTS = {"input_ids", "attention_mask", "inputs_embeds", "output_attentions", "output_hidden_states", "return_dict"}


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
        others: the tensors of all other parameters: norms, biases, embeddings, convolutions, experts, linear layers for which
            PEFT loads no LoRA, and whatever else has none. By parameter, or by the tensor's name where loading ignores it or
            merges several tensors into one parameter.
        tokens: the tensors of embeddings and the rows that the adapter holds, by module.
        ties: weights that the fine-tune or the base shares, and the weight that they are tied to.
    """

    file, prefix, library = ADAPTER, PREFIX, "peft"  # of the LoRA: its file, the start of the names there, what loads it

    model: PreTrainedModel
    layers: dict[str, Pair] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    others: dict[str, Pair] = field(default_factory=dict)
    tokens: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    @cached_property
    def task(self) -> TaskType | None:
        """PEFT's type of task; None if the model's class has none, or if PEFT's model of the type cannot call it."""
        name = type(self.model).__name__
        task = next((task for ending, task in TASKS.items() if name.endswith(ending)), None)
        if name.endswith("ForConditionalGeneration") and self.model.config.is_encoder_decoder:
            task = TaskType.SEQ_2_SEQ_LM
        parameters = inspect.signature(type(self.model).forward).parameters
        takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())  # and may hand it to a part of the model
        takes_all = ARGUMENTS <= parameters.keys() or takes_more and "inputs_embeds" in parameters
        generates = task in (TaskType.CAUSAL_LM, TaskType.SEQ_2_SEQ_LM)
        if self.model.main_input_name != "input_ids" or not takes_all or generates and not self.model.can_generate():
            return None
        return task

    @cached_property
    def embedding(self) -> str | None:
        """The module of the input embedding; None if there is none, as in models of images."""
        try:
            module = self.model.get_input_embeddings()
        except NotImplementedError:
            return None
        names = (name for name, other in self.model.named_modules() if other is module)
        return next(names, None) if isinstance(module, nn.Embedding) else None

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
        parts, heads = parameter.split("."), tuple(HEADS.get(self.task, ()))
        modules = (".".join(parts[:i]) for i in range(1, len(parts)))
        return next((module for module in modules if module.endswith(heads)), None)  # as PEFT matches, "pre_classifier" too

    def with_changed(self, changed: Iterable[str], rows: Callable[[str], list[int]], resized: Collection[str]) -> LoraLayers:
        """Returns the parts with the parameters of modules with a changed parameter in `whole`, except those of linear layers,
        of experts, of modules with parts of their own, and weights that are tied to others. The changed rows of the input
        embedding are in `tokens` if it is tied or most rows are unchanged.

        Args:
            changed: the names of parameters.
            rows: returns the indices of the rows of a parameter that changed.
            resized: linear layers with another number of rows than in the base, which become whole.
        """
        parts = self.with_layers(self.layers.keys() - {*resized})
        tied = {name for pair in self.ties.items() for name in pair}
        state = self.model.state_dict()
        modules = {_module_of(name) for name in changed if name in state} | {*resized}
        whole: set[str] = set()
        tokens: dict[str, tuple[str, list[int]]] = {}
        for module in (name for name in modules - parts.layers.keys() if "experts" not in name):
            names = {name for name in state if _module_of(name) == module}
            parameters, is_shared = names & parts.others.keys(), bool(tied & names)
            if module == self.embedding and (name := f"{module}.weight") in parameters:
                indices = rows(name)
                is_shared &= not any(head in self.whole for head, source in self.ties.items() if source == name)
                if is_shared or len(indices) < len(state[name]) // 2:
                    tokens[module] = (parts.others[name].tensor, indices)
                    continue
            if not is_shared and not any(self.model.get_submodule(module).children()):
                whole |= parameters
        others = {name: pair for name, pair in parts.others.items() if _module_of(name) not in tokens}
        return replace(parts, others=others, tokens=tokens).with_whole(whole)

    def with_whole(self, parameters: Iterable[str] = ()) -> LoraLayers:
        """Returns the parts with these parameters in `whole`, and with those of all modules whose names end in that of a whole
        module: PEFT takes them for it."""
        pairs = self.others | {f"{name}.weight": pair for name, pair in self.layers.items()}
        chosen = replace(self, whole=self.whole | {name: pairs[name].tensor for name in parameters})
        endings = tuple(chosen.whole_modules)
        modules = tuple(f"{name}." for name, _ in self.model.named_modules() if endings and name.endswith(endings))
        whole = chosen.whole | {name: pair.tensor for name, pair in pairs.items() if name.startswith(modules)}
        layers = {name: pair for name, pair in self.layers.items() if f"{name}.weight" not in whole}
        others = {name: pair for name, pair in self.others.items() if name not in whole}
        return replace(self, layers=layers, whole=whole, others=others)

    def with_layers(self, names: Collection[str]) -> LoraLayers:
        """Returns the parts with only these linear layers in `layers`, and the weights of the rest in `others`."""
        layers = {name: pair for name, pair in self.layers.items() if name in names}
        rest = {f"{name}.weight": pair for name, pair in self.layers.items() if name not in names}
        return replace(self, layers=layers, others=self.others | rest)

    def loadable(self) -> set[str]:
        """Returns the linear layers whose LoRA PEFT loads."""
        shapes = {name: tuple(self.model.get_submodule(name).weight.shape) for name in self.layers}
        shapes = {name: shape if self.layers[name].transposed else shape[::-1] for name, shape in shapes.items()}
        plain = LoraLayers(self.model, self.layers)
        plain.task = None  # else PEFT expects heads, too
        return layers_that_load(self.model, shapes, lambda names: plain.config(dict.fromkeys(names, 1), ""))

    def config(self, ranks: Mapping[str, int], base: str) -> LoraConfig:
        """Returns the configuration of a LoRA with these ranks, by layer, and a scaling of 1.

        `r` is the largest rank: servers reserve memory for it.
        """
        modules = [name for name, _ in self.model.named_modules()]
        endings = {name.rpartition(".")[2] for name in ranks}

        def matched(targets: Iterable[str]) -> set[str]:
            """Returns the modules that PEFT adapts."""
            ends = tuple(f".{target}" for target in targets)
            return {name for name in modules if f".{name}".endswith(ends)}

        targets = next((sorted(names) for names in (endings, ranks) if matched(names) == ranks.keys()), None)
        rank = max(ranks.values())
        patterns = {f"^{name}": number for name, number in ranks.items() if number != rank}
        kind = type(self.model)
        return LoraConfig(
            r=rank,
            lora_alpha=rank,
            rank_pattern=patterns,
            alpha_pattern=dict(patterns),
            target_modules=targets or "|".join(map(re.escape, ranks)),
            modules_to_save=self.whole_modules or None,
            trainable_token_indices={module: rows for module, (_, rows) in self.tokens.items()} or None,
            fan_in_fan_out=any(self.layers[name].transposed for name in ranks),
            task_type=self.task,
            auto_mapping=None if self.task else {"base_model_class": kind.__name__, "parent_library": kind.__module__},
            base_model_name_or_path=base,
            inference_mode=True,
        )

    def metadata(self, config: LoraConfig) -> dict[str, str]:
        """Returns the configuration as metadata of the LoRA's file; empty if it has a file of its own."""
        return {}

    def lost(self, folder: Path, tokens: int | None) -> set[str]:
        """Returns the tensors of a saved LoRA that do not arrive. See `landing.lost`."""
        return lost(self.model, folder, tokens)


def lora_layers(folder: Path, tuned: TensorSource, base: TensorSource) -> LoraLayers:
    """Sorts the parameters of a fine-tune by the way in which a LoRA can carry them.

    Args:
        folder: of the fine-tune, with its config.json.
        tuned, base: the two checkpoints.

    Raises:
        CheckpointError: the configuration cannot be read, or names a class that has no LoRA.
    """
    model = _skeleton(folder)
    state = model.state_dict()
    ties = {name: source for name, source in compat.declared_ties(model).items() if name in state and source in state}
    parts = LoraLayers(model, ties=ties)
    (origins, ignored), (twins, _) = _origins(parts, tuned), _origins(parts, base)
    parts.others = {name: Pair(name, name if name in base else "") for name in ignored}
    for target, part in origins.items():
        names, source = part.all_names(), ties.get(target, "")
        is_tied, was_tied = (target in plan and plan[target] is plan.get(source) for plan in (origins, twins))
        if not is_tied and not was_tied:
            ties.pop(target, None)
        if is_tied and (was_tied or target not in twins):
            continue
        if part.converter is not None:  # loading merges several tensors into one parameter
            priors = twins[target].all_names() if target in twins else []
            parts.others |= {name: Pair(name, priors[i] if len(priors) == len(names) else "") for i, name in enumerate(names)}
        elif target not in twins or was_tied or parts.head_of(target):
            parts.whole[target] = names[0]
        else:
            pair, module = Pair(names[0], twins[target].all_names()[0]), _module_of(target)
            if target.endswith(".weight") and _is_linear(model, module):
                parts.layers[module] = pair._replace(transposed=isinstance(model.get_submodule(module), Conv1D))
            else:
                parts.others[target] = pair
    parts = parts.with_whole()
    return parts.with_layers(parts.loadable())


def _origins(parts: LoraLayers, source: TensorSource) -> tuple[dict[str, Loaded], list[str]]:
    """Returns the origin of each parameter in a checkpoint, and the names of the tensors that loading ignores.

    A weight and the one that it is tied to have the same origin, unless the checkpoint holds both, with different values.
    """
    plan, ignored = plan_of(parts.model, source.names())
    origins = {part.target: part for part in plan}
    for target, other in parts.ties.items():
        if target in origins:
            origins.setdefault(other, origins[target])
    for target, other in parts.ties.items():
        if other in origins and (target not in origins or _is_same(source, origins[target], origins[other])):
            origins[target] = origins[other]
    return origins, ignored


def _is_same(source: TensorSource, part: Loaded, other: Loaded) -> bool:
    """Checks whether two parameters have the same values in a checkpoint."""
    (name,), (twin,) = part.all_names(), other.all_names()
    entry, prior = source.entry(name), source.entry(twin)
    is_like = (entry.dtype, entry.shape) == (prior.dtype, prior.shape)
    return name == twin or is_like and source.identity(name) == source.identity(twin)


def _is_linear(model: PreTrainedModel, module: str) -> bool:
    """Checks whether a module is a linear layer that computes as PyTorch's does, and is called for it."""
    layer = model.get_submodule(module)
    is_plain = isinstance(layer, nn.Linear | Conv1D) and computes_as_linear(layer)
    return is_plain and not isinstance(model.get_submodule(_module_of(module)), nn.MultiheadAttention)


def computes_as_linear(layer: nn.Module) -> bool:
    """Checks whether a layer computes as PyTorch's linear layer does. Some have a forward of their own, such as Falcon's."""
    if type(layer).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    if any(layer.children()) or {name for name, _ in layer.named_parameters()} - {"weight", "bias"}:
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = cast(nn.Linear, type(layer)(3, 2))
            x = 3 * torch.randn(8, 3, dtype=small.weight.dtype)
            return torch.allclose(small(x), nn.functional.linear(x, small.weight, small.bias))
    except Exception:  # it takes other arguments, or has other weights
        return False


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _skeleton(folder: Path) -> PreTrainedModel:
    """Returns the model that a folder's config.json describes, without weights."""
    config = read_config(folder / CONFIG)
    if (model := skeleton_of(config, folder)) is None:
        name = (config.get("architectures") or ["no class"])[0]
        raise CheckpointError(f"The {CONFIG} of {folder} names {name}, which is no model class of Transformers.")
    return model
