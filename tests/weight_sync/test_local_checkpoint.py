"""A folder's weights follow the steps of a training where they lie."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import bits, files, publish, same, weights

from hf_ext.cli.main import main
from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.fm_delta import compress_checkpoint
from hf_ext.weight_sync import LocalCheckpoint
from hf_ext.weight_sync.places import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model before the training, in two shards."""
    return write(tmp_path / "model", weights(0))


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[:4], names[4:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_folder_has_the_bits_of_each_step(tmp_path: Path, folder: Path):
    publish(tmp_path / "run", range(4))
    checkpoint = LocalCheckpoint(folder, tmp_path / "run")
    headers = {file: file.read_bytes()[:200] for file in folder.glob("*.safetensors")}
    for step in (0, 1, 3, 2):
        checkpoint.update(step)
        assert checkpoint.has(step) and same(read(folder), weights(step))
    for step in (2, 1, 3):  # as other processes
        LocalCheckpoint(folder, tmp_path / "run").update(step)
        assert same(read(folder), weights(step))
    assert {file: file.read_bytes()[:200] for file in headers} == headers


SHARD = "model-00001-of-00002.safetensors"


def replace_file(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Does what rsync and `hf download` do."""
    save_file(tensors or {name: -tensor for name, tensor in load_file(folder / SHARD).items()}, folder / "new")
    os.replace(folder / "new", folder / SHARD)


def change_in_place(folder: Path) -> None:
    with open(folder / SHARD, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\7" * 8)
    os.utime(folder / SHARD, (0, 0))  # the clock of the file system may not have moved on


def replace_folder(folder: Path) -> None:
    folder.rename(folder.with_name("old"))
    shutil.copytree(folder.with_name("old"), folder)
    replace_file(folder)


def replace_by_link(folder: Path) -> None:
    (folder / SHARD).rename(folder / "elsewhere")
    (folder / SHARD).symlink_to(folder / "elsewhere")


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("harm", [replace_file, change_in_place, replace_folder])
def test_weights_that_others_changed_are_replaced(tmp_path: Path, folder: Path, harm, step: int):
    publish(tmp_path / "run", range(3))
    checkpoint = LocalCheckpoint(folder, tmp_path / "run")
    checkpoint.update(1)
    harm(folder)
    assert not checkpoint.has(1)
    checkpoint.update(step)
    assert checkpoint.has(step) and same(read(folder), weights(step))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: os.truncate(folder / SHARD, 999), "is not a readable safetensors file"),
        (lambda folder: (folder / SHARD).unlink(), "cannot be read: No such file"),
        (lambda folder: shutil.rmtree(folder), "could not be listed"),
        (
            lambda folder: replace_file(folder, {"double": torch.zeros(2)}),
            "is not among the tensors given|do not fit|is missing",
        ),
        (replace_by_link, "is a link"),
        (lambda folder: os.link(folder / SHARD, folder / "snapshot"), "is a link"),
    ],
)
def test_a_folder_that_no_longer_fits_is_refused_and_claims_no_step(tmp_path: Path, folder: Path, harm, reason: str, step: int):
    publish(tmp_path / "run", range(3))
    checkpoint = LocalCheckpoint(folder, tmp_path / "run")
    checkpoint.update(1)
    harm(folder)
    before = read(folder) if reason == "is a link" else None
    with pytest.raises((CheckpointError, CorruptFileError), match=reason):
        checkpoint.update(step)
    assert not checkpoint.has(step) and not (folder / "step.json").exists()
    assert before is None or same(read(folder), before)


def test_a_file_that_is_replaced_during_an_update_is_noticed(tmp_path: Path, folder: Path):
    class Racing(Folder):
        def get(self, name: str):
            if name.startswith("step-00000001"):
                replace_file(folder)
            return super().get(name)

    publish(tmp_path / "run", range(2))
    checkpoint = LocalCheckpoint(folder, Racing(tmp_path / "run"))
    checkpoint.update(0)
    with pytest.raises(CheckpointError, match="were replaced during the update to step 1"):
        checkpoint.update(1)
    assert not checkpoint.has(1)
    LocalCheckpoint(folder, tmp_path / "run").update(1)
    assert same(read(folder), weights(1))


def test_two_checkpoints_at_one_folder_do_not_trust_each_other(tmp_path: Path, folder: Path):
    publish(tmp_path / "run", range(4))
    publish(tmp_path / "other", range(2), run="other")
    one, two, other = (LocalCheckpoint(folder, tmp_path / place) for place in ("run", "run", "other"))
    for checkpoint, step in ((one, 1), (two, 2), (one, 1), (one, 3), (two, 3), (other, 1), (two, 3), (one, 3)):
        checkpoint.update(step)
        assert checkpoint.has(step) and same(read(folder), weights(step))
    assert two.has(3) and not other.has(3)


def test_threads_that_update_one_folder_wait_for_each_other(tmp_path: Path, folder: Path):
    publish(tmp_path / "run", range(2))
    checkpoint = LocalCheckpoint(folder, tmp_path / "run")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(checkpoint.update, [1] * 4))
    assert same(read(folder), weights(1))


def test_a_step_that_cannot_be_read_changes_nothing(tmp_path: Path, folder: Path):
    publish(tmp_path / "run", range(3), anchor_every=10)
    checkpoint = LocalCheckpoint(folder, tmp_path / "run")
    checkpoint.update(1)
    step = tmp_path / "run" / files(tmp_path / "run", "step")[-1]
    step.write_bytes(step.read_bytes()[:-3])
    with pytest.raises(CorruptFileError, match="No other files"):
        checkpoint.update(2)
    assert checkpoint.has(1) and same(read(folder), weights(1))
    for later in (checkpoint, LocalCheckpoint(folder, tmp_path / "run")):  # a new process, too
        with pytest.raises(CheckpointError, match="Step 9 is not"):
            later.update(9)
        assert later.has(1) and same(read(folder), weights(1))


def test_a_quantized_folder_follows_quantized_steps(tmp_path: Path):
    def fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"layer.weight": tensors["layer.weight"].to(torch.float8_e4m3fn)}

    folder = write(tmp_path / "model", fp8(weights(0)))
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    publish(tmp_path / "run", range(3), transform=fp8)
    checkpoint = LocalCheckpoint(folder, tmp_path / "run")
    for step in (1, 2):
        checkpoint.update(step)
        assert same(read(folder), fp8(weights(step)))


def test_an_interrupted_update_leaves_no_record_and_is_repeated(tmp_path: Path, folder: Path, monkeypatch):
    publish(tmp_path / "run", range(2))
    checkpoint = LocalCheckpoint(folder, tmp_path / "run")
    checkpoint.update(0)
    with monkeypatch.context() as patch:

        def stop(*args: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("hf_ext.weight_sync.memory.Home.copy", stop)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.update(1)
    assert not checkpoint.has(0) and not checkpoint.has(1)
    checkpoint.update(1)
    assert same(read(folder), weights(1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("scale"), "'scale', which .* publishes, is not among the tensors given"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "Nothing is published at .* for the tensor 'more'"),
        (lambda tensors: tensors.update(frozen=torch.zeros(9, 8)), "'frozen', which is published as"),
        (lambda tensors: tensors.update(frozen=torch.zeros(8, 8).half()), "'frozen', which is published as"),
    ],
)
def test_the_folder_of_another_model_is_refused_unchanged(tmp_path: Path, change, reason: str):
    publish(tmp_path / "run", range(1))
    tensors = weights(0)
    change(tensors)
    folder = write(tmp_path / "model", tensors)
    with pytest.raises(CheckpointError, match=reason):
        LocalCheckpoint(folder, tmp_path / "run").update(0)
    assert {name: bits(tensor) for name, tensor in read(folder).items()} == {name: bits(t) for name, t in tensors.items()}


def test_folders_that_must_not_change_are_refused(tmp_path: Path, folder: Path):
    publish(tmp_path / "run", range(1))
    links = tmp_path / "links"
    links.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="is a link"):
        LocalCheckpoint(links, tmp_path / "run")
    shutil.copytree(folder, tmp_path / "hard", copy_function=os.link)
    with pytest.raises(CheckpointError, match="is a link"):
        LocalCheckpoint(folder, tmp_path / "run")
    with pytest.raises(CheckpointError, match="no safetensors|could not be listed"):
        LocalCheckpoint(tmp_path / "nowhere", tmp_path / "run")
    compress_checkpoint(folder, None, tmp_path / "small")
    with pytest.raises(CheckpointError, match="is compressed"):
        LocalCheckpoint(tmp_path / "small", tmp_path / "run")


def test_the_command_follows_without_a_server(tmp_path: Path, folder: Path, capsys):
    publish(tmp_path / "run", range(3))
    command = ["follow", str(tmp_path / "run"), "--checkpoint", str(folder), "--stop-at-step", "2", "--poll-interval", "0.01"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{folder} is at step 2.\n"
    assert same(read(folder), weights(2))
    assert main(["follow", str(tmp_path / "run")]) == 2
    assert "--checkpoint" in capsys.readouterr().err
    assert main([*command, "--requests", "keep"]) == 2
