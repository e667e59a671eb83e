"""What people's folders look like: weights twice over, links, other names, a base that moves along."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import fine_tune, pair, weights, write_folder
from tiny_models import bert, fine_tuned
from transformers import AutoModel

from hf_ext import CheckpointError, fm_delta


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_may_hold_the_model_whole_and_in_shards(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path)
    write_folder(tuned, fine_tune(weights(), seed=2), shards=3)
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "out")
    fm_delta.decompress_checkpoint(tmp_path / "out", tmp_path / "back")
    assert files(tmp_path / "back") == files(tuned)


def test_shards_may_have_names_that_only_the_index_knows(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, shards=2)
    index = tuned / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-0000", "weights-0000"))
    for path in tuned.glob("model-0000*"):
        path.rename(tuned / path.name.replace("model-", "weights-"))
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "out")
    assert fm_delta.verify(tmp_path / "out") == len(weights())
    fm_delta.decompress_checkpoint(tmp_path / "out", tmp_path / "back")
    assert files(tmp_path / "back") == files(tuned)


def test_links_to_folders_stay_and_links_to_files_are_copied(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("not part of the model")
    (tmp_path / "blob").write_text("words")
    (tuned / "inside").mkdir()
    for name, place in {
        "data": "../elsewhere",
        "near": "inside",
        "circle": ".",
        "nowhere": "not/there",
        "vocab.txt": "../blob",
    }.items():
        (tuned / name).symlink_to(place)
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "elsewhere" / "out", verify=True)
    out = tmp_path / "elsewhere" / "out"
    assert {name: os.readlink(out / name) for name in ("data", "near", "circle", "nowhere")} == {
        "data": str(tmp_path / "elsewhere"),
        "near": "inside",
        "circle": ".",
        "nowhere": "not/there",
    }
    assert (out / "inside").is_dir() and not (out / "vocab.txt").is_symlink() and (out / "vocab.txt").read_text() == "words"


def test_permissions_stay(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, shards=2)
    (tuned / "private").mkdir(mode=0o700)
    for path in tuned.iterdir():
        path.chmod(0o600 if path.is_file() else 0o700)
    (tuned / "model-00002-of-00002.safetensors").chmod(0o640)
    expected = {path.name: path.stat().st_mode for path in tuned.iterdir()}
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "small")
    fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")
    for folder in ("small", "back"):
        assert {name: (tmp_path / folder / name).stat().st_mode for name in expected} == expected


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    tuned, base = pair(tmp_path)
    if kind == "pipe":
        os.mkfifo(tuned / "odd")
    else:
        socket.socket(socket.AF_UNIX).bind(str(tuned / "odd"))
    with pytest.raises(CheckpointError, match=f"odd is a {kind}, which cannot be copied"):
        fm_delta.compress_checkpoint(tuned, base, tmp_path / "out", delete_source=True)
    assert (tuned / "model.safetensors").exists() and not (tmp_path / "out").exists()


def test_a_checkpoint_and_its_relative_base_can_move(tmp_path: Path) -> None:
    fine_tuned(bert(), tmp_path / "models")
    tuned, base = tmp_path / "models" / "tuned", tmp_path / "models" / "base"
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "models" / "small")
    config = tmp_path / "models" / "small" / "config.json"
    settings = json.loads(config.read_text())
    settings["quantization_config"]["base"] = "../base"
    config.write_text(json.dumps(settings))
    expected = AutoModel.from_pretrained(tuned).state_dict()
    shutil.move(tmp_path / "models", tmp_path / "moved")
    fm_delta.verify(tmp_path / "moved" / "small")
    loaded = AutoModel.from_pretrained(tmp_path / "moved" / "small").state_dict()
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)
