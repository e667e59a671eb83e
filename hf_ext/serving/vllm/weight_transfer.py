"""vLLM's weight transfer by a place: a server takes the steps of a training as deltas (`{"backend": "hf_ext"}`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

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

from hf_ext.serving.stored_models import StoredModel
from hf_ext.serving.vllm.models import whole_layers
from hf_ext.storage.hub import absolute_path
from hf_ext.weight_sync.publisher import Publisher
from hf_ext.weight_sync.sglang_layout import VersionReader, open_reader
from hf_ext.weight_sync.shared_memory import SharedTensors, machine
from hf_ext.weight_sync.subscriber import Subscriber

logger = init_logger(f"vllm.{__name__}")

T = TypeVar("T")


@dataclass
class PlaceInitInfo(WeightTransferInitInfo):
    """`place`: a folder, `hf://owner/name` or `hf://buckets/owner/name`, reachable from the server."""

    place: str


@dataclass
class PlaceUpdateInfo(WeightTransferUpdateInfo):
    """`step`: the step to go to. All workers must go to the same one, so the newest is no choice."""

    step: int


class PlaceEngine(WeightTransferEngine[PlaceInitInfo, PlaceUpdateInfo]):
    """Brings a worker's model to a step that a `Publisher` has written.

    The first worker of each machine keeps the weights of the checkpoint in memory, because vLLM's own are fused, sharded or
    quantized. It reads a step there in a thread, while the model serves. The commit loads what has changed since the last one,
    in all workers of the machine. A step that cannot be read leaves the model as it is.
    """

    init_info_cls = PlaceInitInfo
    update_info_cls = PlaceUpdateInfo
    supports_draft_weight_update = False
    _place: str | None = None
    _reader: Subscriber | VersionReader | None = None  # of the first worker
    _reading: tuple[int, Future[None]] | None = None  # the step that is, or was, read since the last commit
    _unloaded: set[str] | None = None  # the names that steps have changed since the last load; None: all

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        rank, machines = get_world_group().rank_in_group, _gather(machine())
        alike = [other for other in range(len(machines)) if other == rank or machines[other] == machines[rank] is not None]
        self._rank, self._first = rank, alike[0]
        self._shared = SharedTensors() if len(alike) > 1 else None
        self._thread = ThreadPoolExecutor(1)

    def init_transfer_engine(self, init_info: PlaceInitInfo) -> None:
        """Opens the place. Until the first update, the model keeps the weights that the server was started with."""
        if self._place == init_info.place:
            return
        self.shutdown()
        self._place = init_info.place
        if self._rank == self._first:
            self._reader = self._open_reader(init_info.place)

    def prepare(self, place: str, step: int) -> dict[str, Any]:
        """Starts to read a step, which changes nothing that is served, and returns at once.

        Returns:
            `is_ready`: true if the step is read, so that a commit only has to load it; call this again until it is.
            `error`: the error that prevented it, or None. The next call tries again.
        """
        self.init_transfer_engine(PlaceInitInfo(place))
        is_done, error = True, None
        if self._reader is not None:  # otherwise, the first worker of this machine reads the step
            reading = self._read(step)
            is_done = reading.done()
            error = reading.exception() if is_done else None
        if error is not None:
            self._reading = None
            logger.warning("Step %d of %s cannot be read: %s", step, place, error)
        return {"is_ready": is_done and error is None, "error": error and f"{type(error).__name__}: {error}"}

    def start_weight_update(self) -> None:
        """Does nothing."""

    def receive_weights(self, update_info: PlaceUpdateInfo) -> None:
        """Loads the layers in which anything has changed up to the step, which is read first if that was not prepared.

        No worker begins before all can load, and none returns before all have: what they load must not change meanwhile.
        """
        step = update_info.step
        names, share = _in_all_workers(step, lambda: self._offer(step))[self._first]
        tensors: dict[str, torch.Tensor] = {}
        _in_all_workers(step, lambda: tensors.update(self._reader.tensors if self._reader else share.open()))
        self._unloaded = None  # until all have loaded
        _in_all_workers(step, lambda: self._load(tensors, names))
        self._unloaded = set()
        logger.info("Step %d of %s: %d of %d tensors loaded.", step, self._place, len(names), len(tensors))

    def finish_weight_update(self) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """Forgets the place and the weights of its steps."""
        self._place = self._reader = self._reading = self._unloaded = None

    def _open_reader(self, place: str) -> Subscriber | VersionReader:
        """Opens what is at a place by now. Steps in SGLang's layout begin with the model that the server was started with."""
        extra = self.vllm_config.load_config.model_loader_extra_config or {}
        model = StoredModel(self.model_config.model, self.model_config.revision, extra.get("task"))
        return open_reader(place, self._shared.allocate if self._shared else None, model.open)

    def _read(self, step: int) -> Future[None]:
        """Starts to read a step in the thread, unless that was done since the last commit."""

        def read() -> None:
            assert self._place is not None
            if self._reader is None or self._reader.step is None:
                self._reader = self._open_reader(self._place)
            self._reader.update(step=step)
            if self._unloaded is not None:
                self._unloaded.update(self._reader.changed)

        if self._reading is None or self._reading[0] != step:
            self._reading = step, self._thread.submit(read)
        return self._reading[1]

    def _offer(self, step: int) -> tuple[list[str], Any]:
        """Returns which tensors the workers of this machine have to load, and where they are. Only the first worker knows."""
        if self._place is None:
            raise RuntimeError("Give the place of the training first: POST /init_weight_transfer_engine.")
        if self._reader is None:
            return [], None
        try:
            self._read(step).result()
        finally:
            self._reading = None
        names = whole_layers(self._reader.tensors, lambda name: self._unloaded is None or name in self._unloaded)
        return list(names), self._shared.share if self._shared else None

    def _load(self, tensors: dict[str, torch.Tensor], names: list[str]) -> None:
        if names:
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, tensors[name]) for name in names)
            finalize_layerwise_reload(self.model, self.model_config)


def _gather(value: Any) -> list[Any]:
    """Returns the values of all workers. All of them must call this."""
    group = get_world_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _in_all_workers(step: int, work: Callable[[], T]) -> list[T]:
    """Returns the results of a function that each worker calls. If it fails in any worker, this raises in all of them."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # of any kind: the other workers wait
        error = caught
    succeeded, results = zip(*_gather((error is None, result)))
    if not all(succeeded):
        raise error or RuntimeError(f"Another worker cannot take step {step}; its log has the reason.")
    return list(results)


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
