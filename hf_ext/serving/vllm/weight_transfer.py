"""vLLM's weight transfer by a place: a server takes the steps of a training as deltas (`{"backend": "hf_ext"}`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hf_ext.serving.vllm.models import whole_layers
from hf_ext.storage.hub import absolute_path
from hf_ext.weight_sync.publisher import Publisher
from hf_ext.weight_sync.subscriber import Subscriber

logger = init_logger(f"vllm.{__name__}")


@dataclass
class PlaceInitInfo(WeightTransferInitInfo):
    """`place`: a folder, `hf://owner/name` or `hf://buckets/owner/name`, reachable from the server."""

    place: str


@dataclass
class PlaceUpdateInfo(WeightTransferUpdateInfo):
    """`step`: the step to go to. All workers must go to the same one, so the newest is no choice."""

    step: int


def _all(succeeded: bool) -> bool:
    """Checks whether all workers succeeded."""
    group = get_world_group()
    if group.world_size == 1:
        return succeeded
    flag = torch.tensor(int(succeeded))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag)


class PlaceEngine(WeightTransferEngine[PlaceInitInfo, PlaceUpdateInfo]):
    """Brings a worker's model to a step that a `Publisher` has written.

    Each worker keeps the weights of the checkpoint in its machine's memory, because vLLM's own are fused, sharded or quantized.
    A step that cannot be read leaves the model as it is.
    """

    init_info_cls = PlaceInitInfo
    update_info_cls = PlaceUpdateInfo
    supports_draft_weight_update = False
    _subscriber: Subscriber | None = None
    _is_loaded = False  # whether the model has the subscriber's weights

    def init_transfer_engine(self, init_info: PlaceInitInfo) -> None:
        """Opens the place. Until the first update, the model keeps the weights that the server was started with."""
        if self._subscriber is None or str(self._subscriber.place) != init_info.place:
            self._subscriber, self._is_loaded = Subscriber(init_info.place), False

    def start_weight_update(self) -> None:
        """Does nothing."""

    def receive_weights(self, update_info: PlaceUpdateInfo) -> None:
        """Reads what is missing up to the step, and loads the layers in which it changed anything."""
        subscriber = self._subscriber
        if subscriber is None:
            raise RuntimeError("Give the place of the training first: POST /init_weight_transfer_engine.")
        before = subscriber.step if self._is_loaded else None
        error = None
        try:
            subscriber.update(step=update_info.step)
        except Exception as caught:  # of any kind: the other workers wait in `_all`
            error = caught
        if not _all(error is None):  # no worker may load what another cannot
            self._is_loaded = self._is_loaded and error is not None
            raise error or RuntimeError(f"Another worker cannot read step {update_info.step}; its log has the reason.")
        names = list(whole_layers(subscriber.tensors, lambda name: before is None or name in subscriber.changed))
        if names:
            self._is_loaded = False
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, subscriber.tensors[name]) for name in names)
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_loaded = True
        count = len(subscriber.tensors)
        logger.info("Step %d of %s: %d of %d tensors loaded.", update_info.step, subscriber.place, len(names), count)

    def finish_weight_update(self) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """Forgets the place and the weights of its steps."""
        self._subscriber, self._is_loaded = None, False


@dataclass
class PlaceTrainerInitInfo(TrainerInitInfo):
    """Settings of a trainer that publishes."""

    backend: ClassVar[str] = "hf_ext"
    place: str  # see `Publisher`; servers have to reach it under the same name
    options: dict[str, Any] = field(default_factory=dict)  # more of `Publisher`'s, such as `dtype`, `anchor_every`, `resume`


class PlaceTrainerEngine(TrainerWeightTransferEngine[PlaceTrainerInitInfo]):
    """Publishes a trainer's weights and tells the servers behind `client` to take them. Only rank 0 publishes; on the others,
    gathering the weights goes along."""

    init_info_cls = PlaceTrainerInitInfo

    def __init__(self, publisher: Publisher | None, *, client: VLLMWeightSyncClient, source: WeightSource):
        super().__init__(client=client, source=source, is_sender=publisher is not None)
        self.publisher = publisher

    @classmethod
    def trainer_init(
        cls, init_info: PlaceTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError("the weights to publish are missing: give trainer_init a source, such as ModuleSource(model)")
        if not init_info.is_sender:
            return cls(None, client=client, source=source)
        place = absolute_path(init_info.place) if "://" not in init_info.place else init_info.place
        client.init_weight_transfer_engine({"place": place})
        return cls(Publisher(place, **init_info.options), client=client, source=source)

    def send_weights(self) -> None:
        """Publishes the next step, which follows the last one at the place, and waits until the servers have it."""
        assert self.source is not None  # `trainer_init` sees to it
        if self.publisher is None:
            for _ in self.source:
                pass
            return
        step = self.publisher.next_step
        self.publisher.publish(self.source, step)
        self.publisher.wait()
        self.client.start_weight_update()
        self.client.update_weights({"step": step})
        self.client.finish_weight_update(weight_version=str(step))

    def shutdown(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
