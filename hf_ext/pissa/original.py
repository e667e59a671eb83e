"""The full-precision weights of a quantized model, read tensor by tensor from its base's checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ext.errors import BaseModelError, HfExtError
from hf_ext.integration import compat
from hf_ext.storage.safetensors_file import torch_dtype
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import open_counterpart

ADVICE = "Name a folder or Hub id that holds the base's original weights: QPissaConfig(full_precision_model=…)."


class OriginalModel:
    """The model whose checkpoint has the full-precision weights of a quantized one. Its name, a folder or Hub id, is empty if
    unknown; `revision` is the commit on the Hub."""

    def __init__(self, name: str, revision: str | None, model: nn.Module):
        self.name, self.revision = name, revision
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._weights = {name: weight.detach().to("meta") for name, weight in model.named_parameters()}  # before adapters

    @cached_property
    def checkpoint(self) -> TensorSource:
        """The open checkpoint. Raises BaseModelError if it cannot be read."""
        if not self.name:
            raise BaseModelError(f"The model has no name, so its original weights cannot be read. {ADVICE}")
        try:
            return open_counterpart(self.name, "", self.revision)
        except HfExtError as error:
            raise BaseModelError(f"The original weights of the quantized layers cannot be read: {error} {ADVICE}") from error

    def name_of(self, weight: str) -> str | None:
        """Returns the checkpoint's name of one of the model's weights; None if it has none."""
        return self._names.get(weight) or self.checkpoint.twin_of(weight)

    @cached_property
    def _names(self) -> dict[str, str]:
        """The checkpoint's names by weight, where loading only renames."""
        model = vars(self).get("_model", lambda: None)()
        if not isinstance(model, PreTrainedModel):
            return {}
        with compat.host_internals("Finding the original weights", ADVICE):
            from hf_ext.integration.loading.renaming import names_by_weight

            return names_by_weight(self.checkpoint.names(), model, self._weights)

    def __getstate__(self) -> dict:  # a copy opens the files again
        return {key: value for key, value in vars(self).items() if key in ("name", "revision", "_names")}


@dataclass(frozen=True)
class OriginalWeight:
    """One weight of an original model."""

    model: OriginalModel
    layer: str  # the module's name in the model
    shape: tuple[int, int]  # (out_features, in_features)
    transposed: bool  # the checkpoint has it as (in_features, out_features), as Conv1D does

    def read(self, device: torch.device) -> torch.Tensor:
        """Reads the weight, (out_features, in_features), float32, and nothing else of the checkpoint. Raises BaseModelError if
        the checkpoint has no float weight of that name and shape."""
        checkpoint = self.model.checkpoint
        name = self.model.name_of(f"{self.layer}.weight")
        if name is None:
            raise BaseModelError(f"{checkpoint} holds no weight for the quantized layer {self.layer}. {ADVICE}")
        entry = checkpoint.entry(name)
        shape = self.shape[::-1] if self.transposed else self.shape
        if tuple(entry.shape) != shape or not torch_dtype(entry.dtype).is_floating_point:
            raise BaseModelError(
                f"'{name}' in {checkpoint} is of type {entry.dtype} and shape {tuple(entry.shape)}, not floats of {shape}: it "
                f"is itself quantized, or of another model. {ADVICE}"
            )
        weight = checkpoint.read(name).to_torch().to(device).float()
        checkpoint.release(name)
        return weight.T.contiguous() if self.transposed else weight
