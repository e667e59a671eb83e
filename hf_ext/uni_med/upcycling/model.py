"""Uni-Med's connector as a PEFT tuner: LoRA's, with mixtures of experts where the model has projectors."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import nn

from hf_ext.integration.compat import NamedAsInStateDict
from hf_ext.uni_med.upcycling.config import CMoEConfig
from hf_ext.uni_med.upcycling.layer import MixtureProjector
from hf_ext.uni_med.upcycling.projectors import find_projectors, layers_of
from hf_ext.uni_med.upcycling.tasks import BatchTasks


class CMoEModel(LoraModel):
    """The tuner behind `get_peft_model(model, CMoEConfig(…))`. The model then takes `tasks=`, the task of each sample, in calls
    and in `generate`."""

    tuner_layer_cls = BaseTunerLayer

    def _prepare_adapter_config(self, config: CMoEConfig, model_config: dict) -> CMoEConfig:
        return config  # without target_modules there are no LoRA layers

    def _prepare_model(self, config: CMoEConfig, model: nn.Module) -> None:
        super()._prepare_model(config, model)
        config.projectors = find_projectors(model, config.connectors)
        if compiled := next((name for name in config.projectors if name.endswith("_orig_mod")), None):
            raise ValueError(f"'{compiled}' would run without experts, as it was compiled. Call torch.compile after this.")
        names = (name for name, _ in model.named_modules() if name not in config.projectors)
        if config.target_modules not in (None, "all-linear") and not any(
            self._check_target_module_exists(config, name) for name in names
        ):
            # PEFT would not notice, as it finds the projectors.
            raise ValueError(f"target_modules={config.target_modules}: {type(model).__name__} has no such modules for LoRA.")
        if not any(isinstance(module, MixtureProjector) for module in model.modules()):
            BatchTasks(getattr(model, "_orig_mod", model))  # behind torch.compile

    @staticmethod
    def _check_target_module_exists(config: CMoEConfig, key: str) -> Any:
        if key in config.projectors:
            return True
        is_inside = any(key.startswith(f"{name}.") for name in config.projectors)
        return False if is_inside or config.target_modules is None else check_target_module_exists(config, key)

    def _create_and_replace(self, config, adapter_name, target, target_name, parent, current_key, **kwargs) -> None:
        if current_key not in config.projectors:
            return super()._create_and_replace(config, adapter_name, target, target_name, parent, current_key, **kwargs)
        if isinstance(target, MixtureProjector):
            mixture = target
        elif isinstance(target, BaseTunerLayer):
            raise ValueError(f"{current_key} already has an adapter of another kind: unload() that first.")
        else:
            mixture = MixtureProjector(target, layers_of(target, current_key), self.model.generate.__self__)
            setattr(parent, target_name, mixture)
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, current_key), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, current_key), config.lora_alpha)
        mixture.update_layer(adapter_name, config, rank, alpha)
        if adapter_name not in self.active_adapters:
            mixture.lora_experts[adapter_name].requires_grad_(False)
            mixture.lora_router[adapter_name].requires_grad_(False)

    def _check_mixtures(self, adapter_names: list[str] | None) -> None:
        for module in self.model.modules():
            if isinstance(module, MixtureProjector):
                module.check_merge(adapter_names)

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        self._check_mixtures(adapter_names)  # before any LoRA layer merges
        super().merge_adapter(adapter_names, safe_merge)

    def _unload_and_optionally_merge(
        self, merge: bool = True, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        if merge:
            self._check_mixtures(adapter_names)
        model = super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)
        model.generate.__self__.remove()
        return model

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("adapter_names") is not None:
            raise ValueError("adapter_names: a CMoE model has one active adapter for a batch. Call set_adapter.")
        return super()._enable_peft_forward_hooks(*args, **kwargs)

    # PEFT 0.21 saves and loads by these three.

    @classmethod
    def _get_adapter_state_dict(cls, model: nn.Module, adapter_name: str, state_dict: dict, **kwargs: Any) -> dict[str, Any]:
        named = NamedAsInStateDict(model)
        named.require_modules(key for key in state_dict if ".lora_" in key and f".{adapter_name}." in f"{key}.")
        return super()._get_adapter_state_dict(model=named, adapter_name=adapter_name, state_dict=state_dict, **kwargs)

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model: nn.Module, **kwargs: Any) -> dict[str, Any]:
        return super()._remap_adapter_state_dict_for_load(model=NamedAsInStateDict(model), **kwargs)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return super()._remove_adapter_name_from_key(key.replace("._orig_mod.", "."), adapter_name)  # of torch.compile

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("Mixtures of experts cannot be combined: the routers of two adapters have no common weights.")
