"""Access to the Hub: settings, downloads, and errors that name the repository."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import huggingface_hub  # its parts load where they are used: local folders need none of them
from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

from hf_ext.errors import BaseModelError, CheckpointError, HfExtError
from hf_ext.storage.layout import INDICES, PIPELINE, SINGLES, all_weights, shards_in

if TYPE_CHECKING:
    from huggingface_hub.utils import SafetensorsFileMetadata

Check: TypeAlias = "Callable[[list[SafetensorsFileMetadata]], None]"


class Hub(NamedTuple):
    """Hub access settings.

    Attributes:
        token: replaces the saved one (`hf auth login`) and that of HF_TOKEN.
        cache_dir: folder of downloads.
        local_files_only: use what was downloaded before and send no requests.
    """

    token: str | bool | None = None
    cache_dir: str | os.PathLike | None = None
    local_files_only: bool = False

    def download(self, name: str, file: str, revision: str | None) -> Path:
        """Returns a file of a repository, from the cache if it is there. Raises the errors of `huggingface_hub`."""
        repository, subfolder = split_id(name)
        self.probe(repository, revision)
        options = self._asdict() | {"subfolder": subfolder or None}
        return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision, **options))

    def probe(self, name: str, revision: str | None = None) -> None:
        """Asks the Hub once about a repository that is not in the cache. Without a connection, a download would try for a
        minute. Raises the errors of `huggingface_hub`."""
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(name)
        if not (self.local_files_only or HF_HUB_OFFLINE or self._folder(name).exists()):
            huggingface_hub.HfApi(token=self.token).model_info(name, revision=revision)

    def _folder(self, repository: str) -> Path:
        """Returns the folder of a repository in the cache."""
        from huggingface_hub.file_download import repo_folder_name

        return Path(self.cache_dir or HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))

    def weights(self, name: str, revision: str | None, check: Check | None = None) -> list[Path]:
        """Returns the safetensors weights of a repository, one file or shards, from the cache if they are there.

        Args:
            check: called with the headers of weights that would have to be downloaded; raises BaseModelError to prevent that.

        Raises:
            BaseModelError: the repository cannot be reached, has no safetensors weights, or its copy in the cache lacks some.
        """
        from huggingface_hub import errors

        def download(files: list[str]) -> list[Path]:
            if check and (headers := self.headers(name, files, revision)):
                check(headers)
            return [self.download(name, file, revision) for file in files]

        with reaching(name, revision):
            shards = [SINGLES[0]]  # for the error if there is none
            for single, index in zip(SINGLES, INDICES):
                with contextlib.suppress(errors.EntryNotFoundError):
                    return download([single])
                with contextlib.suppress(errors.EntryNotFoundError):
                    shards = shards_in(self.download(name, index, revision))
                    break
            with self.requiring(name, revision, shards):
                return download(shards)

    @contextlib.contextmanager
    def requiring(self, name: str, revision: str | None, files: Sequence[str]) -> Iterator[None]:
        """Turns the error of a download without a connection into a BaseModelError that names the missing files, if the
        repository is in the cache."""
        from huggingface_hub import errors

        try:
            yield
        except errors.LocalEntryNotFoundError as error:
            repository, subfolder = split_id(name)
            ref = self._folder(repository) / "refs" / (revision or "main")
            commit = ref.read_text() if ref.is_file() else revision or "main"
            if (snapshot := self._folder(repository) / "snapshots" / commit).is_dir():
                lacking = [file for file in files if not (snapshot / subfolder / file).exists()]
                raise BaseModelError(incomplete(name, snapshot, lacking)) from error
            raise

    def headers(self, name: str, files: list[str], revision: str | None) -> list[SafetensorsFileMetadata]:
        """Returns the headers of safetensors files that are not downloaded yet; an empty result if a file is downloaded or
        cannot be read.

        Raises EntryNotFoundError, or another error of `huggingface_hub` if the Hub refuses access.
        """
        from huggingface_hub import errors

        cache = None if self.cache_dir is None else Path(self.cache_dir)
        repository, subfolder = split_id(name)
        files = [f"{subfolder}/{file}" if subfolder else file for file in files]
        cached = (isinstance(huggingface_hub.try_to_load_from_cache(repository, file, cache, revision), str) for file in files)
        if self.local_files_only or HF_HUB_OFFLINE or any(cached):
            return []
        hub = huggingface_hub.HfApi(token=self.token)
        try:
            return [hub.parse_safetensors_file_metadata(repository, file, revision=revision) for file in files]
        except errors.HfHubHTTPError:
            raise
        except (errors.HTTPError, errors.SafetensorsParsingError, TypeError, AttributeError, KeyError, ValueError):
            return []  # the download tries again and reports the error


def incomplete(name: str, snapshot: Path, lacking: Sequence[str]) -> str:
    """Returns the error message for a repository whose copy in the cache lacks files."""
    return (
        f"The copy of '{name}' in the Hub's cache, {snapshot}, is incomplete: {', '.join(lacking[:3])}"
        f"{', …' * (len(lacking) > 3)} {'are' if len(lacking) > 1 else 'is'} missing. Download it again, with a connection: "
        f"`hf download {split_id(name)[0]}`."
    )


# Files of a repository that hold its weights in other formats.
OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data", "*.tflite"]
HUB = Hub()  # settings of the environment


@contextlib.contextmanager
def reaching(name: str, revision: str | None) -> Iterator[None]:
    """Turns errors of `huggingface_hub` in the block into a BaseModelError that names the repository."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HFValidationError, errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        private = isinstance(error, errors.RepositoryNotFoundError)
        advice = " If it is private, sign in with `hf auth login` or set HF_TOKEN." if private else ""
        raise BaseModelError(
            f"'{name}' is neither a folder nor a Hub repository with safetensors weights that can be reached "
            f"(revision {revision or 'main'}): {reason_of(error)}{advice}"
        ) from error
    except HfExtError:
        raise
    except (errors.HTTPError, errors.OfflineModeIsEnabled, OSError, ValueError) as error:  # ValueError: invalid headers
        raise BaseModelError(
            f"'{name}' could not be downloaded, and there is no folder of this name: {reason_of(error)}"
        ) from error


def split_id(name: str) -> tuple[str, str]:
    """Splits the id of a folder in a repository on the Hub, such as org/name/unet, into the repository's id and the folder. The
    folder of org/name is ''."""
    parts = os.path.normpath(name).split("/", 2)
    return "/".join(parts[:2]), parts[2] if len(parts) > 2 else ""


def within(name: str | os.PathLike, folder: str) -> str:
    """Returns the path or id of a folder in a model's folder or repository; for the folder '', that of the model."""
    return f"{os.fspath(name)}/{folder}" if folder else os.fspath(name)


def is_local(name: str | os.PathLike) -> bool:
    """Checks whether a name stands for a path, existing or not, rather than for a repository on the Hub."""
    name = os.fspath(name)
    return os.path.exists(name) or name.startswith((".", "/", "~"))


def downloaded(name: str | os.PathLike, what: str = "", whole: bool = False) -> Path:
    """Returns a local folder as it is, or the folder in the cache that a Hub repository is downloaded into, with weights that
    are not safetensors too if `whole`. Raises CheckpointError, whose message `what` begins, if there is no such folder or
    repository, or its copy in the cache lacks files and cannot be completed."""
    name = os.fspath(name)
    if os.path.isdir(name):
        return Path(name)
    if is_local(name):
        raise CheckpointError(f"{what}{name} is not a folder; give the folder or the Hub id of a saved model.")
    from huggingface_hub import errors

    try:
        repository, subfolder = split_id(name)
        ignored = None if whole else OTHER_WEIGHTS
        patterns = [f"{subfolder}/*"] if subfolder else None
        folder = Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns, ignore_patterns=ignored))
        if ignored and not subfolder and (folder / PIPELINE).exists():  # some components have no other weights
            lacking = [path.name for path in folder.iterdir() if path.is_dir() and not any(path.glob("*.safetensors"))]
            if lacking:
                huggingface_hub.snapshot_download(repository, allow_patterns=[f"{name}/*" for name in lacking])
    except (OSError, ValueError, errors.HTTPError) as error:
        raise CheckpointError(
            f"{what}'{name}' is neither a folder nor a Hub repository that can be reached: {reason_of(error)}"
        ) from error
    # Without a connection, the folder may be what is left of an interrupted download.
    root = folder / subfolder
    files = [path for path in root.rglob("*") if whole or not any(path.match(other) for other in OTHER_WEIGHTS)]
    components = [path for path in root.iterdir() if path.is_dir()] if (root / PIPELINE).exists() else []
    files += [path for place in (root, *components) for path in all_weights(place)]
    if lacking := sorted({path.relative_to(folder).as_posix() for path in files if not path.exists()}):
        raise CheckpointError(what + incomplete(name, folder, lacking))
    return root


def local_copy(src: str | os.PathLike) -> Path:
    """Returns a path as it is, existing or not, or the folder in the cache that a Hub repository is downloaded into."""
    return Path(src) if is_local(src) else downloaded(src, whole=True)


def absolute(name: str | os.PathLike) -> str:
    """Returns a folder's absolute path, which stays valid in any working directory; a Hub id as it is. Raises BaseModelError if
    it is neither."""
    if not isinstance(name, str | os.PathLike):
        raise BaseModelError(f"The base must be a folder or a Hub id, not {name!r}.")
    return absolute_path(name) if os.path.isdir(name) else os.fspath(name)


def name_from(folder: Path, base: str) -> str:
    """Returns the name by which a folder records its base, which is an absolute path or a Hub id: a relative path if the base,
    or the pipeline that it is a component of, lies beside the folder or one above it, so that all can move together."""
    place, name = os.path.split(base)
    beside = [(place, name, 2)]
    if os.path.exists(os.path.join(place, PIPELINE)):
        beside.append((os.path.dirname(place), os.path.join(os.path.basename(place), name), 3))
    for place, name, levels in beside if os.path.isabs(base) else ():
        for level, above in enumerate(Path(os.path.realpath(folder)).parents[:levels], 1):
            if os.path.realpath(place) == str(above):
                return os.path.join(*[os.pardir] * level, name)
    return base


def absolute_path(path: str | os.PathLike) -> str:
    """Returns the absolute path of a file or folder without "..". As the system does, follows the links that lead to a ".."."""
    return os.path.realpath(path) if os.pardir in Path(path).parts else os.path.abspath(path)


def hub_id(name: str | os.PathLike | None) -> str | None:
    """Returns a name if it is valid for a repository on the Hub, or a folder in one, and no such folder exists; else None."""
    if not isinstance(name, str) or not name or os.path.exists(name):
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(split_id(name)[0])
    except HFValidationError:
        return None
    return name


def snapshot_of(folder: Path) -> Path | None:
    """Returns the snapshot of a repository in the Hub's cache that a folder is, or lies in; None if it does not."""
    return next((path for path in (folder, *folder.parents) if path.match("models--*/snapshots/*")), None)


def repository_of(snapshot: Path) -> str:
    """Returns the Hub id of the repository that a snapshot in the Hub's cache is of."""
    return snapshot.parents[1].name.removeprefix("models--").replace("--", "/")


def reason_of(error: Exception) -> str:
    """Returns why a repository could not be downloaded."""
    from huggingface_hub import errors

    is_incomplete = isinstance(error, getattr(errors, "IncompleteSnapshotError", ()))  # names the files
    if HF_HUB_OFFLINE and isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled) and not is_incomplete:
        return "as a Hub id, it is not in the cache, and HF_HUB_OFFLINE is set."
    return first_line(error)


def first_line(error: Exception) -> str:
    """Returns an error's first line; huggingface_hub writes several."""
    return str(error).strip().split("\n")[0]
