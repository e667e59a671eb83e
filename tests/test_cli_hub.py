"""Commands that read from the Hub and push to it, and what they keep when that fails; a base that is not the base."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
from local_hub import LocalHub
from processes import python
from test_cli import fails, run, shown
from tiny_checkpoints import contents, pair, weights, write_folder
from tiny_merges import write_tasks

from hf_ext import emr, fm_delta

SCRIPT = """
import contextlib, io, json, os, sys
from pathlib import Path
from huggingface_hub import HfApi
from hf_ext.cli.main import main

src, base = sys.argv[1:3]
token = os.environ["HF_TOKEN"]
def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([*map(str, arguments)])
    return [code, out.getvalue(), err.getvalue()]

for name, folder in (("base", base), ("tuned", src)):
    HfApi().create_repo(f"user/{name}")
    HfApi().upload_folder(repo_id=f"user/{name}", folder_path=folder)
commit = HfApi().model_info("user/base").sha
local = ("--base", base, "--base-id", "user/base", "--revision", commit)
results = {
    "pushed": run("compress", src, *local, "--push-to-hub", "user/small"),
    "recorded": json.loads(Path(HfApi().hf_hub_download("user/small", "config.json")).read_text())["quantization_config"],
    "commit": commit,
    "no repository": run("compress", src, "--base", "user/base", "--push-to-hub", "user/no/name"),
}
Path(src, "README.md").write_text("---\\nbase_model: /a/folder\\n---\\n")
results["no upload"] = run("compress", src, "--base", "user/base", "--push-to-hub", "user/other")
results["no upload, with a folder"] = run("compress", src, "--base", "user/base", "--push-to-hub", "user/other", "--out", "out")
results |= {command: run(command, "user/small") for command in ("inspect", "verify")}
results["decompress"] = run("decompress", "user/small", "--out", "back")
base_task, *tasks = sys.argv[3:]
merge = ("merge", "--base", "user/tasks-base", *(part for task in tasks for part in ("--task", task)))
HfApi().create_repo("user/tasks-base")
HfApi().upload_folder(repo_id="user/tasks-base", folder_path=base_task)
results["merge"] = run(*merge, "--push-to-hub", "user/merged", "--private", "--json")
results["merge of a local base"] = run("merge", "--base", base_task, "--task", tasks[0], "--push-to-hub", "user/no")
name, _, folder = tasks[0].partition("=")
run("merge", "--base", base_task, "--task", tasks[0], "--out", "local")
results["add-task, local base"] = run("add-task", "local", "--task", tasks[1], "--reelect", "--push-to-hub", "user/local")
results["inspect a merge"] = run("inspect", "user/merged")
results["verify a merge"] = run("verify", "user/merged")
results["extract"] = run("extract", "user/merged", "--task", name, "--out", "extracted")
results["extract and push"] = run("extract", "user/merged", "--task", name, "--push-to-hub", "user/extracted")
results["add-task"] = run("add-task", "user/merged", "--task", f"more={folder}", "--out", "more", "--reelect")
Path(src, "README.md").unlink()
batch = ("compress-all", src, "--out", "all", "--push-to-hub", "me", "--private", "--base")
results["compress-all"] = run(*batch, "user/base")
results["compress-all, local base"] = run(*batch, base)
os.environ["HF_TOKEN"] = ""
results["without a token"] = run("inspect", "me/tuned")
results["with a token"] = run("inspect", "me/tuned", "--token", token)
results["token left"] = os.environ["HF_TOKEN"]
results["find-base"] = run("find-base", "user/tuned", "user/base")
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def results(place):
    src, base = pair(place)
    tasks_base, tasks = write_tasks(place / "tasks", {"trec": 6, "cr": 2})
    tasks = [f"{name}={folder}" for name, folder in tasks.items()]
    with LocalHub() as hub:
        done = python("-c", SCRIPT, src, base, tasks_base, *tasks, env=hub.client_env(place), cwd=place)
        private = {name: repo.private for name, repo in hub.repos.items()}
        files = {name: {*repo.at("main").files} for name, repo in hub.repos.items()}
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"private": private, "files": files}


def test_a_local_copy_of_the_base_is_recorded_by_id_and_commit(results):
    assert results["pushed"][0] == 0 and "Pushed to user/small." in results["pushed"][1]
    assert (results["recorded"]["base"], results["recorded"]["revision"]) == ("user/base", results["commit"])


def test_a_repository_that_cannot_be_created_is_found_first(results):
    code, _, err = results["no repository"]
    assert code == 1 and "user/no/name cannot be written, so nothing was done" in err and "tensors" not in err


def test_a_result_that_cannot_be_uploaded_is_kept(results, place):
    code, _, err = results["no upload"]
    kept = re.search(r"(\S+) is written, but its upload to user/other failed", err)
    assert code == 1 and kept
    assert results["no upload, with a folder"][0] == 1
    for folder in (kept[1], place / "out"):
        assert fm_delta.verify(folder, base=place / "base") == len(weights())
    shutil.rmtree(kept[1])


@pytest.mark.parametrize("command", ["inspect", "verify", "decompress", "find-base"])
def test_checkpoints_are_read_from_the_hub_by_their_ids(results, place, command):
    code, out, err = results[command]
    assert code == 0, err
    if command == "decompress":
        assert (place / "back" / "model.safetensors").read_bytes() == (place / "tuned" / "model.safetensors").read_bytes()
    elif command == "find-base":
        assert "user/base" in out and "sure" in out


def test_a_merge_is_pushed_without_paths_of_this_machine(results):
    code, out, err = results["merge"]
    assert code == 0 and json.loads(out)["pushed_to"] == "user/merged", err
    assert results["private"]["user/merged"] and not results["private"]["user/small"]
    assert "config.json" in results["files"]["user/merged"] and "merge_recipe.yaml" not in results["files"]["user/merged"]
    code, _, err = results["merge of a local base"]
    assert code == 1 and "Others cannot read the base" in err and "user/no" not in results["private"]
    code, _, err = results["add-task, local base"]  # the base is known only from the merge
    kept = re.search(r"(\S+) is written, but its upload to user/local failed: Others cannot read the base", err)
    assert code == 1 and emr.verify(kept[1]) and results["files"]["user/local"] == {".gitattributes"}
    shutil.rmtree(kept[1])


@pytest.mark.parametrize("command", ["inspect a merge", "verify a merge", "extract", "add-task"])
def test_merges_are_read_from_the_hub_by_their_ids(results, command):
    assert results[command][0] == 0, results[command][2]


def test_a_temporary_folder_is_not_named_as_the_result(results):
    assert results["extract and push"] == [0, "Wrote the model of task 'trec'.\nPushed to user/extracted.\n", ""]
    assert "Wrote the model of task 'trec' to extracted." in results["extract"][1]


def test_each_of_many_models_is_pushed_to_its_own_repository(results):
    code, out, err = results["compress-all"]
    assert code == 0 and out.endswith("Pushed 1 of 1 models to me.\n"), err
    assert results["private"]["me/tuned"] and "model.safetensors" in results["files"]["me/tuned"]
    code, _, err = results["compress-all, local base"]
    assert code == 1 and "Others cannot read the base" in err


def test_a_token_is_used_for_one_command(results):
    assert results["without a token"][0] == 1 and "me/tuned" in results["without a token"][2]
    assert results["with a token"][0] == 0, results["with a token"][2]
    assert results["token left"] == ""


def test_an_unrelated_base_is_refused_before_writing(tmp_path, capsys):
    src, base = pair(tmp_path)
    stranger = write_folder(tmp_path / "stranger", weights(seed=5))
    command = ("compress", src, "--base", stranger, "--out", tmp_path / "small")
    error = fails(capsys, *command)
    assert "is not the base of" in error and all(advice in error for advice in ("find-base", "--no-base", "--any-base"))
    assert not (tmp_path / "small").exists()
    assert run(capsys, *command, "--any-base")[0] == 0
    assert run(capsys, "compress", src, "--base", tmp_path / "small", "--out", tmp_path / "chain")[0] == 0


def test_without_matplotlib_a_report_says_what_draws_its_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    base, tasks = write_tasks(tmp_path, {"trec": 6, "cr": 2})
    given = [argument for task, folder in tasks.items() for argument in ("--task", f"{task}={folder}")]
    code, out, _ = run(capsys, "merge", "--base", base, *given, "--out", tmp_path / "merged", "--report")
    assert code == 0 and "cosine" in out and "pip install matplotlib" in out
    code, out, _ = run(capsys, "inspect", tmp_path / "merged", "--plot", tmp_path / "picture.png")
    assert code == 0 and "pip install matplotlib" in out and not (tmp_path / "picture.png").exists()
    assert "MB" in out or "cosine" in out
    assert contents(tmp_path / "merged").keys() & {"report.png"} == set()
    assert shown(capsys, "inspect", tmp_path / "merged")
