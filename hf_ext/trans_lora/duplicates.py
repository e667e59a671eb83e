"""Finds texts that repeat an earlier one, word for word or nearly."""

from __future__ import annotations

import math
import re

SHINGLE = 3  # words


def words_of(text: str) -> tuple[str, ...]:
    """Returns the words and the single signs of a text, in lower case and without spaces."""
    return tuple(re.findall(r"\w+|[^\w\s]", text.casefold()))


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Returns all runs of SHINGLE words; for a shorter text, all its words as one run."""
    words = words_of(text)
    return frozenset(words[i : i + SHINGLE] for i in range(max(1, len(words) - SHINGLE + 1)))


def jaccard(one: frozenset, other: frozenset) -> float:
    """Returns the Jaccard similarity of two sets: shared elements over all elements; 1 for two empty sets."""
    return len(one & other) / len(one | other) if one or other else 1.0


class SeenTexts:
    """An index of earlier texts, which finds exactly whether a text is as near to one of them as `threshold` (Jaccard index of
    shingles).

    Two sets that are so near share one of the first n − ⌈threshold·n⌉ + 1 shingles of each, in any fixed order, n being
    the size of each (prefix filtering; Bayardo, Ma and Srikant, WWW 2007), so few earlier texts have to be compared.

    Args:
        threshold: in (0, 1]; at 1 only texts with equal shingles are near.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._exact: set[tuple[str, ...]] = set()
        self._by_shingle: dict[tuple[str, ...], list[frozenset]] = {}

    def has(self, text: str) -> bool:
        """Checks whether an earlier text is the same except for case and spaces."""
        return words_of(text) in self._exact

    def has_near(self, text: str) -> bool:
        runs = shingles(text)
        return any(
            jaccard(runs, other) >= self.threshold
            for shingle in self._first(runs)
            for other in self._by_shingle.get(shingle, ())
        )

    def add(self, text: str) -> None:
        runs = shingles(text)
        self._exact.add(words_of(text))
        for shingle in self._first(runs):
            self._by_shingle.setdefault(shingle, []).append(runs)

    def _first(self, runs: frozenset) -> list[tuple[str, ...]]:
        return sorted(runs)[: len(runs) - math.ceil(self.threshold * len(runs) - 1e-9) + 1]
