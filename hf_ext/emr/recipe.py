"""The recipe of a merge: a YAML file that names the base and the tasks."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from hf_ext.errors import CheckpointError

RECIPE = "merge_recipe.yaml"
RESCALE = ("tensor", "paper", "tensor_mean")


@dataclass(frozen=True)
class Recipe:
    """The arguments of `merge` that decide what comes out.

    Attributes:
        base: folder or Hub id.
        tasks: folders or Hub ids by name, in order.
        revision: of the base on the Hub.
        rescale: see `merge`.
    """

    base: str
    tasks: dict[str, str]
    revision: str | None = None
    rescale: str = "tensor"

    @classmethod
    def read(cls, path: str | os.PathLike) -> Recipe:
        """Reads a recipe.

        Raises:
            CheckpointError: the file is not a recipe; the message says which key is missing, unknown or of another type.
        """
        if Path(path).is_dir():
            raise CheckpointError(f"{path} is a folder. Give the file of a recipe, such as {Path(path) / RECIPE}.")
        try:
            contents = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CheckpointError(f"The recipe {path} cannot be read: {error}") from error
        keys = [field.name for field in fields(cls)]
        if not isinstance(contents, dict):
            raise CheckpointError(f"The recipe {path} must have the keys base and tasks at its top level.")
        if unknown := [str(key) for key in contents if key not in keys]:
            raise CheckpointError(f"The recipe {path} may have the keys {', '.join(keys)}, not {', '.join(unknown)}.")
        problem = _problem(contents)
        if problem:
            raise CheckpointError(f"The recipe {path}: {problem}")
        return cls(**contents)

    def write(self, path: str | os.PathLike) -> None:
        contents = {key: value for key, value in asdict(self).items() if value is not None}
        Path(path).write_text(yaml.safe_dump(contents, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _problem(contents: dict[str, Any]) -> str | None:
    """Returns a sentence about the first value that is not valid."""
    if not isinstance(contents.get("base"), str):
        return "'base' must be the folder or Hub id of the base model."
    tasks = contents.get("tasks")
    if not isinstance(tasks, dict) or not tasks or not all(isinstance(part, str) for pair in tasks.items() for part in pair):
        return "'tasks' must map the name of each task to its folder or Hub id, as in 'sst2: my-sst2'."
    if not isinstance(contents.get("revision"), str | None):
        return "'revision' must be text; quote a number."
    if contents.get("rescale", "tensor") not in RESCALE:
        return f"'rescale' must be one of: {', '.join(RESCALE)}."
    return None
