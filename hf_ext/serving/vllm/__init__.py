"""The plugin of vLLM: it serves compressed checkpoints and merges as they are, and many fine-tunes of one base by one server.

vLLM finds it by the entry points in setup.cfg. docs/serving.md shows the commands.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def register() -> None:
    """Adds loader, formats and weight transfer of this package to vLLM's registries. vLLM calls it in each of its processes."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from hf_ext.serving.vllm.formats import FORMATS
    from hf_ext.serving.vllm.loader import LOAD_FORMAT, StoredModelLoader

    register_model_loader(LOAD_FORMAT)(StoredModelLoader)
    for method, config in FORMATS.items():
        register_quantization_config(method)(config)
    WeightTransferEngineFactory.register_engine(LOAD_FORMAT, "hf_ext.serving.vllm.weight_transfer", "PlaceEngine")
    WeightTransferTrainerFactory.register_engine(LOAD_FORMAT, "hf_ext.serving.vllm.weight_transfer", "PlaceTrainerEngine")
    # POST /collective_rpc calls methods of the workers. In a vLLM that has no such class, the server refuses to prepare steps:
    # updates then read them while the server is paused.
    with suppress(ImportError):
        from vllm.v1.worker.worker_base import WorkerBase

        WorkerBase.prepare_weights = _prepare_weights


def _prepare_weights(worker: Any, place: str, step: int) -> dict[str, Any]:
    """A method for vLLM's workers: see `PlaceEngine.prepare`."""
    return worker.weight_transfer_engine.prepare(place, step)
