"""The parameters that Transformers loads the tensors of a checkpoint into, and their order.

Depends on internals of its loading, as decoding.py does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, dot_natural_key, rename_source_key


class Destination(NamedTuple):
    """The destination of a tensor."""

    target: str  # a parameter of the model, the first if a converter makes several of the tensor
    pattern: str | None  # the source pattern of the model's converter for it; None without one
    kept: str | None  # where the tensor keeps its name, as the new one is not in the model: the new one before converters


def destinations(
    names: Iterable[str], conversions: Iterable[WeightTransform], prefix: str, state: Mapping[str, torch.Tensor]
) -> dict[str, Destination]:
    """Returns the destinations of the tensors of a checkpoint that the model has a place for, in the order in which
    `from_pretrained` uses them, given the conversions of the model's checkpoints, its `base_model_prefix` and its state
    dict."""
    conversions = deepcopy(list(conversions))  # renaming leaves marks on them
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    groups: dict[str, dict[str, list[str]]] = {}  # by target and pattern
    places: dict[str, Destination] = {}
    for name in sorted(names, key=dot_natural_key):
        (target, pattern), kept = rename_source_key(name, renamings, converters, prefix, state), None
        if target not in state and name in state:
            kept = rename_source_key(name, renamings, [])[0]
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            places[name] = Destination(target, pattern, kept)
            groups.setdefault(target, {}).setdefault(pattern or name, []).append(name)
    return {name: places[name] for group in groups.values() for part in group.values() for name in part}


def names_by_weight(names: Iterable[str], model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns the name in a checkpoint of each weight that loading takes from one tensor, which it may rename. The model may
    have adapters inside; `state` are the weights that it has without them."""
    places = destinations(names, get_model_conversion_mapping(model), model.base_model_prefix, state)
    return {place.target: name for name, place in places.items() if place.pattern is None}
