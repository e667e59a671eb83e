"""A task's file: what goes in comes out, in whatever order it went in, and what is damaged does not."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ext import CorruptFileError
from hf_ext.emr.modulators import Modulated, TaskFile, TaskRecord, TaskWriter
from hf_ext.storage.safetensors_file import RawTensor

OWN = {
    "head.weight": torch.randn(3, 5),
    "flags": torch.tensor([True, False, True]),
    "steps": torch.tensor(7),
    "half": torch.randn(3).bfloat16(),
    "empty": torch.empty(0, 4),
}
MASKS = {
    "dense": np.random.default_rng(0).integers(0, 256, 1001, np.uint8),
    "rows": np.repeat(np.uint8([0, 255, 0, 255]), 5000),
    "last": np.uint8([128]),
}


def record() -> TaskRecord:
    scales = {"dense": 0.1 + 0.2, "rows": 1.0, "last": 2.5, "none": 0.0}
    modulated = {name: Modulated(scale, "b0", 7 if name == "rows" else None) for name, scale in scales.items()}
    return TaskRecord("cr", "d1", modulated, ["shared.weight"], ["tokenizer.json"], "c0", {"cosine": 0.5})


def write(path, order=1):
    writer = TaskWriter(path)
    for name, mask in list(MASKS.items())[::order]:
        writer.add_mask(name, mask)
    writer.add_mask("none", np.zeros(40, np.uint8))
    for name, tensor in list(OWN.items())[::order]:
        writer.add("own/" + name, RawTensor.from_torch(tensor))
    writer.add("rows/rows", RawTensor.from_torch(torch.ones(2, 8)))
    writer.finish(record())
    return path


def test_modulators_come_back_from_a_file(tmp_path):
    file = TaskFile(write(tmp_path / "cr" / "modulators.safetensors"))
    assert file.record.modulated == record().modulated
    assert (file.record.task, file.record.elected, file.record.files) == ("cr", "d1", ["tokenizer.json"])
    for name, mask in MASKS.items():
        assert (file.mask(name, 8 * mask.size) == mask).all()
        assert (file.mask(name, 8 * mask.size - 7) == mask).all()
    assert file.mask("none", 320) is None
    for name, tensor in OWN.items():
        modulator = file.read("own/" + name)
        modulator = RawTensor(modulator.dtype, modulator.shape, modulator.data.copy()).to_torch()
        assert modulator.dtype == tensor.dtype and torch.equal(modulator, tensor)
    assert file.entries["rows/rows"].shape == (2, 8) and not {"rows/dense", "own/dense"} & file.entries.keys()
    assert file.names() == sorted([*record().modulated, "shared.weight", *OWN])
    assert file.verify() == len(MASKS) + len(OWN) + 1
    assert sorted(path.name for path in (tmp_path / "cr").iterdir()) == ["modulators.safetensors"]


def test_files_do_not_depend_on_the_order_of_writing(tmp_path):
    first, second = write(tmp_path / "first"), write(tmp_path / "second", -1)
    assert first.read_bytes() == second.read_bytes()
    assert torch.equal(load_file(first)["own/head.weight"], OWN["head.weight"])


def test_a_mask_of_another_size_than_its_tensors_is_refused(tmp_path):
    file = TaskFile(write(tmp_path / "file"))
    for values in (8 * 1001 + 1, 8 * 1000, 1):
        with pytest.raises(CorruptFileError, match="does not fit its tensor"):
            file.mask("dense", values)


def test_a_stream_that_grows_without_end_is_not_followed(tmp_path):
    writer = TaskWriter(tmp_path / "bomb")
    bomb = zlib.compress(bytes(200_000_000), 9)
    writer.add("mask/dense", RawTensor("U8", (len(bomb),), np.frombuffer(bomb, np.uint8)))
    writer.add("mask/last", RawTensor("U8", (3,), np.uint8([1, 2, 3])))
    writer.finish(record())
    file = TaskFile(tmp_path / "bomb")
    for name in ("dense", "last"):
        with pytest.raises(CorruptFileError, match="does not fit its tensor"):
            file.mask(name, 64)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "x"}', '{"version": 1}', '{"version": 0}', "null"])
def test_a_header_of_impossible_values_is_refused(tmp_path, text):
    path = write(tmp_path / "file")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["emr_task"] = text
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])
    with pytest.raises(CorruptFileError):
        TaskFile(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"files": [name]} for name in ("../../etc/a.json", "/etc/a.json", "..", "model.safetensors", "config.json", 3)),
        *({"modulated": {"dense": Modulated(scale, "b0")}} for scale in (float("nan"), "1", True)),
        {"modulated": {"dense": Modulated(1.0, "b0", -1)}},
        {"modulated": {"dense": Modulated(1.0, 3)}},
        {"shared": [["a"]]},
        {"elected": None},
    ],
)
def test_a_forged_record_is_refused(tmp_path, change):
    writer = TaskWriter(tmp_path / "file")
    writer.finish(replace(record(), **change))
    with pytest.raises(CorruptFileError, match="contains invalid values"):
        TaskFile(tmp_path / "file")


def test_a_file_of_something_else_is_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "file")
    with pytest.raises(CorruptFileError, match="not the file of a merge's task"):
        TaskFile(tmp_path / "file")
    (tmp_path / "text").write_text("text")
    with pytest.raises(CorruptFileError):
        TaskFile(tmp_path / "text")
