"""The connector from vision tower to language model: resampling, router, experts (Uni-Med, arXiv 2409.17508, section 3.2).

The parameters are not in `nn.Linear` modules, so quantizers and adapters that look for linear layers skip the connector.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

Kind = Literal["linear", "mlp", "moe_linear", "moe_mlp"]
Routing = Literal["soft", "hard", "constant", "sparse"]
RouterInput = Literal["task_token", "token", "task"]
Resampling = Literal["projection", "avg_pool", "max_pool"]


def resample(features: torch.Tensor, grid: tuple[int, int], how: Resampling, rate: int) -> torch.Tensor:
    """Combines each `rate` visual tokens into one.

    Args:
        features: (images, height * width, size), row by row.
        grid: height and width.
        how: "projection" concatenates neighbors in a row to (…, tokens / rate, size * rate). "avg_pool" and "max_pool" pool
            squares of √rate by √rate to (…, tokens / rate, size).
    """
    images, tokens, size = features.shape
    if how == "projection":
        if tokens % rate:
            raise ValueError(f"{tokens} visual tokens cannot be grouped by resampling_rate={rate}.")
        return features.reshape(images, tokens // rate, size * rate)
    side = math.isqrt(rate)
    height, width = grid
    if height % side or width % side:
        raise ValueError(f"A grid of {height} x {width} visual tokens cannot be pooled by squares of {side} x {side}.")
    squares = features.view(images, height // side, side, width // side, side, size)
    pooled = squares.mean((2, 4)) if how == "avg_pool" else squares.amax((2, 4))
    return pooled.flatten(1, 2)


def _init_as_linear(parameter: nn.Parameter | None, inputs: int) -> None:
    """Draws values as nn.Linear does."""
    if parameter is not None:
        nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5)


def check_routing(router: Routing, num_experts: int, num_experts_per_tok: int, num_tasks: int) -> None:
    """Raises a ValueError if a mixture has too few experts for its router."""
    if router == "hard" and num_experts < num_tasks:
        raise ValueError(
            f"The hard router requires an expert for each task: num_experts={num_experts} is less than the {num_tasks} tasks."
        )
    if router == "sparse" and not 1 <= num_experts_per_tok <= num_experts:
        raise ValueError(f"num_experts_per_tok={num_experts_per_tok} is not within 1…{num_experts}.")


class Router(nn.Module):
    """Logits over experts: W₂ GELU(W₁ [task token ; visual token] + b₁) + b₂.

    W₁ has two parts, so that the task's part is computed once per image and not once per token.

    Args:
        token_size: size of the visual tokens; 0 to route by the task alone.
        task_size: size of the task tokens; 0 to route by the visual tokens alone.
        hidden_size: size of the hidden layer; None for four times the input's, as in the paper.
    """

    def __init__(self, token_size: int, task_size: int, num_experts: int, hidden_size: int | None = None):
        super().__init__()
        self.input_size = token_size + task_size
        hidden = hidden_size or 4 * self.input_size
        self.token_weight = nn.Parameter(torch.empty(hidden, token_size)) if token_size else None
        self.task_weight = nn.Parameter(torch.empty(hidden, task_size)) if task_size else None
        self.bias = nn.Parameter(torch.empty(hidden))
        self.out_weight = nn.Parameter(torch.empty(num_experts, hidden))
        self.out_bias = nn.Parameter(torch.empty(num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.token_weight, self.task_weight, self.bias):
            _init_as_linear(parameter, self.input_size)
        for parameter in (self.out_weight, self.out_bias):
            _init_as_linear(parameter, len(self.bias))

    def forward(self, tokens: torch.Tensor, task: torch.Tensor | None) -> torch.Tensor:
        """Returns logits (images, tokens, experts), or (images, 1, experts) if they depend on the task alone.

        Args:
            tokens: (images, tokens, token_size).
            task: (images, task_size), the task token of each image.
        """
        if self.task_weight is None:
            assert self.token_weight is not None  # a router has at least one input
            hidden = F.linear(tokens, self.token_weight, self.bias)
        else:
            assert task is not None
            hidden = F.linear(task, self.task_weight, self.bias)[:, None]
            if self.token_weight is not None:
                hidden = F.linear(tokens, self.token_weight).add_(hidden)  # in place, as it is large
        return F.linear(F.gelu(hidden), self.out_weight, self.out_bias)


def soft_weights(logits: torch.Tensor) -> torch.Tensor:
    """Returns sigmoid(logits) over their sum, in float32, computed so that half precision does not underflow to zero."""
    return F.logsigmoid(logits.float()).softmax(-1)


class Experts(nn.Module):
    """A weighted sum of projections, Σₑ wₑ Eₑ(x), with Eₑ(x) = Uₑᵀ GELU(Vₑ x + aₑ) + bₑ, or Uₑᵀ x + bₑ if they are linear. The
    hidden units are multiplied by their expert's weight, so that the sum over experts is one matrix product. The output of a
    single expert is never in memory. Vₑ is `up[e]`, (hidden, inputs); Uₑ is `down[e]`, (hidden, outputs)."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, linear: bool):
        super().__init__()
        hidden = in_features if linear else out_features
        self.up = None if linear else nn.Parameter(torch.empty(num_experts, hidden, in_features))
        self.up_bias = None if linear else nn.Parameter(torch.empty(num_experts, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, out_features))
        self.down_bias = nn.Parameter(torch.empty(num_experts, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.up is not None:
            for parameter in (self.up, self.up_bias):
                _init_as_linear(parameter, self.up.shape[2])
        for parameter in (self.down, self.down_bias):
            _init_as_linear(parameter, self.down.shape[1])

    def forward(
        self, tokens: torch.Tensor, weights: torch.Tensor | None = None, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps (tokens, inputs) to (tokens, outputs).

        Args:
            weights: (tokens, experts); None for a single expert without weight.
            chosen: (tokens, k), the indices of the experts to compute; `weights` is then (tokens, k) too. None for all experts.
        """
        experts, units, _ = self.down.shape
        if chosen is not None:
            assert weights is not None
            # PyTorch's grouped products do not support all cases; the others compute all experts.
            if tokens.dtype != torch.float64 and (tokens.dtype == torch.bfloat16 or not torch.compiler.is_compiling()):
                return self._grouped(tokens, weights, chosen)
            weights = weights.new_zeros(len(tokens), experts).scatter(1, chosen, weights)
        if self.up is None or self.up_bias is None:
            hidden = tokens[:, None]
        else:
            hidden = F.gelu(F.linear(tokens, self.up.flatten(0, 1), self.up_bias.flatten())).unflatten(1, (experts, units))
        if weights is None:
            return torch.addmm(self.down_bias[0], hidden[:, 0], self.down[0])
        hidden = (hidden * weights[:, :, None]).flatten(1)
        return torch.addmm(weights @ self.down_bias, hidden, self.down.flatten(0, 1))

    def _grouped(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Computes pairs of token and expert, sorted by expert."""
        k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        experts = chosen.flatten()[order]
        ends = torch.bincount(experts, minlength=len(self.down)).cumsum(0).to(torch.int32)
        hidden = tokens[order // k].to(self.down.dtype)  # autocast leaves grouped products as they are
        if self.up is not None and self.up_bias is not None:
            hidden = F.gelu(F.grouped_mm(hidden, self.up.transpose(1, 2), offs=ends) + self.up_bias[experts])
        weights = weights.flatten()[order, None].to(self.down.dtype)
        out = F.grouped_mm(hidden * weights, self.down, offs=ends) + weights * self.down_bias[experts]
        # Restores the order of the tokens without index_add, which is not deterministic on GPUs.
        return out[order.argsort()].unflatten(0, (-1, k)).sum(1)


class Connector(nn.Module):
    """Maps visual tokens to input embeddings of the language model. The arguments are fields of `UniMedConfig`: `kind` is its
    `connector`, and `top_k` its `num_experts_per_tok`, which are the only experts that the sparse router computes.
    `vision_size` and `text_size` are the sizes of the models' embeddings."""

    def __init__(
        self,
        vision_size: int,
        text_size: int,
        kind: Kind = "moe_mlp",
        num_experts: int = 5,
        router: Routing = "soft",
        router_input: RouterInput = "task_token",
        top_k: int = 2,
        resampling: Resampling = "projection",
        resampling_rate: int = 4,
        num_tasks: int = 5,
    ):
        super().__init__()
        self.resampling, self.resampling_rate = resampling, resampling_rate
        self.routing, self.top_k = router, top_k
        size = vision_size * (resampling_rate if resampling == "projection" else 1)
        self.num_experts = num_experts if kind.startswith("moe") else None
        mixture = self.num_experts is not None
        learned = mixture and router in ("soft", "sparse")
        task_size = size if learned and router_input != "token" else 0
        self.needs_task = bool(task_size) or (mixture and router == "hard")
        self.task_tokens = nn.Parameter(torch.empty(num_tasks, task_size)) if task_size else None
        self.router = Router(size if router_input != "task" else 0, task_size, num_experts) if learned else None
        self.experts = Experts(num_experts if mixture else 1, size, text_size, kind.endswith("linear"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.task_tokens is not None:
            nn.init.normal_(self.task_tokens, std=0.02)

    def forward(
        self, features: torch.Tensor, grid: tuple[int, int], tasks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns embeddings (images, tokens / rate, text_size) and weights (images, tokens / rate, experts) or None.

        Args:
            features: (images, height * width, vision_size).
            grid: height and width.
            tasks: (images,), the index of each image's task.
        """
        if self.needs_task and tasks is None:
            raise ValueError("This connector routes by task: pass task= to the processor, or image_tasks to the model.")
        tasks = None if tasks is None else tasks.to(features.device)
        x = resample(features, grid, self.resampling, self.resampling_rate)
        images, count, _ = x.shape
        tokens = x.flatten(0, 1)
        if self.num_experts is None:
            return self.experts(tokens).unflatten(0, (images, count)), None
        shape = (images, count, self.num_experts)
        if self.routing == "constant":
            weights = x.new_full(shape, 1 / self.num_experts)
        elif self.router is None:
            assert tasks is not None  # checked above
            weights = F.one_hot(tasks, self.num_experts)[:, None].to(x.dtype).expand(shape)
        else:
            logits = self.router(x, None if self.task_tokens is None else self.task_tokens[tasks]).expand(shape)
            if self.routing == "sparse":
                top, chosen = logits.topk(self.top_k, dim=-1)
                top = top.softmax(-1).to(x.dtype)  # on GPUs, autocast computes it in float32
                out = self.experts(tokens, top.flatten(0, 1), chosen.flatten(0, 1))
                return out.unflatten(0, (images, count)), top.new_zeros(shape).scatter(-1, chosen, top)
            weights = soft_weights(logits).to(x.dtype)
        return self.experts(tokens, weights.flatten(0, 1)).unflatten(0, (images, count)), weights
