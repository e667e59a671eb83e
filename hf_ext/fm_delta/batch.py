"""Compressing many fine-tunes in a run that can be resumed, in several processes or on several machines."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.utils import disable_progress_bars, tqdm

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.fm_delta.base_search import find_base
from hf_ext.fm_delta.batch_record import BatchReport, ModelResult, Record
from hf_ext.fm_delta.compress import compress_checkpoint
from hf_ext.fm_delta.reports import inspect
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta import DEFAULT_LEVEL
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.files import locked
from hf_ext.storage.guards import places_of
from hf_ext.storage.hub import absolute
from hf_ext.storage.layout import all_weights, weights_instead
from hf_ext.storage.open import open_plain
from hf_ext.storage.prefetch import at_most_cores, cores
from hf_ext.storage.tree import flush_folder, stamp


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
        verify, delete_source, level: see `compress_checkpoint`. A source that contains
            the base of another model is not deleted.
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
        run = Record(out, folders, verify or delete_source)
        jobs = []
        for source in run.sources:
            if not run.is_done(source, common, base_id):
                with run.reporting(source):
                    against = common or _found_base(source, candidates)
                    commit = against.revision or (revision if base_id else None)
                    target = str(out / source.name)
                    jobs.append(Job(str(source), against.name, commit, target, run.verify, level, 1, base_id))
                    run.needed += places_of(against)
        if not run.models and not jobs:
            instead = "".join(f" {folder} {contents}" for folder, contents in [*skipped.items()][:1])
            raise CheckpointError(f"There is nothing to compress: no folder of safetensors weights in {sources}.{instead}")
        for folder, contents in skipped.items():
            run.models.setdefault(folder.name, ModelResult(folder.name, str(folder), skipped=contents))
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
        skipped = {path: contents for path in visible if not _holds_weights(path) and (contents := weights_instead(path))}
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


def compress_job(job: Job) -> ModelResult:
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
        original_bytes=report.original_bytes,
        compressed_bytes=report.compressed_bytes,
        seconds=round(seconds, 3),
        verified=job.verify,
        stamp=seen,
        digest=CompressedFile(all_weights(out)[0]).digest,
    )


def _results(jobs: Sequence[Job], workers: int, executor: Executor | None) -> Iterator[tuple[Job, Future[ModelResult]]]:
    """Yields jobs with their results, each as soon as it is done."""
    with contextlib.ExitStack() as stack:
        work, share = compress_job, 1
        if executor is None:
            executor, share = ThreadPoolExecutor(workers), max(cores() // workers, 1)
            stack.callback(executor.shutdown, cancel_futures=True)
            work = compress_job if workers == 1 else compress_in_process
        futures = {executor.submit(work, job._replace(cores=share)): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future


def compress_in_process(job: Job) -> ModelResult:
    """Runs a job in a process of its own. If that dies, for lack of memory for instance, only this job fails."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, compress_job, job), daemon=True)
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        raise CheckpointError(f"The process died (exit code {process.exitcode}), perhaps for lack of memory.") from None
    process.join()
    if isinstance(result, Exception):
        raise result
    return result


def _send_result(sender: Connection, work: Callable[[Job], ModelResult], job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupts are the parent's
    disable_progress_bars()
    try:
        result: ModelResult | Exception = work(job)
    except Exception as error:
        result = error
    with contextlib.suppress(BrokenPipeError):  # the parent was killed
        sender.send(result)
