"""The command line does what its help says, prints results that programs can read, and fails with one line."""

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest
import transformers
import typer
from processes import python
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder
from tiny_merges import write_tasks

import hf_ext
from hf_ext import emr, fm_delta
from hf_ext.cli.command import app
from hf_ext.cli.main import main
from hf_ext.storage import prefetch

COMMANDS = typer.main.get_command(app).commands
MERGE = ["merge", "--base", "a", "--out", "b"]


@pytest.fixture
def folder(tmp_path):
    """A folder with tuned, base and small, which is tuned as compressed."""
    fm_delta.compress_checkpoint(*pair(tmp_path), tmp_path / "small")
    return tmp_path


def process(*arguments, of=("-m", "hf_ext.cli"), cwd=None, **environment):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, *of, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=120)


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Returns the exit code, stdout, and stderr without progress bars."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines(keepends=True) if not re.search(r"\b(tensors|models):", line)]
    return code, printed.out, "".join(lines)


def fails(capsys, *arguments) -> str:
    """Returns the one line that a failing command prints."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("hf-ext: ") and err.endswith("\n") and err.count("\n") == 1
    return err


def mistaken(capsys, *arguments) -> str:
    """Returns the one line that a wrong command line prints."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("hf-ext") and err.endswith("--help shows how)\n") and err.count("\n") == 1
    return err


def shown(capsys, *arguments) -> dict:
    """Returns a command's result for programs."""
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_a_checkpoint_is_compressed_checked_and_restored(tmp_path, capsys):
    src, base = pair(tmp_path)
    small, back = tmp_path / "small", tmp_path / "back"
    code, out, _ = run(capsys, "compress", src, "--base", base, "--out", small)
    assert (code, out) == (0, fm_delta.inspect(small).summary() + "\n")
    checked = f"All 7 tensors of {small} match their checksums. Files without weights have none.\n"
    assert run(capsys, "verify", small)[:2] == (0, checked)
    restored = f"{back} holds the original weights, and the other files of {small}.\n"
    assert run(capsys, "decompress", small, "--out", back)[:2] == (0, restored)
    assert contents(back) == contents(src)


def test_json_prints_the_result_and_nothing_else_to_stdout(folder, capsys):
    out, back = folder / "out", folder / "back"
    result = shown(capsys, "compress", folder / "tuned", "--base", folder / "base", "--out", out)
    inspected = json.loads(json.dumps(fm_delta.inspect(out).to_dict()))
    assert shown(capsys, "inspect", out) == inspected and result == inspected | {"tensors": 7}
    assert shown(capsys, "inspect", out / "model.safetensors") == inspected
    assert shown(capsys, "verify", out) == {"src": str(out), "tensors": 7}
    assert shown(capsys, "decompress", out, "--out", back) == {"out": str(back)}


def test_a_checkpoint_is_compressed_without_a_base(folder, capsys):
    code, out, _ = run(capsys, "compress", folder / "tuned", "--no-base", "--out", folder / "alone")
    assert code == 0 and out.endswith("%), without a base\n")
    assert shown(capsys, "inspect", folder / "alone")["base"] is None
    assert run(capsys, "decompress", folder / "alone", "--out", folder / "back")[0] == 0
    assert contents(folder / "back") == contents(folder / "tuned")


def test_without_a_base_it_is_found_or_the_candidates_are_shown(tmp_path, capsys):
    src, base = pair(tmp_path)
    stranger = write_folder(tmp_path / "stranger", weights(seed=5))
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps(config | {"_name_or_path": str(stranger)}))
    code, out, err = run(capsys, "compress", src, "--out", tmp_path / "small")
    assert (code, out) == (1, "") and f"None of 1 candidates fits {src} (" in err and "Give the base by name: --base" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "small").exists()
    (src / "config.json").write_text(json.dumps(config | {"_name_or_path": str(base)}))
    code, out, _ = run(capsys, "compress", src, "--out", tmp_path / "small", "--verify")
    assert code == 0 and out.startswith(f"The base of {src} is {base}.\n")
    assert "requires --base" in mistaken(capsys, "compress", src, "--revision", "main", "--out", tmp_path / "out")


def test_find_base_prints_its_summary_a_table_or_json(folder, capsys):
    arguments = ("find-base", folder / "tuned", folder / "base", folder / "none")
    report = fm_delta.find_base(*arguments[1:2], arguments[2:])
    assert run(capsys, *arguments)[:2] == (0, f"{report.summary()}\n") and report.verdict == "sure"
    assert run(capsys, *arguments, "--verbose")[:2] == (0, f"{report}\n")
    assert shown(capsys, *arguments) == report.to_dict()
    stranger = write_folder(folder / "stranger", weights(seed=5))
    code, out, _ = run(capsys, "find-base", folder / "tuned", stranger)
    assert code == 1 and out == f"None of 1 candidates fits {folder / 'tuned'}. --verbose shows how the candidates compare.\n"


def test_many_models_are_compressed_and_a_failure_exits_with_1(folder, capsys):
    write_folder(folder / "models/a", fine_tune(weights(), 2))
    write_folder(folder / "models/b", fine_tune(weights(), 3))
    options = ("--base", folder / "base", "--out", folder / "out")
    code, out, _ = run(capsys, "compress-all", folder / "models", *options)
    assert code == 0 and "2 of 2 models done" in out
    (folder / "broken").mkdir()
    (folder / "broken/model.safetensors").write_bytes(b"broken")
    code, out, _ = run(capsys, "compress-all", folder / "tuned", folder / "broken", *options, "--json")
    assert code == 1
    again = run(capsys, "compress-all", folder / "broken", *options)[1]
    assert re.search(r"^broken +– +– +– +0\.0 .*failed$", again, re.MULTILINE)
    main(["compress-all", str(folder / "tuned"), *map(str, options)])
    assert "models:" not in capsys.readouterr().err  # no bar, as nothing was to be done
    errors = {model["name"]: bool(model["error"]) for model in json.loads(out)["models"]}
    assert errors == {"a": False, "b": False, "broken": True, "tuned": False}
    for workers in ("0", "-1", "two"):
        assert "'--workers'" in mistaken(capsys, "compress-all", "models", "--out", "out", f"--workers={workers}")


@pytest.fixture
def mixed(folder):
    """A folder with two models, two adapters, a GGUF file, old PyTorch weights and notes."""
    models = folder / "models"
    for seed, name in enumerate(("a", "b")):
        write_folder(models / name, fine_tune(weights(), seed))
    adapters = ("lora/adapter_config.json", "lora-2/adapter_config.json")
    for name in (*adapters, "gguf/q4.gguf", "old/pytorch_model.bin", "notes/notes.md"):
        (models / name).parent.mkdir()
        (models / name).write_text("{}")
    return models


def test_errors_say_what_a_folder_without_weights_holds(folder, mixed, capsys):
    for name, reason in (("lora", "holds a PEFT adapter"), ("gguf", "holds GGUF weights"), ("old", "holds PyTorch files")):
        for command in ("compress", "compress-all"):
            code, out, err = run(capsys, command, mixed / name, "--base", folder / "base", "--out", folder / f"out-{command}")
            assert code == 1 and f"{name} {reason}" in out + err
        assert f"{name} {reason}" in fails(capsys, "find-base", mixed / name)
    (mixed / "no/lora").mkdir(parents=True)
    (mixed / "no/lora/adapter_config.json").write_text("{}")
    assert "no/lora holds a PEFT adapter" in fails(capsys, "compress-all", mixed / "no", "--out", folder / "none")


def test_reports_of_many_models_list_skipped_folders(folder, mixed, capsys):
    for _ in range(2):  # also when all is done
        code, out, _ = run(capsys, "compress-all", mixed, "--base", folder / "base", "--out", folder / "out")
        assert code == 0 and "2 of 2 models done" in out and "Skipped 5 other folders." in out
        assert re.findall(r"^(\S+) .* skipped$", out, re.MULTILINE) == ["gguf", "lora", "lora-2", "notes", "old"]
        assert out.count("PEFT adapter") == 1 and "\n\nlora, lora-2: holds a PEFT adapter" in out
    result = json.loads((folder / "out/compress_all.json").read_text())["models"]
    assert [bool(model["skipped"]) for model in result] == [False, False, True, True, True, True, True]


def test_the_same_reason_is_printed_once_for_many_models(folder, mixed, capsys):
    stranger = write_folder(folder / "stranger", weights(seed=9))
    code, out, _ = run(capsys, "compress-all", mixed, "--candidates", stranger, folder / "small", "--out", folder / "out")
    assert code == 1 and out.count("Give the base by name") == 1
    assert f"\n\na, b: None of 2 candidates fits {mixed / 'a'}" in out and out.count("(the others likewise)") == 1
    code, out, _ = run(capsys, "compress-all", mixed, "--candidates", stranger, folder / "base", "--out", folder / "out")
    assert code == 0 and out.count(str(folder / "base")) == 2


def test_an_unrelated_base_is_refused_before_anything_is_written(folder, capsys):
    stranger = write_folder(folder / "stranger", weights(seed=5))
    error = fails(capsys, "compress", folder / "tuned", "--base", stranger, "--out", folder / "out")
    assert "is not the base of" in error and "find-base" in error and "--no-base" in error
    assert not (folder / "out").exists()
    assert run(capsys, "compress", folder / "tuned", "--base", folder / "small", "--out", folder / "chain")[0] == 0


def test_threads_limits_all_commands_that_work_on_tensors(folder, tasks, monkeypatch, capsys):
    pools, (base, models) = [], tasks

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads, **options):
            pools.append(threads)
            super().__init__(threads, **options)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(prefetch, "CORES", 5)
    monkeypatch.setattr(prefetch, "ThreadPoolExecutor", Pool)
    lines = (
        "compress tuned --base base --out new --verify", "decompress new --out back", "verify new",
        "compress-all tuned --base base --out all", f"merge --base {base} --task a={models['trec']} --bits 6 --out merged",
        f"add-task merged --task b={models['trec']} --bits 6 --out more", "extract more --task b --out extracted",
        f"extract-lora {models['trec']} --base {base} --out lora --rank 4",
    )  # fmt: skip
    for threads, options in ((2, ["--threads", "2"]), (5, [])):
        for line in lines:
            if threads == 5 and line.startswith("compress-all"):  # is done once
                continue
            pools.clear()
            code, _, error = run(capsys, *options, *line.split())
            assert code == 0, error
            assert set(pools) == {threads}, line
    assert "--threads" in mistaken(capsys, "--threads", "0", "verify", "new")


def test_inspect_prints_its_summary_or_tables_and_draws_a_picture(folder, capsys, monkeypatch):
    report = fm_delta.inspect(folder / "small")
    assert run(capsys, "inspect", folder / "small") == (0, f"{report.kind_table()}\n\n{report.summary()}\n", "")
    assert run(capsys, "inspect", folder / "small", "--verbose") == (0, f"{report}\n", "")
    picture = folder / "sizes.png"
    assert run(capsys, "inspect", folder / "small", "--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.stat().st_size > 10_000
    assert "sizes.nonsense" in fails(capsys, "inspect", folder / "small", "--plot", folder / "sizes.nonsense")
    assert "none/sizes.png" in fails(capsys, "inspect", folder / "small", "--plot", folder / "none/sizes.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = run(capsys, "inspect", folder / "small", "--plot", folder / "none.png")
    assert code == 0 and "MB" in out and "pip install matplotlib" in out and not (folder / "none.png").exists()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Folders of a base and of its fine-tunes, to merge."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_tasks_are_merged_checked_shown_and_taken_out_again(tmp_path, tasks, capsys):
    base, folders = tasks
    named = [part for task, folder in folders.items() for part in ("--task", f"{task}={folder}")]
    merged, one = tmp_path / "merged", tmp_path / "cr"
    code, out, _ = run(capsys, "merge", "--base", base, *named, "--method", "emr", "--out", merged)
    assert (code, out) == (0, emr.report(merged).summary() + "\n")
    assert run(capsys, "inspect", merged)[:2] == (0, f"{emr.report(merged)}\n")
    assert shown(capsys, "inspect", merged, "--plot", tmp_path / "tasks.png") == emr.report(merged).to_dict()
    assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert run(capsys, "verify", merged)[0] == 0
    assert shown(capsys, "extract", merged, "--task", "cr", "--out", one) == {"out": str(one), "task": "cr"}
    emr.extract(merged, "cr", tmp_path / "expected")
    assert contents(one) == contents(tmp_path / "expected")


def test_tasks_are_added_and_renamed_by_commands(tmp_path, tasks, capsys):
    base, folders = tasks
    one = ("--task", f"cr={folders['cr']}", "--out", tmp_path / "one")
    result = shown(capsys, "merge", "--base", base, *one, "--method", "emr")
    assert [task["task"] for task in result["tasks"]] == ["cr"] and result["bytes"] > 0
    command = ("add-task", tmp_path / "one", "--out", tmp_path / "two", "--task")
    assert "has a task 'cr' already" in mistaken(capsys, *command, f"cr={folders['subj']}")
    assert "--method switch" in fails(capsys, *command, f"subj={folders['subj']}")
    assert "two tasks called 'a'" in mistaken(capsys, *command, f"a={folders['cr']}", "--task", f"a={folders['cr']}")
    result = shown(capsys, *command, f"cr-again={folders['cr']}", "--task", f"third={folders['cr']}")
    assert result == emr.report(tmp_path / "two").to_dict()
    assert [task["task"] for task in result["tasks"]] == ["cr", "cr-again", "third"]
    result = shown(capsys, "rename-task", tmp_path / "two", "--task", "third", "--to", "last", "--out", tmp_path / "three")
    assert [task["task"] for task in result["tasks"]] == ["cr", "cr-again", "last"]


def test_a_coded_task_is_merged_added_and_removed_by_commands(tmp_path, tasks, capsys):
    base, folders = tasks
    named = [part for task in ("cr", "trec") for part in ("--task", f"{task}={folders[task]}")]
    merge = ("merge", "--base", base, *named, "--out", tmp_path / "two")
    for options, message in ((("--bits", 0), "bits=0.0"), (("--size", "big"), "size='big'")):
        assert message in fails(capsys, *merge, *options)
    assert "bits and size are given" in fails(capsys, *merge, "--size", "1MB", "--bits", 1) and not (tmp_path / "two").exists()
    assert run(capsys, *merge, "--bits", 6)[0] == 0
    add = ("add-task", tmp_path / "two", "--task", f"subj={folders['subj']}", "--out", tmp_path / "three")
    assert run(capsys, *add, "--bits", 6)[0] == 0
    remove = ("remove-task", tmp_path / "three", "--out", tmp_path / "rest", "--task")
    assert "its tasks are cr, trec, subj" in mistaken(capsys, *remove, "sst2")
    result = shown(capsys, *remove, "cr")
    assert result == emr.report(tmp_path / "rest").to_dict() and [task["task"] for task in result["tasks"]] == ["trec", "subj"]


def test_errors_are_one_line(folder, capsys):
    src, base, out = folder / "tuned", folder / "base", folder / "out"
    run_folder = write_folder(folder / "run/checkpoint-5", fine_tune(weights())).parent
    checkpoints = f"Give one of them, such as {run_folder / 'checkpoint-5'}"
    for line, message in (
        (("compress", src, "--base", base, "--out", src / "config.json"), f"{src / 'config.json'} is a file; give a folder"),
        (("verify", src), "is not compressed"),
        (("extract", src, "--task", "cr", "--out", out), "holds no merge"),
        (("inspect", run_folder), checkpoints),
        (("verify", run_folder), checkpoints),
    ):
        assert message in fails(capsys, *line)
    assert not out.exists()


def examples(text: str) -> list[list[str]]:
    """Returns the command lines in a help text, as words."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line.replace("$ ", ""), comments=True)[1:] for line in lines if re.match(r" +(\$ )?hf-ext ", line)]


def parsed(words: list[str]) -> None:
    """Parses a command line without running it."""
    context = COMMANDS[words[0]].make_context(words[0], words[1:])
    assert context.allow_extra_args or not context.args


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_valid_examples(command, capsys):
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "") and out.startswith(f"Usage: hf-ext {command} ")
    assert max(map(len, out.splitlines())) <= 88
    lines = examples(out.split("Examples:\n")[1])
    assert lines and {words[0] for words in lines} == {command}
    for words in lines:
        parsed(words)


def test_no_command_has_more_than_eight_options_besides_those_of_all_writers():
    options = {name: {item.opts[0] for item in command.params} - {"--force", "--json"} for name, command in COMMANDS.items()}
    assert {name for name in COMMANDS if sum(option.startswith("--") for option in options[name]) > 8} == set()


def test_the_help_is_a_tutorial_that_shows_every_command_at_work(capsys):
    code, out, err = run(capsys, "--help")
    assert run(capsys) == (2, out, "")  # without a command, as `hf` does
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 88
    listed = re.findall(r"^    ([a-z][a-z-]+)  +[a-z]", out, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    worked = [part for part in out.split("\n\n") if part.lstrip().startswith("$ hf-ext ")]
    assert len(worked) == 6
    lines = examples("\n".join(worked))
    for words in lines:
        parsed(words)
    assert sum(len(re.findall(r"\$ hf-ext", part)) for part in worked) == len(lines) >= 12


def test_help_and_mistakes_import_no_heavy_library():
    code = """
import sys
from hf_ext.cli.main import main
for line in ("--help", "transfer --help", "compress a", "compress a --out b --revision c", "compres"):
    main(line.split())
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "peft", "numpy"}))
"""
    done = process(of=("-c", code))
    assert done.stdout.splitlines()[-1] == "[]" and done.stderr.count("\n") == 3


@pytest.mark.parametrize(
    ("line", "expected"), [("hf-ext compress", ["compress", "compress-all"]), ("hf-ext inspect --pl", ["--plot"])]
)
def test_a_shell_completes_commands_options_and_choices(line, expected, monkeypatch, capsys):
    words = {"_HF_EXT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit:
        main([])
    assert not exit.value.code and capsys.readouterr().out.split() == expected


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_a_result_that_cannot_be_printed_is_one_line():
    code = (
        "import os, runpy; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); runpy.run_module('hf_ext.cli', run_name='__main__')"
    )
    done = process("--version", of=("-c", code))
    message = "hf-ext: the result could not be printed: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_the_version_comes_with_those_of_the_libraries(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith(f"hf_ext {hf_ext.__version__} (transformers {transformers.__version__}, peft ")
    assert f"torch {metadata.version('torch')}," in out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--traceback"], "hf-ext: Missing command"),
    (["zip"], "hf-ext: No such command 'zip'"),
    (["compres"], "Did you mean 'compress', "),
    (["compress", "a"], "hf-ext compress: Missing option '--out'"),
    (MERGE, "hf-ext merge: Missing option '--task'"),
    (["compress", "a", "--out", "b", "--verfy"], "--verify"),  # Typer's versions word it in several ways
    (["compress", "a", "--out"], "hf-ext compress: Option '--out' requires an argument"),
    (["compress", "a", "--out", "b", "--level", "9"], "hf-ext compress: Invalid value for '--level': "),
    (["compress", "a", "--out", ""], "hf-ext compress: Invalid value for '--out': the value is empty; give a path"),
    (["compress", "a", "--out", "b", "--base-id", "org/name"], "for '--base-id': requires --base"),
    (["compress", "a", "--out", "b", "--no-base", "--base", "c"], "for '--no-base': cannot be combined with --base"),
    ("compress-all a --out b --base c --candidates d e".split(), "for '--candidates': cannot be combined with --base"),
    (["verify", ""], "hf-ext verify: Invalid value for 'SRC': the value is empty"),
    (["transfer"], "hf-ext transfer: Missing option '--out'"),
    *(([*MERGE, "--task", task], "not of the form NAME=PATH") for task in ("cr", "=a", "cr=")),
    ([*MERGE, "--task", "a b=c"], "'a b'"),
    ([*MERGE, "--task", "cr=c", "--task", "cr=d"], "two tasks called 'cr'"),
    ([*MERGE, "--task", "cr=c", "--method", "other"], "'other' is not one of 'switch', 'emr'"),
])  # fmt: skip
def test_a_wrong_command_line_is_explained_in_one_line(arguments, message, capsys):
    assert message in mistaken(capsys, *arguments)


def test_as_a_process_it_exits_with_one_line_and_no_traceback(folder):
    done = process("inspect", folder / "small", "--verbose", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and r"\xd7" in done.stdout
    failed = process("verify", folder / "tuned")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("hf-ext: ") and failed.stderr.count("\n") == 1


def test_delta_commands_need_neither_transformers_nor_peft(folder):
    code = """
import sys
sys.modules |= {"transformers": None, "peft": None, "accelerate": None}  # as if they were not installed
from hf_ext.cli.main import main
lines = (
    "compress tuned --base base --out new --verify", "verify new", "inspect new", "find-base tuned base",
    "decompress new --out back", "compress-all tuned --candidates base --out all", "merge --base base --task a=tuned --out x",
)
print([main(line.split()) for line in lines])
"""
    done = python("-c", code, cwd=folder, hosts=False)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 1]"
    assert done.stderr.splitlines()[-1].endswith("Install it: pip install transformers")
    assert contents(folder / "back") == contents(folder / "tuned")


def test_delta_commands_import_pytorch_only_for_low_rank_parts(folder):
    code = """
import sys
from hf_ext.cli.main import main
heavy = {"torch", "transformers", "huggingface_hub.hf_api"}
for line in ("inspect small", "compress tuned --base base --out new --level 1", "verify new", "decompress new --out back",
             "compress tuned --base base --out best"):
    assert main(line.split()) == 0
    print(sorted(heavy & sys.modules.keys()))
    heavy.discard("huggingface_hub.hf_api")  # only inspecting needs no part of it
"""
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (folder / "tuned/config.json").write_text(json.dumps(config))
    done = process(of=("-c", code), cwd=folder)
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == ["[]"] * 4 + ["['torch']"], done.stderr
    assert "fm-delta" in (folder / "new/README.md").read_text()


def test_a_fault_is_one_line_and_traceback_shows_where(folder, monkeypatch, capsys):
    def faulty(*_, **__):
        raise KeyError("what is missing")

    monkeypatch.setattr(fm_delta, "verify", faulty)
    line = fails(capsys, "verify", folder / "small")
    assert line == "hf-ext: KeyError: 'what is missing' (hf-ext --traceback verify … shows where it comes from)\n"
    _, _, err = run(capsys, "--traceback", "verify", folder / "small")
    assert err.startswith("Traceback") and "in faulty" in err and err.endswith(line)


def test_an_interrupted_run_says_what_it_has_left(folder, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fm_delta, "compress_checkpoint", interrupted)
    command = ("compress", folder / "tuned", "--base", folder / "base", "--out")
    assert run(capsys, *command, folder / "out") == (130, "", "hf-ext: interrupted; nothing was written.\n")
    left = f"hf-ext: interrupted; {folder / 'small'} is unchanged, or has the whole model.\n"
    assert run(capsys, *command, folder / "small") == (130, "", left)


def test_ctrl_c_while_the_command_starts_prints_one_line():
    code = """
import importlib.abc, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("hf_ext.cli", run_name="__main__")
"""
    done = process("verify", "small", of=("-c", code))
    assert (done.returncode, done.stderr) == (130, "hf-ext: interrupted.\n")


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", -15), ("SIGHUP", -1)])
def test_a_signal_leaves_no_temporary_files(tmp_path, name, code):
    pair(tmp_path)
    before = contents(tmp_path)
    script = f"""
import runpy, signal, sys
sent = []
def interrupt(event, arguments):
    if event == "open" and ".out.hf_ext-partial" in str(arguments[0]) and not sent:
        sent.append(event)
        signal.raise_signal(signal.{name})
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
sys.addaudithook(interrupt)
runpy.run_module("hf_ext.cli", run_name="__main__")
"""
    done = process("compress", "tuned", "--base", "base", "--out", "out", of=("-c", script), cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, "hf-ext: interrupted; nothing was written.")
    assert contents(tmp_path) == before and {path.name for path in tmp_path.iterdir()} == {"base", "tuned"}


def test_the_last_line_says_that_config_json_is_missing(folder, capsys):
    for name in ("tuned", "small"):
        (folder / name / "config.json").unlink()
    tuned, small, base = folder / "tuned", folder / "small", (folder / "base").rename(folder / "moved")
    for command, bare in (
        (["compress", tuned, "--base", base, "--out", folder / "out", "--verify"], folder / "out"),
        (["decompress", small, "--base", base, "--out", folder / "back"], folder / "back"),
        (["verify", small, "--base", base], small),
    ):
        code, out, _ = run(capsys, *command)
        assert code == 0 and out.endswith(f". {bare} has no config.json, so from_pretrained cannot load it.\n")


def test_another_tool_runs_with_the_package_imported(tmp_path, monkeypatch, capsys):
    """A tool parses its own arguments, and its output and exit code are its own."""
    info = tmp_path / "tool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[console_scripts]\nmy-tool = my_tool:main\nwithout-extra = my_tool:serve\nwithout-module = my_tool:read\n"
    )
    (tmp_path / "my_tool.py").write_text(
        "import sys\ndef main():\n    print(sys.argv, 'hf_ext' in sys.modules)\n    return 3\n"
        "def serve():\n    raise ImportError('Install with `pip install tool[extra]`')\n"
        "def read():\n    import yaml_2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    done = run(capsys, "run", "my-tool", "--json", "--out", "x", "--help")
    assert done == (3, "['my-tool', '--json', '--out', 'x', '--help'] True\n", "")
    assert "pip install tool[extra]" in fails(capsys, "run", "without-extra")
    assert fails(capsys, "run", "without-module").endswith("No module named 'yaml_2'. Install the package that provides it.\n")
    assert "There is no command 'no-such-tool'" in fails(capsys, "run", "no-such-tool")


def test_a_closed_pipe_is_no_error(folder):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for arguments in (["inspect", str(folder / "small")], ["--version"]):
        with subprocess.Popen([sys.executable, "-m", "hf_ext.cli", *arguments], env=env, **pipes) as piped:
            piped.stdout.close()
            assert piped.stderr.read() == b"" and piped.wait(120) == 1
