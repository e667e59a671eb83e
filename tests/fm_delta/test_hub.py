"""Compressed checkpoints go to the Hub by the usual calls and load from it by id, with the base pinned to its commit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from local_hub import LocalHub
from tiny_models import bert, perturb

from hf_ext.storage.config_file import HINT
from hf_ext.storage.installation import plugin

MODELS = """
import json, os, sys
from pathlib import Path
import torch
import hf_ext
from hf_ext import fm_delta
from tiny_checkpoints import edit_settings
from tiny_models import assert_same_weights, bert, perturb
from transformers import AutoModelForSequenceClassification

def tuned(seed):
    return perturb(bert(), seed)

load = AutoModelForSequenceClassification.from_pretrained

def check(seed, *args, **options):
    assert_same_weights(load(*args, **options), tuned(seed))

def report(act, *values):
    errors = []
    for value in values:
        try:
            errors.append(["none", str(act(value))])
        except Exception as error:
            errors.append([type(error).__name__, str(error)])
    print(json.dumps(errors))
"""

PUSH = """
base = bert().push_to_hub("user/base").oid
tuned(1).push_to_hub("user/plain")
model = fm_delta.enable(tuned(1), "user/base")
model.push_to_hub("user/small", commit_message="by push_to_hub")
second = fm_delta.enable(tuned(2), "user/base").push_to_hub("user/small", revision="second").oid
fm_delta.enable(tuned(3), "user/base").push_to_hub("user/shards", max_shard_size="60KB")
model.add_model_tags("tiny")
model.save_pretrained("saved", push_to_hub=True, repo_id="user/saved", commit_message="by save_pretrained", private=True)
assert {path.name for path in Path("saved").iterdir()} == {"README.md", "config.json", "model.safetensors"}
Path("saved/notes.txt").write_text("not part of the save")
fm_delta.enable(tuned(4), "user/base").save_pretrained("saved", push_to_hub=True, repo_id="user/saved")
# From now on the base's main branch is another model.
other = perturb(bert(), 99).push_to_hub("user/base").oid
print(json.dumps({"base": base, "other": other, "second": second}))
"""

LOAD = """
check(1, "user/small")
check(1, "user/plain")
check(2, "user/small", revision="second")
check(2, "user/small", revision=sys.argv[1])
check(3, "user/shards")
check(4, "user/saved")
with fm_delta.open("user/small", revision=sys.argv[1], cache_dir="cache") as checkpoint:
    assert checkpoint.get_tensor("classifier.weight").equal(tuned(2).classifier.weight)
try:
    raise AssertionError(fm_delta.open("user/small", cache_dir="empty", local_files_only=True))
except hf_ext.BaseModelError as error:
    assert "'user/small'" in str(error)
"""

PIN = """
model = fm_delta.enable(tuned(1), "user/base", revision=sys.argv[1])
model.save_pretrained("pinned")
config = json.loads(Path("pinned/config.json").read_text())["quantization_config"]
assert (config["base"], config["revision"]) == ("user/base", sys.argv[1])
check(1, "pinned")
fm_delta.enable(model, "user/base").save_pretrained("newest")
config = json.loads(Path("newest/config.json").read_text())["quantization_config"]
assert config["revision"] == sys.argv[2]
check(1, "newest")
"""

ANOTHER_BASE = """
from huggingface_hub import snapshot_download
from transformers import BertConfig, BertForSequenceClassification
wide = BertForSequenceClassification(BertConfig.from_pretrained("user/base", hidden_size=96))
wide.push_to_hub("user/wide")
wide.push_to_hub("user/wide-shards", max_shard_size="60KB")
names = ("user/wide", "user/wide-shards")
folders = [Path(snapshot_download("user/small", local_dir=f"needs/{name}")) for name in names]
for folder, name in zip(folders, names):
    edit_settings(folder, base=name, revision=None)
report(load, *folders)
"""


class Client:
    """Runs code in new processes that know no other Hub than `hub`."""

    def __init__(self, hub: LocalHub, home: Path):
        self.hub, self.home = hub, home

    def run(self, code: str, *args: str, **options) -> str:
        return self.hub.run(self.home, MODELS + code, *args, **options)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return {path: file.content for path, file in self.hub.repos[repo].at(revision).files.items()}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with LocalHub() as hub:
        yield Client(hub, tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def commits(client) -> dict[str, str]:
    return json.loads(client.run(PUSH))


def metadata(file: bytes) -> dict[str, str]:
    return json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]


@pytest.mark.parametrize("repo", ["user/small", "user/saved"])
def test_both_pushes_upload_compressed_files(client, commits, repo):
    files, plain = client.files(repo), client.files("user/plain")
    assert files.keys() == plain.keys()
    assert len(files["model.safetensors"]) < 0.85 * len(plain["model.safetensors"])
    record = json.loads(metadata(files["model.safetensors"])["fm_delta"])
    assert (record["base"]["name"], record["base"]["revision"]) == ("user/base", commits["base"])
    settings = json.loads(files["config.json"])["quantization_config"]
    expected = {"quant_method": "hf_ext.fm_delta", "base": "user/base", "revision": commits["base"], "dtype": "float32"}
    assert settings == expected | {"hint": HINT, "card": "added"} and plugin() in HINT
    assert record["hint"] == HINT
    assert plugin() in files["README.md"].decode()
    assert client.hub.repos[repo].at("main").files["model.safetensors"].lfs


def test_a_push_keeps_message_privacy_tags_and_branch(client, commits):
    small, saved = client.hub.repos["user/small"], client.hub.repos["user/saved"]
    assert [commit.summary for commit in small.commits.values()][1] == "by push_to_hub"
    assert [commit.summary for commit in saved.commits.values()][1:] == ["by save_pretrained", "Upload model"]
    assert saved.private and not small.private
    assert b"- tiny" in client.files("user/saved")["README.md"]
    assert small.branches["second"] == commits["second"]


def test_shards_are_pushed_compressed(client, commits):
    shards = [file for path, file in client.files("user/shards").items() if path.endswith(".safetensors")]
    assert len(shards) > 2 and all("fm_delta" in metadata(shard) for shard in shards)


def test_a_pushed_checkpoint_loads_after_its_base_has_changed(client, commits, tmp_path):
    assert client.hub.repos["user/base"].branches["main"] == commits["other"]
    client.run(LOAD, commits["second"], home=tmp_path)
    answered = len(client.hub.log)
    client.run(LOAD, commits["second"], home=tmp_path, HF_HUB_OFFLINE="1")
    assert len(client.hub.log) == answered


def test_the_base_may_be_given_with_a_revision(client, commits):
    client.run(PIN, commits["base"], commits["other"])


def test_a_base_that_cannot_be_reached_is_named_with_its_commit(client, commits, tmp_path, monkeypatch):
    base = client.hub.repos["user/base"]

    def refusal(**options) -> None:
        [[kind, message]] = json.loads(client.run("report(load, 'user/small')", **options))
        assert kind == "BaseModelError" and "'user/base'" in message and commits["base"] in message

    monkeypatch.setattr(base, "private", True)
    refusal(home=tmp_path / "stranger", signed_in=False)
    monkeypatch.setattr(base, "commits", {commit: base.commits[commit] for commit in base.commits if commit != commits["base"]})
    refusal(home=tmp_path / "newcomer")


def test_weights_of_another_model_are_not_downloaded(client, commits, tmp_path):
    seen = len(client.hub.log)
    errors = json.loads(client.run(ANOTHER_BASE, home=tmp_path))
    assert len(errors) == 2
    for kind, message in errors:
        assert kind == "BaseModelError" and "was not downloaded" in message and "user/small" not in message
        assert "'user/base'" in message and "F32 tensor that predicts" in message
    asked = [(method, path) for method, path, status in client.hub.log[seen:] if "user/wide" in path and status < 300]
    assert {"GET"} < {method for method, path in asked} and not list(tmp_path.rglob("models--user--wide*/**/*.safetensors"))


def test_a_listed_shard_that_a_repository_lacks_is_the_error(client, commits, tmp_path):
    repo = client.hub.repos["user/small"]
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()
    config = repo.at("main").files["config.json"]
    files = {"config.json": config, "model.safetensors.index.json": dataclasses.replace(config, content=index)}
    lacking = client.hub.repos["user/lacking"] = type(repo)(private=False)
    lacking.add("main", dataclasses.replace(repo.at("main"), files=files))
    [[kind, message]] = json.loads(client.run("report(fm_delta.open, 'user/lacking')", home=tmp_path))
    assert kind == "BaseModelError" and "'user/lacking'" in message
    assert client.hub.log[-1][1].endswith("model-00001-of-00002.safetensors")


INCOMPLETE = """
report(
    lambda act: act(),
    lambda: fm_delta.open("user/in-shards"),
    lambda: fm_delta.compress_checkpoint("user/in-shards", None, "out"),
    lambda: fm_delta.compress_checkpoint("user/plain", "user/in-shards", "out"),
    lambda: load("user/small"),
)
assert not Path("out").exists()
"""


@pytest.mark.parametrize("kind", ["no file", "a link to nothing"])
def test_without_a_connection_an_incomplete_copy_names_what_it_lacks(client, commits, tmp_path, kind):
    client.run(
        """
tuned(1).push_to_hub("user/in-shards", max_shard_size="60KB")
check(1, "user/in-shards")
check(1, "user/small")
check(1, "user/plain")
""",
        home=tmp_path,
    )
    (base,) = tmp_path.rglob("models--user--base/snapshots/*/model.safetensors")
    shard = sorted(tmp_path.rglob("models--user--in-shards/snapshots/*/model-*"))[1]
    for file in (base, shard):
        (file if kind == "no file" else file.resolve()).unlink()
    errors = json.loads(client.run(INCOMPLETE, home=tmp_path, HF_HUB_OFFLINE="1"))
    for (error, message), path in zip(errors, (shard, shard, shard, base), strict=True):
        assert error in ("BaseModelError", "CheckpointError")
        assert "is incomplete: " in message and path.name in message and "not in the cache" not in message
    client.run(LOAD.splitlines()[1], home=tmp_path)  # downloads it again


CHAIN = """
tuned(5).save_pretrained("five")
fm_delta.compress_checkpoint("five", "user/small", "five-small")
for folder, model in (("five-small", None), ("six-small", tuned(6))):
    if model:
        fm_delta.enable(model, "user/small").save_pretrained(folder)
    settings = json.loads(Path(folder, "config.json").read_text())["quantization_config"]
    assert (settings["base"], settings["revision"]) == ("user/small", sys.argv[1]), settings
"""


def test_a_compressed_base_is_recorded_by_id_and_commit(client, commits, tmp_path):
    client.run(CHAIN, client.hub.repos["user/small"].branches["main"])
    folders = [str(client.home / folder) for folder in ("five-small", "six-small")]
    client.run("check(5, sys.argv[1]); check(6, sys.argv[2])", *folders, home=tmp_path / "without the cache")


LIED_TO = """
for attempt in (
    lambda: fm_delta.compress_checkpoint(sys.argv[1], "user/base", "out"),
    lambda: fm_delta.compress_checkpoint("user/plain", None, "out"),
):
    try:
        attempt()
    except hf_ext.HfExtError as error:
        assert "user/" in str(error)
    else:
        raise AssertionError
"""


def test_a_server_that_leads_out_of_the_cache_is_refused(client, commits, tmp_path, monkeypatch):
    perturb(bert(), seed=4).save_pretrained(tmp_path / "tuned")
    monkeypatch.setattr(client.hub, "lies", {"X-Repo-Commit": "../../outside"})
    client.run(LIED_TO, str(tmp_path / "tuned"), home=tmp_path / "home")
    assert not list(tmp_path.rglob("*outside*"))
