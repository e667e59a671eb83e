"""Folders of checkpoints to compressed folders and back, tensor by tensor."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from transformers.utils.logging import tqdm

from hf_ext.checkpoint import (
    CONFIG,
    SAFETENSORS_DTYPES,
    WEIGHTS,
    Checkpoint,
    RawTensor,
    SafetensorsFile,
    all_weights,
    staged_folder,
)
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.fm_delta.codec import FLOATS, decode_raw, encode_raw
from hf_ext.fm_delta.format import (
    BaseInfo,
    CompressedFile,
    CompressedWriter,
    add_to_config,
    check_shards,
    digest_of,
    remove_from_config,
)

METHOD = "fm_delta"
AHEAD = 256 * 1024 * 1024  # bytes of tensors worked on before they are asked for
CORES = os.cpu_count() or 1

Item = TypeVar("Item")
Result = TypeVar("Result")


def compress_checkpoint(src: str | os.PathLike, base: str | os.PathLike, out: str | os.PathLike, revision: str | None = None) -> None:
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
    base_checkpoint = Checkpoint(base, revision)
    for folder in (src, Path(base)):
        if out.exists() and folder.exists() and out.samefile(folder):
            raise CheckpointError(f"The compressed checkpoint cannot be written into {folder} itself; give another folder.")
    with staged_folder(out) as stage:
        for path in _other_files(src, out):
            _copy(path, stage / path.relative_to(src))
        compress_weights(src, base_checkpoint, stage)


def compress_weights(src: Path, base: Checkpoint, out: Path) -> None:
    """Compresses the weights of a folder into `out`, then adds what `from_pretrained` must know to `out`/config.json."""
    config_path = out / CONFIG
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise CheckpointError(
            f"{src} is compressed already." if method == METHOD else f"{src} is quantised ({method}); only plain weights can be compressed."
        )
    paths = all_weights(src)
    if not paths:
        raise CheckpointError(f"{src} holds no safetensors weights (model.safetensors, or shards of it).")
    if any((Path(file.path)).is_relative_to(src) for file in base.files):
        raise CheckpointError(f"{src} is the base model itself; give the folder of a fine-tune of it.")
    info = BaseInfo(_portable_name(base), base.revision, base.fingerprint)
    originals = [SafetensorsFile(path) for path in paths]
    writers: list[CompressedWriter] = []
    dtypes: Counter[str] = Counter()
    try:
        with _progress("Compressing", sum(len(file.entries) for file in originals)) as bar:
            for original in originals:
                writer = CompressedWriter(out / original.path.name, original)
                writers.append(writer)

                def encode(name: str, original: SafetensorsFile = original) -> bytes:
                    twin = base.twin_of(name)
                    tensor = original[name]
                    return encode_raw(tensor, None if twin is None else base[twin], name, twin or "", _threads(tensor.data.size))

                for name, payload in WorkAhead(encode, {name: original[name].data.size for name in original.entries}):
                    writer.add(name, payload)
                    dtypes[original[name].dtype] += original[name].data.size
                    bar.update()
        for stem in {_group(writer.original.path) for writer in writers}:
            group = [writer for writer in writers if _group(writer.original.path) == stem]
            digest = digest_of(header for writer in group for header in writer.headers)
            for writer in group:
                writer.finish(info, digest)
    finally:
        for writer in writers:
            writer.close()
    if config_path.exists():
        settings = {"quant_method": METHOD, "base": info.name, "revision": info.revision, "dtype": _float_type(dtypes)}
        config_path.write_text(add_to_config(config_path.read_text(encoding="utf-8"), settings), encoding="utf-8")


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
    if out.exists() and out.samefile(src):
        raise CheckpointError(f"{src} cannot be decompressed into itself; give another folder.")
    base_checkpoint = open_base(files, src, base)
    with staged_folder(out) as stage:
        for path in _other_files(src, out):
            _copy(path, stage / path.relative_to(src))
        if (stage / CONFIG).exists():
            text = (stage / CONFIG).read_text(encoding="utf-8")
            (stage / CONFIG).write_text(remove_from_config(text), encoding="utf-8")
        with _progress("Decompressing", sum(len(file.original) for file in files)) as bar:
            for file in files:
                with open(stage / file.path.name, "wb") as target:
                    target.write(len(file.original_header).to_bytes(8, "little") + file.original_header)
                    names = sorted(file.original, key=lambda name: file.original[name]["data_offsets"])
                    for _, tensor in decoded(file, base_checkpoint, names):
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
    for stem in {_group(path) for path in paths}:
        check_shards([file for file in files if _group(file.path) == stem])
    return files


def open_base(files: list[CompressedFile], src: Path, base: str | os.PathLike | None = None) -> Checkpoint:
    """Opens the base of compressed files: `base`, or where config.json says, or what the files themselves say.

    Raises:
        BaseModelError: it cannot be read, or its fingerprint is another than when the files were written.
    """
    recorded = files[0].base
    name, revision = base, None
    if name is None:
        name, revision = recorded.name, recorded.revision
        if (src / CONFIG).exists():
            settings = json.loads((src / CONFIG).read_text(encoding="utf-8")).get("quantization_config", {})
            name, revision = settings.get("base", name), settings.get("revision", revision)
    return matching_base(recorded, name, revision)


def matching_base(recorded: BaseInfo, name: str | os.PathLike, revision: str | None) -> Checkpoint:
    """Opens `name` and makes sure that it is the recorded base."""
    advice = (
        'If the base has moved, set "base" under "quantization_config" in config.json to its folder or Hub id '
        "(on the command line: --base)."
    )
    try:
        checkpoint = Checkpoint(name, revision)
    except (BaseModelError, CheckpointError, CorruptFileError) as error:
        raise BaseModelError(f"The base model {recorded} is needed to read this checkpoint. {error} {advice}") from error
    if checkpoint.fingerprint != recorded.fingerprint:
        raise BaseModelError(
            f"This checkpoint was compressed against {recorded} (fingerprint {recorded.fingerprint}), but {checkpoint} is another "
            f"model or revision (fingerprint {checkpoint.fingerprint}). {advice}"
        )
    return checkpoint


def decoded(file: CompressedFile, base: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, RawTensor]]:
    """The tensors of a file, decoded on all cores, some ahead of the reader."""
    sizes = {name: file.size(name) for name in names}
    return iter(WorkAhead(lambda name: decode_tensor(file, base, name), sizes))


def decode_tensor(file: CompressedFile, base: Checkpoint, name: str) -> RawTensor:
    header = file.headers[name]
    return decode_raw(file.payload(name), base_tensor(base, header.base_name), header, _threads(file.size(name)))


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


def _group(path: Path) -> str:
    """What the shards of one checkpoint share: `model`, or `model.fp16` of a variant."""
    return WEIGHTS.fullmatch(path.name)[1] or "" if WEIGHTS.fullmatch(path.name) else path.name


def _other_files(src: Path, out: Path) -> list[Path]:
    return [path for path in src.rglob("*") if path.is_file() and path not in all_weights(src) and not path.is_relative_to(out)]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _portable_name(base: Checkpoint) -> str:
    """A folder by its absolute path, so that the checkpoint loads from any working directory; a Hub id as it is."""
    return os.path.abspath(base.name) if os.path.isdir(base.name) else base.name


def _float_type(sizes: Counter[str]) -> str | None:
    """torch's name of the float type that most of the weights have: what dtype="auto" must find."""
    floats = [dtype for dtype, _ in sizes.most_common() if dtype in FLOATS]
    names = {name: str(dtype).removeprefix("torch.") for dtype, name in SAFETENSORS_DTYPES.items()}
    return names[floats[0]] if floats else None
