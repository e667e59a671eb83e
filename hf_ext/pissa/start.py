"""The start of a PiSSA adapter: the options of the decomposition."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from peft import LoraConfig
from transformers.utils.logging import tqdm


@dataclass
class PrincipalStart(LoraConfig):
    """The part of a configuration that makes an adapter one of PiSSA.

    Attributes:
        is_trained: the adapter's weights are loaded afterwards, so no layer is decomposed.
    """

    svd: Literal["randomized", "exact"] = field(
        default="randomized",
        metadata={"help": "Algorithm that computes the principal components."},
    )
    niter: int = field(default=3, metadata={"help": "Rounds of subspace iteration of the randomized decomposition."})
    seed: int = field(default=0, metadata={"help": "Seed of the randomized decomposition."})

    def __post_init__(self):
        super().__post_init__()
        self.is_trained = False
        self._bar: Any = None

    @abstractmethod
    def to_lora_config(self) -> LoraConfig:
        """Returns the configuration of the saved adapter."""

    def count_decomposition(self) -> None:
        """Advances the progress bar over the layers of the adapter that PEFT is adding."""
        if self._bar is None:
            self._bar = tqdm(desc="Principal components", unit=" layers")
        self._bar.update()

    def close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
