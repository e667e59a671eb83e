"""Everything that this package makes goes to the Hub by the usual calls and comes back by id, branch, token and cache; a
download that fails leaves nothing behind, and a model in memory becomes another one of the Hub."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hosts import HAS_PISSA, host
from local_hub import LocalHub
from packaging.version import Version
from valid_cards import valid_card

# As in hub_artifacts.
KINDS = ["fm_delta", "emr", "discriminator", "transfer", "uni_med", *(["pissa", "qpissa"] if HAS_PISSA else [])]
every_kind = pytest.mark.parametrize("kind", KINDS)

PUSH = "print(json.dumps(push_all()))"

LOAD = """
import os
from importlib.metadata import version
from packaging.version import Version
refused = refusals(token=False)
assert not list(Path("cache").rglob("*.safetensors"))
token = {"token": sys.argv[1], "cache_dir": "cache"}
signed_in = []
if Version(version("transformers")) < Version("5.18"):  # there AutoTokenizer loses the token if there is no config.json
    signed_in.append("transfer")
loaded = load_all([name for name in ARTIFACTS if name not in signed_in], **token)
os.environ["HF_TOKEN"] = sys.argv[1]
loaded |= load_all(signed_in, cache_dir="cache")
print(json.dumps({"refused": refused, "loaded": loaded}))
"""

OFFLINE = 'print(json.dumps(load_all(cache_dir="cache")))'

# The connection breaks once in the middle of the compressed weights, then at the base's header and every attempt to get it.
UNSTEADY = """
import time
from hf_ext import BaseModelError
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 4096  # what comes in pieces of this size is kept
time.sleep = lambda seconds: None  # as huggingface_hub does between attempts
kind = ARTIFACTS["fm_delta"]

def weights():  # of what was downloaded to the end
    return sorted(path.parts[-4] for path in Path("cache").glob("models--*/snapshots/*/model.safetensors"))

try:
    kind.load("user/fm_delta", cache_dir="cache")
except BaseModelError as error:
    failed = str(error)
after = weights()
model = kind.load("user/fm_delta", cache_dir="cache")
report = {"failed": failed, "after": after, "loaded": numbers(kind, model), "then": weights()}
print(json.dumps(report))
"""

SWITCH = """
from hf_ext import CheckpointError, fm_delta
kind = ARTIFACTS["fm_delta"]
model = kind.load("user/fm_delta", cache_dir="cache", token=sys.argv[1])
places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
try:
    fm_delta.switch(model, "user/fm_delta", revision="second", token=False, cache_dir="empty")
except CheckpointError as error:
    refused = str(error)
unchanged = numbers(kind, model)
fm_delta.switch(model, "user/fm_delta", revision="second", token=sys.argv[1], cache_dir="cache")
second = numbers(kind, model)
fm_delta.switch(model, "user/fm_delta", token=sys.argv[1], cache_dir="cache", local_files_only=True)
assert places == {name: weight.data_ptr() for name, weight in model.named_parameters()}
print(json.dumps({"refused": refused, "unchanged": unchanged, "second": second, "main": numbers(kind, model)}))
"""


# The checkpoint itself was downloaded before. The base is private, and the environment has the token.
SETTINGS = """
from huggingface_hub import constants, snapshot_download
kinds = ["fm_delta", "emr"]
for kind in kinds:
    for revision in ("main", "second"):
        snapshot_download(f"user/{kind}", revision=revision, cache_dir="cache")
report = {"offline": refusals(kinds, cache_dir="cache", local_files_only=True)}
report["without"] = refusals(kinds, cache_dir="cache", token=False)
report["loaded"] = load_all(kinds, cache_dir="cache", token=sys.argv[1])
snapshot_download("user/emr", local_dir="local")
ARTIFACTS["emr"].load("local", cache_dir="cache", token=sys.argv[1]).save_pretrained("copy")
report["elsewhere"] = [path.name for path in Path(constants.HF_HUB_CACHE).glob("models--*")]
print(json.dumps(report))
"""


class Client:
    """Runs code in new processes that know no other Hub than `hub`, and takes what they print."""

    def __init__(self, hub: LocalHub, home: Path):
        self.hub, self.home = hub, home

    def run(self, code: str, *args: str, signed_in: bool = False, **extra: str) -> Any:
        code = f"import json, sys\nfrom pathlib import Path\nfrom hub_artifacts import *\n{code}"
        return json.loads(self.hub.run(self.home, code, *args, signed_in=signed_in, **extra).splitlines()[-1])


@pytest.fixture(scope="module")
def hub():
    with LocalHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def pushed(hub, tmp_path_factory) -> dict[str, dict[str, list[float]]]:
    """What the artifacts computed before they were pushed, by kind and revision."""
    return Client(hub, tmp_path_factory.mktemp("push")).run(PUSH, signed_in=True)


@pytest.fixture(scope="module")
def newcomer(hub, tmp_path_factory) -> Client:
    """Somebody who has downloaded nothing yet, and whose token is nowhere but in the calls."""
    return Client(hub, tmp_path_factory.mktemp("newcomer"))


@pytest.fixture(scope="module")
def fetched(hub, pushed, newcomer) -> dict[str, Any]:
    return newcomer.run(LOAD, hub.token)


@pytest.fixture(scope="module")
def offline(hub, fetched, newcomer) -> dict[str, Any]:
    answered = len(hub.log)
    computed = newcomer.run(OFFLINE, HF_HUB_OFFLINE="1")
    assert len(hub.log) == answered
    return computed


def same(numbers: list[float], others: list[float]) -> bool:
    return numbers == pytest.approx(others, abs=1e-5)


def loadable(kind: str) -> list[str]:
    """Returns the branches that can be loaded. Before PEFT 0.20, AutoPeftModel always takes an adapter's weights from main."""
    old = Version(version("peft")) < Version("0.20") and kind == "transfer"
    return ["main"] if old else ["main", "second"]


@every_kind
def test_it_is_pushed_privately_with_a_card_or_keeps_the_one_that_is_there(hub, pushed, tmp_path, kind):
    repo = hub.repos[f"user/{kind}"]
    assert repo.private and repo.branches.keys() == {"main", "second"}
    assert any(path.endswith(".safetensors") for path in repo.at("second").files)
    (tmp_path / "README.md").write_bytes(repo.at("main").files["README.md"].content)
    if kind in ("fm_delta", "emr"):
        data, _ = valid_card(tmp_path)
        assert {"tiny", "mine"} < {*data.tags}
        assert data.base_model == {"fm_delta": "user/bert", "emr": "user/body"}[kind]
        assert repo.at("second").files["README.md"].content == b"# Mine"
    if kind in ("discriminator", "transfer"):
        card = repo.at("main").files["README.md"].content
        assert b"base_model: user/gpt2" in card and (kind == "discriminator" or b"inputs given" in card)
    assert not same(pushed[kind]["main"], pushed[kind]["second"])


@every_kind
@pytest.mark.parametrize("revision", ["main", "second"])
def test_it_loads_by_id_revision_and_token(pushed, fetched, kind, revision):
    if revision in loadable(kind):
        assert same(fetched["loaded"][kind][revision], pushed[kind][revision])


@every_kind
def test_a_stranger_is_refused_and_the_error_names_the_repository(fetched, kind):
    assert f"user/{kind}" in fetched["refused"][kind]


def test_a_base_is_read_with_the_settings_of_the_call(hub, pushed, tmp_path):
    bases = {"fm_delta": "user/bert", "emr": "user/body"}
    for kind, base in bases.items():
        hub.repos[f"user/{kind}"].private, hub.repos[base].private = False, True
    client, requests = Client(hub, tmp_path), len(hub.log)
    try:
        report = client.run(SETTINGS, hub.token, signed_in=True)
    finally:
        for kind, base in bases.items():
            hub.repos[f"user/{kind}"].private, hub.repos[base].private = True, False
    for kind, base in bases.items():
        for refusal in ("offline", "without"):
            assert report[refusal][kind].startswith("BaseModelError") and base in report[refusal][kind]
        assert same(report["loaded"][kind]["main"], pushed[kind]["main"])
        asked = [(path, status) for _, path, status in hub.log[requests:] if f"/{base}/" in path]
        assert asked[0][1] in (401, 403, 404), "the first request has no token"
    assert "models--user--body" not in report["elsewhere"], "a loaded merge keeps the settings, for when it is saved"


@every_kind
def test_what_was_downloaded_is_enough_offline(pushed, offline, kind):
    for revision in loadable(kind):
        assert same(offline[kind][revision], pushed[kind][revision])


@host("huggingface_hub>=1.20")
def test_a_broken_connection_resumes_or_leaves_nothing(hub, pushed, tmp_path):
    compressed, base = (hub.repos[f"user/{name}"].at("main").files["model.safetensors"] for name in ("fm_delta", "bert"))
    hub.cuts = {compressed.sha256: [len(compressed.content) // 2], base.sha256: [0] * 7}
    seen = len(hub.log)
    report = Client(hub, tmp_path).run(UNSTEADY, signed_in=True)
    assert "'user/bert' could not be downloaded" in report["failed"] and "needed to read this checkpoint" in report["failed"]
    assert report["after"] == ["models--user--fm_delta"]
    assert report["then"] == ["models--user--bert", "models--user--fm_delta"]
    assert same(report["loaded"], pushed["fm_delta"]["main"])
    statuses = [status for _, path, status in hub.log[seen:] if path.endswith(compressed.sha256)]
    assert 206 in statuses, "the rest was asked for by its range"


def test_switching_to_a_model_of_the_hub_fetches_only_its_delta(hub, pushed, tmp_path):
    seen = len(hub.log)
    report = Client(hub, tmp_path).run(SWITCH, hub.token)
    assert "'user/fm_delta'" in report["refused"] and "HF_TOKEN" in report["refused"]
    for stage, revision in (("unchanged", "main"), ("second", "second"), ("main", "main")):
        assert same(report[stage], pushed["fm_delta"][revision])
    whole = [path for method, path, status in hub.log[seen:] if (method, status) == ("GET", 200) and "/storage/" in path]
    fetched = [path.rpartition("/")[2] for path in whole]  # without peeks at headers
    repos = [("user/fm_delta", "main"), ("user/bert", "main"), ("user/fm_delta", "second")]
    assert fetched == [hub.repos[repo].at(revision).files["model.safetensors"].sha256 for repo, revision in repos]
