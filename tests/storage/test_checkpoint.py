"""Checkpoints are read lazily, identified by content, and located."""

import os
import shutil

import pytest
import torch
from processes import python
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SAFETENSORS_DTYPES, weights, write_folder, write_safetensors

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.plain_writer import shards_of, write_files
from hf_ext.storage.safetensors_file import ComputedFile, RawTensor, SafetensorsFile, safetensors_dtype

# ---- files -----------------------------------------------------------------------------------------------------------


def test_tensors_equal_those_of_the_safetensors_library(tmp_path):
    tensors = {f"{name}.weight": torch.arange(24).to(dtype).reshape(2, 3, 4) for dtype, name in SAFETENSORS_DTYPES.items()}
    tensors |= {"scalar": torch.tensor(-0.0), "empty": torch.empty(0, 5)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert file.metadata == {"format": "pt"}
    assert set(file.entries) == set(tensors)
    for name, tensor in tensors.items():
        raw = file[name]
        assert (raw.dtype, raw.shape) == (safetensors_dtype(tensor.dtype), tuple(tensor.shape))
        assert raw.data.tobytes() == RawTensor.from_torch(tensor).data.tobytes()


@pytest.mark.parametrize("content", [b"", b"\x08", b"PK\x03\x04 a zip file", b"\xff" * 100, (2).to_bytes(8, "little") + b"[]"])
def test_an_unreadable_file_is_named(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="model.safetensors is not a readable safetensors file"):
        SafetensorsFile(path)
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CorruptFileError, match=path.name):
            SafetensorsFile(path)


def test_a_tensor_with_lazy_conjugation_gives_the_bytes_it_shows():
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert RawTensor.from_torch(values.conj()).data.tobytes() == values.conj().resolve_conj().numpy().tobytes()
    assert RawTensor.from_torch(values.conj().imag).data.tobytes() == torch.tensor([-2.0, 4.0]).numpy().tobytes()


def test_types_without_a_counterpart_are_refused_by_name():
    with pytest.raises(CheckpointError, match="complex128"):
        RawTensor.from_torch(torch.zeros(2, dtype=torch.complex128))
    for dtype, shape, size in (("F6_E2M3", (4,), 3), ("F4", (2, 3), 3), ("F2", (4,), 1)):
        with pytest.raises(CheckpointError, match=dtype):
            RawTensor(dtype, shape, RawTensor.from_torch(torch.zeros(size, dtype=torch.uint8)).data).to_torch()
    with pytest.raises(CheckpointError, match="F2"):
        ComputedFile("model.safetensors", {"a": ("F2", (4,))}, dict().__getitem__, {})


def test_types_that_share_bytes_are_written_and_read_as_safetensors_does(tmp_path):
    pairs = torch.arange(64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(4, 16)
    tensors = {"packed": pairs, "scales": torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu), "a": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert file.entries["packed"][:2] == ("F4", (4, 32))
    for name, tensor in tensors.items():
        read = file[name].to_torch()
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    shapes = {name: entry[:2] for name, entry in file.entries.items()}
    (tmp_path / "out").mkdir()
    write_files(shards_of(shapes, file.__getitem__, tmp_path / "out", "1GB"), tmp_path / "out", "Writing")
    again = load_file(tmp_path / "out/model.safetensors")
    assert {name: tensor.view(torch.uint8).tolist() for name, tensor in tensors.items()} == {
        name: again[name].view(torch.uint8).tolist() for name in again
    }


# ---- which files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "\x00\x01"])
def test_a_broken_index_is_named(tmp_path, index):
    write_folder(tmp_path, weights(), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BaseModelError, match="model.safetensors.index.json is not an index"):
        Checkpoint(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    write_safetensors(tmp_path / "secret.safetensors", weights())
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(BaseModelError, match="model/secret.safetensors"):
        Checkpoint(tmp_path / "model")


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none", "file"])
def test_a_path_is_not_searched_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BaseModelError, match=f"there is no folder '{name}'"):
        Checkpoint(name)


@pytest.mark.parametrize("name", ["no/such/folder/here", "", "a b", "n" * 300])
def test_an_unknown_name_is_repeated_in_the_error(name):
    with pytest.raises(BaseModelError, match=f"'{name}' is neither a folder nor a Hub repository"):
        Checkpoint(name)


# ---- fingerprints and names ------------------------------------------------------------------------------------------


def test_the_fingerprint_does_not_depend_on_shards_or_order(tmp_path):
    tensors = weights()
    backwards = dict(reversed(tensors.items()))
    first = Checkpoint(write_folder(tmp_path / "one", tensors)).fingerprint
    assert Checkpoint(write_folder(tmp_path / "shards", tensors, shards=3)).fingerprint == first
    assert Checkpoint(write_folder(tmp_path / "backwards", backwards, shards=2)).fingerprint == first
    write_safetensors(tmp_path / "padded/model.safetensors", backwards, {"other": "metadata"}, padding=" " * 13, indent=1)
    assert Checkpoint(tmp_path / "padded").fingerprint == first


def test_the_fingerprint_covers_names_types_shapes_values(tmp_path):
    tensors = {"a.weight": torch.zeros(4, 6), "a.bias": torch.zeros(6), "large": torch.zeros(100, 100)}
    start, middle, end = (tensors["large"].clone() for _ in range(3))
    start[0, 0] = middle[50, 3] = end[99, 99] = 1e-30
    versions = [
        tensors,
        {"b.weight" if name == "a.weight" else name: tensor for name, tensor in tensors.items()},
        tensors | {"a.weight": tensors["a.weight"].half()},
        tensors | {"a.weight": tensors["a.weight"].int()},
        tensors | {"a.weight": tensors["a.weight"].reshape(6, 4)},
        tensors | {"a.weight": tensors["a.bias"], "a.bias": tensors["a.weight"]},
        tensors | {"a.bias": -tensors["a.bias"]},
        tensors | {"extra": torch.zeros(0)},
        {name: tensor for name, tensor in tensors.items() if name != "a.bias"},
        *(tensors | {"large": version} for version in (start, middle, end)),
    ]
    prints = [Checkpoint(write_folder(tmp_path / str(i), version)).fingerprint for i, version in enumerate(versions)]
    assert len(set(prints)) == len(versions)


def test_a_folder_with_several_models_is_refused(tmp_path):
    folder = write_folder(tmp_path / "folder", weights())
    (folder / "model.safetensors").rename(folder / "model.ema.safetensors")
    assert set(Checkpoint(folder).names()) == weights().keys()
    shutil.copy(folder / "model.ema.safetensors", folder / "model.non_ema.safetensors")
    with pytest.raises(BaseModelError, match=r"holds several models: model\.ema, model\.non_ema"):
        Checkpoint(folder)


def test_without_a_connection_a_name_fails_at_once_and_both_readings_are_told(tmp_path):
    code = """
from hf_ext.storage.hub import downloaded
from hf_ext.storage.stored import open_checkpoint
for name in ("my-bert", "me/my-bert"):
    for read in (downloaded, lambda name: open_checkpoint(name, "v2")):
        try:
            read(name)
        except ValueError as error:
            text = str(error)
            assert read is downloaded or "revision v2" in text or "OFFLINE" not in text
            assert repr(name) in text and "folder" in text and ("OFFLINE" in text or "ConnectError" in text or "[Errno" in text)
            print("refused")
"""
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://host.invalid", "HF_HOME": str(tmp_path)}
    for change in (online, {"HF_HUB_OFFLINE": "1"}):
        result = python("-c", code, env=os.environ | change, timeout=20, hosts=False)  # downloads alone would try for 25 s
        assert result.stdout.split() == ["refused"] * 4, result.stderr
