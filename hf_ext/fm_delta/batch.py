"""Compresses many fine-tunes on any executor, in a run that can be resumed."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import xxhash
from huggingface_hub.utils import disable_progress_bars

from hf_ext.display import megabytes, percent, table
from hf_ext.errors import CheckpointError, CorruptFileError, HfExtError
from hf_ext.fm_delta.base_search import find_base, main_model, open_first, require_related
from hf_ext.fm_delta.compress import compress_checkpoint
from hf_ext.fm_delta.reports import Sizes
from hf_ext.storage.config_file import CONFIG
from hf_ext.storage.delta import DEFAULT_LEVEL
from hf_ext.storage.files import locked, write_atomically
from hf_ext.storage.hub import absolute, absolute_path
from hf_ext.storage.layout import PIPELINE, all_weights, models_in, weights_instead
from hf_ext.storage.prefetch import at_most_cores, cores, progress

RECORD = "compress_all.json"  # in the folder of the compressed models
IMPORTS = threading.Lock()
SOURCE = "\0"  # in a reason, the place of the source's path


@dataclass(frozen=True)
class ModelResult(Sizes):
    """The result for one model."""

    name: str  # of its folder, and of the compressed folder
    source: str
    base: str | None = None
    revision: str | None = None
    seconds: float = 0.0  # verification included
    verified: bool = False
    error: str | None = None
    skipped: str | None = None  # what the folder holds instead of safetensors weights
    note: str | None = None  # what a user should know of the result
    stamps: Sequence[str] = ()  # of the source and of the compressed weights, for a later run


@dataclass
class BatchReport:
    """The results for all models, those of earlier runs included. `str()` gives a table.

    Attributes:
        earlier: number of models that an earlier run had done, and this one skipped.
    """

    models: list[ModelResult]
    earlier: int = 0

    @property
    def failed(self) -> list[ModelResult]:
        return [model for model in self.models if model.error]

    def to_dict(self) -> dict:
        return {"version": 1, "models": [model.to_dict() for model in self.models]}

    def summary(self) -> str:
        models = [model for model in self.models if not model.skipped]
        original, compressed, ratio, seconds = _figures(models)
        done = f"{len(models) - len(self.failed)} of {len(models)} models done: {compressed} of {original} ({ratio})"
        skipped = f" Skipped {len(self.models) - len(models)} other folders." if models != self.models else ""
        earlier = f" Skipped {self.earlier}, which an earlier run had done." if self.earlier else ""
        return f"{done}, {seconds} s of work.{earlier}{skipped}"

    def __str__(self) -> str:
        rows, reasons = [], dict[str, list[ModelResult]]()  # models with the same reason share a paragraph
        for model in self.models:
            state = "failed" if model.error else "skipped" if model.skipped else "verified" if model.verified else "done"
            rows.append((model.name, *_figures([model]), model.base or "–", state))
            if reason := model.error or model.skipped or model.note:
                reasons.setdefault(reason.replace(model.source, SOURCE), []).append(model)
        notes = []
        for reason, models in reasons.items():
            names, text = ", ".join(model.name for model in models), reason.replace(SOURCE, models[0].source)
            notes.append(f"{names}: {text}{' (the others likewise)' if len(models) > 1 and text != reason else ''}")
        header = ("model", "original", "compressed", "ratio", "seconds", "base", "state")
        return "\n\n".join([table(header, rows), *notes, self.summary()])


def _figures(models: Sequence[ModelResult]) -> tuple[str, str, str, str]:
    original, compressed = sum(model.original_bytes for model in models), sum(model.compressed_bytes for model in models)
    sizes = (megabytes(original), megabytes(compressed), percent(compressed / original)) if original else ("–", "–", "–")
    return *sizes, f"{sum(model.seconds for model in models):.1f}"


def compress_all(
    sources: str | os.PathLike | Iterable[str | os.PathLike],
    out: str | os.PathLike,
    base: str | os.PathLike | None = None,
    revision: str | None = None,
    *,
    workers: int = 1,
    executor: Executor | None = None,
    verify: bool = False,
    level: int = DEFAULT_LEVEL,
    candidates: Iterable[str | os.PathLike] | None = None,
    overwrite: bool = False,
) -> BatchReport:
    """Compresses many fine-tunes, each to a folder of its own name in `out`.

    A model that cannot be compressed, or is unrelated to the base, is reported and does not stop the others. Each result is
    saved to `out`/compress_all.json. A later run skips the models that are done, unless files of the source or the compressed
    weights have changed.

    Args:
        sources: a folder whose subfolders are models, or a list of models' folders.
        base, revision: the base of all, see `compress_checkpoint`. By default, `find_base` finds the base of each model.
        workers: models to compress at a time, each in a process with its share of the cores and a few tensors in memory.
        executor: compresses the models instead, each on one core: any executor like those of `concurrent.futures`, such as
            `dask.distributed.Client(…).get_executor(pure=False)`. All its machines must see `sources`, `out` and the base
            under the same paths.
        verify, level: see `compress_checkpoint`.
        candidates: without `base`, folders or Hub ids among which `find_base` searches; by default the local Hub cache.
        overwrite: replace files of a folder that holds something else than a compressed model.

    Raises:
        CheckpointError: there is nothing to compress, two models have the same name, or another process is writing to `out`.
        BaseModelError: `base` cannot be read.
        CorruptFileError: `out`/compress_all.json is not the record of a run.
    """
    out, candidates = Path(absolute_path(out)), None if candidates is None else [absolute(name) for name in candidates]
    folders = _folders(sources, base)
    common = None
    if base is not None:
        places = [""]  # where the base may have weights, if it is a pipeline
        for path in (path for path, reason in folders.items() if reason is None):
            with contextlib.suppress(HfExtError):
                places.append(main_model(path))
        common = absolute(base), open_first(absolute(base), list(dict.fromkeys(places)), revision)[0].checkpoint.revision
    pool, threads = (executor, 1) if executor else (ThreadPoolExecutor(workers), max(cores() // workers, 1))
    processes = SimpleQueue[ProcessPoolExecutor]()
    for _ in range(workers):
        processes.put(_new_process())  # starts when it is used
    work = compress_model if executor or workers == 1 else partial(compress_in_process, processes)
    options = (*(common or (None, None)), candidates, verify, level, threads)
    with locked(out):
        results = _read(out / RECORD)
        results |= {path.name: ModelResult(path.name, str(path), skipped=reason) for path, reason in folders.items() if reason}
        todo = [path for path, reason in folders.items() if not (reason or _is_done(results, path, out, common, verify))]
        try:
            futures = {pool.submit(work, source, out / source.name, overwrite, *options): source for source in todo}
            for future in progress("Compressing", len(futures), "models", as_completed(futures)) if futures else ():
                source = futures[future]
                try:
                    results[source.name] = future.result()
                except Exception as error:
                    text = str(error) if isinstance(error, HfExtError) else f"{type(error).__name__}: {error}"
                    results[source.name] = ModelResult(source.name, str(source), error=text)
                _write(out / RECORD, results)
        finally:
            if executor is None:
                pool.shutdown(cancel_futures=True)
            while not processes.empty():
                processes.get().shutdown()
        return _write(out / RECORD, results, sum(1 for reason in folders.values() if not reason) - len(todo))


def _folders(
    sources: str | os.PathLike | Iterable[str | os.PathLike], base: str | os.PathLike | None
) -> dict[Path, str | None]:
    """Returns the models' folders, by absolute path, each with the reason to skip it. In a folder of folders, leaves out the
    base itself."""
    if not isinstance(sources, str | os.PathLike):
        folders = [Path(absolute_path(source)) for source in sources]
        names = [path.name for path in folders]
        if twice := [name for name in names if names.count(name) > 1]:
            raise CheckpointError(f"Two models are called '{twice[0]}' and would be written to one folder; rename one.")
        return dict.fromkeys(folders)
    if not os.path.isdir(sources):
        raise CheckpointError(f"{sources} is not a folder; give a folder of saved models, or a list of their folders.")
    visible = [path for path in sorted(Path(absolute_path(sources)).glob("[!.]*")) if path.is_dir()]
    models = [path for path in visible if not (base and os.path.isdir(base) and path.samefile(base))]
    reasons = {path: _reason_to_skip(path) for path in models}
    if all(reasons.values()):
        first = "".join(f" {path} {reason}" for path, reason in [*reasons.items()][:1])
        raise CheckpointError(f"There is nothing to compress: no folder of safetensors weights in {sources}.{first}")
    return reasons


def _reason_to_skip(folder: Path) -> str | None:
    try:
        holds_weights = any(all_weights(folder / place) for place in models_in(folder))
        return None if holds_weights else weights_instead(folder) or "holds no weights."
    except HfExtError:  # reported with this model later
        return None


def _read(record: Path) -> dict[str, ModelResult]:
    """Returns an earlier run's successes, by name."""
    if not record.exists():
        return {}
    try:
        results = json.loads(record.read_text(encoding="utf-8"))["models"]
        models = [ModelResult(**{key: value for key, value in result.items() if key != "ratio"}) for result in results]
        return {model.name: model for model in models if model.stamps}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CorruptFileError(f"{record} is not the record of an earlier run; move it away to start again.") from error


def _write(record: Path, results: dict[str, ModelResult], earlier: int = 0) -> BatchReport:
    report = BatchReport([results[name] for name in sorted(results)], earlier)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(record, lambda beside: beside.write_text(json.dumps(report.to_dict(), indent=2), encoding="utf-8"))
    return report


def _is_done(
    results: dict[str, ModelResult], source: Path, out: Path, base: tuple[str, str | None] | None, verify: bool
) -> bool:
    """Checks whether an earlier run compressed this model as requested, and source and result have not changed."""
    model = results.get(source.name)
    if model and model.source != str(source):
        raise CheckpointError(f"{out / model.name} holds another model, compressed from {model.source}. Rename {source}.")
    if model is None or verify > model.verified or base and (model.base, model.revision) != base:
        return False
    if not all(os.path.lexists(out / model.name / path.relative_to(source)) for path in source.rglob("*")):
        return False
    return list(model.stamps) == [_stamp(source.rglob("*")), _stamp((out / model.name).rglob("*.safetensors"))]


def _stamp(paths: Iterable[Path]) -> str:
    """Returns a hash of files by their names, sizes and times."""
    entries = [(path.name, path.lstat()) for path in sorted(paths) if not path.is_dir()]
    written = [(name, entry.st_size, entry.st_mtime_ns) for name, entry in entries]
    return xxhash.xxh3_128_hexdigest(repr(written).encode(errors="surrogateescape"))


def compress_model(
    source: Path,
    out: Path,
    overwrite: bool,
    base: str | None,
    revision: str | None,
    candidates: list | None,
    verify: bool,
    level: int,
    threads: int,
) -> ModelResult:
    """Compresses a model, in a worker. All paths are absolute, so that another machine with the same disks can do it."""
    with IMPORTS:  # PyTorch parses source, which fails in CPython 3.11 if two threads do: "AST constructor recursion depth"
        if level > 1:
            importlib.import_module("hf_ext.storage.delta.low_rank")  # and PyTorch with it
    start, before = time.perf_counter(), _stamp(source.rglob("*"))
    with at_most_cores(threads):
        if base is None:
            match = find_base(source, candidates).require()
            base, revision = absolute(match.name), match.revision
        else:
            require_related(source, base, revision)
        sizes = compress_checkpoint(source, base, out, revision, verify, level, overwrite=overwrite)
    seconds = round(time.perf_counter() - start, 3)
    result = ModelResult(source.name, str(source), base, revision, seconds, verify)
    if not any((source / name).exists() for name in (CONFIG, PIPELINE)):
        result = replace(result, note=f"{source} has no {CONFIG}, so from_pretrained cannot load it.")
    result = replace(result, original_bytes=sizes.original_bytes, compressed_bytes=sizes.compressed_bytes)
    return replace(result, stamps=[before, _stamp(out.rglob("*.safetensors"))])


def compress_in_process(processes: SimpleQueue[ProcessPoolExecutor], *arguments: Any) -> ModelResult:
    """Calls `compress_model` in a free process. If that dies, for lack of memory for instance, only this model fails."""
    process = processes.get()
    try:
        return process.submit(compress_model, *arguments).result()
    except BrokenProcessPool:
        process = _new_process()
        raise CheckpointError("The process that compressed it died, perhaps for lack of memory.") from None
    finally:
        processes.put(process)


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_process)


def _start_process() -> None:
    """Leaves interrupts to the parent process, and ends this one with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    disable_progress_bars()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
