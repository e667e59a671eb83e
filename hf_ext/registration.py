"""Adds this package's entries to the registries of Transformers and PEFT. No other module does; nothing is replaced.

`import hf_ext` must stay light, so it imports neither library. A library that is imported already gets its entries at once, any
other one when its import is done.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODELS = "transformers.modeling_utils"
AUTO = "transformers.models.auto"


def register() -> None:
    """Makes Transformers and PEFT know the methods of this package. Calling it again does nothing."""
    if any(isinstance(finder, _ImportWatcher) for finder in sys.meta_path):
        return
    watcher = _ImportWatcher()
    sys.meta_path.insert(0, watcher)
    watcher.after(["transformers.quantizers.auto"], _add_quantizers)
    watcher.after(["peft", MODELS], _add_peft_types)
    watcher.after(["transformers.trainer"], _add_callback)
    watcher.after([f"{AUTO}.configuration_auto"], _add_config)
    watcher.after([f"{AUTO}.modeling_auto", MODELS], _add_model)
    watcher.after([f"{AUTO}.processing_auto", MODELS], _add_processor)
    watcher.after(["hf_ext.uni_med.modeling_uni_med"], _add_blip2_vision)


class _ImportWatcher(MetaPathFinder):
    """Calls functions once the modules they need have been imported. It finds no modules itself.

    A function waits until no import of the watched packages is under way, so that it never meets a half-imported module.
    """

    PACKAGES = ("hf_ext", "peft", "transformers")

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
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
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
                action()


def _add_quantizers() -> None:
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )

    from hf_ext.emr.config import EMRConfig
    from hf_ext.emr.quantizer import EMRQuantizer
    from hf_ext.fm_delta.config import FMDeltaConfig
    from hf_ext.fm_delta.quantizer import FMDeltaQuantizer

    for config, quantizer in ((FMDeltaConfig, FMDeltaQuantizer), (EMRConfig, EMRQuantizer)):
        method = config.quant_method
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(config)
        if method not in AUTO_QUANTIZER_MAPPING:
            register_quantizer(method)(quantizer)


def _add_peft_types() -> None:
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils import register_peft_method

    from hf_ext.pissa.config import QPissaConfig
    from hf_ext.pissa.model import QPissaModel
    from hf_ext.uni_med.upcycling.config import CMoEConfig
    from hf_ext.uni_med.upcycling.model import CMoEModel

    for name, config, model in (("QPISSA", QPissaConfig, QPissaModel), ("CMOE", CMoEConfig, CMoEModel)):
        if name not in PeftType.__members__:  # PEFT registers methods only under members of this enumeration
            member = str.__new__(PeftType, name)
            member._name_ = member._value_ = name
            PeftType._member_map_[name] = PeftType._value2member_map_[name] = member
            PeftType._member_names_.append(name)
            type.__setattr__(PeftType, name, member)
        if PeftType(name) not in PEFT_TYPE_TO_TUNER_MAPPING:
            register_peft_method(name=name.lower(), config_cls=config, model_cls=model, prefix="lora_")


def _add_callback() -> None:
    from transformers import trainer

    from hf_ext.fm_delta.training import ResumeCompressed

    if ResumeCompressed not in trainer.DEFAULT_CALLBACKS:
        trainer.DEFAULT_CALLBACKS.append(ResumeCompressed)


def _add_config() -> None:
    from transformers import AutoConfig

    from hf_ext.uni_med.configuration_uni_med import UniMedConfig

    AutoConfig.register(UniMedConfig.model_type, UniMedConfig, exist_ok=True)


def _add_model() -> None:
    from transformers import AutoModelForImageTextToText

    from hf_ext.uni_med.configuration_uni_med import UniMedConfig
    from hf_ext.uni_med.modeling_uni_med import UniMedForConditionalGeneration

    AutoModelForImageTextToText.register(UniMedConfig, UniMedForConditionalGeneration, exist_ok=True)


def _add_processor() -> None:
    from transformers import AutoProcessor

    from hf_ext.uni_med.configuration_uni_med import UniMedConfig
    from hf_ext.uni_med.processing_uni_med import UniMedProcessor

    AutoProcessor.register(UniMedConfig, UniMedProcessor, exist_ok=True)


def _add_blip2_vision() -> None:
    """The vision tower of the Uni-Med paper, which Transformers registers only as a part of BLIP-2."""
    from transformers import AutoModel, Blip2VisionConfig, Blip2VisionModel

    AutoModel.register(Blip2VisionConfig, Blip2VisionModel, exist_ok=True)
    # Up to Transformers 5.18, `register` ignores configurations of Transformers' own.
    AutoModel._model_mapping._extra_content.setdefault(Blip2VisionConfig, Blip2VisionModel)
