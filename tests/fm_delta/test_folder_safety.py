"""Commands that write or delete folders, killed at any step or run twice at once, leave the old folder or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kills import in_child, killed, without_exchange
from repeats import repeats
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder
from tiny_merges import write_tasks

from hf_ext import BaseModelError, CheckpointError, HfExtError, emr, fm_delta
from hf_ext.fm_delta import compress
from hf_ext.storage.tree import GRAVE, HELD, OURS, delete_folder, flush_folder, scan, stamp

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes as Linux does")


# ---- killed ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), {"trec": 6, "cr": 2})


@pytest.fixture(scope="module")
def commands(tasks, tmp_path_factory) -> dict[str, tuple[Callable[[Path], object], Path]]:
    """For each command what it does with `out`, and the result of another call of it, the old content."""
    place = tmp_path_factory.mktemp("commands")
    base, folders = tasks
    reference = write_folder(place / "base", weights())
    for seed, shards in ((1, 1), (2, 2)):
        tuned = write_folder(place / f"tuned{seed}", fine_tune(weights(), seed=seed), shards=shards)
        fm_delta.compress_checkpoint(tuned, reference, place / f"small{seed}")
    emr.merge(base, {"trec": folders["trec"]}, place / "merged-trec")
    emr.merge(base, folders, place / "merged")
    fm_delta.decompress_checkpoint(place / "small1", place / "decompressed")
    emr.extract(place / "merged", "trec", place / "extracted")
    return {
        "decompress": (lambda out: fm_delta.decompress_checkpoint(place / "small2", out), place / "decompressed"),
        "extract": (lambda out: emr.extract(place / "merged", "cr", out, max_shard_size="60KB"), place / "extracted"),
        "merge": (lambda out: emr.merge(base, {"cr": folders["cr"]}, out, max_shard_size="60KB"), place / "merged"),
        "add-task": (
            lambda out: emr.add_task(place / "merged-trec", "cr", folders["cr"], out, reelect=True),
            place / "merged-trec",
        ),
    }


@repeats("stride", 11, 1)
@pytest.mark.parametrize("exchanges", [True, False], ids=["one step", "file by file"])
@pytest.mark.parametrize("name", ["decompress", "extract", "merge", "add-task"])
def test_a_killed_command_leaves_no_mixed_folder_that_loads(commands, tmp_path, monkeypatch, name, exchanges, stride):
    if not exchanges:
        without_exchange(monkeypatch)
    work, old = commands[name]
    work(tmp_path / "expected")
    shutil.copytree(old, tmp_path / "then")
    work(tmp_path / "then")
    before, after = contents(old), contents(tmp_path / "then")
    assert contents(tmp_path / "expected").items() <= after.items()
    out, seen = tmp_path / "out", set()
    for step in killed(out, old, lambda: work(out), stride):
        files = {name: digest for name, digest in contents(out).items() if OURS not in name}
        seen.add("old" if files == before else "new" if files == after else "neither")
        assert files in (before, after) or "config.json" not in files
        if files not in (before, after) and step % 3 == 0:
            work(out)
            assert contents(out) == after
    assert contents(out) == after and "old" in seen
    assert stride > 1 or "new" in seen and ("neither" in seen) != exchanges
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out", "then"]


# ---- twice at once ---------------------------------------------------------------------------------------------------


def twice(work: Callable[[], object], delay: float) -> list[str]:
    """Runs the same work in two processes, one a little later; returns the error of each, or "done"."""

    def late(wait: float) -> str:
        return in_child(lambda: [time.sleep(wait), work(), "done"][-1])[1]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(late, (0.0, delay)))


ANSWERS = {"done", "CheckpointError", "BaseModelError", "CorruptFileError"}


@repeats("rounds", 5, 200)
@pytest.mark.parametrize("command", ["compress", "compress-all", "remove-checkpoint"])
def test_two_runs_at_once_never_lose_a_model(tmp_path, command, rounds):
    chance = random.Random(0)
    write_folder(tmp_path / "base", weights())
    start = tmp_path / "start"
    for step in (1, 2):
        write_folder(start / f"checkpoint-{step}", fine_tune(weights(), seed=step))
    plain = {step: contents(start / f"checkpoint-{step}") for step in (1, 2)}
    if command == "remove-checkpoint":
        fm_delta.compress_series(start, tmp_path / "base")
    run, small, outcomes = tmp_path / "run", tmp_path / "small", set()
    base, newest = tmp_path / "base", run / "checkpoint-2"
    work: dict[str, Callable[[], object]] = {
        "compress": lambda: fm_delta.compress_checkpoint(newest, base, small / "checkpoint-2", delete_source=True),
        "compress-all": lambda: fm_delta.compress_all([newest], small, base, delete_source=True),
        "remove-checkpoint": lambda: fm_delta.remove_checkpoint(newest, rebase=True),
    }
    for _ in range(rounds):
        for folder in (run, small):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, run)
        answers = twice(work[command], chance.uniform(0, 0.06))
        outcomes |= {answer.partition(":")[0] for answer in answers}
        assert "done" in answers
        assert all(answer.partition(":")[0] in ANSWERS for answer in answers)
        if command == "remove-checkpoint":
            assert not newest.exists() and restored(run / "checkpoint-1", tmp_path) == plain[1]
        else:
            assert newest.exists() and contents(newest) == plain[2] or restored(small / "checkpoint-2", tmp_path) == plain[2]
            assert not newest.exists() or any(answer != "done" for answer in answers)
        assert not list(run.rglob(".*")) and not list(small.rglob(".*"))
    assert "done" in outcomes and (rounds < 200 or outcomes & {"CheckpointError", "BaseModelError"})


def test_a_failed_command_leaves_no_empty_folders(tmp_path):
    src, _ = pair(tmp_path)
    with pytest.raises(BaseModelError):
        fm_delta.compress_checkpoint(src, tmp_path / "missing", tmp_path / "new" / "deep" / "out", delete_source=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]


def restored(folder: Path, place: Path) -> dict[str, str]:
    shutil.rmtree(place / "back", ignore_errors=True)
    fm_delta.decompress_checkpoint(folder, place / "back")
    return contents(place / "back")


# ---- only what was read is deleted -----------------------------------------------------------------------------------


CHANGES = {
    "a new file": lambda src, base: (src / "optimizer.pt").write_text("state"),
    "a newer save": lambda src, base: shutil.copyfile(base / "model.safetensors", src / "model.safetensors"),
    "a file removed": lambda src, base: (src / "notes.txt").unlink(),
    "a new folder": lambda src, base: (src / "checkpoint-1").mkdir(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_source_that_changes_meanwhile_is_kept(tmp_path, monkeypatch, change):
    src, base = pair(tmp_path)
    (src / "notes.txt").write_text("notes")

    def flush_and_change(out):
        flush_folder(out)
        change(src, base)

    monkeypatch.setattr(compress, "flush_folder", flush_and_change)
    with pytest.raises(CheckpointError, match="is not deleted: files in it were written or removed"):
        fm_delta.compress_checkpoint(src, base, tmp_path / "out", delete_source=True)
    assert (src / "model.safetensors").exists() and fm_delta.verify(tmp_path / "out") == len(weights())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "tuned"]


def test_a_folder_that_cannot_be_listed_stops_a_deletion(tmp_path, monkeypatch):
    src, base = pair(tmp_path)
    (src / "secret").mkdir()
    (src / "secret" / "file").write_text("mine")
    scandir = os.scandir

    def refuses(path):
        if os.fspath(path).endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuses)
    with pytest.raises(CheckpointError, match="secret could not be listed: Permission denied"):
        fm_delta.compress_checkpoint(src, base, tmp_path / "out", delete_source=True)
    monkeypatch.undo()
    assert (src / "secret" / "file").read_text() == "mine" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("state", ["held", "deleted"])
def test_the_next_call_ends_a_killed_deletion(tmp_path, state):
    src, base = pair(tmp_path)
    fm_delta.compress_checkpoint(src, base, tmp_path / "out", verify=True)
    src.rename(src.with_name(f".{src.name}.hf_ext-{state}"))
    if state == "deleted":
        next(path for path in tmp_path.glob("*/model.safetensors") if "deleted" in str(path)).unlink()
    fm_delta.compress_checkpoint(src, base, tmp_path / "out", delete_source=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]
    assert fm_delta.verify(tmp_path / "out") == len(weights())


def test_a_stamp_covers_everything_that_a_deletion_loses(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("text")
    stamps = [stamp(folder)]
    for change in (
        lambda: os.utime(folder / "sub" / "file", ns=(1, 1)),
        lambda: (folder / "empty").mkdir(),
        lambda: (folder / "link").symlink_to("sub"),
        lambda: (folder / "sub" / "file").chmod(stat.S_IRUSR),
    ):
        change()
        stamps.append(stamp(folder))
    assert len(set(stamps)) == 5 and stamp(folder) == stamps[-1]
    assert {path.as_posix() for path in scan(folder)} == {"sub", "sub/file", "empty", "link"}
    with pytest.raises(CheckpointError, match="is not deleted"):
        delete_folder(folder, stamps[0])
    assert stamp(folder) == stamps[-1]
    delete_folder(folder, stamps[-1])
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_cannot_flush_folders_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    fsync, flushed = os.fsync, []

    def only_files(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flushed.append(handle)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    flush_folder(tmp_path)
    assert len(flushed) == 1
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        flush_folder(tmp_path)


# ---- what lies in a folder already --------------------------------------------------------------------------------------


def test_interrupted_work_in_a_source_is_not_deleted(tmp_path):
    tuned, base = pair(tmp_path)
    for name in (f"notes{OURS}mine.txt", f"sub/.checkpoint-5{OURS}held/model.safetensors"):
        left = tuned / name
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_text("precious")
        with pytest.raises(CheckpointError, match=f"an interrupted command left .*{OURS}"):
            fm_delta.compress_checkpoint(tuned, base, tmp_path / "out", delete_source=True)
        assert left.exists()
        shutil.rmtree(tuned / name.split("/")[0]) if "/" in name else left.unlink()
    seen = stamp(tuned)
    (tuned / f"new{OURS}x").touch()
    assert stamp(tuned) != seen


@pytest.mark.parametrize("use", ["as the source", "as the base"])
def test_a_folder_whose_files_are_being_moved_is_not_read(tmp_path, use):
    tuned, base = pair(tmp_path)
    ((tuned if use == "as the source" else base) / f"{OURS}journal").write_text("{}")
    with pytest.raises((CheckpointError, BaseModelError), match="is incomplete: a command that wrote to it was interrupted"):
        fm_delta.compress_checkpoint(tuned, base, tmp_path / "out")


def test_a_checkpoint_that_is_a_link_is_not_removed(tmp_path):
    tuned, _ = pair(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-20").symlink_to(tuned)
    with pytest.raises(CheckpointError, match="is not a checkpoint of a run"):
        fm_delta.remove_checkpoint(tmp_path / "run" / "checkpoint-20")
    with pytest.raises(CheckpointError, match="is a link and is not deleted"):
        delete_folder(tmp_path / "run" / "checkpoint-20")
    assert (tuned / "model.safetensors").exists()


@pytest.fixture
def home(tmp_path):
    """Files of the user, to which links of a stranger lead."""
    (tmp_path / "home" / "ssh").mkdir(parents=True)
    (tmp_path / "home" / "ssh" / "id").write_text("secret")
    (tmp_path / "home" / "config.json").write_text("mine")
    yield tmp_path / "home"
    assert contents(tmp_path / "home").keys() == {"ssh/id", "config.json"}
    assert (tmp_path / "home" / "config.json").read_text() == "mine"


def test_a_stage_that_is_a_link_is_not_moved(tmp_path, home):
    tuned, base = pair(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(tuned, run / "checkpoint-10")
    stage = f".checkpoint-10.aaaaaaaa{OURS}partial"
    (run / stage).symlink_to(home)
    (run / "checkpoint-10" / f"{OURS}journal").write_text(f'{{"stage": "{stage}", "dropped": []}}')
    fm_delta.compress_series(run, base)
    assert contents(run / "checkpoint-10").keys() - {"README.md"} == contents(tuned).keys()


def test_links_in_place_of_temporary_files_are_not_followed(tmp_path, home):
    tuned, base = pair(tmp_path)
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)  # so that files are moved one by one, with a journal
    (out / "sub" / "mine.txt").touch()
    (out / f".{OURS}journal.partial").symlink_to(home / "config.json")
    fm_delta.compress_checkpoint(tuned, base, out)
    fm_delta.verify(out)


def test_files_are_not_written_through_a_link_to_another_folder(tmp_path, home, tasks):
    base, folders = tasks
    out = tmp_path / "out"
    (out / "assets").mkdir(parents=True)
    (out / "assets" / "mine.txt").touch()
    (out / "task-cr").symlink_to(home)
    with pytest.raises(CheckpointError, match="task-cr is a link"):
        emr.merge(base, folders, out)
    assert not (out / "config.json").exists()


@pytest.fixture
def copy_on_write(tmp_path: Path) -> Iterator[Path]:
    """A file system on which files can share blocks."""
    image, place = tmp_path / "disk", tmp_path / "place"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(200 << 20)
    for command in (["mkfs.btrfs", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount Btrfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_files_that_equal_those_of_the_base_share_its_blocks(copy_on_write):
    tuned, base = pair(copy_on_write)
    tokenizer = os.urandom(20 << 20)
    for folder in (base, tuned):
        (folder / "tokenizer.json").write_bytes(tokenizer)

    def used() -> int:
        os.sync()
        status = os.statvfs(copy_on_write)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    before = used()
    fm_delta.compress_checkpoint(tuned, base, copy_on_write / "small")
    shutil.rmtree(tuned)
    assert used() < before - (15 << 20)
    assert (copy_on_write / "small" / "tokenizer.json").read_bytes() == tokenizer
    (copy_on_write / "small" / "tokenizer.json").write_text("another")
    assert (base / "tokenizer.json").read_bytes() == tokenizer


def test_no_folder_is_deleted_whose_result_lacks_its_base(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("text")
    with pytest.raises(CheckpointError, match="base is gone"):
        delete_folder(folder, stamp(folder), [tmp_path / "base"])
    assert (folder / "file").read_text() == "text" and [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("pause", ["before", "after"])
def test_models_that_need_each_other_are_not_both_deleted(tmp_path, monkeypatch, pause):
    """The second command runs in the middle of the first one's deletion."""
    one, two = pair(tmp_path)
    rename, renamed = os.rename, []

    def interrupted(source, target):
        if pause == "after":
            rename(source, target)
        if Path(source) == one and not renamed:
            renamed.append(source)
            with contextlib.suppress(CheckpointError, BaseModelError):
                fm_delta.compress_checkpoint(two, one, tmp_path / "two-small", delete_source=True)
        if pause == "before":
            rename(source, target)

    # Compressed first, as two commands would do that at the same time.
    fm_delta.compress_checkpoint(two, one, tmp_path / "two-small")
    monkeypatch.setattr(os, "rename", interrupted)
    with contextlib.suppress(CheckpointError):
        fm_delta.compress_checkpoint(one, two, tmp_path / "one-small", delete_source=True)
    assert renamed and (one.exists() or two.exists())
    for folder, small in ((one, "one-small"), (two, "two-small")):
        assert folder.exists() or fm_delta.verify(tmp_path / small)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize(
    "place", ["base/README.md", "out/README.md", "base/model.safetensors.index.json", "out/.hf_ext-journal"]
)
def test_a_pipe_is_never_read_from(tmp_path, place):
    """A reader of a pipe that nobody writes to would wait forever."""
    src, base = pair(tmp_path)
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".json":
        (base / "model.safetensors").unlink()
    os.mkfifo(path)
    previous = signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(60)
    try:
        with contextlib.suppress(HfExtError):
            fm_delta.compress_checkpoint(src, base, tmp_path / "out")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(
    ("place", "copied"), [("tuned", "out"), ("tuned/below", "out/below"), ("base", "base"), ("out", "out")]
)
def test_a_link_to_itself_is_copied_as_a_link(tmp_path, place, copied):
    src, base = pair(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "loop").symlink_to("loop")
    fm_delta.compress_checkpoint(src, base, tmp_path / "out", delete_source=True)
    assert os.readlink(tmp_path / copied / "loop") == "loop"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json", "out"])
def test_a_link_to_itself_is_copied_or_a_clear_error(tmp_path, file):
    src, base = pair(tmp_path)
    link = tmp_path / "out" if file == "out" else src / file
    link.unlink(missing_ok=True)
    link.symlink_to(link.name)
    with contextlib.suppress(HfExtError):
        fm_delta.compress_checkpoint(src, base, tmp_path / "out")
    assert os.readlink(link) == link.name


@pytest.mark.parametrize("leads_to", ["elsewhere", "nowhere", None])
@pytest.mark.parametrize("suffix", [HELD, GRAVE])
def test_a_file_with_the_name_of_a_deletion_is_left(tmp_path, suffix, leads_to):
    src, base = pair(tmp_path)
    kept = tmp_path / f".tuned{suffix}"
    (tmp_path / "elsewhere").mkdir()
    kept.symlink_to(leads_to) if leads_to else kept.touch()
    before = contents(src)
    with pytest.raises(CheckpointError, match=f"{suffix} is not a folder of this package. Move it away"):
        fm_delta.compress_checkpoint(src, base, tmp_path / "out", delete_source=True)
    assert contents(src) == before and os.path.lexists(kept) and (tmp_path / "elsewhere").exists()


def test_a_name_too_long_to_delete_is_an_early_error(tmp_path):
    src, base = pair(tmp_path)
    src = src.rename(tmp_path / ("x" * 240))
    with pytest.raises(CheckpointError, match="could not be deleted: .*too long"):
        fm_delta.compress_checkpoint(src, base, tmp_path / "out", delete_source=True)
    assert src.exists() and not (tmp_path / "out").exists()
    fm_delta.compress_checkpoint(src, base, tmp_path / "out")


@pytest.mark.parametrize("step", [2, 3])
def test_a_checkpoint_that_disappears_is_a_clear_error(tmp_path, monkeypatch, step):
    write_folder(tmp_path / "base", weights())
    for number in (1, 2, 3):
        write_folder(tmp_path / f"run/checkpoint-{number}", fine_tune(weights(), seed=number))
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda *args, **times: [utime(*args, **times), shutil.rmtree(gone, ignore_errors=True)])
    gone = tmp_path / f"run/checkpoint-{step}"
    with pytest.raises(CheckpointError, match=f"checkpoint-{step}"):
        fm_delta.compress_series(tmp_path / "run", tmp_path / "base")
