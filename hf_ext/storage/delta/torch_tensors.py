"""The codec's functions on PyTorch tensors."""

from __future__ import annotations

import torch

from hf_ext.errors import CheckpointError
from hf_ext.storage.delta import DEFAULT_LEVEL
from hf_ext.storage.delta.codec import decode_raw, encode_raw
from hf_ext.storage.delta.in_place import apply_raw
from hf_ext.storage.safetensors_file import RawTensor, has_values


def encode(tensor: torch.Tensor, base: torch.Tensor | None = None, threads: int = 1, level: int = DEFAULT_LEVEL) -> bytes:
    """Compresses a tensor losslessly to a payload of bytes, which is at most a header larger than the tensor.

    Args:
        tensor: of any dtype. Floats of 16, 32 and 64 bits are coded. Other dtypes are deflated, or coded if few bytes changed.
        base: its counterpart in the base model. For floats: a float tensor of the same shape, or of another number of rows (a
            resized embedding). For other types: a tensor of the same type and shape. Any other tensor is ignored.
        threads: used for tensors of more than 262,144 values.
        level: 1 encodes values one by one; 2 first looks for a low-rank part of a matrix's change; 3 looks longer.

    Raises:
        CheckpointError: the tensor has more than 255 dimensions, or is not a dense tensor with values.
        MissingDependencyError: floats need the C++ extension, which is not built.
        ValueError: there is no such level.
    """
    base_tensor = None if base is None else RawTensor.from_torch(base)
    return encode_raw(RawTensor.from_torch(tensor), base_tensor, threads=threads, level=level)


def decode(payload: bytes, base: torch.Tensor | None = None, threads: int = 1) -> torch.Tensor:
    """Decodes a payload to its tensor on the CPU, bit for bit.

    Args:
        payload: as `encode` returned it.
        base: the tensor that `encode` got as `base`.
        threads: used for tensors of more than 262,144 values.

    Raises:
        CorruptFileError: the payload is damaged.
        BaseModelError: `base` is missing, or is another tensor.
        MissingDependencyError: the C++ extension is not built.
    """
    return decode_raw(payload, None if base is None else RawTensor.from_torch(base), threads=threads).to_torch()


def apply(payload: bytes, tensor: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """Turns the base's tensor into the one that was encoded against it, in place. On an error, the tensor is unchanged.

    Where few values changed, writes only these, which takes 6 bytes of memory for each. Otherwise decodes the new tensor beside
    the old one.

    Args:
        payload: as `encode` returned it.
        tensor: the tensor that `encode` got as `base`, contiguous and on the CPU, of the type and shape of the encoded one.
        threads: used for tensors of more than 262,144 values.

    Returns:
        The rows that changed: indices of the first dimension (int64), in increasing order.

    Raises:
        CorruptFileError: the payload is damaged.
        BaseModelError: `tensor` is not the base, or has another type or shape than the encoded tensor.
        CheckpointError: `tensor` is not contiguous, or not on the CPU.
    """
    # The values of a conjugate or negative view differ from its memory.
    is_here = has_values(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()
    if not is_here or tensor.is_conj() or tensor.is_neg():
        raise CheckpointError("Only a contiguous tensor in the CPU's memory can be changed in place. Call tensor.contiguous().")
    return torch.from_numpy(apply_raw(payload, RawTensor.from_torch(tensor), threads=threads))
