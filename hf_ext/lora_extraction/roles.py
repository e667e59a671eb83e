"""The role of each tensor of a fine-tune in the adapter, under the names that PEFT gives them, and the LoRA's configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from peft import LoraConfig, TaskType
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_ext.adapters.landing import PREFIX, computes_as_linear, layers_that_load, lost
from hf_ext.errors import CheckpointError
from hf_ext.integration import compat
from hf_ext.integration.loading.weight_plan import Loaded, plan_of, skeleton_of
from hf_ext.storage.config_file import CONFIG
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
    TaskType.SEQ_CLS: ("classifier", "score"),
    TaskType.TOKEN_CLS: ("classifier", "score"),
    TaskType.QUESTION_ANS: ("qa_outputs",),
}
#: The arguments that PEFT's models of all types of task give to the forward of the base.
ARGUMENTS = {"input_ids", "attention_mask", "inputs_embeds", "output_attentions", "output_hidden_states", "return_dict"}


class Role(Enum):
    """The way in which an adapter carries a tensor of the fine-tune, or the reason why it does not."""

    LORA = "the weight of a linear layer"
    WHOLE = "the adapter holds its module whole: a head, a module that the base lacks or, if asked for, one that changed"
    ROWS = "the adapter holds its changed rows"
    SHARED = "it is the weight of another parameter"
    COMBINED = "loading combines it with other tensors into one parameter, such as experts"
    IGNORED = "loading ignores it"
    REFUSED = "PEFT loads no LoRA of its linear layer"
    OTHER = "its module is no linear layer, such as a norm or an embedding, or it is a bias"


LEFT_OUT = (Role.COMBINED, Role.IGNORED, Role.REFUSED, Role.OTHER)


class Part(NamedTuple):
    """A tensor of the fine-tune.

    Attributes:
        tensor: its name in the fine-tune.
        twin: name of its counterpart in the base; empty if there is none, or if the adapter holds the tensor whole.
        module: the module that it belongs to, or the head that PEFT saves whole.
        rows: indices of the rows that the adapter holds.
    """

    role: Role
    tensor: str
    twin: str
    module: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parts:
    """The tensors of a fine-tune with their roles, and where the adapter's file puts them.

    Attributes:
        model: the model, without weights.
        parts: the tensors by parameter, or by their names where loading ignores or combines them.
        task: PEFT's type of task, if it has one for the model.
        embedding: the weight of the input embedding; empty if there is none, as in models of images.
        ties: weights that the fine-tune or the base shares, and the weight that they are tied to.
        file, prefix, library: name of the adapter's file, the start of the names there, and what loads it.
        lost: given the model, the adapter's folder, and the number of tokens of the base if it is another one, returns the
            tensors of the adapter that do not arrive.
    """

    model: PreTrainedModel
    parts: Mapping[str, Part]
    task: TaskType | None = None
    embedding: str = ""
    ties: Mapping[str, str] = field(default_factory=dict)
    file: str = ADAPTER
    prefix: str = PREFIX
    library: str = "peft"
    lost: Callable[[PreTrainedModel, Path, int | None], set[str]] = lost

    def having(self, *roles: Role) -> dict[str, Part]:
        """Returns the parts with one of these roles."""
        return {name: part for name, part in self.parts.items() if part.role in roles}

    @property
    def whole_modules(self) -> list[str]:
        """The modules that the adapter holds whole."""
        return sorted({part.module for part in self.having(Role.WHOLE).values()})

    def with_changed(self, changed: Set[str], rows: Callable[[str], list[int]]) -> Parts:
        """Returns the parts with modules that changed as whole, except linear layers, experts, modules with modules inside, and
        weights that are tied to others. The adapter holds the changed rows of the input embedding if it is tied or most rows
        are unchanged.

        Args:
            changed: names of the tensors without a LoRA that changed, and of linear layers with another number of rows.
            rows: returns the indices of the rows of a tensor that changed.
        """
        state, tied, parts = self.model.state_dict(), {*self.ties, *self.ties.values()}, dict(self.parts)
        layers = {part.module for name, part in self.having(Role.LORA).items() if name not in changed}
        modules: dict[str, set[str]] = {}
        for name in state:
            modules.setdefault(name.rpartition(".")[0], set()).add(name)
        for module, names in modules.items():
            if names.isdisjoint(changed) or module in layers or "experts" in module:
                continue
            is_shared = not names.isdisjoint(tied)
            if self.embedding in names and self.embedding in changed:
                indices = rows(self.embedding)
                is_shared &= all(self.ties.get(head) != self.embedding for head in self.having(Role.WHOLE))
                if is_shared or len(indices) < len(state[self.embedding]) // 2:
                    parts[self.embedding] = parts[self.embedding]._replace(role=Role.ROWS, rows=tuple(indices))
                    continue
            if not is_shared and not any(self.model.get_submodule(module).children()):
                parts |= {name: parts[name]._replace(role=Role.WHOLE) for name in names & parts.keys()}
        return replace(self, parts=_with_matched(self.model, parts))

    def config(self, ranks: Mapping[str, int], base: str) -> LoraConfig:
        """Returns the configuration of a LoRA with these ranks, by layer, and a scaling of 1.

        `r` is the largest rank: servers reserve memory for it.
        """
        modules = [f".{name}" for name, _ in self.model.named_modules()]
        endings = {name.rpartition(".")[2] for name in ranks}
        targets: str | list[str] = "|".join(map(re.escape, ranks))
        for names in (endings, ranks):  # PEFT adapts all modules whose names end so
            ends = tuple(f".{name}" for name in names)
            if {name for name in modules if name.endswith(ends)} == {f".{name}" for name in ranks}:
                targets = sorted(names)
                break
        rank, kind = max(ranks.values()), type(self.model)
        patterns = {f"^{name}": number for name, number in ranks.items() if number != rank}
        return LoraConfig(
            r=rank,
            lora_alpha=rank,
            rank_pattern=patterns,
            alpha_pattern=dict(patterns),
            target_modules=targets,
            modules_to_save=self.whole_modules or None,
            trainable_token_indices={part.module: [*part.rows] for part in self.having(Role.ROWS).values()} or None,
            fan_in_fan_out=any(isinstance(self.model.get_submodule(name), Conv1D) for name in ranks),
            task_type=self.task,
            auto_mapping=None if self.task else {"base_model_class": kind.__name__, "parent_library": kind.__module__},
            base_model_name_or_path=base,
            inference_mode=True,
        )


def sort(folder: Path, config: dict, tuned: TensorSource, base: TensorSource) -> Parts:
    """Sorts the tensors of a fine-tune by the way in which an adapter can carry them.

    Args:
        folder: of the fine-tune, for messages.
        config: its config.json.
        tuned, base: the two checkpoints.

    Raises:
        CheckpointError: the configuration names a class that has no LoRA.
    """
    if (model := skeleton_of(config, folder)) is None:
        name = (config.get("architectures") or ["no class"])[0]
        raise CheckpointError(f"The {CONFIG} of {folder} names {name}, which is no model class of Transformers.")
    state, task = model.state_dict(), _task_of(model)
    ties = {name: source for name, source in compat.declared_ties(model).items() if name in state and source in state}
    (origins, ignored), (twins, _) = (_origins(model, ties, source) for source in (tuned, base))
    tied, were_tied = (
        {name for name, origin in plan.items() if origin is plan.get(ties.get(name, ""))} for plan in (origins, twins)
    )
    heads = HEADS.get(task, ())

    def module_of(name: str) -> str:
        """Returns `Part.module`."""
        names = name.split(".")
        modules = [".".join(names[:i]) for i in range(1, len(names))]
        return next((module for module in modules if module.endswith(heads)), ".".join(names[:-1]))  # "pre_classifier", too

    def role(parameter: str) -> Role:
        """Returns the role of a parameter by itself. PEFT may match its module with a whole one, or refuse its layer."""
        if parameter in tied and (parameter in were_tied or parameter not in twins):
            return Role.SHARED
        if origins[parameter].converter is not None:
            return Role.COMBINED
        if parameter not in twins or parameter in were_tied or module_of(parameter).endswith(heads):
            return Role.WHOLE
        module, _, name = parameter.rpartition(".")
        layer, parent = model.get_submodule(module), model.get_submodule(module.rpartition(".")[0])
        is_linear = isinstance(layer, nn.Linear | Conv1D) and not isinstance(parent, nn.MultiheadAttention)  # which calls none
        return Role.LORA if name == "weight" and is_linear and computes_as_linear(layer) else Role.OTHER

    parts = {name: Part(Role.IGNORED, name, name if name in base else "", module_of(name)) for name in ignored}
    for parameter, origin in origins.items():
        names, priors = origin.all_names(), twins[parameter].all_names() if parameter in twins else []
        kind = role(parameter)
        if kind is Role.COMBINED:
            pairs = zip(names, priors if len(priors) == len(names) else [""] * len(names))
            parts |= {name: Part(kind, name, prior, module_of(name)) for name, prior in pairs}
        elif kind is not Role.SHARED:
            parts[parameter] = Part(kind, names[0], "".join(priors[:1]), module_of(parameter))
    parts = _with_matched(model, parts)
    bare = Parts(model, {})  # for a task, PEFT expects heads, too
    layers = [part.module for part in parts.values() if part.role is Role.LORA]
    loading = layers_that_load(model, layers, lambda names: bare.config(dict.fromkeys(names, 1), ""))
    refused = {name for name, part in parts.items() if part.role is Role.LORA and part.module not in loading}
    kept = {name: part for name, part in parts.items() if name not in refused}
    parts = kept | {name: parts[name]._replace(role=Role.REFUSED) for name in parts if name in refused}  # reported last
    ties = {name: source for name, source in ties.items() if name not in origins or name in tied | were_tied}
    return Parts(model, parts, task, _embedding_of(model), ties)


def _with_matched(model: PreTrainedModel, parts: Mapping[str, Part]) -> dict[str, Part]:
    """Returns the parts with those of all modules whose names end in that of a whole one as whole: PEFT takes them for it."""
    endings = tuple({part.module for part in parts.values() if part.role is Role.WHOLE})
    modules = tuple(f"{name}." for name, _ in model.named_modules() if name.endswith(endings))
    rest = {name for name, part in parts.items() if part.role is Role.ROWS or not name.startswith(modules)}
    return {name: part if name in rest else part._replace(role=Role.WHOLE, twin="") for name, part in parts.items()}


def _origins(model: PreTrainedModel, ties: Mapping[str, str], source: TensorSource) -> tuple[dict[str, Loaded], list[str]]:
    """Returns the origin of each parameter in a checkpoint, and the names of the tensors that loading ignores.

    A weight and the one that it is tied to have the same origin, unless the checkpoint holds both, with different values.
    """
    plan, ignored = plan_of(model, source.names())
    origins = {part.target: part for part in plan}
    for target, other in ties.items():
        if target in origins:
            origins.setdefault(other, origins[target])
    for target, other in ties.items():
        if other in origins:
            names = {*origins.get(target, origins[other]).all_names(), *origins[other].all_names()}
            if target not in origins or len(names) == 1 or len(source.distinct(sorted(names))) == 1:
                origins[target] = origins[other]
    return origins, ignored


def _task_of(model: PreTrainedModel) -> TaskType | None:
    """Returns PEFT's type of task; None if the model's class has none, or if PEFT's model of the type cannot call it."""
    name = type(model).__name__
    task = next((task for ending, task in TASKS.items() if name.endswith(ending)), None)
    if name.endswith("ForConditionalGeneration") and model.config.is_encoder_decoder:
        task = TaskType.SEQ_2_SEQ_LM
    parameters = inspect.signature(type(model).forward).parameters
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())  # and may hand it to a part of the model
    takes_all = ARGUMENTS <= parameters.keys() or takes_more and "inputs_embeds" in parameters
    generates = task in (TaskType.CAUSAL_LM, TaskType.SEQ_2_SEQ_LM)
    if model.main_input_name != "input_ids" or not takes_all or generates and not model.can_generate():
        return None
    return task


def _embedding_of(model: PreTrainedModel) -> str:
    """Returns the name of the weight of the input embedding; "" if there is none, as in models of images."""
    try:
        module = model.get_input_embeddings()
    except NotImplementedError:
        return ""
    names = (f"{name}.weight" for name, other in model.named_modules() if other is module)
    return next(names, "") if isinstance(module, nn.Embedding) else ""
