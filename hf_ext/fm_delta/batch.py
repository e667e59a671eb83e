"""Compressing many fine-tunes in a run that can be resumed, in several processes or on several machines."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.utils import disable_progress_bars, tqdm

from hf_ext.display import megabytes, percent, table
from hf_ext.errors import CheckpointError, CorruptFileError, HfExtError
from hf_ext.fm_delta.base_search import find_base
from hf_ext.fm_delta.compress import compress_checkpoint, places_of
from hf_ext.fm_delta.reports import inspect
from hf_ext.storage.atomic import locked, write_atomically
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.codec import DEFAULT_LEVEL
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.hub import absolute
from hf_ext.storage.layout import all_weights, require_deletable, weights_instead
from hf_ext.storage.open import open_files, open_plain
from hf_ext.storage.prefetch import at_most_cores, cores
from hf_ext.storage.tree import delete_folder, flush_folder, stamp

RECORD = "compress_all.json"  # in the folder of the compressed models: the report, by which the next run resumes


@dataclass(frozen=True)
class ModelResult:
    """The result for one model.

    Attributes:
        name: name of its folder, and of the compressed folder.
        source: path of its folder.
        base, revision: the base that it is stored against; None if none was found.
        original_bytes, compressed_bytes: sizes of its files of weights.
        seconds: time that it took, verification included.
        verified: whether all tensors were decoded and compared with the source.
        deleted: whether the source was deleted after that.
        error: why it was not compressed, or not deleted; None on success.
        skipped: what the folder holds instead of a model's safetensors weights; None if it has such weights.
        stamp, digest: identify the source and the compressed weights in a later run.
    """

    name: str
    source: str
    base: str | None = None
    revision: str | None = None
    original_bytes: int = 0
    compressed_bytes: int = 0
    seconds: float = 0.0
    verified: bool = False
    deleted: bool = False
    error: str | None = None
    skipped: str | None = None
    stamp: str | None = None
    digest: str | None = None

    @property
    def ratio(self) -> float:
        """Compressed size as a share of the original."""
        return self.compressed_bytes / max(self.original_bytes, 1)


@dataclass(frozen=True)
class BatchReport:
    """The results for all models. `str()` gives a table.

    Attributes:
        out: folder of the results.
        models: the results, those of earlier runs included.
        done_before: number of models that an earlier run had finished, which this run left as they are.
    """

    out: str
    models: list[ModelResult]
    done_before: int = 0

    @property
    def failed(self) -> list[ModelResult]:
        return [model for model in self.models if model.error]

    def to_dict(self) -> dict:
        models = [asdict(model) | {"ratio": model.ratio} for model in self.models]
        return {"version": 1, "done_before": self.done_before, "models": models}

    def __str__(self) -> str:
        rows = [(model.name, *_figures([model]), model.base or "–", _state(model)) for model in self.models]
        shown = table(("model", "original", "compressed", "ratio", "seconds", "base", "state"), rows)
        return "\n\n".join([shown, self.summary(), *self._notes()])

    def summary(self) -> str:
        original, compressed, ratio, seconds = _figures(self.models)
        skipped = sum(model.skipped is not None for model in self.models)
        models = len(self.models) - skipped
        more = f" Skipped {skipped} other folder{'s' * (skipped > 1)}." if skipped else ""
        done = f"{models - len(self.failed)} of {models} models done"
        if self.done_before:
            done += f" ({self.done_before} by an earlier run, left as they are; for another --level, give another --out)"
        return f"{done}: {compressed} of {original} ({ratio}), {seconds} s of work.{more}"

    def _notes(self) -> list[str]:
        """Returns why models failed or were skipped. Models with the same reason share a paragraph."""
        reasons: dict[str, list[ModelResult]] = {}
        for model in self.models:
            if note := model.error or model.skipped:
                reasons.setdefault(note.replace(model.source, "FOLDER"), []).append(model)
        return [
            f"{', '.join(model.name for model in models)}: "
            + (reason if len(models) > 1 else reason.replace("FOLDER", models[0].source))
            for reason, models in reasons.items()
        ]


class Job(NamedTuple):
    """One model to compress. All paths are absolute, so that another machine with the same disks can do it."""

    source: str
    base: str
    revision: str | None
    out: str
    verify: bool
    level: int
    cores: int
    base_id: str | None


def compress_all(
    sources: str | os.PathLike | Iterable[str | os.PathLike],
    out: str | os.PathLike,
    base: str | os.PathLike | None = None,
    revision: str | None = None,
    *,
    workers: int = 1,
    executor: Executor | None = None,
    verify: bool = False,
    delete_source: bool = False,
    level: int = DEFAULT_LEVEL,
    candidates: Iterable[str | os.PathLike] | None = None,
    base_id: str | None = None,
) -> BatchReport:
    """Compresses many fine-tunes, each to a folder of its own name in `out`.

    A model that cannot be compressed is reported and does not stop the others. Each result is saved to `out`/compress_all.json.
    A later run skips the models that are done, unless their source has changed or their compressed weights are damaged. The
    report lists adapters and models in other formats as skipped.

    Args:
        sources: a folder whose subfolders are models, or a list of models' folders.
        out: folder to write.
        base: folder or Hub id of the model that all were fine-tuned from. By default, `find_base` finds the base of each model.
        revision: branch, tag or commit of the base on the Hub.
        workers: models to compress at a time, each in a process with its share of the cores and a few tensors in memory.
        executor: compresses the models instead, each on one core: any executor like those of `concurrent.futures`, such as
            `dask.distributed.Client(…).get_executor(pure=False)`. All its machines must see `sources`, `out` and the base
            under the same paths.
        verify, delete_source, level: see `compress_checkpoint`. A source in which another model's base lies is not deleted.
        candidates: without `base`, folders or Hub ids among which `find_base` searches; by default the local Hub cache.
        base_id: Hub id to record for the base if `base` is a local copy of it, so that others can load the results.

    Raises:
        CheckpointError: there is nothing to compress, two models have the same name, or another process is writing to `out`.
        BaseModelError: `base` cannot be read.
        CorruptFileError: `out`/compress_all.json is not the record of a run.
    """
    out = Path(os.path.abspath(out))
    common = None if base is None else open_plain(absolute(base), revision)
    folders, skipped = _folders(sources, out, common)
    candidates = None if candidates is None else list(candidates)
    with locked(out):
        run = _Run(out, folders, verify or delete_source)
        jobs = []
        for source in run.sources:
            if not run.is_done(source, common, base_id):
                with run.reporting(source):
                    against = common or _found_base(source, candidates)
                    target = str(out / source.name)
                    jobs.append(
                        Job(
                            str(source),
                            against.name,
                            against.revision or (revision if base_id else None),
                            target,
                            run.verify,
                            level,
                            1,
                            base_id,
                        )
                    )
                    run.needed += places_of(against)
        if not run.models and not jobs:
            instead = "".join(f" {folder} {held}" for folder, held in [*skipped.items()][:1])
            raise CheckpointError(f"There is nothing to compress: no folder of safetensors weights in {sources}.{instead}")
        for folder, held in skipped.items():
            run.models.setdefault(folder.name, ModelResult(folder.name, str(folder), skipped=held))
        if delete_source:  # the sources of an earlier run; all bases must be known before
            run.delete(list(run.models.values()))
        with tqdm(total=len(jobs), desc="Compressing models", disable=not jobs) as bar:
            for job, future in _results(jobs, workers, executor):
                with run.reporting(Path(job.source)):
                    model = future.result()
                    run.add(model)
                    if delete_source:
                        run.delete([model])
                bar.update()
        run.save()
        return run.report()


class _Run:
    """The results of a run, in memory and in its record."""

    def __init__(self, out: Path, sources: list[Path], verify: bool):
        self.out, self.sources, self.verify, self.done_before = out, sources, verify, 0
        self.record = out / RECORD
        self.models = {model.name: model for model in _read(self.record) if model.stamp}
        # The bases of all models, which must not be deleted.
        bases = [model.base for model in self.models.values() if model.base]
        self.needed: list[str | Path] = [base for base in bases if os.path.isdir(base)]
        for source in sources:
            model = self.models.get(source.name)
            if model and (model.source != str(source) or model.deleted and source.exists()):
                raise CheckpointError(
                    f"{out / source.name} holds another model, compressed from {model.source}. Rename {source}, or give "
                    "another folder to write."
                )

    def is_done(self, source: Path, base: Checkpoint | None, base_id: str | None) -> bool:
        """Checks whether an earlier run compressed this model as requested, and source and result have not changed."""
        model = self.models.get(source.name)
        if model is None or self.verify > model.verified or source.exists() and stamp(source) != model.stamp:
            return False
        if base is not None and (model.base, model.revision) != (base.name, base.revision):
            return False
        try:
            file = open_files(self.out / source.name)[0]
            done = file.digest == model.digest and file.base is not None and base_id in (None, file.base.name)
        except (HfExtError, OSError):
            return False
        self.models[source.name] = replace(model, error=None)
        self.done_before += done
        return done

    @contextlib.contextmanager
    def reporting(self, source: Path) -> Iterator[None]:
        """Turns an error in the block into the result of the model, in place of its earlier result."""
        self.models.pop(source.name, None)
        try:
            yield
        except Exception as error:
            what = str(error) if isinstance(error, HfExtError) else f"{type(error).__name__}: {error}"
            self.models[source.name] = ModelResult(source.name, str(source), error=what)
            self.save()

    def add(self, model: ModelResult) -> None:
        self.models[model.name] = model
        self.save()

    def delete(self, models: list[ModelResult]) -> None:
        """Deletes the sources of verified models, or records why not. Completes a deletion that a kill interrupted."""
        for model in models:
            source = Path(model.source)
            others = [other for other in self.sources if other != source and other.exists()]
            if not model.verified or source.exists() and source not in self.sources:
                continue
            try:
                if source.exists():
                    require_deletable(source, self.out, [*self.needed, *others])
                delete_folder(source, model.stamp, self.needed)
                self.add(replace(model, deleted=True, error=None))
            except CheckpointError as error:
                self.add(replace(model, error=str(error)))

    def save(self) -> None:
        text = json.dumps(self.report().to_dict(), indent=2)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomically(self.record, lambda beside: beside.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{self.record} could not be written: {error}") from error

    def report(self) -> BatchReport:
        return BatchReport(str(self.out), sorted(self.models.values(), key=lambda model: model.name), self.done_before)


def _read(record: Path) -> list[ModelResult]:
    if not os.path.isfile(record):
        return []
    try:
        models = json.loads(record.read_text(encoding="utf-8"))["models"]
        return [ModelResult(**{key: value for key, value in model.items() if key != "ratio"}) for model in models]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{record} is not the record of an earlier run; move it away to start again.") from error


def _folders(
    sources: str | os.PathLike | Iterable[str | os.PathLike], out: Path, base: Checkpoint | None
) -> tuple[list[Path], dict[Path, str]]:
    """Returns the folders to compress, by absolute path, and those to skip, each with what it holds instead of weights.

    From a folder of folders, it takes those with weights, except the base itself."""
    skipped = {}
    if isinstance(sources, str | os.PathLike):
        folder = Path(os.path.abspath(sources))
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give a folder of saved models, or a list of their folders.")
        visible = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
        folders = [path for path in visible if _holds_weights(path) and not _is_base(path, base)]
        skipped = {path: held for path in visible if not _holds_weights(path) and (held := weights_instead(path))}
    else:
        folders = [Path(os.path.abspath(source)) for source in sources]
    names = [path.name for path in folders]
    for path in folders:
        if names.count(path.name) > 1:
            raise CheckpointError(f"Two models are called '{path.name}' and would be written to one folder; rename one.")
        if path == out / path.name:
            raise CheckpointError(f"{out} holds the models themselves; give another folder to write.")
    return folders, skipped


def _holds_weights(folder: Path) -> bool:
    try:
        return bool(all_weights(folder))
    except HfExtError:  # reported with this model later
        return True


def _is_base(folder: Path, base: Checkpoint | None) -> bool:
    return base is not None and os.path.isdir(base.name) and folder.samefile(base.name)


def _found_base(source: Path, candidates: list[str | os.PathLike] | None) -> Checkpoint:
    base = find_base(source, candidates).require()
    return open_plain(absolute(base.name), base.revision)


def _compress(job: Job) -> ModelResult:
    """Compresses a model; runs in a worker."""
    source, out, start = Path(job.source), Path(job.out), time.perf_counter()
    seen = stamp(source)
    with at_most_cores(job.cores):
        compress_checkpoint(source, job.base, out, job.revision, job.verify, level=job.level, base_id=job.base_id)
    if job.verify:
        flush_folder(out)  # the source may be deleted next
    seconds, report = time.perf_counter() - start, inspect(out)
    return ModelResult(
        source.name,
        job.source,
        job.base,
        job.revision,
        report.original_bytes,
        report.compressed_bytes,
        round(seconds, 3),
        job.verify,
        stamp=seen,
        digest=CompressedFile(all_weights(out)[0]).digest,
    )


def _results(jobs: Sequence[Job], workers: int, executor: Executor | None) -> Iterator[tuple[Job, Future[ModelResult]]]:
    """Yields jobs with their results, each as soon as it is done."""
    own, share = None, 1
    if executor is None:
        executor, share = (own := ThreadPoolExecutor(workers)), max(cores() // workers, 1)
    work = _compress if own is None or workers == 1 else _compress_in_process
    try:
        futures = {executor.submit(work, job._replace(cores=share)): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future
    finally:
        if own is not None:
            own.shutdown(cancel_futures=True)


def _compress_in_process(job: Job) -> ModelResult:
    """Runs in a process of its own. If that dies, for lack of memory for instance, only this job fails."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_worker) as pool:
        return pool.submit(_compress, job).result()


def _start_worker() -> None:
    """Leaves interrupts to the parent process, and ends with it: the next run would write to the same folder."""

    def follow() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    disable_progress_bars()


def _figures(models: Sequence[ModelResult]) -> tuple[str, str, str, str]:
    original, compressed = sum(model.original_bytes for model in models), sum(model.compressed_bytes for model in models)
    seconds = f"{sum(model.seconds for model in models):.1f}"
    if not original:  # all failed before
        return "–", "–", "–", seconds
    return megabytes(original), megabytes(compressed), percent(compressed / max(original, 1)), seconds


def _state(model: ModelResult) -> str:
    if model.skipped:
        return "skipped"
    done = "source deleted" if model.deleted else "verified" if model.verified else "done"
    return "failed" if model.error and not model.stamp else f"{done}, but see below" if model.error else done
