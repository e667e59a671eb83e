"""Folders of checkpoints to compressed folders and back, tensor by tensor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from transformers.utils.logging import get_logger, tqdm

from hf_ext.checkpoint import (
    CONFIG,
    STAGE,
    TORCH_DTYPES,
    Checkpoint,
    RawTensor,
    SafetensorsFile,
    all_weights,
    read_config,
    select_weights,
    shard_sets,
    staged_folder,
    write_atomically,
)
from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.fm_delta.codec import FLOATS, decode_raw, encode_raw
from hf_ext.fm_delta.format import (
    KEY,
    BaseInfo,
    CompressedFile,
    CompressedWriter,
    add_to_config,
    check_shards,
    digest_of,
    remove_from_config,
)

logger = get_logger(__name__)

METHOD = "fm_delta"
AHEAD = 256 * 1024 * 1024  # bytes of tensors worked on before they are asked for
CORES = os.cpu_count() or 1

Result = TypeVar("Result")


def compress_checkpoint(
    src: str | os.PathLike, base: str | os.PathLike, out: str | os.PathLike, revision: str | None = None
) -> None:
    """Writes a model's folder again with its weights as lossless differences from a base model (FM-Delta, NeurIPS 2024).

    Every file that holds no weights is copied; config.json gets a `quantization_config` entry, by which
    `from_pretrained` finds the base. Memory: a few tensors.

    Args:
        src: folder with safetensors weights.
        base: folder or Hub id of the model that `src` was fine-tuned from.
        out: folder to write. On failure it is left as it was.
        revision: of the base on the Hub; the commit it leads to is recorded.

    Raises:
        CheckpointError: `src` has no safetensors weights, is quantised or compressed already, or `out` is `src` or the base.
        BaseModelError: the base cannot be read.
    """
    src, out = Path(src), Path(out)
    if not src.is_dir():
        raise CheckpointError(f"{src} is not a folder; give the folder of a saved model.")
    base_checkpoint = open_plain_base(base, revision)
    _require_another_folder(out, src, base)
    with staged_folder(out) as stage:
        for path in _other_files(src, out):
            _copy(path, stage / path.relative_to(src))
        compress_weights(src, base_checkpoint, stage)


def compress_weights(src: Path, base: Checkpoint, out: Path) -> None:
    """Compresses the weights of a folder into `out`, then adds what `from_pretrained` must know to `out`/config.json."""
    config = read_config(out / CONFIG)
    if "quantization_config" in config:
        settings = config["quantization_config"]
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise CheckpointError(
            f"{src} is compressed already."
            if method == METHOD
            else f"{src} is quantised ({method}); only plain weights can be compressed."
        )
    paths = all_weights(src)
    if not paths:
        raise CheckpointError(f"{src} holds no safetensors weights (model.safetensors, or shards of it).")
    if any(file.path.parent.samefile(src) for file in base.files):
        raise CheckpointError(f"{src} is the base model itself; give the folder of a fine-tune of it.")
    info = BaseInfo(_portable_name(base), base.revision, base.fingerprint)
    originals = [SafetensorsFile(path) for path in paths]
    if any(KEY in file.metadata for file in originals):
        raise CheckpointError(f"The weights of {src} are compressed already; decompress them first.")
    writers: list[CompressedWriter] = []
    dtype = _float_type(SafetensorsFile(select_weights(src)[0]))
    try:
        with _progress("Compressing", sum(len(file.entries) for file in originals)) as bar:
            for original in originals:
                writer = CompressedWriter(out / original.path.name, original, info)
                writers.append(writer)

                def encode(name: str, original: SafetensorsFile = original) -> bytes:
                    twin = base.twin_of(name)
                    tensor = original[name]
                    return encode_raw(
                        tensor, None if twin is None else base[twin], name, twin or "", _threads(tensor.data.size)
                    )

                for name, payload in WorkAhead(encode, {name: original[name].data.size for name in original.entries}):
                    writer.add(name, payload)
                    bar.update()
        for shards in shard_sets(paths):
            group = [writer for writer in writers if writer.original.path in shards]
            digest = digest_of(header for writer in group for header in writer.headers)
            for writer in group:
                writer.finish(digest)
    finally:
        for writer in writers:
            writer.close()
    if not any(header.base_name for writer in writers for header in writer.headers):
        logger.warning(f"The base {base} predicts no tensor of {src}: this is hardly the model it was fine-tuned from.")
    settings = {"quant_method": METHOD, "base": info.name, "revision": info.revision, "dtype": dtype}
    _rewrite(out / CONFIG, lambda text: add_to_config(text, settings))


def decompress_checkpoint(src: str | os.PathLike, out: str | os.PathLike, base: str | os.PathLike | None = None) -> None:
    """Writes the folder that was compressed: safetensors files and all others, byte for byte as they were.

    Args:
        src: compressed folder.
        out: folder to write. On failure it is left as it was.
        base: folder or Hub id of the base, if it is no longer where config.json says.

    Raises:
        CorruptFileError: a file is damaged or from a newer version.
        BaseModelError: the base is missing or is another model.
    """
    src, out = Path(src), Path(out)
    files = open_compressed(src)
    base_checkpoint = open_base(files, src, base)
    _require_another_folder(out, src, base_checkpoint.name)
    with staged_folder(out) as stage:
        for path in _other_files(src, out):
            _copy(path, stage / path.relative_to(src))
        read_config(stage / CONFIG)
        _rewrite(stage / CONFIG, remove_from_config)
        with _progress("Decompressing", sum(len(file.original) for file in files)) as bar:
            for file in files:
                with open(stage / file.path.name, "wb") as target:
                    target.write(len(file.original_header).to_bytes(8, "little") + file.original_header)
                    for _, tensor in decoded(file, base_checkpoint, file.original):
                        target.write(tensor.data)
                        bar.update()


def verify(src: str | os.PathLike, base: str | os.PathLike | None = None) -> int:
    """Decodes every tensor of a compressed folder and checks it; returns how many there are.

    Raises:
        CorruptFileError, BaseModelError: naming the first tensor that does not come out as it was saved.
    """
    files = open_compressed(Path(src))
    base_checkpoint = open_base(files, Path(src), base)
    with _progress("Verifying", sum(len(file.original) for file in files)) as bar:
        for file in files:
            for _ in decoded(file, base_checkpoint, file.file.entries):
                bar.update()
    return sum(len(file.original) for file in files)


def open_compressed(src: Path) -> list[CompressedFile]:
    """The compressed files of a folder (or one file), checked but for the tensors' content."""
    paths = all_weights(src) if src.is_dir() else [src]
    if not paths or not paths[0].exists():
        raise CheckpointError(f"{src} holds no safetensors weights.")
    files = [CompressedFile(path) for path in paths]
    if src.is_dir():
        for shards in shard_sets(paths):
            check_shards([file for file in files if file.path in shards])
    return files


def open_plain_base(base: str | os.PathLike, revision: str | None = None) -> Checkpoint:
    """Opens a base to compress against.

    Raises:
        BaseModelError: it cannot be read, or is itself compressed.
    """
    checkpoint = Checkpoint(base, revision)
    if any(KEY in file.metadata for file in checkpoint.files):
        raise BaseModelError(f"The base {checkpoint} is itself compressed; decompress it first and give the plain folder.")
    return checkpoint


def open_base(files: list[CompressedFile], src: Path, base: str | os.PathLike | None = None) -> Checkpoint:
    """Opens the base of compressed files: `base`, or where config.json says, or what the files themselves say.

    Raises:
        BaseModelError: it cannot be read, or its fingerprint is another than when the files were written.
    """
    recorded = files[0].base
    name, revision = base, None
    if name is None:
        name, revision = recorded.name, recorded.revision
        settings = read_config(src / CONFIG).get("quantization_config")
        if isinstance(settings, dict) and "base" in settings:
            name, revision = settings["base"], settings.get("revision")
    return matching_base(recorded, name, revision, src if src.is_dir() else src.parent)


def matching_base(recorded: BaseInfo, name: str | os.PathLike, revision: str | None, beside: Path) -> Checkpoint:
    """Opens `name` and makes sure that it is the recorded base. A relative folder may be meant from `beside`, the folder of
    the checkpoint, so that the two can be moved together."""
    advice = (
        'If the base has moved, set "base" under "quantization_config" in config.json to its folder or Hub id '
        "(on the command line: --base)."
    )
    if not isinstance(name, str | os.PathLike) or not isinstance(revision, str | None):
        raise BaseModelError(f"{name!r} at revision {revision!r} cannot be the name of the base {recorded}. {advice}")
    if not os.path.isdir(name) and os.path.isdir(beside / name):
        name = beside / name
    try:
        checkpoint = Checkpoint(name, revision)
    except BaseModelError as error:
        raise BaseModelError(f"The base model {recorded} is needed to read this checkpoint. {error} {advice}") from error
    if checkpoint.fingerprint != recorded.fingerprint:
        raise BaseModelError(
            f"This checkpoint was compressed against {recorded} (fingerprint {recorded.fingerprint}), but {checkpoint} is "
            f"another model or revision (fingerprint {checkpoint.fingerprint}). {advice}"
        )
    return checkpoint


def decoded(file: CompressedFile, base: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, RawTensor]]:
    """The tensors of a file, decoded on all cores, some ahead of the reader."""
    sizes = {name: file.size(name) for name in names}
    return iter(WorkAhead(lambda name: decode_tensor(file, base, name), sizes))


def decode_tensor(file: CompressedFile, base: Checkpoint, name: str) -> RawTensor:
    """One tensor of a file; where the base is not the recorded one, the error names both."""
    header = file.headers[name]
    try:
        return decode_raw(file.payload(name), base_tensor(base, header.base_name), header, _threads(file.size(name)))
    except BaseModelError as error:
        raise BaseModelError(f"{error} Compressed against {file.base}, read with {base}.") from error


def base_tensor(base: Checkpoint, name: str) -> RawTensor | None:
    """The tensor that predicts another; None where none does or the base has none of that name."""
    return base[name] if name in base else None


class WorkAhead:
    """Runs `work(name)` on all cores before its result is asked for, while what is ahead stays below AHEAD bytes.

    Args:
        sizes: the bytes of each result, by name, in the order in which they will be asked for (in any other it is slower).
    """

    def __init__(self, work: Callable[[str], Result], sizes: dict[str, int]):
        self._work = work
        self._sizes = sizes
        self._coming = iter(sizes)
        self._pool = ThreadPoolExecutor(CORES)
        self._running: dict[str, Future[Result]] = {}
        self._ahead = 0
        self._start()

    def result(self, name: str) -> Result:
        future = self._running.pop(name, None)
        if future is None:
            return self._work(name)
        result = future.result()
        self._ahead -= self._sizes[name]
        self._start()
        return result

    def __iter__(self) -> Iterator[tuple[str, Result]]:
        try:
            for name in self._sizes:
                yield name, self.result(name)
        finally:
            self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _start(self) -> None:
        while (self._ahead < AHEAD or not self._running) and (name := next(self._coming, None)) is not None:
            self._ahead += self._sizes[name]
            self._running[name] = self._pool.submit(self._work, name)


def _threads(size: int) -> int:
    """A tensor that fills the room ahead is worked on by all cores together, others by one each."""
    return CORES if size > AHEAD // 16 else 1


def _progress(what: str, count: int):
    return tqdm(total=count, desc=f"{what} tensors")


def _require_another_folder(out: Path, src: Path, base: str | os.PathLike) -> None:
    for folder in (src if src.is_dir() else src.parent, Path(base)):
        if os.path.exists(out) and os.path.exists(folder) and out.samefile(folder):
            raise CheckpointError(f"{folder} cannot be written over, it is still needed; give another folder.")


def _other_files(src: Path, out: Path) -> list[Path]:
    """All files below `src` but its weights, what a killed save left, and `out`."""
    weights, out = all_weights(src) if src.is_dir() else [], out.resolve()

    def is_other(path: Path) -> bool:
        left = STAGE in path.relative_to(src).parts or path.parent.resolve().is_relative_to(out)
        return path.is_file() and path not in weights and not left

    # A link to a folder is followed, as one to a file is, unless it leads back into a folder that it stands in.
    found = []
    for folder, folders, names in os.walk(src, followlinks=True):
        around = {os.path.realpath(path) for path in (folder, *Path(folder).absolute().parents)}
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(folder, name)) not in around]
        found += [Path(folder, name) for name in names]
    return [path for path in found if is_other(path)]


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Changes the text of a file, if there is one, whatever its line ends, and be it read-only."""
    if path.exists():
        text = change(path.read_bytes().decode())
        write_atomically(path, lambda beside: beside.write_bytes(text.encode()))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _portable_name(base: Checkpoint) -> str:
    """A folder by its absolute path, so that the checkpoint loads from any working directory; a Hub id as it is."""
    return os.path.abspath(base.name) if os.path.isdir(base.name) else base.name


def _float_type(file: SafetensorsFile) -> str | None:
    """torch's name of the type of the first float tensor by name: what Transformers takes for dtype="auto"."""
    dtypes = (file.entries[name].dtype for name in sorted(file.entries))
    return next((str(TORCH_DTYPES[dtype]).removeprefix("torch.") for dtype in dtypes if dtype in FLOATS), None)
