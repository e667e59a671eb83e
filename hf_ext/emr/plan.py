"""How `from_pretrained` has made a model of a checkpoint, to be done again with other tensors."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from hf_ext.checkpoint import Entry
from hf_ext.loading import AnyTensor, Decode


@dataclass(frozen=True)
class Loaded:
    """What `from_pretrained` made one parameter (or several) of: the tensors of the checkpoint by the converter's pattern, and
    the converter, if it did more than rename."""

    target: str
    names: dict[str, list[str]]
    converter: WeightConverter | None

    @classmethod
    def of(cls, target: str, names: dict[str, list[str]], converter: WeightTransform) -> Loaded:
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
