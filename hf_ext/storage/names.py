"""Names of tensors: which names, in one file or in two, stand for the same weight.

Two names stand for one weight if they differ only by a prefix (`bert.`, `model.`, `language_model.`), or by the old names of
normalization parameters (gamma, beta), or if the model ties the two weights. Files disagree about ties: many hold one of the
names, some hold all, and some hold different tensors under them, which breaks the tie.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

MAX_PARTS = 64  # parts of a name, between its dots; longer names have no endings, because these take quadratic memory


class Names:
    """The names of the tensors in a file, to look up the weights of another file or of a model."""

    def __init__(self, names: Iterable[str]):
        self._names = frozenset(names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def twin_of(self, name: str, ties: Ties | None = None) -> str | None:
        """Returns the name that the weight `name` has here; None if it is not here. A weight that is not here under its own
        name is looked up under those that it is tied to, by the `ties` of the model that the two files belong to."""
        for other in (name, *(ties.others(name) if ties else ())):
            if other in self:
                return other
            if twin := next((twin for ending in _endings(other) if (twin := self._by_ending.get(ending))), None):
                return twin
        return None

    @cached_property
    def _by_ending(self) -> dict[str, str | None]:
        """Maps each name and each of its endings to the name, and to None where several names share an ending."""
        endings: dict[str, str | None] = {}
        for name in self._names:
            for ending in _endings(name):
                endings[ending] = None if ending in endings else name
        return endings


class Ties:
    """The weights that a model ties: one tensor under several names, unless a file holds a tensor for each name. `ties` are by
    weight the weight that it is tied to, as in `all_tied_weights_keys` of a Transformers model; `aliases` by name in a file the
    model's name of that weight, where the two differ."""

    def __init__(self, ties: Mapping[str, str], aliases: Mapping[str, str] | None = None):
        self._aliases = aliases or {}
        self._group_of: dict[str, list[str]] = {}
        for name, origin in ties.items():
            group = self._group_of.setdefault(origin, [origin])
            group += [member for member in self._group_of.get(name, [name]) if member not in group]
            self._group_of |= dict.fromkeys(group, group)
        self._tied = Names(self._group_of)
        for name in self._aliases.values():
            self._group_of.setdefault(name, [name])

    def others(self, name: str) -> list[str]:
        """Returns the model's names of the weights that `name`, as a file has it, is tied to. First the one that the model ties
        the others to."""
        member = self._member(name)
        return [other for other in self._group_of.get(member or "", ()) if other != member]

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Returns those of a file's names that stand for tied weights: a list for each weight, which mostly has one name. Its
        first name is the one that the model ties the others to, if the file has that."""
        groups: dict[str, list[tuple[int, str]]] = {}
        for name in names:
            if member := self._member(name):
                group = self._group_of[member]
                groups.setdefault(group[0], []).append((group.index(member), name))
        return [[name for _, name in sorted(group, key=lambda entry: entry[0])] for group in groups.values()]

    def _member(self, name: str) -> str | None:
        """Returns the model's name of a weight that is tied or has an alias."""
        name = self._aliases.get(name, name)
        return name if name in self._group_of else self._tied.twin_of(name)


def is_statistic(name: str) -> bool:
    """Checks whether a tensor holds statistics of the training data, as batch normalization does, and not a weight."""
    return name.endswith((".running_mean", ".running_var", ".num_batches_tracked"))


def layer_of(name: str) -> tuple[str, str] | None:
    """Returns the stack of layers that a parameter belongs to and the layer's number there; None if it is in no layer."""
    match = re.match(r"(.*?)\b(\d+)\.", name)
    return (match[1], match[2]) if match else None


def _endings(name: str) -> Iterator[str]:
    parts = re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", name)).split(".")
    if len(parts) > MAX_PARTS:
        parts = [".".join(parts)]
    # The last part alone ("weight") would match too much, and so would a number before it ("0.weight").
    for start in range(max(len(parts) - 1, 1)):
        if start == 0 or not parts[start].isdigit():
            yield ".".join(parts[start:])
