"""The mapping from a checkpoint's tensors to a model's parameters that `from_pretrained` applies, for other tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightTransform

from hf_ext.errors import CheckpointError
from hf_ext.integration import compat
from hf_ext.integration.loading.decoding import AnyTensor, model_operations
from hf_ext.integration.loading.renaming import destinations
from hf_ext.storage.names import Names, Ties
from hf_ext.storage.source import TensorSource


@dataclass(frozen=True)
class Loaded:
    """The origin of one parameter (or several): the tensors of the checkpoint by the converter's pattern, and the converter, if
    it did more than rename."""

    target: str
    names: dict[str, list[str]]
    converter: WeightConverter | None

    @classmethod
    def of(cls, target: str, names: dict[str, list[str]], converter: WeightTransform | None) -> Loaded:
        if isinstance(converter, AnyTensor) or not isinstance(converter, WeightConverter):
            return cls(target, names, None)
        converter = copy(converter)
        converter.operations = model_operations(converter)
        return cls(target, names, converter)

    def all_names(self) -> list[str]:
        return [name for names in self.names.values() for name in names]

    def convert(self, model: PreTrainedModel, tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the parameters, given a function from names to tensors."""
        if self.converter is None:
            return {self.target: tensor(self.all_names()[0])}
        converter = deepcopy(self.converter)
        for pattern, names in self.names.items():
            converter.collected_tensors[pattern] = [partial(tensor, name) for name in names]
        converted = converter.convert(self.target, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}

    def shapes(self, model: PreTrainedModel, source: TensorSource) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of the parameters."""
        if self.converter is None:
            return {self.target: tuple(source.entry(self.all_names()[0]).shape)}
        weights = self.convert(model, lambda name: torch.empty(source.entry(name).shape, device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in weights.items()}

    def is_in(self, source: TensorSource) -> bool:
        """Checks whether a source has all of the tensors."""
        return all(name in source for name in self.all_names())


def plan_of(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[Loaded], list[str]]:
    """Returns the origin of the model's parameters in a checkpoint with tensors of these names, and the names that
    `from_pretrained` would ignore."""
    names, mapping = set(names), get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    sources: dict[str, dict[str, list[str]]] = {}
    used: dict[str, WeightConverter | None] = {}
    places = destinations(names, mapping, model.base_model_prefix, model.state_dict())
    for name, (target, pattern, _) in places.items():
        sources.setdefault(target, defaultdict(list))[pattern or name].append(name)
        used.setdefault(target, converter_of.get(pattern) if pattern else None)
    plan = [Loaded.of(target, dict(tensors), used[target]) for target, tensors in sources.items()]
    return plan, sorted(names - places.keys())


def ignored_weight(model: PreTrainedModel, names: Iterable[str]) -> tuple[str, str] | None:
    """Returns a tensor that `from_pretrained` would ignore, and the parameter of the same ending that it would leave without a
    tensor; None if there is none."""
    plan, ignored = plan_of(model, names)
    empty = Names(model.state_dict().keys() - {origin.target for origin in plan} - model.all_tied_weights_keys.keys())
    return next(((name, target) for name in ignored if (target := empty.twin_of(name))), None)


def skeleton_of(config: dict, owner: object) -> PreTrainedModel | None:
    """Returns the model of a config.json, without weights; None if Transformers has no class of that name. Raises
    CheckpointError if the class of `owner` cannot be built: Transformers refuses the configuration, or has changed."""
    kind = getattr(transformers, str((config.get("architectures") or [""])[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return None
    try:
        return compat.without_weights(kind, compat.config_of(kind.config_class, config))  # type: ignore[attr-defined]
    except Exception as error:  # a stranger's file may hold anything
        raise CheckpointError(
            f"Transformers {transformers.__version__} cannot build the {kind.__name__} of {owner} "
            f"({type(error).__name__}: {error}). Correct config.json, or install a version that loads the model."
        ) from error


def ties_of(model: PreTrainedModel | None, *files: Collection[str]) -> Ties:
    """Returns the names that stand for one weight: those that the model, which is without weights, ties, and those of one
    weight in different files, given the names of the tensors in each. Without a model, names are compared by their endings.
    Raises CheckpointError if two files hold a weight in different forms: experts one by one and stacked, for instance."""
    if model is None:
        return Ties({}, _twins(files))
    return Ties(model.all_tied_weights_keys, _aliases(model, {frozenset(names) for names in files}))


def _twins(files: Sequence[Collection[str]]) -> dict[str, str]:
    """Returns the names in later files that end as a name of an earlier file does, with that name."""
    aliases: dict[str, str] = {}
    weights = set(files[0])
    for names in files[1:]:
        lookup = Names(weights)
        twins = {name: lookup.twin_of(name) for name in names if name not in weights}
        aliases |= {name: twin for name, twin in twins.items() if twin and twin not in names}
        weights |= {*names} - aliases.keys()
    return aliases


def _aliases(model: PreTrainedModel, kinds: Collection[frozenset[str]]) -> dict[str, str]:
    """Returns the names of files that stand for a weight of another name: the model's, or that of another kind of file."""
    if len(kinds) < 2:
        return {}
    aliases: dict[str, str] = {}
    whole: dict[str, str] = {}
    parts: dict[str, str] = {}
    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    stacks: dict[tuple[str, str], list[str]] = {}  # the names of one file, in the order in which they make a parameter
    for names in kinds:
        stack = defaultdict[tuple[str, str], list[str]](list)
        for name, place in destinations(names, mapping, model.base_model_prefix, state).items():
            (parts if place.pattern else whole).setdefault(place.target, name)
            if place.pattern:
                stack[place.target, place.pattern].append(name)
            elif name != place.target:
                aliases[name] = place.target
        for key, members in stack.items():
            aliases |= {name: first for name, first in zip(members, stacks.setdefault(key, members)) if name != first}
    if both := sorted(whole.keys() & parts.keys()):
        raise CheckpointError(
            f"'{parts[both[0]]}' and '{whole[both[0]]}' are two forms of one weight. Load each checkpoint with "
            "Transformers, save it again, and give the new folders."
        )
    return aliases
