"""The processes of a job that shard a model load plain files, which the first process of each node decodes for all of them."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import on_ranks
from safetensors.torch import load_file, save_file
from tiny_checkpoints import flip_bit
from tiny_merges import write_tasks
from tiny_models import MODELS, assert_same_weights, fine_tuned
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, emr, fm_delta
from hf_ext.integration.loading import ranks
from hf_ext.storage import DeltaCheckpoint, decoded

TENSORS = {"tp_plan": "auto"}
DATA = {"fsdp_size": 2}


@pytest.fixture
def compressed(tmp_path, request) -> Path:
    """A folder with a fine-tune, plain as `tuned` and compressed as `small`."""
    fine_tuned(MODELS[getattr(request, "param", "llama_tied")].build(), tmp_path, max_shard_size="100KB")
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small", level=1)
    return tmp_path


def join(rank: int, folder: Path) -> None:
    """Joins the job. Temporary files go to folders of the job's own."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    tempfile.tempdir, decoded.SHARED_MEMORY = str(folder / "temporary"), folder / "shared"
    for place in ("temporary", "shared"):
        folder.joinpath(place).mkdir(exist_ok=True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def load(folder: Path, sharding: dict, auto=AutoModelForCausalLM):
    from transformers.distributed import DistributedConfig

    return auto.from_pretrained(folder, distributed_config=DistributedConfig(**sharding))


def temporary(folder: Path) -> list[Path]:
    return [*folder.joinpath("temporary").iterdir(), *folder.joinpath("shared").iterdir()]


def same_shards(model, plain) -> bool:
    """Checks that each weight is of the same type in both models, and that this process has the same bits of it."""
    one, other = model.state_dict(), plain.state_dict()
    local = [{name: getattr(tensor, "_local_tensor", tensor) for name, tensor in state.items()} for state in (one, other)]
    assert any(local[0][name].numel() < one[name].numel() for name in one)
    same = all(type(one[name]) is type(other[name]) and torch.equal(*(state[name] for state in local)) for name in other)
    return same and one.keys() == other.keys()


def _equals_plain(rank: int, folder: Path, sharding: dict, readers: list[int]) -> None:
    read, reads = DeltaCheckpoint.read, []
    DeltaCheckpoint.read = lambda self, name, out=None: reads.append(name) or read(self, name, out)
    if len(readers) == 2:
        ranks.node = lambda: f"node {rank}"
    join(rank, folder)
    model, plain = (load(folder / kind, sharding) for kind in ("small", "tuned"))
    assert same_shards(model, plain)
    assert len(reads) == len({*reads}) and bool(reads) == (rank in readers)
    assert not hasattr(model.config, "quantization_config")
    torch.distributed.barrier()
    assert not temporary(folder)


@pytest.mark.parametrize(("compressed", "sharding", "readers"), [
    ("llama_tied", TENSORS, [0]), ("qwen_moe", TENSORS, [0]), ("mixtral", TENSORS, [0, 1]), ("llama_bf16", DATA, [0]),
], indirect=["compressed"])  # fmt: skip
def test_shards_equal_those_of_a_plain_load(compressed, sharding, readers):
    assert on_ranks(_equals_plain, compressed, sharding, readers) == [0, 0]


def test_a_job_of_one_process_decodes_in_memory(compressed, monkeypatch):
    monkeypatch.setattr(ranks, "together", None)
    assert_same_weights(*(load(compressed / kind, {"tp_size": 1}) for kind in ("small", "tuned")))


def _raises(rank: int, folder: Path, case: str, expected: tuple[type, str]) -> None:
    join(rank, folder)
    if case == "a process without a place" and rank == 1:
        tempfile.tempdir = str(folder / "nowhere")
    if case == "no room":
        decoded.shutil.disk_usage = lambda place: SimpleNamespace(free=1000)
    with pytest.raises(expected[0], match=expected[1]) as caught:
        load(folder / "small", TENSORS)
    fails_on = {"a base that differs": 0, "no room": 0, "a process without a place": 1}.get(case, rank)
    assert getattr(caught.value, "__notes__", []) == [f"Raised by the process of rank {fails_on}."] * (rank != fails_on)
    del caught
    torch.distributed.barrier()
    assert not [*folder.joinpath("shared").iterdir()]


FAILURES = {
    "a damaged file": (CorruptFileError, "checksum"),
    "a base that differs": (BaseModelError, "lm_head"),
    "no room": (CheckpointError, "decoded to temporary files first. .* do not fit into .*Set TMPDIR"),
    "a process without a place": ((CheckpointError, FileNotFoundError), "nowhere"),
}


@pytest.mark.parametrize("compressed", ["llama"], indirect=True)
@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_of_one_process_is_raised_by_all(compressed, case):
    if case == "a damaged file":
        flip_bit(max(compressed.joinpath("small").glob("*.safetensors")), 0.6)
    if case == "a base that differs":
        weights = load_file(compressed / "base/model.safetensors")
        weights["lm_head.weight"].view(-1)[weights["lm_head.weight"].numel() // 4] += 0.5  # no sample of the fingerprint
        save_file(weights, compressed / "base/model.safetensors", {"format": "pt"})
    assert on_ranks(_raises, compressed, case, FAILURES[case]) == [0, 0]


def _is_killed(rank: int, folder: Path) -> None:
    DeltaCheckpoint.read = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    join(rank, folder)
    load(folder / "small", TENSORS)


def test_a_killed_process_leaves_no_weights_and_stops_the_other(compressed):
    assert on_ranks(_is_killed, compressed) == [-signal.SIGKILL, 1]
    assert not any(path.is_file() for place in temporary(compressed) for path in (place, *place.glob("*")))


def _keeps(rank: int, folder: Path) -> None:
    os.environ[decoded.FOLDER] = str(folder / "kept")
    join(rank, folder)
    for _ in range(2):
        assert same_shards(load(folder / "small", TENSORS), load(folder / "tuned", TENSORS))
        DeltaCheckpoint.read = None  # the second load reads the files that stay


def test_decoded_files_stay_where_the_environment_says(compressed):
    assert on_ranks(_keeps, compressed) == [0, 0]
    assert len([*compressed.joinpath("kept").iterdir()]) == 1


def _merge(rank: int, folder: Path) -> None:
    join(rank, folder)
    auto = AutoModelForSequenceClassification
    model, plain = (load(folder / name, DATA, auto) for name in ("merged", "first"))
    assert same_shards(model, plain) and model.tasks == ["trec", "cr"]
    with pytest.raises(CheckpointError, match="is sharded"):
        model.set_task("cr")


def test_a_merge_loads_its_first_task(tmp_path):
    base, tasks = write_tasks(tmp_path, {"trec": 6, "cr": 2})
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").save_pretrained(tmp_path / "first")
    assert on_ranks(_merge, tmp_path) == [0, 0]


def _zero3(rank: int, folder: Path, settings: dict, dtype: torch.dtype) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    join(rank, folder)
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}} | settings)
    states = []
    for kind in ("small", "tuned"):
        model = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=dtype)
        shards = {name: weight.ds_tensor.clone() for name, weight in model.named_parameters()}
        assert all(weight.numel() == 0 for weight in model.parameters())
        with deepspeed.zero.GatheredParameters([*model.parameters()]):
            states.append((shards, {name: weight.clone() for name, weight in model.state_dict().items()}))
    del config
    for one, other in zip(*states):
        assert one.keys() == other.keys()
        assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("compressed", "settings"), [
    ("llama_tied", {}), ("mixtral", {"bf16": {"enabled": True}}), ("llama_bf16", {}),
], indirect=["compressed"])  # fmt: skip
def test_zero3_partitions_what_it_partitions_of_a_plain_checkpoint(compressed, settings):
    pytest.importorskip("deepspeed")
    assert on_ranks(_zero3, compressed, settings, torch.bfloat16) == [0, 0]
