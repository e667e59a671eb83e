"""What a user sets: `PissaConfig` and `QPissaConfig`, which take LoRA's options."""

from __future__ import annotations

import copy
import math
import os
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from peft import LoraConfig, PeftType
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_ext.integration.model_cards import write_card
from hf_ext.pissa.adapters import refuse_combination
from hf_ext.pissa.card import pissa_card
from hf_ext.pissa.layer import PRINCIPAL, PissaEmbedding, PissaLinear, refuse, starts_of
from hf_ext.pissa.reports import PissaReport

# Options of LoRA that do not go with an adapter that starts as part of the weight, and their neutral values.
NEUTRAL = {
    "use_dora": False,
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "target_parameters": None,
    "ensure_weight_tying": False,
    "megatron_config": None,
    "alora_invocation_tokens": None,
    "velora_config": None,
    "monteclora_config": None,
    "arrow_config": None,
    "kasa_config": None,
}


@dataclass
class PissaConfig(LoraConfig):
    """LoRA that starts from the principal singular components of the weights (PiSSA, arXiv 2404.02948).

    The layer computes W x + s (B A − B₀ A₀) x, with B₀ A₀ s the r principal components of W and B, A starting there. It trains
    exactly as the paper's form (W − s B₀ A₀) x + s B A x does, and leaves W as it is. Saved, the adapter is a plain LoRA of
    rank 2r, [B, −B₀] [A; A₀], for any program that loads LoRA; `PeftModel.from_pretrained(base, folder,
    config=PissaConfig.from_pretrained(folder), is_trainable=True)` goes on training it as PiSSA.

    All options of `LoraConfig` that go with it may be given. They differ in these:

    Args:
        r: how many components; at most as many as the smallest target has.
        lora_alpha: r unless given, as in the paper.
        lora_dropout: better 0, as in the paper. It acts on the adapter's change, BA − B₀A₀.
        init_lora_weights: False skips the decomposition, for an adapter that is to be loaded.
        svd: "randomized", or "exact" for a full decomposition of every weight.
        niter: rounds of the randomised decomposition.
        seed: of the randomised decomposition.

    Raises:
        ValueError: an option of LoRA that does not go with PiSSA.
    """

    lora_alpha: float | None = field(default=None, metadata={"help": "The scaling is lora_alpha / r. Default: r."})
    svd: Literal["randomized", "exact"] = field(
        default="randomized",
        metadata={"help": "How the principal components are found."},
    )
    niter: int = field(default=3, metadata={"help": "Rounds of subspace iteration of the randomized decomposition."})
    seed: int = field(default=0, metadata={"help": "Seed of the randomized decomposition."})

    def __post_init__(self):
        refuse_combination()
        super().__post_init__()
        self.lora_alpha = self.r if self.lora_alpha is None else self.lora_alpha
        wrong = sorted(name for name, value in NEUTRAL.items() if getattr(self, name, value) != value)
        if wrong:
            raise ValueError(f"{type(self).__name__} does not go with {', '.join(wrong)}; leave that out.")
        if self.init_lora_weights is True:
            self.init_lora_weights = PRINCIPAL
        if self.init_lora_weights not in (PRINCIPAL, False):
            raise ValueError(
                f"init_lora_weights={self.init_lora_weights!r}: {type(self).__name__} starts from principal components; "
                "choose how with svd and niter."
            )
        if min(self.lora_alpha, *self.alpha_pattern.values(), 1) <= 0:
            raise ValueError("lora_alpha must be positive: the principal components are divided by the scaling.")
        if self.svd not in ("randomized", "exact"):
            raise ValueError(f"svd={self.svd!r}; it is 'randomized' or 'exact'.")
        if self.lora_dropout:
            warnings.warn(
                f"lora_dropout={self.lora_dropout}: PiSSA's adapter holds the principal directions of the weights, and dropout "
                "discards some of them at every step. The paper trains with 0.",
                stacklevel=3,
            )
        self._register_custom_module(
            {nn.Linear: PissaLinear, Conv1D: PissaLinear, nn.Embedding: PissaEmbedding, nn.Module: refuse}
        )

    def to_dict(self) -> dict:
        return super().to_dict() | {"init_lora_weights": bool(self.init_lora_weights)}

    def to_lora_config(self) -> LoraConfig:
        """The LoRA of twice the rank, at the same scaling, as which the adapter is saved."""
        options = {item.name: getattr(self, item.name) for item in fields(LoraConfig) if item.init}
        factor = _alpha_factor(self.use_rslora)
        options |= {
            "r": 2 * self.r,
            "lora_alpha": factor * self.lora_alpha,
            "rank_pattern": {key: 2 * rank for key, rank in self.rank_pattern.items()},
            "alpha_pattern": {key: factor * alpha for key, alpha in self.alpha_pattern.items()},
            "init_lora_weights": True,
            "runtime_config": self.runtime_config,
        }
        config = LoraConfig(**options)
        config.inference_mode = self.inference_mode
        return config

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        """Writes the configuration of the LoRA as which the adapter is saved (`to_lora_config`), and the adapter's card."""
        self.to_lora_config().save_pretrained(save_directory, **kwargs)
        self._write_card(save_directory, kwargs.get("auto_mapping_dict"))

    def _write_card(self, folder: str | os.PathLike, auto_mapping: dict[str, str] | None) -> None:
        # PEFT and Transformers save the adapter itself before its configuration.
        if any(Path(folder, name).exists() for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
            trained_class = (auto_mapping or self.auto_mapping or {}).get("base_model_class")
            write_card(Path(folder), pissa_card(self, PissaReport(starts_of(self)), trained_class))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> PissaConfig:
        """The configuration of an adapter that was trained as PiSSA, to go on with it.

        Raises:
            ValueError: it cannot have been, as its rank is odd or it is of another kind.
        """
        lora = LoraConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        if type(lora) is not LoraConfig:
            raise ValueError(
                f"{pretrained_model_name_or_path} holds an adapter of type {lora.peft_type.value}; load it without config=."
            )
        ranks = [lora.r, *lora.rank_pattern.values()]
        if any(rank % 2 for rank in ranks):
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a LoRA of rank {lora.r}; one saved by PiSSA has an even rank. "
                "Load it with PeftModel.from_pretrained, without config=."
            )
        factor = _alpha_factor(lora.use_rslora)
        options = {item.name: getattr(lora, item.name) for item in fields(LoraConfig) if item.init}
        options |= {
            "r": lora.r // 2,
            "lora_alpha": _shortest(lora.lora_alpha / factor),
            "rank_pattern": {key: rank // 2 for key, rank in lora.rank_pattern.items()},
            "alpha_pattern": {key: _shortest(alpha / factor) for key, alpha in lora.alpha_pattern.items()},
            "init_lora_weights": False,
        }
        return cls(**options)


def _alpha_factor(use_rslora: bool) -> float:
    """By how much lora_alpha grows as the rank doubles: the scaling is alpha / r, or alpha / √r with rsLoRA."""
    return math.sqrt(2) if use_rslora else 2


def _shortest(number: float) -> float:
    """Takes back the rounding that a factor of √2 left."""
    return float(f"{number:.12g}")


@dataclass
class QPissaConfig(PissaConfig):
    """PiSSA on a base of 4 (or 8) bits whose quantisation error the adapter's start takes up (QPiSSA, arXiv 2404.02948).

    The layers' weight becomes quantised(W − s B₀ A₀), with W read tensor by tensor from the base's checkpoint when the model
    is already quantised; layers in full precision are quantised here. The model to start from,
    quantised(W − s B₀ A₀) + s B₀ A₀, is nearer to W than quantised(W), and is what `disable_adapter` gives; `unload` gives back
    the base as it was. What is saved rebuilds the same residual from the base's weights on the same kind of device.

    Args:
        iterations: turns of decomposition and quantisation (T of the paper's algorithm 1).
        save_residual: save the quantised residual too (half a byte a weight): then it loads on every device, bit for bit.
        full_precision_modules: names of layers that stay in full precision, under plain PiSSA: those that a quantised model
            leaves out of quantisation, and those that Transformers keeps in float32. Filled in by the package.
        full_precision_model: folder or Hub id of the base's original weights, where they are not those of the model's name.
        quant_type, double_quant: of the residual: "nf4", "fp4" or "int8", and whether the scales of 4 bits are quantised too.
            On a model that is quantised already they become what it uses.
    """

    iterations: int = field(default=5, metadata={"help": "Turns of decomposition and quantisation."})
    save_residual: bool = field(default=False, metadata={"help": "Save the quantised residual with the adapter."})
    full_precision_modules: list[str] = field(
        default_factory=list, metadata={"help": "Targets that are not quantised. Filled in by the package."}
    )
    full_precision_model: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the base's original weights. Default: the model's own name."}
    )
    quant_type: Literal["nf4", "fp4", "int8"] = field(
        default="nf4", metadata={"help": "Of the residual. A model that is quantised already decides."}
    )
    double_quant: bool = field(
        default=True, metadata={"help": "Quantise the scales too. A model that is quantised already decides."}
    )

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = PeftType("QPISSA")
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations}; QPiSSA needs at least one.")
        if self.quant_type not in ("nf4", "fp4", "int8"):
            raise ValueError(f"quant_type={self.quant_type!r}; it is 'nf4', 'fp4' or 'int8'.")

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        saved = copy.copy(self)
        saved.init_lora_weights = False  # a saved adapter is loaded, not decomposed again
        LoraConfig.save_pretrained(saved, save_directory, **kwargs)
        self._write_card(save_directory, kwargs.get("auto_mapping_dict"))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> QPissaConfig:
        return super(PissaConfig, cls).from_pretrained(pretrained_model_name_or_path, **kwargs)
