"""Marks tests that repeat the same thing: a few times in `make test`, many times in `make test-slow`."""

import pytest


def repeats(name: str, few: object, many: object) -> pytest.MarkDecorator:
    """Parametrizes a test with `few`, and with `many` as a slow test."""
    return pytest.mark.parametrize(name, [few, pytest.param(many, marks=pytest.mark.slow)])
