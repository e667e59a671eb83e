"""What people's folders look like: weights twice over, links, other names, a base that moves along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tiny_checkpoints import fine_tune, pair, weights, write_folder
from tiny_models import bert, fine_tuned
from transformers import AutoModel

from hf_ext import fm_delta


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


def test_linked_folders_are_copied_and_circles_end(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "pooling.json").write_text("{}")
    (tuned / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    (tuned / "circle").symlink_to(tuned)
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "out")
    assert (tmp_path / "out" / "1_Pooling" / "pooling.json").read_text() == "{}"
    assert not (tmp_path / "out" / "circle").exists()


def test_a_relative_base_is_found_from_the_checkpoint_so_that_both_can_move(tmp_path: Path) -> None:
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
