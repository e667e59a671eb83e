"""Using a loaded merge as one task for the length of a block or of a call of `generate`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from inspect import signature
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_ext.errors import CheckpointError, UnsavedChangesError
from hf_ext.integration.in_place import lock_of


@contextlib.contextmanager
def task(model: PreTrainedModel, name: str) -> Iterator[PreTrainedModel]:
    """Switches a loaded merge to the task `name` for a `with` block, then back.

    Only one block runs at a time: other threads wait, as the tasks share the memory of the weights.
    """
    with lock_of(model.set_task.model):
        before = model.active_task
        model.set_task(name)
        try:
            yield model
        except BaseException:
            with contextlib.suppress(UnsavedChangesError):  # the error of the block matters more
                model.set_task(before)
            raise
        model.set_task(before)


class Generate:
    """`model.generate(…, task=name)`: generates with a task's model, then switches back.

    The `generation_config` may also have a `task`; servers fill it in from a request. Only one call runs at a time, as the
    tasks share the memory of the weights. If the model's own `generate` has a parameter `task` (Whisper's has), use `set_task`.

    Args:
        task: one of `model.tasks`; defaults to the active task.

    Raises:
        CheckpointError, UnsavedChangesError: as `set_task`.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate, name = type(self.model).generate, None
        if "task" not in signature(generate).parameters:
            configs = [value for value in (*args, *kwargs.values()) if isinstance(value, GenerationConfig)]
            name = kwargs.pop("task", None) or next((getattr(config, "task", None) for config in configs), None)
        if name:
            try:
                self.model.set_task.merged.require_task(name)
            except CheckpointError as error:
                raise bad_request(error) from None
        with task(self.model, name or self.model.active_task):
            return generate(self.model, *args, **kwargs)


def bad_request(error: CheckpointError) -> CheckpointError:
    """Returns an error that `transformers serve` answers with status 400 and the message; by default it answers with 500.
    FastAPI, on which the server is built, reports its own HTTPException to the client. In a process that has not imported
    FastAPI, the error is returned as it is."""
    if "fastapi" not in sys.modules:
        return error
    from fastapi import HTTPException

    class BadRequest(CheckpointError, HTTPException):
        def __init__(self, message: str):
            HTTPException.__init__(self, 400, message)

        def __str__(self) -> str:
            return str(self.detail)

    return BadRequest(str(error))
