"""Replaces what TRL 1.16's AsyncGRPOTrainer takes from a GPU: the device's name, and FlashAttention 3, in plain PyTorch."""

from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def attention(query, key, value, query_ends, key_ends, *lengths, softmax_scale=None, causal=True, **options) -> torch.Tensor:
    """Causal attention in each of several sequences, one behind the other: tensors of [tokens, heads, features]."""
    results = []
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]].transpose(0, 1)
        k, v = (each[key_ends[i] : key_ends[i + 1]].transpose(0, 1) for each in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        results.append(scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(results)


def train_on_cpu() -> None:
    """Lets the trainer run where there is no GPU."""
    if not torch.cuda.is_available():
        async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
