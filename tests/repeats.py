"""Marks tests that repeat the same thing: a few times in `make test`, many times in `make test-slow`."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def repeats(name: str, few: object, many: object, ids: list[str] | None = None) -> pytest.MarkDecorator:
    """Parametrizes a test with `few`, and with `many` as a slow test."""
    return pytest.mark.parametrize(name, [few, pytest.param(many, marks=pytest.mark.slow)], ids=ids)


def some(name: str, usual: list, more: list, **options: Any) -> pytest.MarkDecorator:
    """Parametrizes a test with the usual cases, and with more as slow tests."""
    slow = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in more]
    return pytest.mark.parametrize(name, [*usual, *slow], **options)


def explores(few: int, many: int, *strategies: SearchStrategy) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Runs a test with `few` drawn examples, and with `many` as a slow test; they are the same in each run."""

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @repeats("examples", few, many)
        def test(examples: int) -> None:
            settings(max_examples=examples, derandomize=True, database=None, deadline=None)(given(*strategies)(check))()

        return test

    return decorate
