"""Publishes the weights of a Trainer's model while it trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging

from hf_ext.errors import CheckpointError
from hf_ext.integration.compat import unsaved
from hf_ext.weight_sync.places import Place
from hf_ext.weight_sync.publisher import Publisher
from hf_ext.weight_sync.rows import checkpoint_name
from hf_ext.weight_sync.servers import Follower

logger = logging.get_logger(__name__)


class PublishWeights(TrainerCallback):
    """Publishes the weights at the beginning of a training, after every `every` optimizer steps, and at the end.

    Works with `Trainer` and its subclasses, such as TRL's `SFTTrainer` and `GRPOTrainer`. If you resume from a checkpoint, the
    steps continue at the same place. If a step cannot be published, a warning says why, and training continues. At the end,
    the last step is then published again.

    Args:
        place: see `Publisher`.
        every: number of optimizer steps from one published step to the next.
        dtype: float type in which servers hold the weights.
        on_step: function that the first process calls with the number of each step, after all processes have published it.
            Training waits for it; its errors end the training. Without `on_step`, a thread writes the step meanwhile.
        options: further arguments of `Publisher`.

    Raises:
        CheckpointError: from `Trainer.train`: the model has adapters or is quantized, or the place has steps of another
            training.
    """

    def __init__(
        self,
        place: str | os.PathLike | Place,
        every: int = 1,
        dtype: torch.dtype | None = torch.bfloat16,
        on_step: Callable[[int], object] | None = None,
        **options: Any,
    ):
        if every < 1:
            raise ValueError("every must be 1 or more")
        self.place, self.every, self.on_step = place, every, on_step
        self.options = {"dtype": dtype} | options
        self.publisher: Publisher | None = None
        self._last = -1  # the last step that was published

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        wrapped, model = model, _unwrapped(model)
        if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
            raise CheckpointError(
                f"PublishWeights requires a Transformers model without adapters, not a {type(model).__name__} with adapters. "
                "Save the adapter instead: it is small, and servers load it without conversion."
            )
        if getattr(model, "hf_quantizer", None) is not None:
            raise CheckpointError("The weights of a quantized model cannot be published.")
        if any(isinstance(module, FullyShardedDataParallel) for module in wrapped.modules()):
            raise CheckpointError(
                "The weights of a model under FSDP 1 cannot be published. Train with FSDP 2 (fsdp_version=2)."
            )
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise CheckpointError("The weights of a model under ZeRO-3 cannot be published. Train with FSDP 2 or ZeRO-2.")
        options = {"resume": state.global_step > 0} | self.options
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            options = {"run": args.run_name or "training", "rank": args.process_index, "world_size": args.world_size} | options
        elif args.process_index > 0:
            return  # the first process has the same weights
        self.publisher = Publisher(self.place, **options)
        self._publish(state, model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        if state.global_step % self.every == 0:
            self._publish(state, model)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        if self.publisher is not None:
            if not self._everywhere(self._try(self.publisher.wait)) or state.global_step != self._last:
                self._publish(state, model)
            self._try(self.publisher.close)

    def _publish(self, state: TrainerState, model: torch.nn.Module) -> None:
        publisher, step = self.publisher, state.global_step
        if publisher is None:
            return
        weights = checkpoint_weights(model)
        if not state.is_world_process_zero:  # which publishes what is not sharded
            weights = {name: weight for name, weight in weights.items() if isinstance(weight, DTensor)}
        self._try(publisher.wait)  # for the step before
        is_published = publisher.last_step == step or self._try(lambda: publisher.publish(weights, step))
        if self.on_step is not None:
            is_published = self._everywhere(is_published and self._try(publisher.wait))
            if is_published and state.is_world_process_zero:
                self.on_step(step)
        self._last = step if is_published else -1

    def _everywhere(self, is_done: bool) -> bool:
        """Checks whether all processes that publish have done something."""
        if self.publisher is None or self.publisher.world_size == 1:
            return is_done
        everywhere = [is_done] * self.publisher.world_size
        distributed.all_gather_object(everywhere, is_done)
        return all(everywhere)

    def _try(self, work: Callable[[], object]) -> bool:
        """Checks whether work succeeded that touches the place."""
        try:
            work()
        except Exception as error:  # a store of the user's may raise any
            logger.warning(f"A step could not be published: {error}")
            return False
        return True


class PlaceTransfer:
    """Sends the weights of TRL's `AsyncGRPOTrainer(weight_transfer=…)` to a server through a place.

    Each synchronization is a step, which the server prepares while it generates; only then it pauses.

    Args:
        publisher: writes the steps. Give it the type in which the server holds its weights: `Publisher(place, dtype=…)`.
        server: the server to bring to each step, or another follower. It must read the publisher's place.
    """

    def __init__(self, publisher: Publisher, server: Follower):
        self.publisher, self.server = publisher, server

    def init_weight_transfer(self) -> None:
        """Does nothing: the server opens the place when it takes the first step."""

    def pause(self) -> None:
        """Does nothing: the server pauses when it has prepared the step."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publishes a step, and brings the server to it."""
        step = self.publisher.next_step
        self.publisher.publish(iterator, step)
        self.publisher.wait()
        self.server.update(step)

    def resume(self) -> None:
        """Does nothing: the server has resumed."""

    def destroy(self) -> None:
        """Ends the publisher's thread."""
        self.publisher.close()


def checkpoint_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights of a Transformers model under the names and in the shapes that `save_pretrained` gives them."""
    model = _unwrapped(model)
    state = {checkpoint_name(name): weight for name, weight in model.state_dict().items()}
    state = {name: weight for name, weight in state.items() if name not in unsaved(model)}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside `torch.compile` and data parallelism, in any order."""
    while (inner := extract_model_from_parallel(model, keep_torch_compile=False)) is not model:
        model = inner
    return model
