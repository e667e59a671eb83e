"""Steps of training in bf16, for the benchmarks of weight sync."""

import numpy as np
import torch

RATES = ("1e-6", "3e-6", "1e-5")
Tensors = dict[str, torch.Tensor]


def changed(base: Tensors, step: Tensors) -> float:
    """Returns the share of values whose bits differ."""
    return sum(int((bits(base[name]) != bits(step[name])).sum()) for name in base) / values(base)


def values(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16).ravel()
