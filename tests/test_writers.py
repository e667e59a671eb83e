"""Every writer leaves what it did not write itself, unless told, and what it reads in any case. It updates its own result, and
leaves the old folder or the new one if it is killed, fails or has no room."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from kills import in_child, killed, without_exchange
from peft import LoraConfig
from repeats import repeats
from tiny_checkpoints import contents, edit_settings, fine_tune, pair, weights, write_folder, write_safetensors
from tiny_merges import plain, write_tasks
from tiny_models import bert, fine_tuned, llama, perturb
from tiny_transfers import judge, teacher
from typer.main import get_command

from hf_ext import CheckpointError, TransLoraConfig, emr, fm_delta
from hf_ext.cli.command import app
from hf_ext.cli.main import main
from hf_ext.storage.layout import OURS
from hf_ext.trans_lora import transfer

COMMANDS = (
    "compress",
    "decompress",
    "merge",
    "merge coded",
    "add-task",
    "remove-task",
    "rename-task",
    "extract",
    "extract-lora",
)
WRITERS = (*COMMANDS, "save", "save over plain")  # the last two are `save_pretrained` of an enabled model
STRANGERS = {
    "weights": lambda out: write_folder(out, weights(seed=5)),
    "shards": lambda out: write_folder(out, weights(seed=5), shards=2),
    "adapter": lambda out: write_safetensors(out / "adapter_model.safetensors", weights(seed=5)),
    "PyTorch weights": lambda out: (out / "pytorch_model.bin").write_bytes(b"mine"),
    "notes": lambda out: (out / "notes.txt").write_text("mine"),
}
SIZE = "60KB"  # of shards: one of the two results is in several files


class Writer(NamedTuple):
    write: Callable[..., object]  # of the folder to write, and options
    other: Callable[..., object]  # the same with another source
    reads: set[Path]  # the folders that `write` reads


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, Writer]:
    place = tmp_path_factory.mktemp("sources")
    base, tasks = write_tasks(place, {"trec": 6, "cr": 2})
    plain(tasks["cr"]).save_pretrained(tasks["cr"], max_shard_size=SIZE)
    (tasks["cr"] / "model.safetensors").unlink()
    fine_tuned(llama(), place / "llama")
    small, merged = {task: place / f"small-{task}" for task in tasks}, {task: place / f"merged-{task}" for task in tasks}
    for task, folder in tasks.items():
        fm_delta.compress_checkpoint(folder, base, small[task])
        emr.merge(base, {task: folder}, merged[task], method="emr")
    emr.merge(base, tasks, two := place / "two", method="switch", bits=4)

    def both(write: Callable[..., object], *sources: tuple, **options: object) -> Writer:
        calls = [lambda out, source=source, **more: write(*source, out, **options, **more) for source in sources]
        parts = [part for read in sources[0] for part in (read.values() if isinstance(read, dict) else [read])]
        return Writer(*calls, {part for part in parts if isinstance(part, Path)})

    def save(model: torch.nn.Module, size: str) -> Callable[..., object]:
        return lambda out, **more: model.save_pretrained(out, max_shard_size=size)

    names = ("cr", "trec")
    models = [fm_delta.enable(perturb(llama(), seed), place / "llama/base") for seed in (1, 2)]
    lora = (place / "llama/tuned", place / "llama/base"), (tasks["cr"], base)
    coded = {"method": "switch", "bits": 6}
    return {
        "compress": both(fm_delta.compress_checkpoint, *((tasks[name], base) for name in names)),
        "decompress": both(fm_delta.decompress_checkpoint, *((small[name],) for name in names)),
        "merge": both(emr.merge, *((base, {name: tasks[name]}) for name in names), method="emr"),
        "merge coded": both(emr.merge, *((base, {name: tasks[name]}) for name in names), **coded),
        "add-task": both(emr.add_task, *((merged["cr"], dict.fromkeys(added, tasks["cr"])) for added in (("a", "b"), ("c",)))),
        "remove-task": both(emr.remove_task, (two, "cr"), (two, "trec")),
        "rename-task": both(emr.rename_task, (two, "cr", "more"), (two, "cr", "again")),
        "extract": both(emr.extract, *((merged[name], name) for name in names)),
        "extract-lora": both(lambda *source, **more: fm_delta.extract_lora(*source, rank=2, **more), *lora),
        "save": Writer(save(models[0], SIZE), save(models[1], "100KB"), {place / "llama/base"}),
        "save over plain": Writer(save(models[0], "100KB"), save(llama(), "1GB"), {place / "llama/base"}),
    }


# ---- overwriting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "writer, stranger",
    [*((writer, "weights") for writer in COMMANDS), *(("merge", name) for name in STRANGERS if name != "weights")],
)
def test_a_folder_with_something_else_is_left_unless_told(calls, tmp_path, writer, stranger):
    write, out = calls[writer].write, tmp_path / "out"
    out.mkdir()
    STRANGERS[stranger](out)
    before = contents(out)
    with pytest.raises(CheckpointError, match="out holds something else: .* overwrite=True"):
        write(out)
    assert contents(out) == before and [path.name for path in tmp_path.iterdir()] == ["out"]
    write(out, overwrite=True)
    assert contents(out) != before
    assert all(before.get(name) == contents(out).get(name) for name in ("pytorch_model.bin", "notes.txt"))


@pytest.mark.parametrize("spelling", ["a path", "a link", "relative"])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_read_is_never_overwritten(calls, tmp_path, monkeypatch, writer, spelling):
    write, _, reads = calls[writer]
    for folder in reads:
        before, out = contents(folder), folder
        if spelling == "a link":
            out = tmp_path / folder.name
            out.symlink_to(folder)
        elif spelling == "relative":
            monkeypatch.chdir(folder.parent)
            out = f"{folder.name}/../{folder.name}/"
        with pytest.raises(CheckpointError, match="cannot be overwritten|base"):
            write(out, overwrite=True)
        assert contents(folder) == before


@pytest.fixture(scope="module")
def chains(tmp_path_factory) -> dict[str, tuple[Callable[[Path], object], Path]]:
    """Calls that read a compressed base, task or merge, and the folder that this needs in turn: the base of the base."""
    place = tmp_path_factory.mktemp("chains")
    base, tasks = write_tasks(place, {"cr": 2, "subj": 3, "trec": 6})
    perturb(bert(), 7).bert.save_pretrained(place / "root")
    fm_delta.compress_checkpoint(base, place / "root", place / "middle")
    fm_delta.compress_checkpoint(tasks["cr"], place / "middle", place / "small")
    fm_delta.compress_checkpoint(tasks["subj"], tasks["trec"], place / "task")
    emr.merge(base, {"cr": tasks["cr"]}, place / "merged", method="emr")
    edit_settings(shutil.copytree(place / "merged", place / "on middle"), base=str(place / "middle"))
    model, on_middle = fm_delta.enable(perturb(bert(2), 2), place / "middle"), plain(place / "on middle")
    of_root = {
        "compress": lambda out: fm_delta.compress_checkpoint(tasks["subj"], place / "middle", out, overwrite=True),
        "decompress": lambda out: fm_delta.decompress_checkpoint(place / "small", out, overwrite=True),
        "save": lambda out: model.save_pretrained(out),
        "extract": lambda out: emr.extract(place / "on middle", "cr", out, overwrite=True),
        "add-task": lambda out: emr.add_task(place / "on middle", {"more": tasks["cr"]}, out, overwrite=True),
        "save a merge": lambda out: on_middle.save_pretrained(out),
    }
    of_task = {
        "merge": lambda out: emr.merge(base, {"subj": place / "task"}, out, overwrite=True, method="emr"),
        "add-task of a task": lambda out: emr.add_task(place / "merged", {"subj": place / "task"}, out, overwrite=True),
    }
    return {name: (write, place / "root") for name, write in of_root.items()} | {
        name: (write, tasks["trec"]) for name, write in of_task.items()
    }


CHAINS = ("compress", "decompress", "save", "extract", "add-task", "save a merge", "merge", "add-task of a task")


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_needed_to_read_it_is_never_overwritten(chains, name):
    write, needed = chains[name]
    before = contents(needed)
    with pytest.raises(CheckpointError, match="still needed|is needed|the base needs it"):
        write(needed)
    assert contents(needed) == before


@pytest.mark.parametrize(
    "writer, place",
    [(writer, place) for writer in WRITERS for place in ("file", "file/below", "/proc/no-such-process/out")]
    + [(writer, "n" * 300) for writer in ("compress", "decompress", "extract")],
)
def test_a_target_that_cannot_be_written_is_named(calls, tmp_path, writer, place):
    (tmp_path / "file").write_text("mine")
    out = tmp_path / place
    with pytest.raises(CheckpointError, match=f"({out}|{out.parent}) (is a file|could not be written|was not written)"):
        calls[writer].write(out)
    assert (tmp_path / "file").read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["file"]


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

    write = {
        "compress": partial(fm_delta.compress_checkpoint, src, base, out),
        "decompress": partial(fm_delta.decompress_checkpoint, tmp_path / "small", out),
    }[writer]
    with pytest.raises(CheckpointError, match=f"holds something else: {file}"):
        write()
    assert contents(out) == before
    write(overwrite=True)
    assert contents(out) != before


@pytest.mark.parametrize("writer", COMMANDS)
def test_its_own_result_is_updated(calls, tmp_path, writer):
    """What holds plain weights afterwards tells them from others only by their bytes."""
    (write, other, _), out = calls[writer], tmp_path / "out"
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
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
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


# ---- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("start", ["new", "exchanged", "moved"])
def test_files_are_on_the_disk_before_they_have_their_names(calls, tmp_path, monkeypatch, writer, start):
    (write, other, _), out = calls[writer], tmp_path / "out"
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


KILLS = [(writer, how) for writer in WRITERS for how in ("in one step", "file by file")]
KILLS += [("compress", "failing"), ("save", "failing")]
USUAL = [kill for kill in KILLS if kill[0] == "compress" or kill[1] != "file by file"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes as Linux does")
@repeats("stride", 23, 7)  # test_written_files.py stops at each step of the writing that all writers share
@pytest.mark.parametrize(
    "writer, how", [kill if kill in USUAL else pytest.param(*kill, marks=pytest.mark.slow) for kill in KILLS]
)
def test_a_kill_leaves_the_old_folder_or_the_new(calls, tmp_path, monkeypatch, writer, how, stride):
    """Moving file by file, it may leave neither: then there is no config.json, and the next run completes the folder."""
    if how == "file by file":
        without_exchange(monkeypatch)
    options: dict = {"overwrite": True} | ({"max_shard_size": SIZE} if writer in ("merge", "merge coded", "extract") else {})
    start, out, then = (tmp_path / name for name in ("start", "out", "then"))
    calls[writer].other(start)
    calls[writer].write(shutil.copytree(start, then), **options)
    old, new, states = contents(start), contents(then), []
    assert old != new

    def work() -> None:
        torch.set_num_threads(1)  # the threads of OpenMP are gone after a fork
        calls[writer].write(out, **options)

    is_changed = (lambda: states[-1] != "old") if stride == 7 else None
    for step in killed(out, start, work, stride, how == "failing", is_changed):
        files = {name: digest for name, digest in contents(out).items() if OURS not in name}
        states.append("old" if files == old else "new" if files == new else "neither")
        assert all(digest in (old.get(file), new.get(file)) for file, digest in files.items())
        assert states[-1] != "neither" or "config.json" not in files and how == "file by file"
        if states[-1] == "neither" and step % 3 == 0:
            work()
            assert contents(out) == new
    work()  # clears what the last run left
    assert contents(out) == new and "old" in states
    assert not is_changed or ("neither" in states) == (how == "file by file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "start", "then"]


@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "extract-lora"])  # which tries an adapter elsewhere
def test_without_room_the_error_says_so_and_all_is_as_it_was(calls, tmp_path, writer):
    resource = pytest.importorskip("resource")
    calls[writer].other(tmp_path / "old")
    before = contents(tmp_path)
    for limit in (0, 2000):
        for out in (tmp_path / "old", tmp_path / "new"):

            def work(limit: int = limit, out: Path = out) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                calls[writer].write(out, overwrite=True)

            code, answer = in_child(work)
            assert code == 0 and re.match(f"CheckpointError: {out} (was not|could not be) written: .*File too large", answer)
            assert contents(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["old"]
