"""Steps in SGLang's layout: as its readers expect them, and read with every tensor checked before any changes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from kills import killed_at
from safetensors.torch import load_file, save_file
from tiny_runs import bits, same, weights

from hf_ext import CheckpointError
from hf_ext.errors import CorruptFileError, HfExtError, MissingDependencyError
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.weight_sync import LocalCheckpoint, Publisher, rows, sglang_layout
from hf_ext.weight_sync.sglang_layout import open_reader

zstandard = pytest.importorskip("zstandard")

INDEX = "model.safetensors.index.json"
FILE = "model-00000-of-00001.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "pytorch_model.bin").write_text("other weights")
    save_file(weights(0), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "place"


def publish(place: Path, base: Path, numbers: range, **options: object) -> None:
    """Publishes the weights of some numbers as the steps 0, 10, 20, …"""
    with Publisher(place, layout="sglang", base=base, **options) as run:
        for number in numbers:
            run.publish(weights(number), 10 * number)


def local(base: Path, place: Path) -> LocalCheckpoint:
    folder = base.with_name("local")
    if not folder.exists():
        shutil.copytree(base, folder)
    return LocalCheckpoint(folder, place)


def has(checkpoint: LocalCheckpoint, number: int) -> bool:
    return same(load_file(checkpoint.folder / "model.safetensors"), weights(number))


@pytest.mark.parametrize("anchor_every", [50, 3])
@pytest.mark.parametrize("part", [rows.PART, 1000])
def test_a_checkpoint_follows_forward_and_back(base: Path, place: Path, monkeypatch, anchor_every: int, part: int):
    monkeypatch.setattr(rows, "PART", part)
    publish(place, base, range(8), anchor_every=anchor_every, keep_anchors=1)
    steps = open_reader(place).steps()
    assert steps == [50, 60, 70] if anchor_every == 3 else steps == [*range(0, 80, 10)]
    checkpoint = local(base, place)
    for step in (steps[-1], steps[0], steps[-2], steps[0], steps[-1]):
        checkpoint.update(step)
        assert checkpoint.has(step) and has(checkpoint, step // 10)
        again = local(base, place)  # after a restart, which does not know the step
        again.update(step)
        assert has(again, step // 10)
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


def test_files_are_those_of_the_layout(base: Path, place: Path):
    publish(place, base, range(3), anchor_every=4)
    assert sorted(os.listdir(place)) == ["weight_v000001", "weight_v000002", "weight_v000003"]
    for number, after in ((1, weights(0)), (2, weights(1)), (3, weights(2))):
        before, folder = weights(max(number - 2, 0)), place / f"weight_v{number:06d}"
        changed = [name for name in after if bits(after[name]) != bits(before[name])]
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"] == {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
            "hf_ext_step": str(10 * (number - 1)),
        }
        assert index["weight_map"] == dict.fromkeys(changed, FILE) and ("frozen" not in changed)
        assert sorted(os.listdir(folder)) == ([FILE] if changed else []) + [INDEX]
        if not changed:
            continue
        data = (folder / FILE).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        checksums = header.pop("__metadata__")
        assert sorted(header) == sorted(checksums) == sorted(changed)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            assert entry["dtype"] == "U8" and entry["shape"] == [end - begin]
            frame = data[8 + length + begin : 8 + length + end]
            new, old = (RawTensor.from_torch(tensors[name]).data for tensors in (after, before))
            assert zstandard.frame_content_size(frame) == new.size
            assert zstandard.ZstdDecompressor().decompress(frame) == (new ^ old).tobytes()
            assert checksums[name] == xxhash.xxh3_128_hexdigest(new)


def test_an_anchor_is_a_model_that_loads(base: Path, place: Path):
    publish(place, base, range(3), anchor_every=3)
    folder = place / "weight_v000003"
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", INDEX]
    assert same(load_file(folder / "model.safetensors"), weights(2))
    index = json.loads((folder / INDEX).read_text())
    assert index == {"metadata": {"hf_ext_step": "20"}, "weight_map": dict.fromkeys(weights(0), "model.safetensors")}


def test_a_version_of_another_writer_is_read(tmp_path: Path):
    """Written byte by byte as slime does: two tensors, of which one changes in its first and last byte."""
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.arange(8, dtype=torch.uint8), "b": torch.zeros(3)}, model / "model.safetensors")
    folder = tmp_path / "place/weight_v000001"
    folder.mkdir(parents=True)
    frame = bytes.fromhex("28b52ffd2008410000ff00000000000001")  # of ff 00 00 00 00 00 00 01, stored
    header = b'{"a":{"dtype":"U8","shape":[17],"data_offsets":[0,17]},"__metadata__":{"a":"%s"}}'
    header %= xxhash.xxh3_128_hexdigest(bytes([255, 1, 2, 3, 4, 5, 6, 6])).encode()
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + frame)
    metadata = {"version": "000001", "base_version": "000000"} | sglang_layout.FORMATS
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": {"a": FILE}}))
    LocalCheckpoint(model, tmp_path / "place").update(1)
    assert load_file(model / "model.safetensors")["a"].tolist() == [255, 1, 2, 3, 4, 5, 6, 6]


def test_sglangs_own_reader_reads_it(base: Path, place: Path, tmp_path: Path, request: pytest.FixtureRequest):
    path = request.config.getoption("--sglang-reader")
    if path is None:
        pytest.skip("give --sglang-reader FILE, SGLang's local_checkpoint.py")
    spec = importlib.util.spec_from_file_location("sglang_reader", path)
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    publish(place, base, range(8), anchor_every=5)
    for folder, versions in (("each", range(1, 9)), ("late", (4, 8))):
        for version in versions:
            reader.pull(str(tmp_path / folder), str(base), str(place), version)
            assert same(load_file(tmp_path / folder / "model.safetensors"), weights(version - 1))


def change_index(folder: Path, key: str, value: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    (index if key in index else index["metadata"])[key] = value
    (folder / INDEX).write_text(json.dumps(index))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def swap_checksum(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    digest = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["table"].encode()
    (folder / FILE).write_bytes(content.replace(digest, 32 * b"0"))


DAMAGES = {
    "no index": (lambda folder: (folder / INDEX).unlink(), "Step 10 is not, or no longer, at"),
    "no payload": (lambda folder: (folder / FILE).unlink(), "is not a readable safetensors file"),
    "cut payload": (lambda folder: os.truncate(folder / FILE, 500), "is not a readable safetensors file"),
    "a bit of a frame": (lambda folder: flip(folder / FILE, -3), "does not get the checksum of version 2"),
    "a checksum": (swap_checksum, "'table' does not get the checksum of version 2"),
    "half an index": (lambda folder: os.truncate(folder / INDEX, 50), "index.json is damaged"),
    "a list": (lambda folder: (folder / INDEX).write_text("[]"), "index.json is damaged"),
    "another number": (lambda folder: change_index(folder, "version", "000009"), "not those of version 2"),
    "another base": (lambda folder: change_index(folder, "base_version", "000000"), "not those of version 2"),
    "another compression": (lambda folder: change_index(folder, "compression_format", "lz4"), "only {.*zstd.*} can be read"),
    "another encoding": (lambda folder: change_index(folder, "delta_encoding", "overwrite"), "only {.*xor.*} can be read"),
    "a path": (lambda folder: change_index(folder, "weight_map", {"x": "../evil.safetensors"}), "not those of version 2"),
    "a missing tensor": (lambda folder: change_index(folder, "weight_map", {"special": FILE}), "that model.*index.json lists"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_changes_nothing(base: Path, place: Path, damage: str):
    publish(place, base, range(1))
    checkpoint = local(base, place)
    checkpoint.update(0)
    publish(place, base, range(1, 2), resume=True)
    change, message = DAMAGES[damage]
    change(place / "weight_v000002")
    for follower in (checkpoint, local(base, place)):
        with pytest.raises(HfExtError, match=message):
            follower.update(10)
        assert has(checkpoint, 0) and checkpoint.has(0)


def test_a_gap_and_a_tensor_of_another_model_change_nothing(base: Path, place: Path, tmp_path: Path):
    publish(place, base, range(3))
    checkpoint = local(base, place)
    (place / "weight_v000002").rename(place / "away")
    with pytest.raises(CorruptFileError, match="weight_v000002 is missing"):
        checkpoint.update(20)
    (place / "away").rename(place / "weight_v000002")
    tensors = weights(0)
    del tensors["table"]
    save_file(tensors, checkpoint.folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="'table', which .* publishes, is not among"):
        checkpoint.update(20)
    save_file(weights(0) | {"table": weights(0)["table"] + 1}, checkpoint.folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match="the training did not begin with this model"):
        checkpoint.update(20)
    assert torch.equal(load_file(checkpoint.folder / "model.safetensors")["double"], weights(0)["double"])


@pytest.mark.parametrize("anchor_every", [50, 2])
@pytest.mark.parametrize(("calls", "is_torn"), [(0, False), (2, False), (2, True)])
def test_a_killed_update_is_completed(base: Path, place: Path, anchor_every: int, calls: int, is_torn: bool):
    """Whole tensors of two steps are told apart. A torn one needs a version with all weights. With `calls` 0, the step is
    read and checked, and nothing has changed."""
    publish(place, base, range(3), anchor_every=anchor_every)
    checkpoint = local(base, place)
    checkpoint.update(10)
    assert killed_at(calls, sglang_layout, "_change", lambda: checkpoint.update(20), is_torn)
    assert not checkpoint.has(10) and not checkpoint.has(20)
    assert calls or has(checkpoint, 1)
    fresh = local(base, place)
    if is_torn and anchor_every == 50:
        with pytest.raises(CorruptFileError, match="Give a copy of the model's folder"):
            fresh.update(20)
        shutil.rmtree(fresh.folder)
        fresh = local(base, place)
    fresh.update(20)
    assert has(fresh, 2)


@pytest.mark.parametrize("calls", range(5))
def test_a_killed_publisher_leaves_whole_versions(base: Path, place: Path, calls: int):
    assert killed_at(calls, os, "rename", lambda: publish(place, base, range(5), anchor_every=2, keep_anchors=1))
    checkpoint = local(base, place)
    for step in open_reader(place).steps()[-1:]:
        checkpoint.update(step)
        assert has(checkpoint, step // 10)
    publish(place, base, range(5, 8), anchor_every=2, keep_anchors=1, resume=True)
    checkpoint.update(70)
    assert has(checkpoint, 7)


def test_a_resumed_training_replaces_steps_that_it_repeats(base: Path, place: Path):
    publish(place, base, range(4))
    with Publisher(place, layout="sglang", base=base, resume=True) as run:
        assert run.next_step == 31
        run.publish(weights(7), 20)
    assert open_reader(place).steps() == [0, 10, 20]
    checkpoint = local(base, place)
    checkpoint.update(20)
    assert has(checkpoint, 7)


def test_publishers_that_cannot_write_it_say_so(base: Path, place: Path, tmp_path: Path, monkeypatch):
    with pytest.raises(ValueError, match="with base, the folder of the model"):
        Publisher(place, layout="sglang")
    with pytest.raises(ValueError, match="requires whole tensors"):
        Publisher(place, layout="sglang", base=base, run="x", world_size=2)
    with pytest.raises(CheckpointError, match="requires a folder as place"):
        Publisher("hf://user/run", layout="sglang", base=base)
    with pytest.raises(CheckpointError, match="nowhere"):
        Publisher(place, layout="sglang", base=tmp_path / "nowhere")
    first, second = (Publisher(place, layout="sglang", base=base) for _ in range(2))
    first.publish(weights(1), 0)
    first.close()
    second.publish(weights(2), 0)
    with pytest.raises(CheckpointError, match="Another publisher writes to"):
        second.close()
    with pytest.raises(CheckpointError, match="holds the versions of another training"):
        Publisher(place, layout="sglang", base=base)
    with (
        Publisher(place, layout="sglang", base=base, resume=True) as run,
        pytest.raises(CheckpointError, match="'frozen' is new"),
    ):
        run.publish({"frozen": weights(0)["frozen"].half()}, 1)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    sglang_layout._zstandard.cache_clear()
    with pytest.raises(MissingDependencyError, match="pip install zstandard"):
        Publisher(tmp_path / "other", layout="sglang", base=base)


def test_deltas_are_kept_until_there_are_enough_anchors(base: Path, place: Path):
    """Also those before a resumed training whose anchors lie closer."""
    publish(place, base, range(5), anchor_every=50)
    publish(place, base, range(5, 7), anchor_every=2, keep_anchors=2, resume=True)
    assert open_reader(place).steps() == [*range(0, 70, 10)]
    publish(place, base, range(7, 8), anchor_every=2, keep_anchors=2, resume=True)
    assert open_reader(place).steps() == [50, 60, 70]
