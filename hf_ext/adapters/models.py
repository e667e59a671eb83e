"""The weights of a stored model, with the adapter that lies beside them."""

from __future__ import annotations

from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import CONFIG
from hf_ext.storage.layout import ADAPTER, ADAPTER_CONFIG, all_weights
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import Stored


def open_model(stored: Stored, base: TensorSource | None = None) -> tuple[TensorSource, dict]:
    """Opens the weights of a model and its config.json. As `from_pretrained` does, merges an adapter beside them into them.

    Args:
        base: for the folder of an adapter alone, which is merged into it.

    Raises:
        CheckpointError: it has no config.json, is quantized or a merge, or its adapter cannot be merged.
        BaseModelError: it has no weights, or their base is missing or is another model.
        CorruptFileError: it is damaged.
    """
    stored.require_unquantized()
    if stored.file(ADAPTER_CONFIG):
        from hf_ext.adapters.adapter_source import AdapterSource  # PEFT takes its time to import

        stored.file(ADAPTER)
        weights = stored.tensors() if base is None or all_weights(stored.folder) else base
        source = AdapterSource(stored.folder, weights)
        return source, source.config.to_dict()
    if not stored.full_config:
        raise CheckpointError(f"'{stored.name}' has no {CONFIG}; give the folder of a saved model.")
    return stored.tensors(), stored.config
