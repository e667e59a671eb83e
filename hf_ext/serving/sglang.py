"""The plugin of SGLang: it serves compressed checkpoints and merges as they are.

SGLang finds it by the entry point in setup.cfg. docs/serving.md shows the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hf_ext.serving.stored_models import StoredModel, read_tensors
from hf_ext.storage.config_file import forget_encoding

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from transformers import PretrainedConfig

    Weights = Iterator[tuple[str, torch.Tensor]]

_loaded: WeakKeyDictionary[ModelConfig, str] = WeakKeyDictionary()  # the name of the model in memory


def register() -> None:
    """Adds this package's hooks to SGLang's. SGLang calls this in each of its processes that read a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    loader = "sglang.srt.model_loader.loader.DefaultModelLoader"
    HookRegistry.register("sglang.srt.utils.hf_transformers.config.get_config", remove_settings, HookType.AFTER)
    HookRegistry.register(f"{loader}._get_weights_iterator", read_weights, HookType.AROUND)


def remove_settings(config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
    """Removes the `quantization_config` of a compressed checkpoint or a merge: the loaded weights are plain ones."""
    forget_encoding(config)


def read_weights(
    read: Callable[..., Weights], loader: DefaultModelLoader, source: DefaultModelLoader.Source, **options: Any
) -> Weights:
    """Returns the tensors of a compressed checkpoint or of a task of a merge. Leaves all others to `read`."""
    config, name = source.model_config, source.model_or_path
    model = StoredModel.named(name, source.revision)
    if not model.is_encoded():
        if config is not None:
            _loaded[config] = name
        return read(loader, source, **options)
    if config in _loaded:
        config.model_path = _loaded[config]  # SGLang returns to this one if it cannot load the new one completely
    encoded = model.open()
    tensors = read_tensors(encoded, encoded.names())  # threads begin to decode

    def weights() -> Weights:
        for name, tensor in tensors:
            yield source.prefix + name, tensor
        if config is not None:
            config.model_path = _loaded[config] = source.model_or_path

    return weights()
