"""Compresses many fine-tunes on any executor, in a run that can be resumed."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub.utils import disable_progress_bars, tqdm

from hf_ext.display import megabytes, percent, table
from hf_ext.errors import CheckpointError, CorruptFileError, HfExtError
from hf_ext.fm_delta.base_search import find_base
from hf_ext.fm_delta.compress import compress_checkpoint
from hf_ext.fm_delta.reports import inspect
from hf_ext.fm_delta.sizes import Sizes
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta import DEFAULT_LEVEL
from hf_ext.storage.files import locked, write_atomically
from hf_ext.storage.hub import absolute
from hf_ext.storage.layout import all_weights, weights_instead
from hf_ext.storage.open import open_plain
from hf_ext.storage.prefetch import at_most_cores, cores

RECORD = "compress_all.json"  # in the folder of the compressed models
IMPORTS = threading.Lock()


@dataclass(frozen=True)
class ModelResult(Sizes):
    """The result for one model."""

    name: str  # of its folder, and of the compressed folder
    source: str
    base: str | None = None
    revision: str | None = None
    base_id: str | None = None
    seconds: float = 0.0  # verification included
    verified: bool = False
    error: str | None = None
    skipped: str | None = None  # what the folder holds instead of safetensors weights
    stamps: tuple[str, ...] = ()  # of the source and of the compressed weights, for a later run


@dataclass
class BatchReport:
    """The results for all models, in the order of their names. `str()` gives a table.

    Attributes:
        out: folder of the results.
        models: the results, those of earlier runs included.
    """

    out: str
    models: list[ModelResult]

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
        return f"{done}, {seconds} s of work.{skipped}"

    def __str__(self) -> str:
        rows, reasons = [], dict[str, list[str]]()  # models with the same reason share a paragraph
        for model in self.models:
            state = "failed" if model.error else "skipped" if model.skipped else "verified" if model.verified else "done"
            rows.append((model.name, *_figures([model]), model.base or "–", state))
            if reason := model.error or model.skipped:
                reasons.setdefault(reason.replace(model.source, "FOLDER"), []).append(model.name)
        notes = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        header = ("model", "original", "compressed", "ratio", "seconds", "base", "state")
        return "\n\n".join([table(header, rows), *notes, self.summary()])

    def _add(self, result: ModelResult) -> None:
        """Adds a result, in place of an earlier one of the model, and saves them all."""
        others = [model for model in self.models if model.name != result.name]
        self.models = sorted([*others, result], key=lambda model: model.name)
        text = json.dumps(self.to_dict(), indent=2)
        os.makedirs(self.out, exist_ok=True)
        write_atomically(Path(self.out, RECORD), lambda beside: beside.write_text(text, encoding="utf-8"))

    @contextmanager
    def _reporting(self, source: Path) -> Iterator[None]:
        """Turns an error in the block into the result for a model."""
        try:
            yield
        except Exception as error:
            text = str(error) if isinstance(error, HfExtError) else f"{type(error).__name__}: {error}"
            self._add(ModelResult(source.name, str(source), error=text))


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
    base_id: str | None = None,
) -> BatchReport:
    """Compresses many fine-tunes, each to a folder of its own name in `out`.

    A model that cannot be compressed is reported and does not stop the others. Each result is saved to `out`/compress_all.json.
    A later run skips the models that are done, unless files of the source or the compressed weights have changed. The report
    lists adapters and models in other formats as skipped.

    Args:
        sources: a folder whose subfolders are models, or a list of models' folders.
        out: folder to write.
        base: folder or Hub id of the model that all were fine-tuned from. By default, `find_base` finds the base of each model.
        revision: branch, tag or commit of the base on the Hub.
        workers: models to compress at a time, each in a process with its share of the cores and a few tensors in memory.
        executor: compresses the models instead, each on one core: any executor like those of `concurrent.futures`, such as
            `dask.distributed.Client(…).get_executor(pure=False)`. All its machines must see `sources`, `out` and the base
            under the same paths.
        verify, level: see `compress_checkpoint`.
        candidates: without `base`, folders or Hub ids among which `find_base` searches; by default the local Hub cache.
        base_id: Hub id to record for the base if `base` is a local copy of it, so that others can load the results.

    Raises:
        CheckpointError: there is nothing to compress, two models have the same name, or another process is writing to `out`.
        BaseModelError: `base` cannot be read.
        CorruptFileError: `out`/compress_all.json is not the record of a run.
    """
    out, candidates = Path(os.path.abspath(out)), None if candidates is None else list(candidates)
    common = None if base is None else open_plain(absolute(base), revision)
    pool, share = (executor, 1) if executor else (ThreadPoolExecutor(workers), max(cores() // workers, 1))
    work = compress_model if executor or workers == 1 else compress_in_process
    futures: dict[Future[ModelResult], Path] = {}
    with locked(out):
        report = BatchReport(str(out), _read(out / RECORD))
        folders, skipped = _folders(sources, common, report)
        try:
            for source in folders:
                with report._reporting(source):
                    if not _is_done(report, source, common, base_id, verify):
                        against = common or _found_base(source, candidates)
                        commit = against.revision or (revision if base_id else None)
                        call = (source, out / source.name, against.name, commit, base_id, verify, level, share)
                        futures[pool.submit(work, *call)] = source
            for result in skipped:
                report._add(result)
            for future in tqdm(as_completed(futures), "Compressing models", len(futures), disable=not futures):
                with report._reporting(futures[future]):
                    report._add(future.result())
        finally:
            if executor is None:
                pool.shutdown(cancel_futures=True)
        return report


def _read(record: Path) -> list[ModelResult]:
    """Returns the results of an earlier run's successes."""
    if not record.exists():
        return []
    try:
        results = json.loads(record.read_text(encoding="utf-8"))["models"]
        models = [ModelResult(**{key: value for key, value in result.items() if key != "ratio"}) for result in results]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CorruptFileError(f"{record} is not the record of an earlier run; move it away to start again.") from error
    return [model for model in models if model.stamps]


def _folders(
    sources: str | os.PathLike | Iterable[str | os.PathLike], base: Checkpoint | None, report: BatchReport
) -> tuple[list[Path], list[ModelResult]]:
    """Returns the folders to compress, by absolute path. In a folder of folders, the base itself is left out, and those with
    models in other formats are returned as skipped."""
    if not isinstance(sources, str | os.PathLike):
        folders, skipped = [Path(os.path.abspath(source)) for source in sources], []
    elif os.path.isdir(sources):
        visible = [path for path in sorted(Path(os.path.abspath(sources)).iterdir()) if path.is_dir() and path.name[0] != "."]
        folders = [
            path
            for path in visible
            if _holds_weights(path) and not (base and os.path.isdir(base.name) and path.samefile(base.name))
        ]
        others = [(path, weights_instead(path)) for path in visible if not _holds_weights(path)]
        skipped = [ModelResult(path.name, str(path), skipped=kind) for path, kind in others if kind]
    else:
        raise CheckpointError(f"{sources} is not a folder; give a folder of saved models, or a list of their folders.")
    names = [path.name for path in folders]
    if twice := [name for name in names if names.count(name) > 1]:
        raise CheckpointError(f"Two models are called '{twice[0]}' and would be written to one folder; rename one.")
    if not folders and not report.models:
        holds = f" {skipped[0].source} {skipped[0].skipped}" if skipped else ""
        raise CheckpointError(f"There is nothing to compress: no folder of safetensors weights in {sources}.{holds}")
    return folders, skipped


def _holds_weights(folder: Path) -> bool:
    try:
        return bool(all_weights(folder))
    except HfExtError:  # reported with this model later
        return True


def _is_done(report: BatchReport, source: Path, base: Checkpoint | None, base_id: str | None, verify: bool) -> bool:
    """Checks whether an earlier run compressed this model as requested, and source and result have not changed."""
    model = next((model for model in report.models if model.name == source.name), None)
    if model is None:
        return False
    if model.source != str(source):
        raise CheckpointError(
            f"{report.out}/{model.name} holds another model, compressed from {model.source}. Rename {source}."
        )
    same_base = base is None or (model.base, model.revision) == (base.name, base.revision)
    as_requested = same_base and base_id in (None, model.base_id) and model.verified >= verify
    return as_requested and list(_stamps(source, Path(report.out, model.name))) == list(model.stamps)


def _stamps(source: Path, out: Path) -> tuple[str, ...]:
    """Returns hashes of the files of a source and of its compressed weights, by names, sizes and times."""
    stamps = []
    for paths in (source.rglob("*"), out.glob("*.safetensors")):
        files = [(str(path), path.lstat()) for path in sorted(paths) if not path.is_dir()]
        stamps.append(xxhash.xxh3_128_hexdigest(repr([(path, entry.st_size, entry.st_mtime_ns) for path, entry in files])))
    return tuple(stamps)


def _found_base(source: Path, candidates: list[str | os.PathLike] | None) -> Checkpoint:
    base = find_base(source, candidates).require()
    return open_plain(absolute(base.name), base.revision)


def compress_model(
    source: Path, out: Path, base: str, revision: str | None, base_id: str | None, verify: bool, level: int, threads: int
) -> ModelResult:
    """Compresses a model; runs in a worker. All paths are absolute, so that another machine with the same disks can do it."""
    with IMPORTS:  # by several threads at once, they fail in CPython 3.11: "AST constructor recursion depth mismatch"
        importlib.import_module("hf_ext.storage.delta.low_rank")
        importlib.import_module("jinja2")
    start, before = time.perf_counter(), _stamps(source, out)[0]
    with at_most_cores(threads):
        compress_checkpoint(source, base, out, revision, verify, level=level, base_id=base_id)
    return ModelResult(
        source.name,
        str(source),
        base,
        revision,
        base_id,
        round(time.perf_counter() - start, 3),
        verify,
        original_bytes=(sizes := inspect(out)).original_bytes,
        compressed_bytes=sizes.compressed_bytes,
        stamps=(before, _stamps(source, out)[1]),
    )


def compress_in_process(*arguments: Any) -> ModelResult:
    """Runs `compress_model` in a process of its own. If that dies, for lack of memory for instance, only this model fails."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_process) as pool:
        try:
            return pool.submit(compress_model, *arguments).result()
        except BrokenProcessPool:
            raise CheckpointError("The process that compressed it died, perhaps for lack of memory.") from None


def _start_process() -> None:
    """Leaves interrupts to the parent process, and ends this one with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    disable_progress_bars()
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
