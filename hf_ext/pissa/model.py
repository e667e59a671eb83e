"""QPiSSA as a PEFT tuner: PiSSA adapters on layers whose base is a `ResidualLinear`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import get_logger

from hf_ext.errors import BaseModelError, HfExtError
from hf_ext.integration.compat import config_and_name_of_layer, saves_only_lora_tensors
from hf_ext.pissa.config import QPissaConfig
from hf_ext.pissa.decomposition import energy
from hf_ext.pissa.kinds import PissaLinear
from hf_ext.pissa.quantization import Quantization, QuantizedWeight, bitsandbytes, dequantize, quantized_residual
from hf_ext.pissa.reports import LayerReport
from hf_ext.pissa.residual import OriginalModel, OriginalWeight, ResidualLinear
from hf_ext.pissa.state import stack
from hf_ext.storage.prefetch import progress

logger = get_logger(__name__)

RESIDUAL = ".base_layer."  # part of the keys of the quantized weight, its scales and the bias in a state dict


class QPissaLinear(PissaLinear):
    """A `ResidualLinear` with PiSSA adapters. Merging is exact: the base takes the adapter's factors, not their product."""

    base_layer: ResidualLinear

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        alone = len(active) == 1 and isinstance(self.lora_dropout[active[0]], nn.Identity)
        alone = alone and self.base_layer.B is not None and self.scaling[active[0]] == self.base_layer.scaling
        if not alone or self.disable_adapters or self.merged or kwargs.get("adapter_names"):
            return super().forward(x, *args, **kwargs)
        # The base's s B₀ A₀ x and the adapter's − s B₀ A₀ x cancel, so this computes neither.
        result = self.base_layer.layer(x)
        A, B = self.lora_A[active[0]], self.lora_B[active[0]]
        return (result + self.scaling[active[0]] * B(A(self._cast_input_dtype(x, A.weight.dtype)))).to(result.dtype)

    def start(self, adapter: str, config: QPissaConfig) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        base, rank, scaling = self.base_layer, self.r[adapter], self.start_scaling(adapter)
        if base.B is None:
            weight = base.full_precision()
            decomposition = quantized_residual(
                weight,
                rank,
                base.quantization,
                config.iterations,
                scaling,
                None if config.svd == "exact" else config.niter,
                config.seed,
                self.factors(adapter)[0].dtype,
            )
            base.put(decomposition, scaling, base.plain_error(weight))
        self._check_shared(rank, scaling)
        A, B = base.factors()
        return A[:rank], B[:, :rank]

    def rebuild(self, state_dict: dict[str, torch.Tensor], prefix: str) -> None:
        """Sets the residual that the adapter in a state dict was trained on, unless the layer has one.

        This removes a stored residual from the state dict.
        """
        base, residual = self.base_layer, f"{prefix}{RESIDUAL[1:]}"
        for adapter in self.pissa_adapters():
            A, B = (state_dict.get(prefix + key) for key in self.keys(adapter))
            if A is None or B is None or len(A) != 2 * self.r[adapter]:
                continue
            stored = [key for key in state_dict if key.startswith(residual) and key != f"{residual}bias"]
            parts = {key.removeprefix(residual): state_dict.pop(key) for key in stored}
            if base.B is None:
                quantized = _stored_residual(parts, base.weight.device) if parts else None
                base.rebuild(-B.chunk(2, dim=1)[1], A.chunk(2)[1].clone(), self.start_scaling(adapter), quantized)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        self.rebuild(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check_shared(self, rank: int, scaling: float) -> None:
        base = self.base_layer
        if rank != base.rank or scaling != base.scaling:
            raise ValueError(
                f"The adapters of a QPiSSA model share its residual, and so their start: rank {base.rank} and scaling "
                f"{base.scaling} in {base.original.layer}, not {rank} and {scaling}."
            )

    def check_initial(self, adapter: str, A0: torch.Tensor, B0: torch.Tensor) -> None:
        base = self.base_layer
        self._check_shared(len(A0), self.start_scaling(adapter))
        device = base.weight.device
        A0, B0 = A0.to(device), B0.to(device)
        A, B = base.factors()
        if not (torch.equal(A0, A[: base.rank].to(A0.dtype)) and torch.equal(B0, B[:, : base.rank].to(B0.dtype))):
            raise BaseModelError(
                f"The adapter was trained on another residual of {base.original.layer} than this one. Load it on a fresh base."
            )

    @torch.no_grad()
    def report(self, adapter: str, name: str) -> LayerReport:
        base, rank = self.base_layer, self.r[adapter]
        if base.statistics is not None:
            return LayerReport(name, rank, *base.statistics)
        A, B = (factor.float() for factor in self.initial(adapter))
        weight = base.original_weight()
        total = torch.linalg.norm(weight)
        start = dequantize(base.weight, getattr(base.layer, "state", None)) + base.scaling * (B @ A)
        error = torch.linalg.norm(weight - start) / total
        plain_error = torch.linalg.norm(weight - dequantize(base.quantization.quantize(weight))) / total
        share = energy(B, A, self.start_scaling(adapter)) / total**2
        return LayerReport(name, rank, share.item(), error.item(), plain_error.item())

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter in self.lora_A:
                A, B = self.stacked(adapter)
                if safe_merge and not (torch.isfinite(A).all() and torch.isfinite(B).all()):
                    raise ValueError(f"The adapter '{adapter}' has NaN or infinite weights and was not merged.")
                self.base_layer.merge(B * (self.scaling[adapter] / self.base_layer.scaling), A)
                self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        while self.merged_adapters:
            self.base_layer.unmerge(2 * self.r[self.merged_adapters.pop()])

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None) -> nn.Module:
        if not merge:
            return self.base_layer.restored()
        self.merge(safe_merge, adapter_names)
        layer, self.merge_error = self.base_layer.plain()
        return layer


class PissaModel(LoraModel):
    """The tuner of which PEFT 0.21 and later ask what to save of PiSSA adapters (see `PissaConfig.peft_type`)."""

    @classmethod
    def _get_adapter_state_dict(cls, model, config, adapter_name, state_dict, unwanted_adapter_names):
        state = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        stack(state, adapter_name, is_quantized=config.peft_type == "QPISSA")
        return state


class QPissaModel(PissaModel):
    """The tuner behind `get_peft_model(model, QPissaConfig(…))`."""

    def _create_and_replace(
        self, config: QPissaConfig, adapter_name: str, target: nn.Module, target_name: str, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(target, BaseTunerLayer) and not isinstance(target, PissaLinear):
            raise ValueError(f"QPiSSA replaces the base of {target_name}, which already has an adapter: unload() that first.")
        super()._create_and_replace(config, adapter_name, target, target_name, *args, **kwargs)

    def _prepare_model(self, config: QPissaConfig, model: nn.Module) -> None:
        super()._prepare_model(config, model)
        if not config.init_lora_weights:
            return
        if saves_only_lora_tensors() and (config.save_residual or config.bias != "none"):
            raise HfExtError(
                f"save_residual={config.save_residual}, bias={config.bias!r}: this version of PEFT cannot save residuals and "
                "biases with a QPiSSA adapter. Install peft>=0.21, or set save_residual=False and bias='none'."
            )
        if others := [other for other in self.peft_config.values() if other is not config]:
            # The layers are QPiSSA's already and do not show how the model is quantized.
            for name in ("quant_type", "double_quant", "full_precision_modules"):
                setattr(config, name, getattr(others[0], name))
            return
        linear = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
        formats = {name: Quantization.of(module) for name, module in linear.items()}
        present = next(filter(None, formats.values()), None)
        if present is not None:
            config.quant_type, config.double_quant = present.quant_type, present.double
        kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        config.full_precision_modules = [
            name
            for name, quantization in formats.items()
            if quantization is None and (present is not None or kept & set(name.split(".")))
        ]

    def _create_new_module(self, config: QPissaConfig, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        _, name = config_and_name_of_layer(kwargs | {"config": config})
        bnb = bitsandbytes()
        if not isinstance(target, (nn.Linear, Conv1D, bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            raise ValueError(
                f"QPiSSA has no adapter for {type(target).__name__} ({name}), only for linear layers. Leave it out of "
                "target_modules."
            )
        if name in config.full_precision_modules:
            if Quantization.of(target) is not None:
                raise ValueError(
                    f"{name} is quantized, but was not when the adapter was trained. Load the base in full precision, or with "
                    f"BitsAndBytesConfig(llm_int8_skip_modules=['{name}', …])."
                )
            return PissaLinear(target, adapter_name, config=config, **kwargs)
        transposed = isinstance(target, Conv1D) or issubclass(getattr(target, "source_cls", nn.Linear), Conv1D)
        shape = tuple(target.weight.shape[::-1]) if isinstance(target, Conv1D) else (target.out_features, target.in_features)
        original = OriginalWeight(self._original_model(config), name, shape, transposed)
        before = Quantization.of(target)
        requested = Quantization(config.quant_type, config.double_quant, dtype=getattr(self.model, "dtype", torch.float32))
        quantization = requested
        if before is not None and before.quant_type == requested.quant_type:
            quantization = replace(before, double=requested.double)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # PEFT does not know a ResidualLinear
            return QPissaLinear(ResidualLinear(target, original, quantization), adapter_name, config=config, **kwargs)

    def _original_model(self, config: QPissaConfig) -> OriginalModel:
        """Returns the original model, one for all layers, so that they share its open files."""
        if "original_model" not in self.__dict__:
            name, revision = config.full_precision_model, None
            if name is None:
                name = getattr(self.model, "name_or_path", "") or ""
                revision = getattr(getattr(self.model, "config", None), "_commit_hash", None)
            self.original_model = OriginalModel(name, revision)
        return self.original_model

    def add_weighted_adapter(self, adapters: Sequence[str], *args: Any, **kwargs: Any) -> None:
        """Raises an error: the sum of adapters on a residual has no LoRA on the base.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"The adapters {list(adapters)} are of QPiSSA, which add_weighted_adapter cannot combine. Convert each of them to "
            "a LoRA with hf_ext.pissa.convert_to_lora, and combine these."
        )

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
        layers = [module for module in self.modules() if isinstance(module, QPissaLinear)]
        merged = super().merge_and_unload(*args, **kwargs)
        errors = [100 * layer.merge_error for layer in layers if layer.base_layer.before is not None]
        if errors:
            logger.warning(
                f"merge_and_unload quantized the merged weights again, which changes them by {sum(errors) / len(errors):.1f} % "
                f"in the mean and {max(errors):.1f} % at most. merge_adapter() merges without an error."
            )
        return merged

    @classmethod
    def _get_adapter_state_dict(cls, model, config, adapter_name, state_dict, unwanted_adapter_names):
        state = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        layers = tuple(name + RESIDUAL for name, module in model.named_modules() if isinstance(module, QPissaLinear))
        for key, value in state_dict.items():
            is_saved = config.bias == "lora_only" if key.endswith(".bias") else config.save_residual
            if is_saved and key.startswith(layers):
                state[key] = value
        return state

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model, config, adapter_name, state_dict):
        # The keys of the residual are still those of the file, which have the prefix of a `PeftModel`.
        state = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        if isinstance(model, PeftModel):
            return state
        return {key.removeprefix("base_model.model.") if RESIDUAL in key else key: state[key] for key in state}

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        layers = {name: module for name, module in self.named_modules() if isinstance(module, QPissaLinear)}
        layers = {name: module for name, module in layers.items() if module.base_layer.B is None}
        if layers:  # they would rebuild their residuals without this, but with no progress bar
            with progress("Rebuilding residual", len(layers)) as bar:
                for name, module in layers.items():
                    module.rebuild(state_dict, f"{prefix}{name}.")
                    bar.update()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _stored_residual(stored: dict[str, torch.Tensor], device: torch.device) -> QuantizedWeight:
    """Returns bitsandbytes' parameter of the tensors that its layer's state dict holds."""
    bnb = bitsandbytes()
    weight = stored.pop("weight")
    if "SCB" in stored:
        weight = weight.to(device)
        return bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=stored["SCB"].to(device))
    statistics = {key.removeprefix("weight."): value for key, value in stored.items()}
    return bnb.nn.Params4bit.from_prequantized(weight, statistics, device=device)
