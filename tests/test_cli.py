"""The command does what its help says, prints what programs can read, and fails with one line."""

import json
import os
import subprocess
import sys

import pytest
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder
from tiny_merges import write_tasks

import hf_ext
from hf_ext import emr, fm_delta
from hf_ext.cli import main, parser

COMMANDS = (
    "compress",
    "compress-all",
    "compress-series",
    "remove-checkpoint",
    "find-base",
    "decompress",
    "inspect",
    "verify",
    "merge",
    "add-task",
    "extract",
    "run",
)


@pytest.fixture
def folder(tmp_path):
    """A folder with tuned, base and small, which is tuned as compressed."""
    fm_delta.compress_checkpoint(*pair(tmp_path), tmp_path / "small")
    return tmp_path


def hf_ext_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hf_ext.cli", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(capsys, *arguments) -> tuple[int, str, str]:
    """The exit code, and what was printed to stdout and (but for progress bars) to stderr."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines(keepends=True) if "tensors:" not in line and "models:" not in line]
    return code, printed.out, "".join(lines)


def fails(capsys, *arguments) -> str:
    """The one line that a run which fails prints."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("hf-ext: ") and err.endswith("\n") and err.count("\n") == 1
    return err


def test_a_checkpoint_is_compressed_checked_and_restored(tmp_path, capsys):
    src, base = pair(tmp_path)
    small, back = tmp_path / "small", tmp_path / "back"
    code, out, _ = run(capsys, "compress", src, "--base", base, "--out", small)
    assert (code, out) == (0, fm_delta.inspect(small).summary() + "\n")
    assert run(capsys, "verify", small)[:2] == (0, f"All 7 tensors of {small} come out as they were saved.\n")
    assert run(capsys, "decompress", small, "--out", back)[:2] == (0, f"{back} holds the original files.\n")
    assert contents(back) == contents(src)


def test_without_a_base_it_is_found_or_the_candidates_are_shown(tmp_path, capsys):
    src, base = pair(tmp_path)
    stranger = write_folder(tmp_path / "stranger", weights(seed=5))
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps(config | {"_name_or_path": str(stranger)}))
    code, out, err = run(capsys, "compress", src, "--out", tmp_path / "small")
    assert (code, out) == (1, "") and f"{stranger}  no" in err and "Give the base by name: --base" in err
    assert not (tmp_path / "small").exists()
    (src / "config.json").write_text(json.dumps(config | {"_name_or_path": str(base)}))
    code, out, _ = run(capsys, "compress", src, "--out", tmp_path / "small", "--verify")
    assert code == 0 and out.startswith(f"The base of {src} is {base}.\n")
    assert "give --base too" in fails(capsys, "compress", src, "--revision", "main", "--out", tmp_path / "out")


def test_find_base_prints_a_table_or_json_of_the_same_report(folder, capsys):
    arguments = ("find-base", folder / "tuned", folder / "base", folder / "none")
    report = fm_delta.find_base(*arguments[1:2], arguments[2:])
    assert run(capsys, *arguments)[:2] == (0, f"{report}\n") and report.verdict == "sure"
    assert json.loads(run(capsys, *arguments, "--json")[1]) == report.to_dict()


def test_many_models_are_compressed_and_one_that_fails_is_told_by_the_exit_code(folder, capsys):
    write_folder(folder / "models/a", fine_tune(weights(), 2))
    write_folder(folder / "models/b", fine_tune(weights(), 3))
    options = ("--base", folder / "base", "--out", folder / "out")
    code, out, _ = run(capsys, "compress-all", folder / "models", *options, "--delete-source")
    assert code == 0 and "2 of 2 models done" in out and "source deleted" in out and not any((folder / "models").iterdir())
    (folder / "broken").mkdir()
    (folder / "broken/model.safetensors").write_bytes(b"broken")
    code, out, _ = run(capsys, "compress-all", folder / "tuned", folder / "broken", *options, "--json")
    assert code == 1
    assert {model["name"]: bool(model["error"]) for model in json.loads(out)["models"]} == {
        "a": False,
        "b": False,
        "broken": True,
        "tuned": False,
    }
    for workers in ("0", "-1", "two"):
        with pytest.raises(SystemExit):
            main(["compress-all", "models", "--out", "out", "--workers", workers])


def test_a_source_is_deleted_after_it_was_verified(folder, capsys):
    src = folder / "tuned"
    before = contents(src)
    assert "cannot be deleted" in fails(
        capsys, "compress", src, "--base", folder / "base", "--out", src / "out", "--delete-source"
    )
    assert run(capsys, "compress", src, "--base", folder / "base", "--out", folder / "new", "--delete-source")[0] == 0
    assert not src.exists() and run(capsys, "decompress", folder / "new", "--out", src)[0] == 0
    assert contents(src) == before


def test_a_run_is_compressed_in_place_and_one_checkpoint_deleted(tmp_path, capsys):
    tensors = fine_tune(fine_tune(weights()))
    base, run_folder = write_folder(tmp_path / "base", weights()), tmp_path / "run"
    for step in (5, 10, 15):
        tensors = fine_tune(tensors, seed=step)
        write_folder(run_folder / f"checkpoint-{step}", tensors)
    before = contents(run_folder / "checkpoint-5")
    code, out, _ = run(capsys, "compress-series", run_folder, "--base", base)
    assert (code, out) == (0, f"{fm_delta.inspect_series(run_folder)}\n")
    assert "checkpoint-5   checkpoint-10" in out
    checkpoint = run_folder / "checkpoint-10"
    assert "is needed to read checkpoint-5" in fails(capsys, "remove-checkpoint", checkpoint)
    assert run(capsys, "remove-checkpoint", checkpoint, "--rebase")[:2] == (0, f"{checkpoint} is deleted.\n")
    assert not checkpoint.exists()
    assert run(capsys, "decompress", run_folder / "checkpoint-5", "--out", tmp_path / "back")[0] == 0
    assert contents(tmp_path / "back") == before
    assert "holds no checkpoint-N" in fails(capsys, "compress-series", base, "--base", base)


def test_a_base_that_has_moved_is_given_by_name(folder, capsys):
    moved = (folder / "base").rename(folder / "moved")
    assert str(folder / "base") in fails(capsys, "verify", folder / "small")
    assert run(capsys, "verify", folder / "small", "--base", moved)[0] == 0
    assert run(capsys, "decompress", folder / "small", "--base", moved, "--out", folder / "back")[0] == 0
    assert contents(folder / "back") == contents(folder / "tuned")


def test_inspect_prints_tables_or_json_of_the_same_report(folder, capsys):
    report = fm_delta.inspect(folder / "small")
    assert run(capsys, "inspect", folder / "small")[:2] == (0, f"{report}\n")
    code, out, err = run(capsys, "inspect", folder / "small", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(report.to_dict()))
    assert run(capsys, "inspect", folder / "small/model.safetensors", "--json")[1] == out


def test_inspect_draws_a_picture(folder, capsys):
    picture = folder / "sizes.png"
    assert run(capsys, "inspect", folder / "small", "--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.stat().st_size > 10_000
    assert "sizes.nonsense" in fails(capsys, "inspect", folder / "small", "--plot", folder / "sizes.nonsense")
    assert "none/sizes.png" in fails(capsys, "inspect", folder / "small", "--plot", folder / "none/sizes.png")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Folders of a base and of its fine-tunes, to merge."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_tasks_are_merged_checked_shown_and_taken_out_again(tmp_path, tasks, capsys):
    base, folders = tasks
    named = [part for task, folder in folders.items() for part in ("--task", f"{task}={folder}")]
    merged = tmp_path / "merged"
    code, out, _ = run(capsys, "merge", "--base", base, *named, "--out", merged)
    assert (code, out) == (0, emr.report(merged).summary() + "\n")
    assert run(capsys, "inspect", merged)[:2] == (0, f"{emr.report(merged)}\n")
    assert json.loads(run(capsys, "inspect", merged, "--json")[1]) == emr.report(merged).to_dict()
    assert run(capsys, "verify", merged)[0] == 0
    assert run(capsys, "extract", merged, "--task", "cr", "--out", tmp_path / "cr")[0] == 0
    emr.extract(merged, "cr", tmp_path / "expected")
    assert contents(tmp_path / "cr") == contents(tmp_path / "expected")


def test_a_report_prints_a_table_and_draws_a_picture(tmp_path, tasks, capsys):
    base, folders = tasks
    out = tmp_path / "merged"
    options = ("--task", f"cr={folders['cr']}", "--task", f"trec={folders['trec']}", "--rescale", "paper")
    code, printed, _ = run(capsys, "merge", "--base", base, *options, "--out", out, "--report")
    assert (
        code == 0
        and "sign conflicts" in printed
        and printed == f"{emr.report(out)}\n".replace(emr.report(out).summary(), printed.splitlines()[-1])
    )
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_task_is_added_by_a_command(tmp_path, tasks, capsys):
    base, folders = tasks
    assert run(capsys, "merge", "--base", base, "--task", f"cr={folders['cr']}", "--out", tmp_path / "one")[0] == 0
    task = ("--task", f"subj={folders['subj']}")
    assert "--reelect" in fails(capsys, "add-task", tmp_path / "one", *task, "--out", tmp_path / "two")
    assert run(capsys, "add-task", tmp_path / "one", *task, "--out", tmp_path / "two", "--reelect")[0] == 0
    assert [task.task for task in emr.report(tmp_path / "two").tasks] == ["cr", "subj"]


def test_what_cannot_be_merged_is_one_line(tmp_path, tasks, capsys):
    base, folders = tasks
    twice = ("--task", f"cr={folders['cr']}", "--task", f"cr={folders['subj']}")
    assert "two tasks called 'cr'" in fails(capsys, "merge", "--base", base, *twice, "--out", tmp_path / "out")
    assert "holds no merge" in fails(capsys, "extract", folders["cr"], "--task", "cr", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for text in ("cr", "=there", "cr="):
        with pytest.raises(SystemExit):
            main(["merge", "--base", "b", "--task", text, "--out", "out"])
        assert "not of the form NAME=PATH" in capsys.readouterr().err


def test_what_goes_wrong_is_one_line(folder, capsys):
    src, base, small = folder / "tuned", folder / "base", folder / "small"
    other = write_folder(folder / "other", fine_tune(weights(), seed=5))
    assert "neither a folder nor a Hub repository" in fails(
        capsys, "compress", src, "--base", "no/such/base", "--out", folder / "out"
    )
    assert "is compressed already" in fails(capsys, "compress", small, "--base", base, "--out", folder / "out")
    assert "cannot be written over" in fails(capsys, "compress", src, "--base", base, "--out", src)
    assert "is not a folder" in fails(capsys, "compress", folder / "none", "--base", base, "--out", folder / "out")
    assert "is a file" in fails(capsys, "compress", src, "--base", base, "--out", src / "config.json")
    assert "is not compressed" in fails(capsys, "verify", src)
    assert "is another model or revision" in fails(capsys, "verify", small, "--base", other)
    assert "is another model or revision" in fails(capsys, "decompress", small, "--base", other, "--out", folder / "out")
    data = (small / "model.safetensors").read_bytes()
    (small / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for command in ("verify", "inspect"):
        assert "lm_head.weight" in fails(capsys, command, small)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example_that_it_understands(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    example = capsys.readouterr().out.split("example: hf-ext ")[1].split()
    assert example[0] == command
    assert parser().parse_args(example).run.__name__ == command.replace("-", "_")


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert (exit.value.code, capsys.readouterr().out) == (0, f"hf_ext {hf_ext.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["zip"], ["compress", "a"], ["compress", "a", "--base", "b"], ["decompress", "a"]])
def test_an_incomplete_command_says_what_is_missing(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("usage: hf-ext")


def test_as_a_process_it_exits_with_one_line_and_no_traceback(folder):
    done = hf_ext_command("inspect", folder / "small", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(json.dumps(fm_delta.inspect(folder / "small").to_dict()))
    failed = hf_ext_command("verify", folder / "tuned")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("hf-ext: ") and failed.stderr.count("\n") == 1


def test_another_tool_that_is_not_there_is_one_line(capsys):
    """That those which are there start is seen where models are served."""
    assert "There is no command 'no-such-tool'" in fails(capsys, "run", "no-such-tool", "--option")
