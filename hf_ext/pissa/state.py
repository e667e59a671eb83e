"""The factors of PiSSA adapters in files.

A saved PiSSA adapter is a LoRA of rank 2r, [B, B − B₀] [A − A₀; A₀] = B A − B₀ A₀. Rounded to bf16, it has nearly the same
product. In the form [B, −B₀] [A; A₀], two large products cancel, so rounding errors can exceed a small change. QPiSSA has that
form, because its residual depends on every bit of A₀ and B₀, and its adapters are never loaded as LoRAs.
"""

from __future__ import annotations

import torch


def stack(state_dict: dict[str, torch.Tensor], adapter: str, is_quantized: bool = False) -> dict[str, torch.Tensor]:
    """Returns the tensors that are saved, for each layer with the adapter in a model's state dict: the stacked factors, and
    DoRA's magnitudes.

    Raises:
        ValueError: the factors are shards.
    """
    saved = {}
    for start in [key for key in state_dict if key.endswith(f"initial_A.{adapter}")]:
        layer = start.removesuffix(f"initial_A.{adapter}")
        a, b = f"{layer}lora_A.{adapter}.weight", f"{layer}lora_B.{adapter}.weight"
        if a not in state_dict:
            a, b = f"{layer}lora_embedding_A.{adapter}", f"{layer}lora_embedding_B.{adapter}"
        A, B = state_dict[a], state_dict[b]
        if A.dim() < 2:
            raise ValueError(
                f"A of the adapter '{adapter}' is a shard of the shape {tuple(A.shape)}, because DeepSpeed ZeRO-3 or FSDP has "
                "partitioned it. Gather the parameters first, with deepspeed.zero.GatheredParameters or "
                "FullyShardedDataParallel.summon_full_params."
            )
        A0, B0 = state_dict[start].to(A.dtype), state_dict[f"{layer}initial_B.{adapter}"].to(B.dtype)
        first, second = (A, -B0) if is_quantized else (A - A0, B - B0)
        saved[a], saved[b] = torch.cat([first, A0]), torch.cat([B, second], dim=1)
        magnitude = f"{layer}lora_magnitude_vector.{adapter}"
        if f"{magnitude}.weight" in state_dict:
            saved[magnitude] = state_dict[f"{magnitude}.weight"]  # PEFT saves it under this name
    return saved


def unstack(A: torch.Tensor, B: torch.Tensor, is_quantized: bool = False) -> tuple[torch.Tensor, ...]:
    """Returns A, B, A₀ and B₀ of the saved factors, in new memory."""
    (first, A0), (B, second) = A.chunk(2), B.chunk(2, dim=1)
    A, B0 = (first, -second) if is_quantized else (first + A0, B - second)
    return A.clone(), B.contiguous(), A0.clone(), B0
