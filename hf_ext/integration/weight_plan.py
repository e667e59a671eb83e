"""How `from_pretrained` makes a model of a checkpoint, to be done again with other tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from hf_ext.integration.quantizer import AnyTensor, Decode
from hf_ext.storage.safetensors_file import Entry


@dataclass(frozen=True)
class Loaded:
    """What `from_pretrained` made one parameter (or several) of: the tensors of the checkpoint by the converter's pattern, and
    the converter, if it did more than rename."""

    target: str
    names: dict[str, list[str]]
    converter: WeightConverter | None

    @classmethod
    def of(cls, target: str, names: dict[str, list[str]], converter: WeightTransform | None) -> Loaded:
        if isinstance(converter, AnyTensor) or not isinstance(converter, WeightConverter):
            return cls(target, names, None)
        operations = [operation for operation in converter.operations if not isinstance(operation, Decode)]
        return cls(
            target,
            names,
            converter.copy(list(converter.source_patterns), list(converter.target_patterns), operations=operations),
        )

    def all_names(self) -> list[str]:
        return [name for names in self.names.values() for name in names]

    def convert(self, model: PreTrainedModel, tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the parameters are, given the tensors by name."""
        if self.converter is None:
            return {self.target: tensor(self.all_names()[0])}
        converter = deepcopy(self.converter)
        for pattern, names in self.names.items():
            converter.collected_tensors[pattern] = [partial(tensor, name) for name in names]
        found = converter.convert(self.target, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in found.items()}

    def targets(self, model: PreTrainedModel, entry: Callable[[str], Entry]) -> set[str]:
        """The names of the parameters."""
        if self.converter is None:
            return {self.target}
        return set(self.convert(model, lambda name: torch.empty(entry(name).shape, device="meta")))


def plan_of(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[Loaded], list[str]]:
    """What `from_pretrained` would make the model's parameters of, had a checkpoint tensors of these names, and the names that
    it would leave aside."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    sources: dict[str, dict[str, list[str]]] = {}
    used: dict[str, WeightConverter | None] = {}
    others = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            others.append(name)
            continue
        sources.setdefault(target, defaultdict(list))[pattern or name].append(name)
        used.setdefault(target, converter_of.get(pattern))
    return [Loaded.of(target, dict(found), used[target]) for target, found in sources.items()], others
