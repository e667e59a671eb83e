"""A training of three steps, as the weights that it publishes."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_ext.weight_sync import Publisher

SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e-40, 3.4e38]


def weights(step: int) -> dict[str, torch.Tensor]:
    """Tensors of many types and shapes. Each step changes few values of some, and none of others."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 64, generator=generator).bfloat16()
    tensors = {
        "embedding.weight": matrix,
        "layer.weight": torch.randn(64, 64, generator=generator),
        "layer.bias": torch.randn(64, generator=generator).half(),
        "double": torch.randn(5, 3, generator=generator).double(),
        "special": torch.tensor(SPECIAL).bfloat16(),
        "counter": torch.tensor(0),
        "scale": torch.tensor(1.5),
        "table": torch.arange(100, dtype=torch.int32).reshape(10, 10),
        "frozen": torch.randn(8, 8, generator=generator),
        "empty": torch.empty(0, 4),
    }
    for number in range(1, step + 1):
        generator.manual_seed(number)
        for name in ("embedding.weight", "layer.weight", "layer.bias", "double"):
            tensor = tensors[name]
            changed = torch.rand(tensor.shape, generator=generator) < 0.05
            tensors[name] = torch.where(changed, (tensor.double() * 1.01 + 1e-3).to(tensor.dtype), tensor)
        tensors["special"] = tensors["special"].roll(1)
        tensors["counter"] = tensors["counter"] + 1
        tensors["scale"] = tensors["scale"] * 0.9
        tensors["table"] = tensors["table"] + number * torch.eye(10, dtype=torch.int32)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Returns true if all bits are equal."""
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


def zeros() -> dict[str, torch.Tensor]:
    """Tensors for `weights`, in memory of their own."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def publish(place: Path, steps: range, **options: object) -> None:
    with Publisher(place, **options) as run:
        for step in steps:
            run.publish(weights(step), step)


def files(place: Path, kind: str) -> list[str]:
    return sorted(path.name for path in place.glob(f"{kind}-*"))
