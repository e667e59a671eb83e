"""PiSSA as a PEFT tuner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.utils.logging import get_logger, tqdm

from hf_ext.adapters.landing import is_all_linear, targets_that_load
from hf_ext.display import percent
from hf_ext.errors import AdapterError, BaseModelError, HfExtError
from hf_ext.integration.compat import NamedAsInStateDict, require_methods
from hf_ext.pissa.config import PissaConfig
from hf_ext.pissa.kinds import KINDS, computes_as
from hf_ext.pissa.layer import PissaLayer, is_quantized, whole
from hf_ext.pissa.state import stack, unstack

logger = get_logger(__name__)
require_methods(
    LoraModel,
    "_cast_adapter_dtype",
    "_create_and_replace",
    "_create_new_module",
    "_get_adapter_state_dict",
    "_remap_adapter_state_dict_for_load",
    "_remove_adapter_name_from_key",
)


class PissaModel(LoraModel):
    """The tuner behind `get_peft_model(model, PissaConfig(…))`. It adds A₀ and B₀ to PEFT's LoRA, and saves all factors as one
    LoRA of rank 2r (see state.py)."""

    tuner_layer_cls = PissaLayer
    is_quantized = False

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        if compiled := next((name for name, _ in model.named_modules() if "_orig_mod" in name), None):
            raise AdapterError(
                f"'{compiled}' is compiled, which changes the names of its layers. Call torch.compile after this."
            )
        if config.decomposes and not self.is_quantized:  # QPiSSA's adapters are never loaded as LoRAs
            self._leave_out_what_does_not_load(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        layers = self._set_magnitudes(model, adapter_name)
        if energies := [layer.energies[adapter_name] for layer in layers.values()]:
            logger.info(
                f"The adapter '{adapter_name}' starts with {percent(sum(energies) / len(energies))} of the weights' energy "
                f"(mean over {len(energies)} layers)."
            )
        self._warn_of_what_cannot_learn(model, adapter_name, layers)

    @staticmethod
    def _warn_of_what_cannot_learn(model: nn.Module, adapter: str, layers: dict[str, PissaLayer]) -> None:
        """Warns of layers that are not called, and of components that are zero, whose gradients are zero too."""
        attentions = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
        if unused := [f"{name}.out_proj" for name in attentions if f"{name}.out_proj" in layers]:
            logger.warning(
                f"The adapter '{adapter}' learns nothing in {len(unused)} layers, such as '{unused[0]}': nn.MultiheadAttention "
                "uses their weights without calling them. Name them in exclude_modules."
            )
        zeros = {name: int((layer.factors(adapter)[1].flatten(1) == 0).all(0).sum()) for name, layer in layers.items()}
        if idle := [name for name, count in zeros.items() if count]:
            logger.warning(
                f"{sum(zeros.values())} components of the adapter '{adapter}' are zero and learn nothing, in {len(idle)} "
                f"layers, such as '{idle[0]}': the weight is zero or has fewer than r components. Lower r, or exclude them."
            )

    @staticmethod
    def _leave_out_what_does_not_load(model: nn.Module, config: PissaConfig) -> None:
        """Removes the layers from "all-linear" whose saved factors PEFT would not load: it takes names in mixtures of experts
        for those of older checkpoints. Raises AdapterError if one of them is named in `target_modules`."""
        targets, loaded = targets_that_load(model, config.to_lora_config())
        if not (lost := targets - loaded):
            return
        if not is_all_linear(config):
            raise AdapterError(
                f"PEFT would not load the saved factors of {len(lost)} target_modules of this model, such as '{min(lost)}'. "
                "Leave these out; 'all-linear' does so."
            )
        logger.warning(
            f"'all-linear' leaves out {len(lost)} layers, such as '{min(lost)}': PEFT would not load their saved factors."
        )
        config.target_modules = loaded

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for layer in self._set_magnitudes(self.model, adapter_name).values():
            del layer.energies[adapter_name]  # PEFT calls this after loading too

    @staticmethod
    def _set_magnitudes(model: nn.Module, adapter: str) -> dict[str, PissaLayer]:
        """Sets DoRA's magnitudes of a new adapter, which PEFT computes in the base's dtype. Returns the layers by name."""
        modules = model.named_modules()
        layers = {name: layer for name, layer in modules if isinstance(layer, PissaLayer) and adapter in layer.energies}
        for layer in layers.values():
            if adapter in layer.lora_magnitude_vector:
                layer.lora_magnitude_vector[adapter].weight.data.copy_(layer.norm(adapter))
        return layers

    def _create_and_replace(self, config, adapter_name, target, target_name, parent, current_key, **kwargs) -> None:
        if isinstance(target, BaseTunerLayer) and not isinstance(target, PissaLayer):
            raise AdapterError(
                f"{current_key} already has an adapter of another type. Call unload() or merge_and_unload() first."
            )
        try:
            super()._create_and_replace(config, adapter_name, target, target_name, parent, current_key, **kwargs)
        except ValueError as error:
            if isinstance(error, BaseModelError):
                raise
            raise AdapterError(f"{current_key}: {error}") from error

    @staticmethod
    def _create_new_module(config: PissaConfig, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base = next((base for base in KINDS if isinstance(target, base)), None)
        if base is None:
            raise AdapterError(
                f"PiSSA has no adapter for {type(target).__name__}, only for linear layers, embeddings and convolutions. Leave "
                "it out of target_modules, or name it in exclude_modules."
            )
        if not is_quantized(target.weight) and not computes_as(target, base):  # type: ignore[arg-type]
            raise AdapterError(
                f"PiSSA has no adapter for {type(target).__name__}, whose forward is not that of {base.__name__}. Leave it out "
                "of target_modules, or name it in exclude_modules."
            )
        return KINDS[base](target, adapter_name, config=config, **kwargs)

    def add_weighted_adapter(self, adapters: Sequence[str], *args: Any, **kwargs: Any) -> None:
        """Raises an AdapterError: a combination of PiSSA adapters is a LoRA."""
        raise AdapterError(
            f"The adapters {list(adapters)} are in PiSSA's training form, which add_weighted_adapter cannot combine. Save "
            "them, load them as LoRAs with PeftModel.from_pretrained and load_adapter, and combine these."
        )

    @classmethod
    def _convert_state_dict_for_initial_model(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise AdapterError(
            "PiSSA saves an adapter for the unchanged base by itself. Save it without path_initial_model_for_weight_conversion."
        )

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return super()._remove_adapter_name_from_key(key.replace("_orig_mod.", ""), adapter_name)  # of torch.compile

    @classmethod
    def _get_adapter_state_dict(cls, model, config, adapter_name, state_dict, unwanted_adapter_names):
        model = NamedAsInStateDict(model)
        state = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        model.require_modules(key for key in state_dict if key.endswith(f".initial_A.{adapter_name}.weight"))
        return stack(state, adapter_name, cls.is_quantized)

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model, config, adapter_name, state_dict):
        model = NamedAsInStateDict(model)
        state = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, PissaLayer)]
        for name, layer in tqdm(layers, desc="Rebuilding residuals", unit=" layers", disable=not cls.is_quantized):
            prefix = f"{name}." if name else ""
            a, b = (prefix + key for key in layer.keys(adapter_name))
            a0, b0 = (f"{prefix}initial_{part}.{adapter_name}.weight" for part in "AB")
            if a in state and b in state and a0 not in state:
                rank = layer.r[adapter_name]
                if len(state[a]) != 2 * rank:
                    raise HfExtError(
                        f"The saved adapter has rank {len(state[a])} in {name}, but PiSSA with r={rank} saves rank {2 * rank}. "
                        "Load it with PeftModel.from_pretrained, and with config=PissaConfig.from_pretrained(folder) to resume "
                        "PiSSA."
                    )
                state[a], state[b], state[a0], state[b0] = unstack(state[a], state[b], cls.is_quantized)
                layer.check_start(adapter_name, whole(state[a0]), whole(state[b0]))
        return state
