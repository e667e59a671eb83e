"""The configurations: `PissaConfig` and `QPissaConfig`, which take LoRA's options."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import LoraConfig, PeftType
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from hf_ext.integration.compat import saves_adapter, saves_only_lora_tensors
from hf_ext.pissa.kinds import PissaConv1d, PissaConv2d, PissaConv3d, PissaEmbedding, PissaLinear, layer_for
from hf_ext.pissa.layer import PRINCIPAL
from hf_ext.pissa.quantization import QuantType
from hf_ext.pissa.start import PrincipalStart

#: File beside adapter_config.json, which has no place for PiSSA's own options: PEFT warns about options that it does not know.
FILE = "pissa_config.json"
DECOMPOSITION = ("svd", "niter", "seed")

# LoRA options that PiSSA does not support, with the values that leave them off.
NEUTRAL = {
    "use_dora": False,
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "ensure_weight_tying": False,
    "megatron_config": None,
    "alora_invocation_tokens": None,
    "velora_config": None,
    "monteclora_config": None,
    "arrow_config": None,
    "kasa_config": None,
}


@dataclass
class PissaConfig(PrincipalStart):
    """A LoRA that starts from the principal singular components of the weights (PiSSA, arXiv 2404.02948).

    The layer computes W x + s (B A − B₀ A₀) x. s B₀ A₀ are the r principal components of W, and B and A start from B₀ and A₀.
    This has the gradients of the paper's form (W − s B₀ A₀) x + s B A x, and does not change W.

    The saved adapter is a plain LoRA of rank 2r, `[B, B − B₀] [A − A₀; A₀]`, for any program that loads LoRA. To resume
    training, load it with `config=PissaConfig.from_pretrained(folder)` and `is_trainable=True` in `PeftModel.from_pretrained`.

    It takes the options of `LoraConfig` that PiSSA supports. These are new or have another meaning:

    Args:
        r: number of components, at most as many as the smallest target has.
        lora_alpha: defaults to r, as in the paper.
        lora_dropout: acts on the adapter's change, BA − B₀A₀. The paper uses 0.
        init_lora_weights: False skips the decomposition: A and B are random and A₀ and B₀ zero, as in a LoRA.
        svd: "randomized", or "exact" for a full decomposition of every weight.
        niter: rounds of the randomized decomposition.
        seed: seed of the randomized decomposition.

    Raises:
        ValueError: PiSSA does not support an option or its value.
    """

    if TYPE_CHECKING:
        init_lora_weights: bool | str = True

    lora_alpha: float | None = field(default=None, metadata={"help": "The scaling is lora_alpha / r. Default: r."})

    def __post_init__(self):
        super().__post_init__()
        self.lora_alpha = self.r if self.lora_alpha is None else self.lora_alpha
        unsupported = sorted(name for name, value in NEUTRAL.items() if getattr(self, name, value) != value)
        if unsupported:
            raise ValueError(f"{type(self).__name__} does not support {', '.join(unsupported)}. Leave the option out.")
        if self.init_lora_weights is True:
            self.init_lora_weights = PRINCIPAL
        if self.init_lora_weights not in (PRINCIPAL, False):
            raise ValueError(
                f"init_lora_weights={self.init_lora_weights!r} is not supported: {type(self).__name__} starts from principal "
                "components. Set svd and niter instead."
            )
        if self.r < 1 or self.niter < 0:
            raise ValueError(f"r={self.r} must be 1 or more, and niter={self.niter} 0 or more.")
        if min(self.lora_alpha, *self.alpha_pattern.values(), 1) <= 0:
            raise ValueError("lora_alpha must be positive: PiSSA divides the principal components by the scaling.")
        if self.svd not in ("randomized", "exact"):
            raise ValueError(f"svd={self.svd!r} is not supported. Use 'randomized' or 'exact'.")
        if self.lora_dropout:
            warnings.warn(
                f"lora_dropout={self.lora_dropout}: PiSSA's adapter holds the principal directions of the weights, and dropout "
                "discards some of them at every step. The paper uses 0.",
                stacklevel=3,
            )
        layers: dict[type, Any] = {
            nn.Linear: PissaLinear,
            Conv1D: PissaLinear,
            nn.Embedding: PissaEmbedding,
            nn.Conv1d: PissaConv1d,
            nn.Conv2d: PissaConv2d,
            nn.Conv3d: PissaConv3d,
            nn.Module: layer_for,
        }
        self._register_custom_module(layers)

    @property
    def peft_type(self) -> PeftType:  # type: ignore[override]
        """LORA, so that PiSSA adapters live in a model beside LoRAs. PEFT asks the tuner of the type which tensors to save."""
        kind = self.__dict__["peft_type"]
        return PeftType("PISSA") if kind == PeftType.LORA and not saves_only_lora_tensors() and saves_adapter() else kind

    @peft_type.setter
    def peft_type(self, kind: PeftType) -> None:
        self.__dict__["peft_type"] = kind

    def to_dict(self) -> dict:
        return super().to_dict() | {"init_lora_weights": bool(self.init_lora_weights)}

    def to_lora_config(self) -> LoraConfig:
        """Returns the configuration of the saved adapter: a LoRA of twice the rank, at the same scaling."""
        options = {item.name: getattr(self, item.name) for item in fields(LoraConfig) if item.init}
        factor = _alpha_factor(self.use_rslora)
        assert self.lora_alpha is not None  # __post_init__ sets it
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
        """Writes the configuration of `to_lora_config` and the options of the decomposition."""
        self.to_lora_config().save_pretrained(save_directory, **kwargs)
        options = {name: getattr(self, name) for name in DECOMPOSITION}
        Path(save_directory, FILE).write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> PissaConfig:
        """Reads the configuration of a saved PiSSA adapter, to resume its training.

        It decomposes nothing, because the adapter's weights are loaded next. For another adapter with the same options,
        make a new `PissaConfig`.

        Raises:
            ValueError: the adapter is not one of PiSSA, as its rank is odd or its type is not LORA.
        """
        lora = LoraConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        if type(lora) is not LoraConfig:
            raise ValueError(
                f"{pretrained_model_name_or_path} holds an adapter of type {lora.peft_type.value}. Load it without config=."
            )
        ranks = [lora.r, *lora.rank_pattern.values()]
        if any(rank % 2 for rank in ranks):
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a LoRA of rank {lora.r}, but PiSSA saves LoRAs of an even rank. "
                "Load it with PeftModel.from_pretrained, without config=."
            )
        factor = _alpha_factor(lora.use_rslora)
        options = {item.name: getattr(lora, item.name) for item in fields(LoraConfig) if item.init}
        options |= {
            "r": lora.r // 2,
            "lora_alpha": _shortest(lora.lora_alpha / factor),
            "rank_pattern": {key: rank // 2 for key, rank in lora.rank_pattern.items()},
            "alpha_pattern": {key: _shortest(alpha / factor) for key, alpha in lora.alpha_pattern.items()},
        }
        config = cls(**options, **_saved_decomposition(pretrained_model_name_or_path, kwargs))
        config.is_trained = True
        return config


def _saved_decomposition(name: str | os.PathLike, options: dict[str, Any]) -> dict[str, Any]:
    """Reads svd, niter and seed of a saved adapter, if they are with it.

    Raises:
        ValueError: the file is damaged.
    """
    names = ("subfolder", "revision", "token", "cache_dir", "force_download", "local_files_only")
    hub = {key: options[key] for key in names if options.get(key) is not None}
    path = cached_file(
        name, FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False, **hub
    )
    if path is None:
        return {}
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        return {key: saved[key] for key in DECOMPOSITION}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: it must name {', '.join(DECOMPOSITION)}. Save the adapter again.") from error


def _alpha_factor(use_rslora: bool) -> float:
    """Returns the factor of lora_alpha when the rank doubles. The scaling is alpha / r, with rsLoRA alpha / √r."""
    return math.sqrt(2) if use_rslora else 2


def _shortest(number: float) -> float:
    """Removes the rounding error that a factor of √2 leaves."""
    return float(f"{number:.12g}")


@dataclass
class QPissaConfig(PissaConfig):
    """PiSSA on a base in 4 or 8 bits, where the adapter's start absorbs quantization error (QPiSSA, arXiv 2404.02948).

    The layers' weight becomes quantized(W − s B₀ A₀). If the model is quantized, QPiSSA reads W tensor by tensor from the
    base's checkpoint. If it is in full precision, QPiSSA quantizes it.

    Training starts from quantized(W − s B₀ A₀) + s B₀ A₀, which is nearer to W than quantized(W). `disable_adapter` gives this
    start, up to rounding. `unload` restores the base bit for bit. A saved adapter rebuilds the same residual from the base's
    weights on the same kind of device.

    Args:
        iterations: iterations of decomposition and quantization (T of the paper's algorithm 1).
        init_lora_weights: False is only for loading: the layers have no residual until an adapter's weights are loaded.
        save_residual: save the quantized residual too (half a byte per weight). Such an adapter loads on every device, bit for
            bit. Saving it requires peft>=0.21.
        full_precision_modules: names of layers that stay in full precision and train with plain PiSSA. These are layers that
            a quantized model leaves out of quantization, and layers that Transformers keeps in float32. The package sets it.
        full_precision_model: folder or Hub id of the base's original weights. Defaults to the model's own name.
        quant_type: "nf4", "fp4" or "int8", for the residual. On a quantized model the package sets it to the model's type.
        double_quant: quantize the scales of 4-bit weights too. On a quantized model the package sets it to the model's value.
        bias: as in LoRA. Values other than "none" require peft>=0.21.
    """

    iterations: int = field(default=5, metadata={"help": "Iterations of decomposition and quantization."})
    save_residual: bool = field(default=False, metadata={"help": "Save the quantized residual with the adapter."})
    full_precision_modules: list[str] = field(
        default_factory=list, metadata={"help": "Targets that are not quantized. The package sets it."}
    )
    full_precision_model: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the base's original weights. Default: the model's own name."}
    )
    quant_type: QuantType = field(
        default="nf4", metadata={"help": "Type of the residual. A quantized model's own type takes precedence."}
    )
    double_quant: bool = field(
        default=True, metadata={"help": "Quantize the scales too. A quantized model's own value takes precedence."}
    )

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = PeftType("QPISSA")
        if self.target_parameters:
            raise ValueError("QPissaConfig does not support target_parameters. Leave the option out.")
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations} is not supported: QPiSSA requires at least 1.")
        if self.quant_type not in ("nf4", "fp4", "int8"):
            raise ValueError(f"quant_type={self.quant_type!r} is not supported. Use 'nf4', 'fp4' or 'int8'.")

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        saved = copy.copy(self)
        saved.init_lora_weights = False  # loading it skips the decomposition
        LoraConfig.save_pretrained(saved, save_directory, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> QPissaConfig:
        return super(PissaConfig, cls).from_pretrained(pretrained_model_name_or_path, **kwargs)
