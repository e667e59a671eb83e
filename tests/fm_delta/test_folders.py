"""Folders with links, pipes, permissions, several sets of weights, and a base that moves with its checkpoint."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from tiny_checkpoints import contents, edit_settings, pair

from hf_ext import CheckpointError, fm_delta


def test_links_to_folders_stay_and_links_to_files_are_copied(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path)
    elsewhere, out, back = tmp_path / "elsewhere", tmp_path / "elsewhere" / "out", tmp_path / "back"
    for folder in (elsewhere, tuned / "inside"):
        folder.mkdir()
        (folder / "notes.txt").write_text(folder.name)
    (tmp_path / "blob").write_text("words")
    (tuned / "vocab.txt").symlink_to("../blob")
    links = {"data": elsewhere, "nowhere": "not/there", "near": "inside", "circle": ".", "inside/up": tuned, "parent": tmp_path}
    for name, place in links.items():
        (tuned / name).symlink_to(place)
    (elsewhere / "again").symlink_to(tuned / "inside")
    fm_delta.compress_checkpoint(tuned, base, out, verify=True)
    fm_delta.decompress_checkpoint(out, back)
    for folder in (out, back):
        assert all((folder / name).is_symlink() for name in links)
        assert (folder / "data").resolve() == elsewhere and (folder / "parent").resolve() == tmp_path
        assert (folder / "circle").resolve() == (folder / "inside/up").resolve() == folder
        assert os.readlink(folder / "near") == "inside" and os.readlink(folder / "nowhere") == "not/there"
        assert not (folder / "vocab.txt").is_symlink() and (folder / "vocab.txt").read_text() == "words"
        assert contents(folder).keys() - {"README.md"} == contents(tuned).keys()


def test_paths_with_two_dots_follow_links_as_the_system_does(tmp_path: Path) -> None:
    """`link/../base` lies beside the folder that the link leads to."""
    (tmp_path / "store").mkdir()
    tuned, base = pair(tmp_path / "store")
    (tuned / "data").symlink_to("../data")
    (tmp_path / "link").symlink_to(tuned)
    fm_delta.compress_checkpoint(tmp_path / "link", tmp_path / "link/../base", tmp_path / "store/small")
    assert (tmp_path / "store/small/data").readlink() == tmp_path / "store/data"
    assert json.loads((tmp_path / "store/small/config.json").read_text())["quantization_config"]["base"] == str(base)
    edit_settings(tmp_path / "store/small", base="../base")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("store/small")
    fm_delta.decompress_checkpoint(tmp_path / "link", tmp_path / "back")
    assert contents(tmp_path / "back")["model.safetensors"] == contents(tuned)["model.safetensors"]
    fm_delta.compress_all([tuned], tmp_path / "link/../all", base, workers=1)
    assert (tmp_path / "store/all/tuned/config.json").exists()


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
def test_pipes_and_sockets_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    tuned, base = pair(tmp_path)
    if kind == "pipe":
        os.mkfifo(tuned / "odd")
    else:
        socket.socket(socket.AF_UNIX).bind(str(tuned / "odd"))
    with pytest.raises(CheckpointError, match=f"odd is a {kind}, which cannot be copied"):
        fm_delta.compress_checkpoint(tuned, base, tmp_path / "out")
    assert (tuned / "model.safetensors").exists() and not (tmp_path / "out").exists()
