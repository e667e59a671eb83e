"""How cards, errors and files name this package. They never name it on a package index, where nobody has published it: whoever
registered the name could run code on the machines of those who open our models."""

from __future__ import annotations

import shlex
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata


@cache
def plugin() -> str:
    """Returns the name of this package for a text, with the command that installs it if the build named the repository
    (HF_EXT_REPOSITORY)."""
    name = "hf_ext, a plugin for Transformers and PEFT"
    return f"{name} (`pip install {shlex.quote(f'git+{address}')}`)" if (address := repository()) else name


def repository() -> str | None:
    """Returns the address of the repository, from the metadata of the installed package; None if they lack it."""
    try:
        urls = metadata("hf_ext").get_all("Project-URL") or []
    except PackageNotFoundError:  # a checkout on the path
        return None
    return next((url.partition(", ")[2] for url in urls if url.startswith("Source, ")), None)
