"""A Hugging Face Hub on this machine, so that tests push and load over real HTTP instead of patching functions.

It speaks the part of the Hub protocol that `huggingface_hub` uses for model repositories: repositories, branches,
commits, LFS uploads and downloads at any revision. Content lives in memory and every commit stays readable by its id. Buckets
have the paths and hashes of their files; clients (hf_xet) store the content itself in a folder instead of on a server.

    with LocalHub() as hub:
        printed = hub.run(tmp_path, "…")

The client has to be another process because `huggingface_hub` reads its environment once, at import.
`python tests/local_hub.py` runs a Hub until Ctrl-C, and prints the settings for clients.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from processes import python

LFS_SUFFIXES = (".safetensors", ".bin")
LFS_MIN_SIZE = 10 * 1024 * 1024
REPO, REVISION = "(?P<repo_id>[^/]+/[^/]+)", "(?P<revision>[^/]+)"

Reply = tuple[int, dict[str, str], bytes]
Route = Callable[..., Reply]
ROUTES: list[tuple[list[str], re.Pattern[str], Route]] = []


class HubError(Exception):
    """A refusal. Clients choose which exception to raise by `code` (X-Error-Code) more than by the status."""

    def __init__(self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | dict(headers or {})


@dataclass(frozen=True)
class File:
    """One version of one file. Git tracks an LFS file through a small pointer, so such a file has two ids."""

    content: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def tracked(self) -> bytes:
        """What git itself stores: the content, or the pointer to it."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        return pointer.encode() if self.lfs else self.content

    @cached_property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.tracked) + self.tracked).hexdigest()

    @property
    def etag(self) -> str:
        """The id by which clients recognize content they already have, in their cache or before an upload."""
        return self.sha256 if self.lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    """A full snapshot, so reading an old commit needs no walk through history."""

    parent: str | None
    summary: str
    files: Mapping[str, File]

    @cached_property
    def id(self) -> str:
        tree = sorted((path, file.git_oid) for path, file in self.files.items())
        return hashlib.sha1(json.dumps([self.parent, self.summary, tree]).encode()).hexdigest()


@dataclass
class Repo:
    """A repository. Tests may read it, or delete its branches to see how clients cope."""

    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, commit: Commit) -> None:
        self.commits[commit.id] = commit
        self.branches[branch] = commit.id

    def at(self, revision: str) -> Commit:
        """The commit that a branch name or a commit id stands for."""
        commit = self.commits.get(self.branches.get(revision, revision))
        if commit is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit


def route(methods: str, pattern: str) -> Callable[[Route], Route]:
    """Register a `LocalHub` method for a URL; the pattern's named groups become its arguments."""

    def register(method: Route) -> Route:
        ROUTES.append((methods.split(), re.compile(pattern), method))
        return method

    return register


def json_reply(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(payload).encode()


class Request(BaseHTTPRequestHandler):
    """One request as the routes see it, and the HTTP around `LocalHub.answer`."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"  # keep connections open, as clients expect
    disable_nagle_algorithm = True  # else the body waits for the client to acknowledge the headers

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.query = parse_qs(urlsplit(self.path).query)
        self.authorized = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        path = urlsplit(self.path).path
        status, headers, content = self.hub.answer(self, path)
        self.hub.log.append((self.command, path, status))
        self.send_response(status)
        for name, value in {**headers, **self.hub.lies, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = self.hub.next_cut(path) if self.command == "GET" else None
            self.wfile.write(content[:cut])
            self.close_connection |= cut is not None

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def content_reply(self, content: bytes, headers: dict[str, str]) -> Reply:
        """Content, or the asked part of it: clients resume downloads and peek at safetensors headers with ranges."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return 200, headers, content
        start, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if start > last:
            return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
        return 206, headers | {"Content-Range": f"bytes {start}-{last}/{len(content)}"}, content[start : last + 1]

    def log_message(self, *args: object) -> None:
        """Keep test output quiet: `LocalHub.log` has it all."""


@final
class LocalHub:
    """The server: `endpoint` is its URL, `repos` its state, `log` every (method, path, status) it answered. `cuts` says of LFS
    content, by its SHA-256, after how many bytes each of its next downloads breaks off, as when a connection is lost. `lies`
    are headers that replace those of its answers. Those of one process have one address, where they run one after the other,
    so that `processes` can keep what has imported it."""

    _port = 0

    def __init__(self, user: str = "user", token: str = "hf_local") -> None:
        self.user, self.token = user, token
        self.repos: dict[str, Repo] = {}
        self.buckets: dict[str, dict[str, str]] = {}  # of each file's path: its hash
        self._xet = TemporaryDirectory()
        self.log: list[tuple[str, str, int]] = []
        self.cuts: dict[str, list[int]] = {}
        self.lies: dict[str, str] = {}
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        handler = type("BoundRequest", (Request,), {"hub": self})
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", LocalHub._port), handler)
        except OSError:  # another one is running there
            self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        LocalHub._port = LocalHub._port or self._server.server_port
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        # As on the real Hub, large files live on another origin, to which clients must not send their token.
        self._storage = f"http://localhost:{self._server.server_port}/storage"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._xet.cleanup()

    def client_env(self, home: Path, *, signed_in: bool = True, **extra: str) -> dict[str, str]:
        """The environment for a client process, cut off from the developer's own Hub settings and cache."""
        hub_settings = ("HF_", "HUGGING", "TRANSFORMERS_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(hub_settings)}
        env |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "no_proxy": "127.0.0.1,localhost"}
        env["HF_HUB_DISABLE_XET"] = "1"  # a client that has hf_xet uploads with it and never asks the server
        env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        return env | ({"HF_TOKEN": self.token} if signed_in else {}) | extra

    def run(
        self, folder: Path, code: str, *arguments: object, home: Path | None = None, signed_in: bool = True, **extra: str
    ) -> str:
        """Runs code in a new process in `folder`, with its cache in `home`; returns what it prints."""
        folder.mkdir(exist_ok=True)
        env = self.client_env(home or folder / "home", signed_in=signed_in, **extra)
        done = python("-c", code, *arguments, env=env, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def answer(self, request: Request, path: str) -> Reply:
        """Find the route and run it, one at a time so that routes can change `repos` safely."""
        try:
            if "Authorization" in request.headers and not request.authorized:
                raise HubError(401, "Invalid credentials in Authorization header")
            if request.command == "POST" and not request.authorized:
                raise HubError(401, "Invalid username or password.")
            for methods, pattern, method in ROUTES:
                if request.command in methods and (match := pattern.fullmatch(path)):
                    with self._lock:
                        return method(self, request, **{k: unquote(v) for k, v in match.groupdict("").items()})
            raise HubError(404, f"LocalHub does not know {request.command} {path}")
        except HubError as error:
            return json_reply({"error": str(error)}, error.status, error.headers)

    def next_cut(self, path: str) -> int | None:
        """After how many bytes this download ends; None if it comes whole."""
        cuts = self.cuts.get(path.rpartition("/")[2])
        return cuts.pop(0) if cuts else None

    def _repo(self, request: Request, repo_id: str) -> Repo:
        repo = self.repos.get(repo_id)
        if repo is None or (repo.private and not request.authorized):
            # To a stranger, a missing repository looks like a private one, so that names do not leak.
            raise HubError(404 if request.authorized else 401, "Repository not found", "RepoNotFound")
        return repo

    @route("POST", "/api/repos/create")
    def _create_repo(self, request: Request) -> Reply:
        repo_id = f"{request.json['organization'] or self.user}/{request.json['name']}"
        url = f"{self.endpoint}/{repo_id}"
        if repo_id in self.repos:  # clients that pass `exist_ok` read the URL from this refusal
            return json_reply({"url": url, "error": "You already created this model repo"}, 409)
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        self.repos[repo_id] = repo = Repo(private=request.json.get("visibility") == "private")
        repo.add("main", Commit(None, "initial commit", {".gitattributes": File(attributes.encode(), lfs=False)}))
        return json_reply({"url": url})

    @route("POST", f"/api/models/{REPO}/branch/(?P<branch>[^/]+)")
    def _create_branch(self, request: Request, repo_id: str, branch: str) -> Reply:
        repo = self._repo(request, repo_id)
        if branch in repo.branches:
            raise HubError(409, f"Reference already exists: {branch}")
        repo.branches[branch] = repo.at(request.json.get("startingPoint", "main")).id
        return json_reply({}, 201)

    @route("GET", f"/api/models/{REPO}(?:/revision/{REVISION})?")
    def _model_info(self, request: Request, repo_id: str, revision: str) -> Reply:
        repo = self._repo(request, repo_id)
        commit = repo.at(revision or "main")
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return json_reply({"id": repo_id, "sha": commit.id, "private": repo.private, "siblings": siblings})

    @route("GET", f"/api/models/{REPO}/tree/{REVISION}(?:/(?P<folder>.+))?")
    def _tree(self, request: Request, repo_id: str, revision: str, folder: str) -> Reply:
        root = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, file in sorted(self._repo(request, repo_id).at(revision).files.items()):
            if not path.startswith(root):
                continue
            for parent in (path[: slash.start()] for slash in re.finditer("/", path)):
                if parent.startswith(root):
                    entries[parent] = {"type": "directory", "path": parent, "oid": "0" * 40}
            size = len(file.content)
            entries[path] = {"type": "file", "path": path, "size": size, "oid": file.git_oid}
            if file.lfs:
                entries[path]["lfs"] = {"oid": file.sha256, "size": size, "pointerSize": len(file.tracked)}
        if folder and not entries:
            raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        deep = request.query.get("recursive") == ["true"]
        return json_reply([entry for path, entry in entries.items() if deep or "/" not in path.removeprefix(root)])

    @route("GET HEAD", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)")
    def _resolve(self, request: Request, repo_id: str, revision: str, path: str) -> Reply:
        commit = self._repo(request, repo_id).at(revision)
        headers = {"X-Repo-Commit": commit.id}
        file = commit.files.get(path)
        if file is None:  # knowing the commit, clients remember the absence, which offline loading relies on
            raise HubError(404, "Entry not found", "EntryNotFound", headers)
        if not file.lfs:
            return request.content_reply(file.content, headers | {"ETag": f'"{file.etag}"'})
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
        return 302, headers | {"Location": f"{self._storage}/{file.sha256}"}, b""

    @route("POST", "/api/validate-yaml")
    def _validate_yaml(self, request: Request) -> Reply:
        """The real Hub knows many more rules."""
        errors, block = [], REGEX_YAML_BLOCK.search(request.json["content"])
        card = (yaml.safe_load(block[2]) if block else None) or {}
        bases = card.get("base_model", [])
        for base in bases if isinstance(bases, list) else [bases]:
            if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", base):
                errors.append(f'"base_model" with value "{base}" is not the id of a model')
        if card.get("base_model_relation", "finetune") not in ("finetune", "adapter", "merge", "quantized"):
            errors.append('"base_model_relation" is none of finetune, adapter, merge, quantized')
        if not isinstance(card.get("tags", []), list) or not isinstance(card.get("pipeline_tag", ""), str):
            errors.append('"tags" is no list, or "pipeline_tag" no text')
        return json_reply({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)

    @route("POST", f"/api/models/{REPO}/preupload/{REVISION}")
    def _preupload(self, request: Request, repo_id: str, revision: str) -> Reply:
        """Say how to send each file, and what is there already, so that clients leave unchanged files out."""
        existing = self._repo(request, repo_id).at(revision).files
        files = []
        for asked in request.json["files"]:
            path, binary = asked["path"], b"\0" in base64.b64decode(asked["sample"])
            mode = "lfs" if binary or path.endswith(LFS_SUFFIXES) or asked["size"] >= LFS_MIN_SIZE else "regular"
            oid = existing[path].etag if path in existing else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return json_reply({"files": files})

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/batch")
    def _lfs_batch(self, request: Request, repo_id: str) -> Reply:
        self._repo(request, repo_id)
        verify = {"href": f"{self.endpoint}/{repo_id}.git/info/lfs/objects/verify"}
        objects = request.json["objects"]
        for item in objects:
            if item["oid"] not in self._objects:  # an object without actions needs no upload
                item["actions"] = {"upload": {"href": f"{self._storage}/{item['oid']}"}, "verify": verify}
        return json_reply({"transfer": "basic", "objects": objects})

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/verify")
    def _lfs_verify(self, request: Request, repo_id: str) -> Reply:
        self._repo(request, repo_id)
        if len(self._objects.get(request.json["oid"], b"")) != request.json["size"]:
            raise HubError(404, "Object not found")
        return json_reply({})

    @route("PUT", "/storage/(?P<oid>[0-9a-f]{64})")
    def _store(self, request: Request, oid: str) -> Reply:
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise HubError(400, "The content does not match its SHA-256")
        self._objects[oid] = request.body
        return 200, {}, b""

    @route("GET HEAD", "/storage/(?P<oid>[0-9a-f]{64})")
    def _stored(self, request: Request, oid: str) -> Reply:
        return request.content_reply(self._objects[oid], {"ETag": f'"{oid}"'})

    @route("POST", f"/api/models/{REPO}/commit/{REVISION}")
    def _commit(self, request: Request, repo_id: str, revision: str) -> Reply:
        repo = self._repo(request, repo_id)
        if "create_pr" in request.query or revision not in repo.branches:
            raise HubError(400, "LocalHub only commits to existing branches")
        lines = map(json.loads, request.body.splitlines())
        (_, header), *operations = [(line["key"], line["value"]) for line in lines]
        parent = repo.at(revision)
        if not parent.id.startswith(header.get("parentCommit", "")):
            raise HubError(412, "A commit has happened since")
        files = dict(parent.files)
        for key, value in operations:
            path = value["path"]
            if key == "file":
                files[path] = File(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile" and value["oid"] in self._objects:
                files[path] = File(self._objects[value["oid"]], lfs=True)
            elif key == "deletedFile" and path in files:
                del files[path]
            elif key == "deletedFolder":
                files = {name: file for name, file in files.items() if not name.startswith(f"{path.rstrip('/')}/")}
            else:
                raise HubError(400, f"Cannot apply {key} to {path}")
        commit = Commit(parent.id, header["summary"], files)
        repo.add(revision, commit)
        return json_reply({"commitOid": commit.id, "commitUrl": f"{self.endpoint}/{repo_id}/commit/{commit.id}"})

    def _bucket(self, bucket_id: str) -> dict[str, str]:
        if bucket_id not in self.buckets:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return self.buckets[bucket_id]

    @route("GET", rf"/api/buckets/{REPO}/xet-(?:read|write)-token")
    def _xet_token(self, request: Request, repo_id: str) -> Reply:
        self._bucket(repo_id)
        return json_reply({"casUrl": f"local://{self._xet.name}", "exp": int(time.time()) + 3600, "accessToken": "any"})

    @route("POST", rf"/api/buckets/{REPO}/batch")
    def _batch(self, request: Request, repo_id: str) -> Reply:
        files, stored = self._bucket(repo_id), xet_sizes(Path(self._xet.name))
        for operation in map(json.loads, request.body.splitlines()):
            path = operation["path"]
            if operation["type"] == "addFile" and operation["xetHash"] in stored:
                files[path] = operation["xetHash"]
            elif operation["type"] == "deleteFile" and path in files:
                del files[path]
            else:
                raise HubError(400, f"Cannot apply {operation['type']} to {path}")
        return json_reply({"success": True, "failed": []})

    @route("POST", rf"/api/buckets/{REPO}/paths-info")
    def _paths_info(self, request: Request, repo_id: str) -> Reply:
        files, stored = self._bucket(repo_id), xet_sizes(Path(self._xet.name))
        paths = [path for path in request.json["paths"] if path in files]
        return json_reply([{"type": "file", "path": p, "size": stored[files[p]], "xetHash": files[p]} for p in paths])

    @route("HEAD", rf"/buckets/{REPO}/resolve/(?P<path>.+)")
    def _resolve_in_bucket(self, request: Request, repo_id: str, path: str) -> Reply:
        route = f"{self.endpoint}/api/buckets/{repo_id}/xet-read-token"
        file = self._bucket(repo_id)[path]
        size = str(xet_sizes(Path(self._xet.name))[file])
        return 200, {"X-Xet-Hash": file, "X-Xet-Refresh-Route": route, "X-Linked-Size": size}, b""


def xet_sizes(folder: Path) -> dict[str, int]:
    """Returns the sizes of the files that hf_xet has stored in a folder, by hash, from the binary tables that it writes there:
    a header, then for each file its hash, flags and number of segments, and the segments."""
    sizes = {}
    for path in folder.rglob("*.mdb"):
        table, at = path.read_bytes(), 48
        while table[at : at + 32] != b"\xff" * 32:
            *words, flags, count = struct.unpack_from("<4QII", table, at)
            segments = range(at + 48, at + 48 + 48 * count, 48)
            sizes["".join(f"{word:016x}" for word in words)] = sum(
                struct.unpack_from("<I", table, segment + 36)[0] for segment in segments
            )
            at += 48 + 48 * (count * (1 + (flags >> 31)) + (flags >> 30 & 1))
    return sizes


if __name__ == "__main__":
    with LocalHub() as hub, TemporaryDirectory() as home:
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": hub.token, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1"}
        print("export", *(f"{name}={value}" for name, value in settings.items()), flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
