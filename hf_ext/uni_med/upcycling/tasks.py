"""The tasks of a batch, from the call of the model to the routers of its projectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ext.integration.compat import recomputes_in_backward

UNKNOWN = -1


class BatchTasks:
    """Takes `tasks=` out of the arguments of a model's calls, and says which task each visual token is of. One object is a
    model's: its hooks around forward, the call behind its `generate`, and what the routers ask."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._tasks: list[int | str] | None = None  # of the samples
        self._input_ids: torch.Tensor | None = None
        self._image_sizes: Any = None
        self._in_generate: list[int | str] | None = None
        self._last_had_tasks = False
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]
        model.generate = self.generate

    def remove(self) -> None:
        """Gives the model its own calls back."""
        for hook in self._hooks:
            hook.remove()
        del self.model.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate(…, tasks=names)`: generates with the task of each sample."""
        # Some versions of Transformers compute the images before forward, with the samples as they are here.
        input_ids = next((kwargs[name] for name in ("inputs", "input_ids") if name in kwargs), args[0] if args else None)
        self._in_generate = _one_per_sample(kwargs.pop("tasks", None), kwargs.get("inputs_embeds", input_ids))
        self._set(self._in_generate, input_ids, kwargs)
        try:
            return type(self.model).generate(self.model, *args, **kwargs)
        finally:
            self._in_generate = None
            self._set(None, None, {})

    def _before_forward(self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        samples = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        tasks = _one_per_sample(kwargs.pop("tasks", None), samples)
        self._set(tasks or self._in_generate, input_ids, kwargs)
        self._last_had_tasks = self._tasks is not None
        return args, kwargs

    def _after_forward(self, *_: Any) -> None:
        self._set(None, None, {})

    def _set(self, tasks: list[int | str] | None, input_ids: torch.Tensor | None, inputs: dict[str, Any]) -> None:
        self._tasks, self._input_ids, self._image_sizes = tasks, input_ids, inputs.get("image_sizes")

    def of_tokens(self, count: int, names: Sequence[str]) -> int | torch.Tensor:
        """Returns the index of each visual token's task, (count,), or one index for all of them; `count` is the number of
        visual tokens that a projector computes for the batch."""
        if self._tasks is None:
            if self._last_had_tasks and recomputes_in_backward():
                raise ValueError(
                    "Activation checkpointing computes the projector again after the model's call, when the tasks of its "
                    "samples are gone. Leave the projector out of it."
                )
            return UNKNOWN
        indices = [self._index(task, names) for task in self._tasks]
        if len(set(indices)) == 1:
            return indices[0]
        if self._input_ids is None:
            raise ValueError("Batches of mixed tasks require input_ids: their placeholders say which sample an image is of.")
        beams = len(self._input_ids) // len(indices)
        of_rows = torch.tensor(indices, device=self._input_ids.device).repeat_interleave(beams)
        candidates = [tasks for tasks in self._candidates(of_rows) if len(tasks) == count]
        if not candidates or any(not torch.equal(tasks, candidates[0]) for tasks in candidates):
            raise ValueError(
                f"The projector computes {count} visual tokens, and the placeholders do not say which sample each is of. Put "
                "one image in each sample, or one task in each batch."
            )
        return candidates[0]

    def _index(self, task: int | str, names: Sequence[str]) -> int:
        if isinstance(task, str) and task in names:
            return names.index(task)
        if isinstance(task, int) and UNKNOWN <= task < len(names):
            return task
        raise ValueError(f"The adapter has no task {task!r}, only {', '.join(names) or 'none'}. Use -1 for an unknown task.")

    def _candidates(self, of_rows: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tokens' tasks if they are the placeholders of images or videos, or of images cut into patches."""
        assert self._input_ids is not None  # of_tokens raises without them
        config = self.model.config
        counts = {
            kind: (self._input_ids == getattr(config, f"{kind}_token_id")).sum(1)
            for kind in ("image", "video")
            if getattr(config, f"{kind}_token_id", None) is not None
        }
        # LLaVA-NeXT adds and removes tokens after the projector.
        if not hasattr(config, "image_grid_pinpoints"):
            return [of_rows.repeat_interleave(count) for count in counts.values()]
        of_images = of_rows[counts["image"] > 0]  # if each of these samples has one image
        has_videos = "video" in counts and bool(counts["video"].any())
        if not has_videos and self._image_sizes is not None and len(self._image_sizes) == len(of_images):
            from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

            vision = config.vision_config
            patches = [
                image_size_to_num_patches(size, config.image_grid_pinpoints, vision.image_size) for size in self._image_sizes
            ]
            tokens = (vision.image_size // vision.patch_size) ** 2
            return [of_images.repeat_interleave(torch.tensor(patches, device=of_rows.device) * tokens)]
        return []


def _one_per_sample(tasks: Sequence[str] | torch.Tensor | None, samples: torch.Tensor | None) -> list[int | str] | None:
    """Returns the tasks as a list. Raises a ValueError if they are no list, or more or fewer than the samples."""
    if tasks is None:
        return None
    if isinstance(tasks, str):
        raise ValueError(f"tasks={tasks!r} is a single text. Give a list with one task for each sample.")
    if samples is not None and len(tasks) != len(samples):
        raise ValueError(f"tasks has {len(tasks)} entries for {len(samples)} samples. Give one task for each sample.")
    return tasks.tolist() if isinstance(tasks, torch.Tensor) else list(tasks)
