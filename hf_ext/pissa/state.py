"""The factors of PiSSA adapters in files.

A saved PiSSA adapter is a LoRA of rank 2r, [B, B − B₀] [A − A₀; A₀] = B A − B₀ A₀. Rounded to bf16, it has nearly the same
product. In the form [B, −B₀] [A; A₀], two large products cancel, so rounding errors can exceed a small change. QPiSSA has that
form, because its residual depends on every bit of A₀ and B₀, and its adapters are never loaded as LoRAs.
"""

from __future__ import annotations

import torch

from hf_ext.errors import AdapterError


def stack(state: dict[str, torch.Tensor], adapter: str, is_quantized: bool = False) -> dict[str, torch.Tensor]:
    """Returns an adapter's tensors with the factors that are saved in the place of A, B, A₀ and B₀. Raises AdapterError if the
    factors are shards."""
    saved = dict(state)
    for start in [key for key in state if key.endswith(f"initial_A.{adapter}.weight")]:
        layer = start.removesuffix(f"initial_A.{adapter}.weight")
        a, b = f"{layer}lora_A.{adapter}.weight", f"{layer}lora_B.{adapter}.weight"
        if a not in state:
            a, b = f"{layer}lora_embedding_A.{adapter}", f"{layer}lora_embedding_B.{adapter}"
        A, B, A0, B0 = state[a], state[b], saved.pop(start), saved.pop(f"{layer}initial_B.{adapter}.weight")
        if A.dim() < 2:
            raise AdapterError(
                f"A of the adapter '{adapter}' is a shard of the shape {tuple(A.shape)}, because DeepSpeed ZeRO-3 or FSDP has "
                "partitioned it. Gather the parameters first, with deepspeed.zero.GatheredParameters or "
                "FullyShardedDataParallel.summon_full_params."
            )
        first, second = (A, -B0) if is_quantized else (A - A0, B - B0)
        saved[a], saved[b] = torch.cat([first, A0]), torch.cat([B, second], dim=1)
    return saved


def unstack(A: torch.Tensor, B: torch.Tensor, is_quantized: bool = False) -> tuple[torch.Tensor, ...]:
    """Returns A, B, A₀ and B₀ of the saved factors, in new memory."""
    (first, A0), (B, second) = A.chunk(2), B.chunk(2, dim=1)
    A, B0 = (first, -second) if is_quantized else (first + A0, B - second)
    return A.clone(), B.contiguous(), A0.clone(), B0
