"""Refuses to load compressed weights and merges without their decoder, for which Transformers would report mismatched sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open

from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import ENCODINGS
from hf_ext.storage.weights import KEY, PARTS_OF


def require_decoding(variables: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a `from_pretrained` with these local variables lacks the quantizer that its files require. With
    `quantization_config=None`, the Auto classes remove the entry of config.json that selects the quantizer."""
    files = [file for file in variables.get("checkpoint_files") or () if str(file).endswith(".safetensors")]
    method = getattr(getattr(variables.get("hf_quantizer"), "quantization_config", None), "quant_method", None)
    if not files or method in ENCODINGS:
        return
    try:
        with safe_open(files[0], framework="np") as file:
            encoded = {KEY, PARTS_OF} & (file.metadata() or {}).keys()
    except (SafetensorError, OSError):  # Transformers says what is wrong with the file
        return
    if encoded:
        raise CheckpointError(
            f"The weights of '{variables.get('pretrained_model_name_or_path')}' are compressed, and its configuration has lost "
            "the entry `quantization_config` that selects the decoder. AutoModel removes it for `quantization_config=None`: "
            "leave this argument out where you do not quantize. Pass no `config=` of another checkpoint."
        )
