"""`fm_delta.open` reads single tensors and rows, and moves hardly more than their bytes, from a folder or from the Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from local_hub import LocalHub
from processes import python
from safetensors import safe_open
from tiny_checkpoints import edit_settings, fine_tune, pair, weights, write_folder, write_safetensors

from hf_ext import fm_delta
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.delta.file import CompressedFile

INDICES = (slice(3, 7), slice(None), slice(1, 9, 2), slice(90, 9999), slice(5, 2), 2, -1, (slice(2, 5), slice(3, 4)), (..., 3))

CLIENT = """
import json, sys
from pathlib import Path
import torch
import hf_ext
from hf_ext import fm_delta
from tiny_checkpoints import fine_tune
SHAPES = {"a": (512, 256), "b": (512, 256), "c": (512, 256), "d": (2048, 256)}
def base(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
"""

PUSH = """
from huggingface_hub import HfApi
from tiny_checkpoints import write_folder
api = HfApi()
def push(name, folder, **options):
    api.create_repo(name, **options)
    return api.upload_folder(repo_id=name, folder_path=folder).oid
push("user/base", write_folder(Path("base"), base()))
push("user/other", write_folder(Path("other"), base(seed=9)))
push("user/wide", write_folder(Path("wide"), {name: tensor[:, :200].contiguous() for name, tensor in base().items()}))
push("user/shards", write_folder(Path("shards"), base(), shards=3))
write_folder(Path("tuned"), fine_tune(base()))
write_folder(Path("newer"), fine_tune(fine_tune(base()), seed=2))
fm_delta.compress_checkpoint("tuned", "user/base", "small", level=1)
push("user/small", "small")
push("user/private", "small", private=True)
fm_delta.compress_checkpoint("newer", "small", "chain", level=1, base_id="user/small")
push("user/chain", "chain")
"""

READ = """
with fm_delta.open(sys.argv[1], **json.loads(sys.argv[2])) as checkpoint:
    expected = base()
    for _ in range(int(sys.argv[3])):
        expected = fine_tune(expected, seed=_ + 1)
    assert sorted(checkpoint.keys()) == sorted(expected) and checkpoint.get_slice("d").get_shape() == [2048, 256]
    for name, begin, end in json.loads(sys.argv[4]):
        part = checkpoint.get_tensor(name) if begin is None else checkpoint.get_slice(name)[begin:end]
        assert torch.equal(part, expected[name][begin:end])
"""

REFUSED = """
for name, wanted in [argument.split(":") for argument in sys.argv[1:]]:
    try:
        fm_delta.open(name).get_tensor(wanted)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_and_slices_equal_those_of_safe_open(tmp_path, shards):
    src, base = pair(tmp_path, torch.bfloat16, shards)
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    expected = fine_tune(weights(torch.bfloat16))
    for folder in (src, tmp_path / "small"):
        with fm_delta.open(folder) as checkpoint:
            assert sorted(checkpoint.keys()) == sorted(expected) == sorted(checkpoint) and len(checkpoint) == 7
            for path in src.glob("*.safetensors"):
                with safe_open(path, "pt") as file:
                    for name in file.keys():
                        assert torch.equal(checkpoint.get_tensor(name), file.get_tensor(name))
                        part = checkpoint.get_slice(name)
                        assert part.get_shape() == file.get_slice(name).get_shape()
                        assert part.get_dtype() == file.get_slice(name).get_dtype()
            for index in INDICES:
                assert torch.equal(checkpoint.get_slice("lm_head.weight")[index], expected["lm_head.weight"][index])


def test_odd_tensors_have_parts_too(tmp_path):
    tensors = {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "flags": torch.tensor([True, False])}
    write_folder(tmp_path / "model", tensors)
    fm_delta.compress_checkpoint(tmp_path / "model", write_folder(tmp_path / "base", tensors), tmp_path / "small")
    for folder in ("model", "small"):
        checkpoint = fm_delta.open(tmp_path / folder)
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.get_tensor(name), tensor) and torch.equal(checkpoint.get_slice(name)[...], tensor)
        assert checkpoint.get_slice("empty")[:].shape == (0, 4)
        assert torch.equal(checkpoint.get_slice("flags")[()], tensors["flags"])
        with pytest.raises(IndexError):
            checkpoint.get_slice("flags")[2]


def test_a_tensor_is_writable_and_outlives_the_checkpoint(tmp_path):
    src, base = pair(tmp_path)
    with fm_delta.open(src) as checkpoint:
        whole, part = checkpoint.get_tensor("lm_head.weight"), checkpoint.get_slice("lm_head.weight")[:2]
        with pytest.raises(KeyError, match="has no tensor 'nothing'"):
            checkpoint.get_tensor("nothing")
    with pytest.raises(ValueError, match="closed"):
        checkpoint.get_tensor("lm_head.weight")
    before = (src / "model.safetensors").read_bytes()
    whole.zero_()
    part.zero_()
    assert (src / "model.safetensors").read_bytes() == before


def test_only_tensors_that_are_read_are_checked(tmp_path):
    src, base = pair(tmp_path)
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    file = CompressedFile(tmp_path / "small/model.safetensors")
    damaged, data = "lm_head.weight", bytearray(file.path.read_bytes())
    data[8 + len(file.file.header_bytes) + file.file.entries[damaged].end - 1] ^= 1
    file.path.write_bytes(data)
    checkpoint = fm_delta.open(tmp_path / "small")
    for name, tensor in fine_tune(weights()).items():
        if name != damaged:
            assert torch.equal(checkpoint.get_tensor(name), tensor)
    with pytest.raises(CorruptFileError, match=f"'{damaged}' is damaged"):
        checkpoint.get_tensor(damaged)


def test_bases_are_found_as_by_from_pretrained(tmp_path):
    src, base = pair(tmp_path)
    newer = write_folder(tmp_path / "newer", fine_tune(fine_tune(weights()), seed=2))
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    fm_delta.compress_checkpoint(newer, tmp_path / "small", tmp_path / "chain")
    expected = fine_tune(fine_tune(weights()), seed=2)
    assert torch.equal(fm_delta.open(tmp_path / "chain").get_tensor("lm_head.weight"), expected["lm_head.weight"])
    shutil.move(tmp_path / "small", tmp_path / "moved")
    with pytest.raises(BaseModelError, match="is needed to read this checkpoint.*--base"):
        fm_delta.open(tmp_path / "chain")
    checkpoint = fm_delta.open(tmp_path / "chain", base=tmp_path / "moved")
    assert torch.equal(checkpoint.get_tensor("lm_head.weight"), expected["lm_head.weight"])
    with pytest.raises(BaseModelError, match="is another model or revision"):
        fm_delta.open(tmp_path / "chain", base=base)
    edit_settings(tmp_path / "moved", base=str(tmp_path / "chain"))
    with pytest.raises(BaseModelError, match="need each other"):
        fm_delta.open(tmp_path / "chain", base=tmp_path / "moved")


def test_mixed_saves_and_several_models_are_refused(tmp_path):
    src, base = pair(tmp_path, shards=2)
    write_folder(tmp_path / "second", fine_tune(weights(), seed=5), shards=2)
    for name in ("tuned", "second"):
        fm_delta.compress_checkpoint(tmp_path / name, base, tmp_path / f"small-{name}")
    shard = "model-00001-of-00002.safetensors"
    shutil.copy(tmp_path / "small-second" / shard, tmp_path / "small-tuned" / shard)
    with pytest.raises(CorruptFileError, match="belongs to another save"):
        fm_delta.open(tmp_path / "small-tuned")
    write_safetensors(tmp_path / "merge/model.safetensors", weights(), {"parts_of": "emr"})
    with pytest.raises(CheckpointError, match="hf-ext extract"):
        fm_delta.open(tmp_path / "merge")


class Client:
    """Runs code in new processes that know no other Hub than `hub`."""

    def __init__(self, hub: LocalHub, folder: Path):
        self.hub, self.folder = hub, folder

    def run(self, code: str, *args: object, home: str = "home", **options) -> str:
        env = self.hub.client_env(self.folder / home, **options)
        result = python("-c", CLIENT + code, *args, env=env, cwd=self.folder)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def read(self, name: str, parts: list, trained: int = 1, options: dict | None = None, **extra) -> dict[str, int]:
        """Reads parts (name, begin, end) of tensors, and returns the bytes that each repository has sent of its weights."""
        self.hub.sent.clear()
        self.run(READ, name, json.dumps(options or {}), trained, json.dumps(parts), **extra)
        return {
            repo: sum(self.hub.sent[file.sha256] for file in self.hub.repos[repo].at("main").files.values())
            for repo in ("user/base", "user/small", "user/chain", "user/shards")
        }

    def weights(self, repo: str) -> list[Path]:
        """Returns the weights of a repository that are in the cache."""
        return list(self.folder.rglob(f"models--{repo.replace('/', '--')}/**/*.safetensors"))

    def refusals(self, *targets: str, **options) -> list[list[str]]:
        return [json.loads(line) for line in self.run(REFUSED, *targets, **options).splitlines()]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with LocalHub() as hub:
        client = Client(hub, tmp_path_factory.mktemp("hub"))
        client.run(PUSH, home="pusher")
        shutil.rmtree(client.folder / "pusher")
        yield client


HEADER = 100_000  # bytes that are read of a file to see its header
TENSOR = 512 * 256 * 4


def test_one_tensor_moves_its_payload_and_the_tensor_of_the_base(client):
    sent = client.read("user/small", [("b", None, None)])
    assert TENSOR <= sent["user/base"] <= TENSOR + HEADER + 8
    assert TENSOR // 4 < sent["user/small"] < TENSOR + HEADER
    assert not client.weights("user/small") and not client.weights("user/base")


def test_a_chain_moves_one_tensor_of_each_checkpoint(client):
    sent = client.read("user/chain", [("a", None, None)], trained=2)
    for repo in ("user/base", "user/small", "user/chain"):
        assert TENSOR // 4 < sent[repo] <= TENSOR + HEADER + 8


@pytest.mark.parametrize("repo, files", [("user/base", 1), ("user/shards", 3)])
def test_rows_of_a_plain_tensor_move_alone(client, repo, files):
    sent = client.read(repo, [("d", 1000, 1010)], trained=0)
    assert sent[repo] <= files * HEADER + 8 + 10 * 256 * 4
    assert not client.weights(repo)


def test_rows_of_a_compressed_tensor_are_right(client):
    sent = client.read("user/small", [("d", 1000, 1010), ("a", 0, 1)])
    assert sent["user/small"] < 5 * TENSOR + HEADER


def test_a_cached_repository_is_read_offline(client):
    client.run("from huggingface_hub import snapshot_download\nsnapshot_download('user/small')", home="cached")
    sent = client.read("user/small", [("c", None, None)], home="cached")
    assert not sent["user/small"] and TENSOR <= sent["user/base"] <= TENSOR + HEADER + 8
    client.run("from huggingface_hub import snapshot_download\nsnapshot_download('user/base')", home="cached")
    answered = len(client.hub.log)
    client.read("user/small", [("c", None, None)], home="cached", HF_HUB_OFFLINE="1")
    client.read("user/small", [("c", None, None)], home="cached", options={"local_files_only": True})
    client.read("user/small", [("c", None, None)], options={"cache_dir": "cached/hub", "local_files_only": True})
    assert not any("user/" in path for _, path, _ in client.hub.log[answered:])
    [[kind, message]] = client.refusals("user/chain:a", home="cached", HF_HUB_OFFLINE="1")
    assert kind == "BaseModelError" and "'user/chain'" in message


def test_token_and_revision_hold(client):
    commit = client.hub.repos["user/base"].branches["main"]
    client.read("user/base", [("a", 0, 1)], trained=0, options={"revision": commit})
    client.read("user/private", [("a", None, None)], options={"token": client.hub.token}, signed_in=False)
    [[kind, message]] = client.refusals("user/private:a", signed_in=False)
    assert kind == "BaseModelError" and "sign in" in message
    [[kind, message]] = client.refusals("user/nothing:a")
    assert kind == "BaseModelError" and "'user/nothing' is neither a folder nor a Hub repository" in message


def test_a_download_that_breaks_off_is_resumed(client):
    file = client.hub.repos["user/base"].at("main").files["model.safetensors"]
    client.hub.cuts[file.sha256] = [50_000, 90_000, 20_000]
    sent = client.read("user/base", [("a", None, None)], trained=0)
    assert sent["user/base"] <= HEADER + TENSOR + 8 and not client.hub.cuts[file.sha256]


IMPATIENT = """
from hf_ext.storage import remote
remote.LONGEST_WAIT, remote.PATIENCE = 0.01, 0.1
"""


def test_a_busy_server_is_retried_and_a_slow_one_given_up(client, monkeypatch):
    monkeypatch.setattr(client.hub, "busy", 3)
    client.run(IMPATIENT + READ, "user/base", "{}", 0, json.dumps([("a", 0, 1)]))
    assert client.hub.busy == 0
    monkeypatch.setattr(client.hub, "busy", 100)
    [error] = client.run(IMPATIENT + REFUSED, "user/base:a").splitlines()
    assert "429" in error and "BaseModelError" in error
    monkeypatch.setattr(client.hub, "busy", 0)
    monkeypatch.setattr(client.hub, "drips", True)
    [error] = client.run(IMPATIENT + REFUSED, "user/base:a").splitlines()
    assert "too slowly. Download the model: hf download user/base" in error


def test_a_server_that_sends_whole_files_is_not_listened_to(client, monkeypatch):
    monkeypatch.setattr(client.hub, "ranges", False)
    [[kind, message]] = client.refusals("user/base:a")
    assert kind == "BaseModelError" and "does not send parts" in message and "hf download user/base" in message


def test_another_base_on_the_hub_is_refused(client):
    for other in ("other", "wide"):
        folder = shutil.copytree(client.folder / "small", client.folder / f"needs-{other}")
        edit_settings(folder, base=f"user/{other}", revision=None)
    client.hub.sent.clear()
    refusals = client.refusals("./needs-other:a", "./needs-wide:a")
    assert [kind for kind, _ in refusals] == ["BaseModelError"] * 2
    assert "checksum mismatch" in refusals[0][1] and "'user/other'" in refusals[0][1]
    assert "This is another base model" in refusals[1][1]
    wide = client.hub.repos["user/wide"].at("main").files["model.safetensors"]
    assert client.hub.sent[wide.sha256] <= HEADER


HEADERS = {
    "beyond the file": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]},
    "of another size than its shape": {"dtype": "F32", "shape": [2], "data_offsets": [0, 16]},
    "with a gap": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    "of negative sizes": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
    "without a place": {"dtype": "F32", "shape": [4]},
    "nothing": None,
}
UPLOAD = """
from huggingface_hub import HfApi
for path in Path("forged").iterdir():
    HfApi().create_repo(path.name)
    HfApi().upload_folder(repo_id=f"user/{path.name}", folder_path=path)
"""


def test_headers_on_the_hub_are_not_trusted(client):
    contents = {"long": (1 << 50).to_bytes(8, "little") + b"{}", "short": b"\x02\0\0", "text": b"version https://git-lfs" * 9}
    for number, entry in enumerate(HEADERS.values()):
        header = json.dumps({"a": entry}).encode()
        contents[f"forged-{number}"] = len(header).to_bytes(8, "little") + header + bytes(16)
    for name, content in contents.items():
        path = client.folder / "forged" / name / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    client.run(UPLOAD)
    refusals = client.refusals(*(f"user/{name}:a" for name in contents))
    assert len(refusals) == len(contents)
    for (kind, message), name in zip(refusals, contents):
        assert kind == "BaseModelError" and f"user/{name}/model.safetensors is not a readable safetensors file" in message
