"""The configurations: `PissaConfig` and `QPissaConfig`, which take LoRA's options."""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from peft import LoraConfig, PeftType

from hf_ext.errors import AdapterError
from hf_ext.integration import versions

ROUNDS = 3  # of the randomized decomposition, if init_lora_weights does not say

# LoRA options that PiSSA does not support, with the values that leave them off.
NEUTRAL = {
    "target_parameters": None,
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
class PissaConfig(LoraConfig):
    """A LoRA that starts from the principal singular components of the weights (PiSSA, arXiv 2404.02948).

    The layer computes W x + s (B A − B₀ A₀) x. s B₀ A₀ are the r principal components of W, and B and A start from B₀ and A₀.
    This has the gradients of the paper's form (W − s B₀ A₀) x + s B A x, and does not change W.

    The saved adapter is a plain LoRA of rank 2r, `[B, B − B₀] [A − A₀; A₀]`, for any program that loads LoRA. To resume
    training, load it with `config=PissaConfig.from_pretrained(folder)` and `is_trainable=True` in `PeftModel.from_pretrained`.
    `get_peft_model` starts a new adapter from the same configuration.

    It takes the options of `LoraConfig` that PiSSA supports. These have another meaning:

    Args:
        r: number of components, at most as many as the smallest target has.
        lora_alpha: defaults to r, as in the paper.
        lora_dropout: acts on the adapter's change, BA − B₀A₀. The paper uses 0.
        init_lora_weights: "pissa" decomposes every weight exactly, "pissa_niter_4" by four rounds of randomized subspace
            iteration, and True by three. False skips the decomposition: A and B are random and A₀ and B₀ zero, as in a LoRA.
        use_dora: DoRA (arXiv 2402.09353) of the change. The saved adapter is then a DoRA of rank 2r.

    Raises:
        AdapterError: PiSSA does not support an option or its value.
        ImportError: PEFT is older than 0.21.
    """

    lora_alpha: float | None = field(default=None, metadata={"help": "The scaling is lora_alpha / r. Default: r."})  # type: ignore[assignment]

    def __post_init__(self):
        versions.require("PiSSA", "peft>=0.21")
        if self.peft_type == PeftType.LORA:  # type: ignore[has-type]
            raise AdapterError(
                "These are the options of a saved adapter, a LoRA of twice the rank. Copy a PissaConfig with "
                "dataclasses.replace, or read a saved one with PissaConfig.from_pretrained."
            )
        # LoraConfig warns about saving of PEFT's own "pissa", which this is not.
        start = self.init_lora_weights  # type: ignore[has-type]
        self.init_lora_weights = True
        super().__post_init__()
        self.init_lora_weights = start
        self.peft_type = PeftType("PISSA")
        self.lora_alpha = self.r if self.lora_alpha is None else self.lora_alpha
        unsupported = sorted(name for name, value in NEUTRAL.items() if (getattr(self, name, None) or value) != value)
        if unsupported:
            raise AdapterError(f"{type(self).__name__} does not support {', '.join(unsupported)}. Leave the option out.")
        if start not in (True, False) and not re.fullmatch(r"pissa(_niter_\d+)?", str(start)):
            raise AdapterError(
                f"init_lora_weights={start!r} is not supported: {type(self).__name__} starts from principal "
                "components. Use 'pissa' (exact), 'pissa_niter_4' (randomized), or leave the option out."
            )
        if self.r < 1:
            raise AdapterError(f"r={self.r} is not supported: PiSSA requires at least 1.")
        if min(self.lora_alpha, *self.alpha_pattern.values(), 1) <= 0:
            raise AdapterError("lora_alpha must be positive: PiSSA divides the principal components by the scaling.")
        if start == "pissa_niter_0":
            warnings.warn("init_lora_weights='pissa_niter_0' takes one round: the decomposition requires one.", stacklevel=3)
        if self.lora_dropout:
            warnings.warn(
                f"lora_dropout={self.lora_dropout}: PiSSA's adapter holds the principal directions of the weights, and dropout "
                "discards some of them at every step. The paper uses 0.",
                stacklevel=3,
            )

    @property
    def rounds(self) -> int | None:
        """The rounds of the randomized decomposition; None for the exact one."""
        if self.init_lora_weights == "pissa":
            return None
        return int(str(self.init_lora_weights).rpartition("_")[2]) if isinstance(self.init_lora_weights, str) else ROUNDS

    @property
    def decomposes(self) -> bool:
        """True if new adapters start from principal components. `from_pretrained` leaves `inference_mode` open, which PEFT sets
        where it loads the adapter's weights next."""
        return bool(self.init_lora_weights) or self.inference_mode is None

    def to_lora_config(self) -> LoraConfig:
        """Returns the configuration of the saved adapter: a LoRA of twice the rank, at the same scaling."""
        factor = _alpha_factor(self.use_rslora)
        options = _options(self, lambda rank: 2 * rank, lambda alpha: factor * alpha)
        return LoraConfig(**options | {"init_lora_weights": True})

    def to_dict(self) -> dict[str, Any]:
        """Returns the options of `to_lora_config`. PEFT and diffusers save them with the adapter's weights."""
        return self.to_lora_config().to_dict()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> PissaConfig:
        """Reads the configuration of a saved PiSSA adapter, to resume its training or to start another one.

        `PeftModel.from_pretrained` decomposes nothing with it, because it loads the adapter's weights next. `get_peft_model`
        decomposes the weights as usual.

        Raises:
            AdapterError: the adapter is not one of PiSSA, as its rank is odd or its type is not LORA.
        """
        lora = LoraConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        if type(lora) is not LoraConfig:
            raise AdapterError(
                f"{pretrained_model_name_or_path} holds an adapter of type {lora.peft_type.value}. Load it without config=."
            )
        if any(rank % 2 for rank in (lora.r, *lora.rank_pattern.values())):
            raise AdapterError(
                f"{pretrained_model_name_or_path} holds a LoRA of rank {lora.r}, but PiSSA saves LoRAs of an even rank. "
                "Load it with PeftModel.from_pretrained, without config=."
            )
        factor = _alpha_factor(lora.use_rslora)
        options = _options(lora, lambda rank: rank // 2, lambda alpha: float(f"{alpha / factor:.12g}"))  # as short as it was
        return cls(**options | {"init_lora_weights": False, "inference_mode": None, "peft_type": None})


@dataclass
class QPissaConfig(PissaConfig):
    """PiSSA on a base in 4 bits, where the adapter's start absorbs quantization error (QPiSSA, arXiv 2404.02948).

    The weight of each 4-bit layer becomes quantized(W − s B₀ A₀), in the layer's own format. W is read tensor by tensor from
    the base's checkpoint. Targets that are not quantized, such as `lm_head`, get plain PiSSA.

    Training starts from quantized(W − s B₀ A₀) + s B₀ A₀, which is nearer to W than quantized(W). `disable_adapter` gives this
    start, up to rounding. `unload` restores the base bit for bit. A saved adapter rebuilds the same residual from the base's
    weights, on the same kind of device and with the same `BitsAndBytesConfig`.

    Args:
        iterations: iterations of decomposition and quantization (T of the paper's algorithm 1).
        init_lora_weights: as in `PissaConfig`. Only the first iteration takes all rounds, twice as many. False is for loading
            saved weights, which bring the residual: do not train from it.
        full_precision_model: folder or Hub id of the base's original weights. Defaults to the model's own name.
        quantization: the base's 4-bit format. Training records it, and loading compares it.
    """

    iterations: int = field(default=5, metadata={"help": "Iterations of decomposition and quantization."})
    full_precision_model: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the base's original weights. Default: the model's own name."}
    )
    quantization: str | None = field(default=None, metadata={"help": "The base's 4-bit format, which training records."})

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = PeftType("QPISSA")
        if self.use_dora or self.bias != "none":
            raise AdapterError("QPissaConfig supports neither use_dora nor bias. Leave the option out.")
        if self.iterations < 1:
            raise AdapterError(f"iterations={self.iterations} is not supported: QPiSSA requires at least 1.")

    def to_dict(self) -> dict[str, Any]:
        return LoraConfig.to_dict(self)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        saved = copy.copy(self)
        saved.init_lora_weights = False  # loading it skips the decomposition
        LoraConfig.save_pretrained(saved, save_directory, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> QPissaConfig:
        config = super(PissaConfig, cls).from_pretrained(pretrained_model_name_or_path, **kwargs)
        if not isinstance(config, cls):
            raise AdapterError(
                f"{pretrained_model_name_or_path} holds no QPiSSA adapter. Load it with PeftModel.from_pretrained."
            )
        config.inference_mode = None
        return config


def _options(config: LoraConfig, rank: Callable[[int], int], alpha: Callable[[float], float]) -> dict[str, Any]:
    """Returns LoRA's options of a configuration, with other ranks and alphas."""
    options = {item.name: getattr(config, item.name) for item in fields(LoraConfig) if item.init}
    for name, change in (("r", rank), ("lora_alpha", alpha)):
        options[name] = change(options[name])
    for name, change in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        options[name] = {key: change(value) for key, value in options[name].items()}
    return options


def _alpha_factor(use_rslora: bool) -> float:
    """Returns the factor of lora_alpha when the rank doubles. The scaling is alpha / r, with rsLoRA alpha / √r."""
    return math.sqrt(2) if use_rslora else 2
