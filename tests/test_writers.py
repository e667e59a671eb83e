"""No writer replaces what it did not write itself, unless told. Each one updates its own result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kills import without_exchange
from peft import LoraConfig
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder, write_safetensors
from tiny_merges import plain, write_tasks
from tiny_models import fine_tuned, llama
from tiny_transfers import judge, teacher
from typer.main import get_command

from hf_ext import CheckpointError, TransLoraConfig, emr, fm_delta
from hf_ext.cli.command import app
from hf_ext.cli.main import main
from hf_ext.storage.layout import OURS
from hf_ext.trans_lora import transfer

WRITERS = ("compress", "decompress", "merge", "add-task", "remove-task", "extract", "extract-lora")
STRANGERS = {
    "weights": lambda out: write_folder(out, weights(seed=5)),
    "shards": lambda out: write_folder(out, weights(seed=5), shards=2),
    "adapter": lambda out: write_safetensors(out / "adapter_model.safetensors", weights(seed=5)),
    "PyTorch weights": lambda out: (out / "pytorch_model.bin").write_bytes(b"mine"),
    "notes": lambda out: (out / "notes.txt").write_text("mine"),
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, tuple[Callable[..., object], Callable[..., object]]]:
    """Each writer as a function of `out` and further options, and the same writer with another source."""
    place = tmp_path_factory.mktemp("sources")
    base, tasks = write_tasks(place, {"trec": 6, "cr": 2})
    fine_tuned(llama(), place / "llama")
    small, merged = {task: place / f"small-{task}" for task in tasks}, {task: place / f"merged-{task}" for task in tasks}
    for task, folder in tasks.items():
        fm_delta.compress_checkpoint(folder, base, small[task])
        emr.merge(base, {task: folder}, merged[task])

    emr.merge(base, tasks, two := place / "two", method="switch", bits=4)

    def both(write: Callable[..., object], *sources: tuple) -> tuple[Callable[..., object], ...]:
        return tuple(lambda out, source=source, **more: write(*source, out, **more) for source in sources)

    names = ("cr", "trec")
    lora = (place / "llama/tuned", place / "llama/base"), (tasks["cr"], base)
    return {
        "compress": both(fm_delta.compress_checkpoint, *((tasks[name], base) for name in names)),
        "decompress": both(fm_delta.decompress_checkpoint, *((small[name],) for name in names)),
        "merge": both(emr.merge, *((base, {name: tasks[name]}) for name in names)),
        "add-task": both(emr.add_task, *((merged["cr"], name, tasks["cr"]) for name in ("more", "again"))),
        "remove-task": both(emr.remove_task, (two, "cr"), (two, "trec")),
        "extract": both(emr.extract, *((merged[name], name) for name in names)),
        "extract-lora": both(lambda *source, **more: fm_delta.extract_lora(*source, rank=2, **more), *lora),
    }


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_with_something_else_is_left_unless_told(calls, tmp_path, writer, stranger):
    write, out = calls[writer][0], tmp_path / "out"
    out.mkdir()
    STRANGERS[stranger](out)
    before = contents(out)
    with pytest.raises(CheckpointError, match="out holds something else: .* overwrite=True"):
        write(out)
    assert contents(out) == before and [path.name for path in tmp_path.iterdir()] == ["out"]
    write(out, overwrite=True)
    assert contents(out) != before
    assert all(before.get(name) == contents(out).get(name) for name in ("pytorch_model.bin", "notes.txt"))


@pytest.mark.parametrize(
    "writer, file", [("compress", "README.md"), ("decompress", "README.md"), ("decompress", "config.json")]
)
def test_what_users_edit_in_a_result_stays(tmp_path, writer, file):
    src, base = pair(tmp_path)
    (src / "README.md").write_text("of the model")
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "out")
    out = tmp_path / ("small" if writer == "compress" else "out")
    (out / file).write_text('{"by": "me"}')
    before = contents(out)

    def write(**more: bool) -> None:
        if writer == "compress":
            fm_delta.compress_checkpoint(src, base, out, **more)
        else:
            fm_delta.decompress_checkpoint(tmp_path / "small", out, **more)

    with pytest.raises(CheckpointError, match=f"holds something else: {file}"):
        write()
    assert contents(out) == before
    write(overwrite=True)
    assert contents(out) != before


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("start", ["new", "exchanged", "moved"])
def test_files_are_on_the_disk_before_they_have_their_names(calls, tmp_path, monkeypatch, writer, start):
    (write, other), out = calls[writer], tmp_path / "out"
    if start != "new":
        other(out)
    if start == "moved":
        without_exchange(monkeypatch)
    before, flushed = {*entries(out)}, list[tuple[int, bool]]()

    def flush(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_ino, {*entries(out)} != before))
        fsync(descriptor)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", flush)
    write(out, overwrite=start != "new")
    new = {*entries(out)} - before
    assert new and {(inode, False) for inode, _ in new} <= {*flushed}
    assert ((out if start == "moved" else tmp_path).stat().st_ino, True) in flushed


def entries(folder: Path) -> list[tuple[int, str]]:
    """The inode and the path of every file below a folder."""
    return [(path.stat().st_ino, str(path)) for path in folder.rglob("*") if path.is_file() and OURS not in str(path)]


@pytest.mark.parametrize("writer", WRITERS)
def test_its_own_result_is_updated(calls, tmp_path, writer):
    """What holds plain weights afterwards tells them from others only by their bytes."""
    (write, other), out = calls[writer], tmp_path / "out"
    out.mkdir()
    (out / ".gitattributes").write_text("of a new repository")
    write(out)
    before = contents(out)
    write(out)
    assert contents(out) == before
    if writer in ("decompress", "extract"):
        with pytest.raises(CheckpointError, match="out holds something else"):
            other(out)
    else:
        other(out)
    assert (contents(out) == before) == (writer in ("decompress", "extract"))


def test_one_model_in_the_way_does_not_stop_the_others(tmp_path):
    src, base = pair(tmp_path)
    sources = [write_folder(tmp_path / "models" / name, fine_tune(weights(), seed)) for seed, name in enumerate("ab")]
    before = contents(write_folder(tmp_path / "out/a", weights(seed=5)))
    report = fm_delta.compress_all(tmp_path / "models", tmp_path / "out", base)
    assert [model.name for model in report.failed] == ["a"] and "holds something else" in report.failed[0].error
    assert contents(tmp_path / "out/a") == before
    assert not fm_delta.compress_all(sources, tmp_path / "out", base, overwrite=True).failed
    write_folder(sources[1], fine_tune(weights(), 7), config=None)
    assert not fm_delta.compress_all(sources, tmp_path / "out", base).failed
    shutil.rmtree(tmp_path / "out/b")
    before = contents(write_folder(tmp_path / "out/b", weights(seed=5)))
    assert [model.name for model in fm_delta.compress_all(sources, tmp_path / "out", base).failed] == ["b"]
    assert contents(tmp_path / "out/b") == before


def test_a_transfer_writes_into_its_own_runs_only(tmp_path):
    before = contents(write_folder(tmp_path, weights()))
    args = TransLoraConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(CheckpointError, match="holds something else"):
        transfer("user/none", "user/none", "user/none", ["a"], args, LoraConfig())
    assert contents(tmp_path) == before


def test_a_discriminator_replaces_discriminators_only(tmp_path):
    discriminator = judge(*teacher())
    write_safetensors(tmp_path / "other/adapter_model.safetensors", weights())
    with pytest.raises(CheckpointError, match="holds something else"):
        discriminator.save_pretrained(tmp_path / "other")
    discriminator.save_pretrained(tmp_path / "other", overwrite=True)
    discriminator.save_pretrained(tmp_path / "other")


def test_saving_a_model_does_not_replace_a_merge(tmp_path):
    base, tasks = write_tasks(tmp_path, {"trec": 6, "cr": 2})
    emr.merge(base, tasks, tmp_path / "merged")
    before = contents(tmp_path / "merged")
    with pytest.raises(CheckpointError, match="merged holds a merge"):
        fm_delta.enable(plain(tasks["cr"]), base).save_pretrained(tmp_path / "merged")
    assert contents(tmp_path / "merged") == before


def test_every_command_that_writes_a_folder_has_an_option_to_overwrite(tmp_path):
    commands = {name: {option.opts[0] for option in command.params} for name, command in get_command(app).commands.items()}
    assert {name for name, options in commands.items() if "--out" in options and "--force" not in options} == set()
    src, base = pair(tmp_path)
    write_folder(tmp_path / "out", weights(seed=5))
    line = ["compress", str(src), "--base", str(base), "--out", str(tmp_path / "out")]
    assert [main(line), main([*line, "--force"]), main(line)] == [1, 0, 0]
