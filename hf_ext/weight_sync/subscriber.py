"""Brings tensors in memory to a published step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import torch
import xxhash

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.safetensors_file import RawTensor, torch_dtype
from hf_ext.weight_sync.memory import Home, KeptTensor, rows_of
from hf_ext.weight_sync.places import Place, open_place
from hf_ext.weight_sync.plan import Parts, Plan, Planner, State, common_steps, read_indices
from hf_ext.weight_sync.rows import checkpoint_name
from hf_ext.weight_sync.shared_memory import Kind

logger = logging.getLogger(__name__)

Allocate = Callable[[Mapping[str, Kind]], dict[str, torch.Tensor]]


class Subscriber:
    """Reads the steps that a `Publisher` writes to a place.

    Checks every file before it changes a tensor, and the checksum of every changed tensor before and after. If a file is
    missing or damaged, a warning names it, and the tensors start again from the newest anchor.

    Args:
        place: as for `Publisher`.
        allocate: allocates the tensors that this object keeps. Defaults to memory of this process.

    Attributes:
        is_mixed: true after an update that failed halfway: the tensors are of no one step.
        tensors: copies in CPU memory of the tensors that cannot change where the caller keeps them.
        changed: names of the published tensors that the last `update` changed.
    """

    def __init__(
        self,
        place: str | os.PathLike | Place,
        allocate: Allocate | None = None,
    ):
        self.place = open_place(place)
        self._allocate = allocate or allocate_here
        self.is_mixed = False
        self.tensors: dict[str, torch.Tensor] = {}
        self.changed: set[str] = set()
        self._state: State | None = None
        self._kept: dict[str, KeptTensor] = {}  # the caller's tensors after the last `update`, by published name

    @property
    def step(self) -> int | None:
        """The step that the tensors are at; None before the first `update` and after one that failed halfway."""
        return self._state.step if self._state else None

    def steps(self) -> list[int]:
        """Returns the steps at the place, oldest first.

        Raises:
            CorruptFileError: an index is damaged, or from a newer version.
        """
        return common_steps(read_indices(self.place))

    def update(
        self,
        named_tensors: Mapping[str, torch.Tensor] | None = None,
        step: int | None = None,
        strict: bool = False,
    ) -> int:
        """Updates tensors in place to a step, whichever step they are at.

        Applies all missed steps in one pass over the tensors. Contiguous tensors in CPU memory change where they are. Of other
        tensors, such as those on a GPU, this object keeps a copy in CPU memory and copies the changed rows from there.

        Args:
            named_tensors: the tensors to change, by name. By default, copies of all published tensors, in `tensors`.
            step: number of the step; the newest by default.
            strict: do not accept that the caller lacks a published tensor.

        Returns:
            The step. If damaged files prevent a newer one, this is the newest step that can be reached.

        Raises:
            CheckpointError: nothing is published, `step` is not there, or the tensors do not fit the published ones.
            CorruptFileError: damaged files prevent the update. The tensors are unchanged, unless the message says otherwise.
        """
        planner = Planner(self.place)
        for state in (self._state, None):
            plan = planner.plan(state, step)
            tensors = self._tensors(plan.layout, named_tensors, strict)
            homes = self._homes(plan.layout, tensors)
            altered = _altered(plan, homes)
            if altered is None:
                break
            logger.warning(f"'{altered}' is not as the last update left it: all tensors begin at an anchor.")
        self._apply(plan, homes)
        self._kept = {name: KeptTensor.of(tensor) for name, tensor in tensors.items()}
        self.changed = {name for name, parts in plan.layout.items() if any(key in plan.payloads for key, *_ in parts)}
        return plan.state.step

    def _tensors(
        self, layout: Mapping[str, Parts], named_tensors: Mapping[str, torch.Tensor] | None, strict: bool
    ) -> dict[str, torch.Tensor]:
        """Returns the caller's tensors, which must be published, by name."""
        if named_tensors is None:
            self.tensors = self._copies(layout)
            return self.tensors
        tensors = {checkpoint_name(name): tensor for name, tensor in named_tensors.items()}
        if other := sorted(tensors.keys() - layout.keys()):
            raise CheckpointError(f"Nothing is published at {self.place} for the tensor '{other[0]}'. Is it the same model?")
        if strict and (missing := sorted(layout.keys() - tensors.keys())):
            raise CheckpointError(f"'{missing[0]}', which {self.place} publishes, is not among the tensors given.")
        return {name: tensors[name] for name in layout if name in tensors}

    def _homes(self, layout: Mapping[str, Parts], tensors: Mapping[str, torch.Tensor]) -> dict[str, Home]:
        """Returns the memory of each part that the caller keeps, by key."""
        homes: dict[str, Home] = {}
        first_at: dict[int, str] = {}  # by address: the first tensor there
        for name, tensor in tensors.items():
            parts = layout[name]
            rows = rows_of(name, tensor, parts)
            # Of two names for the same memory, as tied weights have, the second is copied to it.
            twin = first_at.setdefault(rows.data_ptr(), name)
            in_place = rows.device.type == "cpu" and rows.is_contiguous() and twin == name
            if rows.numel() and _checksums(parts) != _checksums(layout[twin]):
                raise CheckpointError(
                    f"'{name}' and '{twin}' are one tensor here, but the training gave them different values."
                )
            is_as_left = name in self._kept and self._kept[name].is_still(tensor)
            for key, part, header in parts:
                of_part = slice(part.begin, part.end(header))
                if in_place:
                    homes[key] = Home(rows[of_part])
                else:
                    self.tensors |= self._copies({name: parts})
                    homes[key] = Home(torch.atleast_1d(self.tensors[name])[of_part], rows[of_part], is_new=not is_as_left)
        return homes

    def _copies(self, layout: Mapping[str, Parts]) -> dict[str, torch.Tensor]:
        """Returns this object's copies of tensors, at first without values. Memory is taken only for what is written there."""
        kinds = {name: (torch_dtype(header.dtype), part.shape) for name, [(_, part, header), *_] in layout.items()}
        copies = {name: self.tensors[name] for name in kinds if name in self.tensors}
        if {name: (copy.dtype, tuple(copy.shape)) for name, copy in copies.items()} != kinds:  # those of another run
            return self._allocate(kinds)
        return copies

    def _apply(self, plan: Plan, homes: Mapping[str, Home]) -> None:
        """Changes the parts that are not up to date, and copies their rows to the caller."""
        changing = [key for key, home in homes.items() if key in plan.payloads or home.is_new]
        self._state, self.is_mixed = None, True
        try:
            for key, rows in Prefetcher(lambda key: homes[key].apply(plan.payloads.get(key, ())), dict.fromkeys(changing, 1)):
                homes[key].copy(rows)
        except (BaseModelError, CorruptFileError) as error:
            raise CorruptFileError(f"{error} The tensors are now of no one step: update them again.") from error
        self._state, self.is_mixed = plan.state, False


def allocate_here(kinds: Mapping[str, Kind]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}


def _checksums(parts: Parts) -> list[int]:
    return [header.checksum for *_, header in parts]


def _altered(plan: Plan, homes: Mapping[str, Home]) -> str | None:
    """Returns the name of a tensor whose values are not those before the plan's update, if there is one."""
    for name, parts in plan.layout.items():
        for key, *_ in parts:
            home = homes.get(key)
            if home is None or key not in plan.checksums:
                continue
            # What a caller keeps may have changed even where this step changes nothing.
            is_used = home.elsewhere is None or home.is_new or key in plan.payloads
            if is_used and xxhash.xxh3_64_intdigest(RawTensor.from_torch(home.part).data) != plan.checksums[key]:
                return name
    return None
