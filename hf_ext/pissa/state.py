"""The factors of PiSSA adapters in state dicts.

A saved PiSSA adapter is a LoRA of rank 2r, [B, B − B₀] [A − A₀; A₀] = B A − B₀ A₀. Rounded to bf16, it has nearly the same
product. In the form [B, −B₀] [A; A₀], two large products cancel, so rounding errors can exceed a small change. QPiSSA has that
form, because its residual depends on every bit of A₀ and B₀, and its adapters are never loaded as LoRAs.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

Factors: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole of a tensor that FSDP 2 has sharded, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_gathered(adapter: str, A: torch.Tensor) -> None:
    """Raises an error if A is a shard.

    Raises:
        ValueError: A is not a matrix or a kernel.
    """
    if A.dim() < 2:
        raise ValueError(
            f"A of the adapter '{adapter}' is a shard of the shape {tuple(A.shape)}, because DeepSpeed ZeRO-3 or FSDP has "
            "partitioned it. Gather the parameters first, with deepspeed.zero.GatheredParameters or "
            "FullyShardedDataParallel.summon_full_params."
        )


def stacked(A: torch.Tensor, B: torch.Tensor, A0: torch.Tensor, B0: torch.Tensor, is_quantized: bool) -> Factors:
    """Returns the saved factors, given those of training and those of the start."""
    first, second = (A, -B0) if is_quantized else (A - A0, B - B0)
    return torch.cat([first, A0]), torch.cat([B, second], dim=1)


def unstacked(first: torch.Tensor, A0: torch.Tensor, B: torch.Tensor, second: torch.Tensor, is_quantized: bool) -> Factors:
    """Returns A and B₀ of both halves of the saved factors."""
    return (first, -second) if is_quantized else (first + A0, B - second)


def stack(state: dict[str, torch.Tensor], adapter: str, prefix: str = "", is_quantized: bool = False) -> None:
    """Turns the factors of an adapter's layers in a state dict into those that are saved.

    Args:
        prefix: that of the layers' keys.
        is_quantized: the adapter is of QPiSSA.

    Raises:
        ValueError: the factors are shards.
    """
    for start in [key for key in state if key.startswith(prefix) and key.endswith(f"initial_A.{adapter}")]:
        layer = start.removesuffix(f"initial_A.{adapter}")
        a, b = (
            next(
                key
                for key in (f"{layer}lora_{part}.{adapter}.weight", f"{layer}lora_embedding_{part}.{adapter}")
                if key in state
            )
            for part in "AB"
        )
        check_gathered(adapter, state[a])
        A0, B0 = (state.pop(f"{layer}initial_{part}.{adapter}") for part in "AB")
        A, B, A0, B0 = state[a], state[b], A0.to(state[a].dtype), B0.to(state[b].dtype)
        if A0.dim() > A.dim():  # (experts, r, n): the rows of an expert stay together
            A, A0 = A.view_as(A0).transpose(0, 1), A0.transpose(0, 1)
        A, state[b] = stacked(A, B, A0, B0, is_quantized)
        state[a] = A.transpose(0, 1).flatten(0, 1) if A.dim() > state[a].dim() else A
