"""The local Hub is real enough when plain Transformers can push to it, load from it, fail and go offline as usual."""

import json

import pytest
from local_hub import Commit, File, LocalHub, Repo
from processes import python

MODELS = """
import json, sys, torch
from transformers import BertConfig, BertModel
def build(seed):
    torch.manual_seed(seed)
    return BertModel(BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
def push(seed, **options):
    return build(seed).push_to_hub("user/tiny", commit_message=f"seed {seed}", **options).oid
def check(seed, **options):
    loaded = BertModel.from_pretrained("user/tiny", **options).state_dict()
    torch.testing.assert_close(loaded, build(seed).state_dict(), rtol=0, atol=0)
"""

PUSH_AND_LOAD = """
commits = [push(0), push(1), push(2, revision="dev/new")]
check(1)
for seed, revision in [(0, commits[0]), (1, "main"), (1, commits[1]), (2, "dev/new")]:
    check(seed, revision=revision)
print(json.dumps(commits))
"""

OTHER_FILES = """
from huggingface_hub import HfApi
api, big = HfApi(), b"text " * 3_000_000
repo_id = api.create_repo("files", private=True).repo_id
api.upload_file(path_or_fileobj=big, path_in_repo="data/big.txt", repo_id=repo_id)
added, again = (api.upload_file(path_or_fileobj=b"x", path_in_repo="data/x", repo_id=repo_id).oid for _ in range(2))
assert added == again
api.delete_file("data/x", repo_id)
assert open(api.hf_hub_download(repo_id, "data/big.txt"), "rb").read() == big
assert open(api.hf_hub_download(repo_id, "data/x", revision=added)).read() == "x"
assert [entry.path for entry in api.list_repo_tree(repo_id)] == [".gitattributes", "data"]
assert api.list_repo_files(repo_id) == [".gitattributes", "data/big.txt"]
assert api.get_safetensors_metadata("user/tiny").parameter_count
"""

DOWNLOADS = """
import sys
from huggingface_hub import hf_hub_download
for target in sys.argv[1:]:
    repo_id, filename, revision = target.split("@")
    try:
        print(open(hf_hub_download(repo_id, filename, revision=revision)).read())
    except Exception as error:
        print(type(error).__name__)
"""


def run(code: str, *args: str, env: dict[str, str]) -> str:
    done = python("-c", code, *args, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    home = tmp_path_factory.mktemp("hf_home")
    with LocalHub() as hub:
        yield hub, home, json.loads(run(MODELS + PUSH_AND_LOAD, env=hub.client_env(home)))


def test_pushed_commits_load_by_default_by_commit_and_by_branch(pushed):
    hub, _, commits = pushed
    repo = hub.repos["user/tiny"]
    assert repo.branches == {"main": commits[1], "dev/new": commits[2]}
    assert [repo.commits[commit].summary for commit in commits] == ["seed 0", "seed 1", "seed 2"]
    assert all(repo.commits[commit].files["model.safetensors"].lfs for commit in commits)


def test_cache_serves_offline(pushed):
    hub, home, commits = pushed
    answered = len(hub.log)
    run(MODELS + "check(0, revision=sys.argv[1]); check(1)", commits[0], env=hub.client_env(home, HF_HUB_OFFLINE="1"))
    assert len(hub.log) == answered


def test_large_unchanged_deleted_and_partly_read_files(pushed, tmp_path):
    hub = pushed[0]
    run(OTHER_FILES, env=hub.client_env(tmp_path))
    assert hub.repos["user/files"].at("main").files["data/big.txt"].lfs
    assert 206 in [status for method, path, status in hub.log if path.startswith("/storage/")]


def test_refusals_raise_the_usual_errors(pushed, tmp_path):
    targets = ["user/repo@a@main", "user/repo@b@main", "user/repo@a@dropped", "user/dropped@a@main"]
    errors = ["RemoteEntryNotFoundError", "RevisionNotFoundError", "RepositoryNotFoundError"]
    hub = pushed[0]
    hub.repos["user/repo"] = Repo(private=True)
    hub.repos["user/repo"].add("main", Commit(None, "first", {"a": File(b"content", lfs=False)}))
    assert run(DOWNLOADS, *targets, env=hub.client_env(tmp_path)).split() == ["content", *errors]
    stranger = hub.client_env(tmp_path / "stranger", signed_in=False)
    assert run(DOWNLOADS, targets[0], env=stranger).split() == ["RepositoryNotFoundError"]
