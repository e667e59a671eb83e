"""The factors of PiSSA adapters in state dicts."""

from __future__ import annotations

import torch


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


def stack(state: dict[str, torch.Tensor], adapter: str, prefix: str = "") -> None:
    """Turns the factors of an adapter's layers in a state dict into those of the saved LoRA, [A; A₀] and [B, −B₀].

    Args:
        prefix: that of the layers' keys.

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
        A, A0 = state[a], A0.to(state[a].dtype)
        is_of_experts = A0.dim() > A.dim()  # (experts, r, n)
        state[a] = torch.cat([A.view_as(A0), A0], dim=1).flatten(0, 1) if is_of_experts else torch.cat([A, A0])
        state[b] = torch.cat([state[b], -B0.to(state[b].dtype)], dim=1)
