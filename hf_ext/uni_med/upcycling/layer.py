"""A projector as a mixture of experts: the trained projector, plus a low-rank change for each expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ext.uni_med.connector import Router, soft_weights
from hf_ext.uni_med.upcycling.config import CMoEConfig
from hf_ext.uni_med.upcycling.projectors import Layers, shapes_of, weights_of
from hf_ext.uni_med.upcycling.tasks import UNKNOWN, BatchTasks


class TaskRouter(Router):
    """The learned router of one adapter at one projector.

    Attributes:
        task_tokens: (tasks, router_hidden_size); None if the router sees the visual token alone.
    """

    def __init__(self, config: CMoEConfig, token_size: int):
        size = config.router_hidden_size
        task_size = size if config.router_input != "token" else 0
        super().__init__(token_size if config.router_input != "task" else 0, task_size, config.num_experts, size)
        self.top_k = config.num_experts_per_tok if config.router == "sparse" else None
        self.task_tokens = nn.Parameter(torch.randn(len(config.tasks), task_size) * 0.02) if task_size else None

    def weights(self, tokens: torch.Tensor, tasks: int | torch.Tensor) -> torch.Tensor:
        """Returns the experts' weights, (tokens, experts) or (1, experts). Their sum is 1.

        Args:
            tokens: (tokens, inputs). The router sees them normalized, as towers differ in the scale of their features.
            tasks: index of each token's task, (tokens,), or one index for all. -1 stands for the mean of all tasks.
        """
        x = F.layer_norm(tokens.to(self.bias.dtype), tokens.shape[1:])
        task = None if self.task_tokens is None else _with_mean(self.task_tokens)[tasks].view(-1, self.task_tokens.shape[1])
        logits = self(x[:, None], task)[:, 0]
        if self.top_k is None:
            return soft_weights(logits).to(logits.dtype)
        top, chosen = logits.topk(self.top_k, dim=-1)
        return torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1).to(logits.dtype))


class FixedRouter(nn.Module):
    """A router without parameters: equal weights, or expert i for task i."""

    def __init__(self, config: CMoEConfig):
        super().__init__()
        experts = config.num_experts
        self.table = torch.full((1, experts), 1 / experts)  # a row for each task
        if config.router == "hard" and experts > 1:
            self.table = torch.eye(experts)[: len(config.tasks)]

    def weights(self, tokens: torch.Tensor, tasks: int | torch.Tensor) -> torch.Tensor:
        """Returns the experts' weights as `TaskRouter` does."""
        tasks = tasks if len(self.table) > 1 else UNKNOWN
        return _with_mean(self.table.to(tokens.device))[tasks].view(-1, self.table.shape[1])


class Experts(nn.Module):
    """The low-rank changes of one adapter at one projector.

    Attributes:
        A: for each layer of the projector, (experts, rank, inputs); the parameters A_0, A_1, …
        B: for each layer, (experts, rank, outputs); the parameters B_0, B_1, … They start at 0.
    """

    def __init__(self, config: CMoEConfig, shapes: list[tuple[int, int]], rank: int, alpha: float):
        super().__init__()
        self.config, self.layers = config, len(shapes)
        self.scaling = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        self.dropout = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        # PEFT finds the adapter's name in a parameter's only where one more name follows it, so there are no lists here.
        for i, (inputs, outputs) in enumerate(shapes):
            A = torch.empty(config.num_experts, rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5)  # as LoRA's
            self.register_parameter(f"A_{i}", nn.Parameter(A))
            self.register_parameter(f"B_{i}", nn.Parameter(torch.zeros(config.num_experts, rank, outputs)))

    @property
    def A(self) -> list[nn.Parameter]:
        return [self.get_parameter(f"A_{i}") for i in range(self.layers)]

    @property
    def B(self) -> list[nn.Parameter]:
        return [self.get_parameter(f"B_{i}") for i in range(self.layers)]

    def change(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """Returns each expert's change of a layer's output, s Bₑ Aₑ x, (tokens, experts, outputs), from (tokens, inputs)."""
        A = self.A[index]
        reduced = F.linear(self.dropout(inputs.to(A.device, A.dtype)), A.flatten(0, 1)).unflatten(1, A.shape[:2])
        return torch.einsum("ter,ero->teo", reduced, self.B[index]) * self.scaling

    def mixed_change(self, index: int, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns Σₑ wₑ s Bₑ Aₑ xₑ: (tokens, outputs).

        Args:
            inputs: (tokens, inputs), or (tokens, experts, inputs) where each expert has its own.
            weights: (tokens, experts) or (1, experts).
        """
        A, B = self.A[index], self.B[index]
        inputs = self.dropout(inputs.to(A.dtype))
        if inputs.dim() == 2:
            reduced = F.linear(inputs, A.flatten(0, 1)).unflatten(1, A.shape[:2])
        else:
            reduced = torch.einsum("tei,eri->ter", inputs, A)
        return (reduced * (weights * self.scaling)[:, :, None]).flatten(1) @ B.flatten(0, 1)

    def merged(self, index: int) -> torch.Tensor:
        """Returns the change of a layer's weight, (outputs, inputs), in float32. Raises a ValueError unless all tokens have the
        same weights of experts, and the sum of the experts is a projector of this size."""
        config, one = self.config, len(self.config.tasks) == 1
        if config.num_experts > 1 and not (config.router == "constant" or (config.router == "hard" and one)):
            raise ValueError(
                f"router={config.router!r}: the experts' weights differ between tokens or tasks, so the mixture is not one "
                "projector. Keep the adapter."
            )
        if config.router == "constant" and config.num_experts > 1 and self.layers > 1:
            raise ValueError("The sum of experts with hidden units is not one projector of this size. Keep the adapter.")
        weights = FixedRouter(config).table.mean(0).to(self.A[index])
        return torch.einsum("e,ero,eri->oi", weights, self.B[index], self.A[index]).float() * self.scaling


def _with_mean(rows: torch.Tensor) -> torch.Tensor:
    """Appends the mean of the rows, which the index -1 stands for."""
    return torch.cat([rows, rows.mean(0, keepdim=True)])


class MixtureProjector(nn.Module, BaseTunerLayer):
    """A projector that computes Σₑ wₑ Eₑ(x), where Eₑ is the projector with the changes of expert e.

    The projector's own code runs once. Hooks on its layers give each expert its hidden units, and mix them before the last
    layer: a linear layer's weighted sum is the layer of the weighted sum. So norms, pooling and shuffling stay the projector's,
    and its layers may be quantized.
    """

    adapter_layer_names = ("lora_experts", "lora_router")
    base_layer: nn.Module
    layers: Layers
    lora_experts: Any  # an nn.ModuleDict of Experts, by adapter
    lora_router: Any  # an nn.ModuleDict of TaskRouter or FixedRouter
    active_adapters: list[str]
    merged_adapters: list[str]
    set_adapter: Callable[..., None]
    tasks: BatchTasks
    _hooks: list[RemovableHandle]

    def __init__(self, base_layer: nn.Module, layers: Layers, tasks: BatchTasks):
        super().__init__()
        self.base_layer, self.layers, self.tasks = base_layer, layers, tasks
        self.lora_experts, self.lora_router = nn.ModuleDict(), nn.ModuleDict()
        self.merged_adapters = []
        self._mixing: _Mixing | None = None  # while the projector computes
        hidden = [base_layer.get_submodule(name) for name in layers.hidden]
        self._hooks = [layer.register_forward_hook(partial(self._expand, i)) for i, layer in enumerate(hidden)]
        if layers.token is not None:
            self._hooks.append(base_layer.get_submodule(layers.token).register_forward_hook(self._keep_token))
        else:
            output = base_layer.get_submodule(layers.output)
            self._hooks += [output.register_forward_pre_hook(self._mix), output.register_forward_hook(self._add_change)]

    def update_layer(self, adapter_name: str, config: CMoEConfig, rank: int, alpha: float) -> None:
        """Adds an adapter, on the projector's device."""
        if self.merged:
            raise ValueError("The model has merged adapters. Call unmerge_adapter() before you add another.")
        shapes = shapes_of(self.base_layer, self.layers)
        learned = config.router in ("soft", "sparse") and config.num_experts > 1
        experts = Experts(config, shapes, rank, alpha)
        router = TaskRouter(config, shapes[0][0]) if learned else FixedRouter(config)
        if experts.A[0].device.type != "meta":
            device = next(self.base_layer.parameters()).device
            experts, router = experts.to(device), router.to(device)
        self.lora_experts[adapter_name], self.lora_router[adapter_name] = experts, router
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        active = [name for name in self.active_adapters if name in self.lora_experts]
        if self.disable_adapters or self.merged or not active:
            return self.base_layer(*args, **kwargs)
        if len(active) > 1:
            raise ValueError(f"A projector has one mixture at a time, not {', '.join(active)}. Call set_adapter with one name.")
        self._mixing = mixing = _Mixing(self.lora_experts[active[0]], self.lora_router[active[0]], self.tasks)
        try:
            output = self.base_layer(*args, **kwargs)
        finally:
            self._mixing = None
        return output if self.layers.token is None else mixing.add_change(0, output)

    def _expand(self, index: int, layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output if self._mixing is None else self._mixing.expand(index, args[0], output)

    def _mix(self, layer: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return args if self._mixing is None else (self._mixing.mix(args[0], bool(self.layers.hidden)), *args[1:])

    def _add_change(self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output if self._mixing is None else self._mixing.add_change(len(self.layers.hidden), output)

    def _keep_token(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self._mixing is not None:
            self._mixing.mix(output, False)

    def _replicate_for_data_parallel(self) -> nn.Module:
        # A replica's layers have the hooks of the original, so its experts would compute nothing.
        raise RuntimeError(
            "CMoE does not support torch.nn.DataParallel. Start one process for each GPU (torchrun, accelerate launch), or "
            "show one GPU to the process (CUDA_VISIBLE_DEVICES=0)."
        )

    def check_merge(self, adapter_names: list[str] | None) -> None:
        """Raises the ValueError of `merge` if an adapter cannot be merged, and changes nothing."""
        for adapter in self.active_adapters if adapter_names is None else adapter_names:
            if adapter in self.lora_experts and adapter not in self.merged_adapters:
                self._changes(adapter)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter in self.lora_experts:
                self._add_to_weights(adapter, 1, safe_merge)
                self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        while self.merged_adapters:
            self._add_to_weights(self.merged_adapters.pop(), -1, False)

    @torch.no_grad()
    def _add_to_weights(self, adapter: str, sign: int, safe: bool) -> None:
        changes = [sign * change for change in self._changes(adapter)]
        if safe and not all(torch.isfinite(change).all() for change in changes):
            raise ValueError(f"The adapter '{adapter}' has NaN or infinite weights and was not merged.")
        for weight, change in zip(weights_of(self.base_layer, self.layers), changes):
            weight.add_((change if self.layers.token is None else change.T).to(weight))

    @torch.no_grad()
    def _changes(self, adapter: str) -> list[torch.Tensor]:
        weights = weights_of(self.base_layer, self.layers)
        if not all(weight.is_floating_point() for weight in weights):
            raise ValueError("The projector is quantized, so the mixture cannot be merged. Load the base in full precision.")
        return [self.lora_experts[adapter].merged(index) for index in range(len(weights))]

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None) -> nn.Module:
        if merge:
            self.merge(safe_merge, adapter_names)
        for hook in self._hooks:
            hook.remove()
        return self.base_layer


class _Mixing:
    """One run of a projector: what its hooks compute of the tokens, and keep for the next layer. `weights` are those of the
    experts, (tokens, experts) or (1, experts), once the first layer has seen the tokens; `inputs` those of the last layer,
    (tokens, inputs), or (tokens, experts, inputs) if it follows hidden units."""

    def __init__(self, experts: Experts, router: TaskRouter | FixedRouter, tasks: BatchTasks):
        self.experts, self.router, self.tasks = experts, router, tasks
        self.weights: torch.Tensor | None = None
        self.inputs: torch.Tensor | None = None

    def expand(self, index: int, tokens: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Returns the hidden units of all experts, (…, experts · hidden units)."""
        tokens = tokens.flatten(0, -2)
        self._weigh(tokens)
        change = self.experts.change(index, tokens).to(output)
        return (output.flatten(0, -2)[:, None] + change).reshape(*output.shape[:-1], -1)

    def mix(self, inputs: torch.Tensor, is_hidden: bool) -> torch.Tensor:
        """Returns the last layer's input: the tokens, or the weighted sum of the experts' hidden units."""
        self.inputs = inputs.flatten(0, -2).to(self.experts.A[0].device)  # a device map may split the projector
        weights = self._weigh(self.inputs)
        if not is_hidden:
            return inputs
        self.inputs = self.inputs.unflatten(1, (self.experts.config.num_experts, -1))
        # As the weights' sum is 1, this is the weighted sum. While the experts agree it is the projector's own, bit for bit.
        first = self.inputs[:, 0]
        differences = (self.inputs - first[:, None]).to(weights.dtype)
        mixed = first + torch.einsum("te,teh->th", weights.expand(len(first), -1), differences).to(first.dtype)
        return mixed.reshape(*inputs.shape[:-1], -1)

    def add_change(self, index: int, output: torch.Tensor) -> torch.Tensor:
        """Returns the last layer's output with the weighted sum of the experts' changes."""
        assert self.inputs is not None and self.weights is not None  # `mix` comes before
        change = self.experts.mixed_change(index, self.inputs, self.weights)
        return output + change.view_as(output).to(output)

    def _weigh(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.weights is None:
            tokens = tokens.to(self.experts.A[0].device)
            tasks = self.tasks.of_tokens(len(tokens), self.experts.config.tasks)
            tasks = tasks.to(tokens.device) if isinstance(tasks, torch.Tensor) else tasks
            self.weights = self.router.weights(tokens, tasks).to(self.experts.A[0].dtype)
        return self.weights
