"""Adds this package's entries to the registries of Transformers, PEFT and diffusers. No other module does; nothing is replaced.

`import hf_ext` must stay light, so it imports none of them. A library that is imported already gets its entries at once, any
other one when its import is done. Each entry stands alone: where the classes of a method cannot be imported, classes in their
place say what is missing when the method is used.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODELS = "transformers.modeling_utils"
AUTO = "transformers.models.auto"
UNI_MED = "hf_ext.uni_med.modeling_uni_med"  # imported with the first configuration of a Uni-Med model


def register() -> None:
    """Makes Transformers, PEFT and diffusers know the methods of this package. Calling it again does nothing."""
    if any(isinstance(finder, _ImportWatcher) for finder in sys.meta_path):
        return
    watcher = _ImportWatcher()
    sys.meta_path.insert(0, watcher)
    watcher.after(["transformers.quantizers.auto"], _add_quantizers)
    watcher.after([MODELS], _add_load_check)
    watcher.after(["diffusers.quantizers.auto"], _add_diffusers_quantizer)
    watcher.after(["peft", MODELS], _add_peft_types)
    watcher.after([f"{AUTO}.configuration_auto"], _add_config)
    watcher.after([f"{AUTO}.modeling_auto", MODELS, UNI_MED], _add_model)
    watcher.after([f"{AUTO}.processing_auto", MODELS], _add_processor)
    watcher.after([UNI_MED], _add_blip2_vision)


class _ImportWatcher(MetaPathFinder):
    """Calls functions once the modules they need have been imported. It finds no modules itself. A function waits until no
    import of the watched packages is under way, so that it never meets a half-imported module."""

    PACKAGES = ("diffusers", "hf_ext", "peft", "transformers")

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[str, ...], Callable[[], None]]] = []
        self._thread = threading.local()  # its `depth` is how many imports of the packages are under way

    def after(self, modules: Sequence[str], action: Callable[[], None]) -> None:
        """Calls `action` when all of these modules are imported: at once if they are."""
        self._waiting.append((tuple(modules), action))
        self._run_ready()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self._waiting or name.partition(".")[0] not in self.PACKAGES:
            return None
        finds = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        specs = (find(name, path, target) for find in finds if find is not None)  # Python skips finders of older kinds, too
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the instance's own; that of its class is back
            depth = getattr(self._thread, "depth", 0)
            self._thread.depth = depth + 1
            try:
                execute(module)
            finally:
                self._thread.depth = depth
            if depth == 0:
                self._run_ready()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _run_ready(self) -> None:
        for entry in list(self._waiting):
            modules, action = entry
            if all(name in sys.modules for name in modules):
                try:
                    self._waiting.remove(entry)
                except ValueError:  # an action before this one, or another thread, has run it
                    continue
                try:
                    action()
                except Exception as error:  # of internals of a host that have changed
                    warnings.warn(f"hf_ext: {action.__name__} failed: {type(error).__name__}: {error}", stacklevel=2)


def _add_quantizers() -> None:
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from hf_ext.storage.config_file import EMR, FM_DELTA  # also the modules

    for package, name in ((FM_DELTA, "FMDelta"), (EMR, "EMR")):
        if package not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(package)(_imported(f"{package}.config", f"{name}Config", QuantizationConfigMixin))
        if package not in AUTO_QUANTIZER_MAPPING:
            register_quantizer(package)(_imported(f"{package}.quantizer", f"{name}Quantizer", HfQuantizer))


def _add_load_check() -> None:
    from hf_ext.integration.compat import check_each_load
    from hf_ext.integration.loading.load_check import require_decoding

    check_each_load(require_decoding)


def _add_diffusers_quantizer() -> None:
    from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    from hf_ext.integration.loading.diffusers import CompressedConfig, CompressedQuantizer

    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(CompressedConfig.quant_method, CompressedConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(CompressedConfig.quant_method, CompressedQuantizer)


def _add_peft_types() -> None:
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils import register_peft_method

    from hf_ext.integration.compat import add_peft_type

    for package, name, module in (
        ("pissa", "Pissa", "model"),
        ("pissa", "QPissa", "quantized"),
        ("uni_med.upcycling", "CMoE", "model"),
    ):
        key = name.upper()
        add_peft_type(key)
        if PeftType(key) not in PEFT_TYPE_TO_TUNER_MAPPING:
            config = _imported(f"hf_ext.{package}.config", f"{name}Config")
            model = _imported(f"hf_ext.{package}.{module}", f"{name}Model")
            register_peft_method(name=key.lower(), config_cls=config, model_cls=model, prefix="lora_")


def _add_config() -> None:
    from transformers import AutoConfig

    config = _imported("hf_ext.uni_med.configuration_uni_med", "UniMedConfig")
    AutoConfig.register("uni_med", config, exist_ok=True)
    if (module := sys.modules.get(config.__module__)) and hasattr(module, "IMPORTS"):  # else it could not be imported
        module.IMPORTS.append(UNI_MED)


def _add_model() -> None:
    from transformers import AutoModelForImageTextToText

    from hf_ext.integration.compat import let_serve_load
    from hf_ext.uni_med.modeling_uni_med import UniMedConfig, UniMedForConditionalGeneration

    AutoModelForImageTextToText.register(UniMedConfig, UniMedForConditionalGeneration, exist_ok=True)
    let_serve_load(UniMedConfig, UniMedForConditionalGeneration)


def _add_processor() -> None:
    from transformers import AutoProcessor

    config = _imported("hf_ext.uni_med.configuration_uni_med", "UniMedConfig")
    AutoProcessor.register(config, _imported("hf_ext.uni_med.processing_uni_med", "UniMedProcessor"), exist_ok=True)


def _add_blip2_vision() -> None:
    """The vision tower of the Uni-Med paper, which Transformers registers only as a part of BLIP-2."""
    from transformers import Blip2VisionConfig, Blip2VisionModel

    from hf_ext.integration.compat import register_part

    register_part(Blip2VisionConfig, Blip2VisionModel)


def _imported(module: str, name: str, base: type = object) -> type:
    """Imports a class. Where that fails, returns a class of its name that raises an ImportError when it is used."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        message = f"{name} is not available: {type(error).__name__}: {error}"

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise ImportError(message)

        return type(name, (base,), {"__init__": fail, "from_dict": fail, "from_pretrained": fail})
