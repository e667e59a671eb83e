"""PiSSA's layer for parameters, which PEFT's `target_parameters` names: the weights of experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn.utils import parametrize

from hf_ext.pissa.decomposition import energy, initial_factors, is_of, principal_components, truncate
from hf_ext.pissa.layer import PissaLayer, PissaVariant, another_base
from hf_ext.pissa.reports import LayerReport
from hf_ext.pissa.start import PrincipalStart

Factors = tuple[torch.Tensor, torch.Tensor]


class _StartedWrapper(ParamWrapper):
    """PEFT's layer for a parameter, which itself supports no variant of LoRA."""

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        super().update_layer(adapter_name, *args, **kwargs)
        if isinstance(self.configs[adapter_name], PrincipalStart):
            self.lora_variant[adapter_name] = PissaVariant()
            PissaVariant.init(self, adapter_name)  # type: ignore[arg-type]  # the only subclass is a `PissaLayer`
            self.initial_A[adapter_name] = self.initial_A[adapter_name].unflatten(0, (self.num_experts, -1))


class PissaExperts(PissaLayer, _StartedWrapper):
    """The layer for a parameter (experts, m, n), or (experts, n, m) if the module says `is_transposed`, or (m, n), such as that
    of a router. PiSSA decomposes the matrix of each expert.

    A and B hold the factors of all experts as in PEFT, (experts · r, n) and (m, r · experts). A₀ is kept as (experts, r, n), so
    that `stack` sees how many experts there are. The change is computed before it is rounded to the type of the parameter.
    """

    num_experts: int

    def resolve_lora_variant(self, **kwargs: Any) -> None:
        """Returns None: PEFT's layer refuses variants."""

    def is_transposed(self) -> bool:
        return self.get_param().dim() == 3 and bool(getattr(self.get_base_layer(), "is_transposed", False))

    def matrix(self) -> torch.Tensor:
        return torch.stack(list(self.matrices()))

    def matrices(self) -> Iterator[torch.Tensor]:
        """Yields the matrix (m, n) of each expert, float32.

        Raises:
            ValueError: the weight does not consist of floats.
        """
        weight = self.get_param().detach()
        if not weight.is_floating_point() or weight.element_size() == 1:
            raise ValueError(
                f"The parameter {self.name} has the type {weight.dtype}: PiSSA cannot start from it. Load the base in bfloat16."
            )
        matrices = weight if weight.dim() == 3 else weight[None]
        return (matrix.float() for matrix in (matrices.mT if self.is_transposed() else matrices))

    def by_expert(self, A: torch.Tensor, B: torch.Tensor) -> Factors:
        """Returns the factors of each expert, (experts, r, n) and (experts, m, r)."""
        return A.reshape(self.num_experts, -1, A.shape[-1]), B.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)

    @staticmethod
    def joined(A: torch.Tensor, B: torch.Tensor) -> Factors:
        """Returns the factors of all experts, (experts · r, n) and (m, r · experts), from those of `by_expert`."""
        return A.flatten(0, 1), B.permute(1, 2, 0).flatten(1)

    def truncated(self, A: torch.Tensor, B: torch.Tensor, rank: int | None) -> tuple[torch.Tensor, torch.Tensor, int, float]:
        """Returns the factors of all experts of the best approximation by a rank, the rank (at most that of the factors and
        the weight), and the relative error of their products."""
        A, B = self.by_expert(A, B)
        B, A, singular = map(torch.stack, zip(*(truncate(b, a, min(rank or len(a), len(a))) for a, b in zip(A, B))))
        kept = A.shape[1]
        lost = singular[:, kept:].square().sum() / singular.square().sum().clamp_min(1e-300)
        return *self.joined(A, B), kept, lost.sqrt().item()

    def start(self, adapter: str, config: PrincipalStart) -> Factors:
        niter, scaling = None if config.svd == "exact" else config.niter, self.start_scaling(adapter)
        starts = [
            initial_factors(principal_components(matrix, self.r[adapter], niter, config.seed), scaling)
            for matrix in self.matrices()
        ]
        B, A = map(torch.stack, zip(*starts))
        return self.joined(A, B)

    def initial(self, adapter: str) -> Factors:
        A, A0, B0 = self.factors(adapter)[0], self.initial_A[adapter].detach(), self.initial_B[adapter].detach()
        return A0.reshape(-1, A0.shape[-1]).to(A.dtype), B0.to(A.dtype)

    def rows(self, adapter: str) -> int:
        return self.r[adapter] * self.num_experts

    def split(self, A: torch.Tensor) -> Factors:
        A, A0 = A.unflatten(0, (self.num_experts, -1)).chunk(2, dim=1)
        return A.flatten(0, 1), A0

    def check_initial(self, adapter: str, A0: torch.Tensor, B0: torch.Tensor) -> None:
        weight = self.get_param()
        if weight.device.type == "meta":
            return
        A0, B0 = A0.to(weight.device), B0.to(weight.device)
        scaling = self.start_scaling(adapter)
        if not all(is_of(B, A, scaling, matrix) for A, B, matrix in zip(*self.by_expert(A0, B0), self.matrices())):
            raise another_base(self.name)

    @torch.no_grad()
    def report(self, adapter: str, name: str) -> LayerReport:
        A, B = self.by_expert(*self.initial(adapter))
        parts, totals = zip(
            *(
                (energy(b.float(), a.float(), self.start_scaling(adapter)), matrix.square().sum())
                for a, b, matrix in zip(A, B, self.matrices())
            )
        )
        return LayerReport(self.name or name, self.r[adapter], (sum(parts) / sum(totals)).item(), None, None)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        if adapter not in self.pissa_adapters():
            return super().get_delta_weight(adapter)
        with torch.autocast(self.get_param().device.type, enabled=False):
            now, before = (
                torch.bmm(B, A) for A, B in (self.by_expert(*pair) for pair in (self.factors(adapter), self.initial(adapter)))
            )
        delta = now.sub_(before).mul_(self.scaling[adapter]).to(self.get_param().dtype)
        return (delta.mT if self.is_transposed() else delta).reshape(self.get_param().shape)

    def change(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        """Raises an error: an expert's input is inside of the module. `forward` changes the weight instead."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        active = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        is_plain = self.disable_adapters or self.merged or kwargs.get("adapter_names")
        if is_plain or not set(active) & set(self.pissa_adapters()):
            return super().forward(x, *args, **kwargs)
        change = reduce(torch.add, map(self.get_delta_weight, active))
        with _moved(self.get_base_layer(), self.parameter_name, change):
            return self.base_layer(x, *args, **kwargs)


# PEFT recognizes its layer by the name of the class when it wraps another parameter of the module, or adds an adapter.
PissaExperts.__name__ = ParamWrapper.__name__


class _Plus(nn.Module):
    def __init__(self, change: torch.Tensor):
        super().__init__()
        self.change = change

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.change


@contextmanager
def _moved(module: nn.Module, name: str, change: torch.Tensor) -> Iterator[None]:
    """Adds a change to a parameter of a module until the context ends."""
    parametrize.register_parametrization(module, name, _Plus(change), unsafe=True)  # safe means to compute the sum once more
    try:
        with parametrize.cached():
            yield
    finally:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
