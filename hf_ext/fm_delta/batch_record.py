"""The record of a run of `compress_all`: the results for its models, and which of them are done."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_ext.display import megabytes, percent, table
from hf_ext.errors import CheckpointError, CorruptFileError, HfExtError
from hf_ext.fm_delta.sizes import Sizes
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.files import write_atomically
from hf_ext.storage.guards import require_deletable
from hf_ext.storage.open import open_files
from hf_ext.storage.tree import delete_folder, stamp

RECORD = "compress_all.json"  # in the folder of the compressed models


@dataclass(frozen=True)
class ModelResult(Sizes):
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
    seconds: float = 0.0
    verified: bool = False
    deleted: bool = False
    error: str | None = None
    skipped: str | None = None
    stamp: str | None = None
    digest: str | None = None


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
        models = [model.to_dict() for model in self.models]
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


class Record:
    """The results of a run, in memory and in compress_all.json, by which a later run resumes."""

    def __init__(self, out: Path, sources: list[Path], verify: bool):
        self.out, self.sources, self.verify, self.done_before = out, sources, verify, 0
        self.path = out / RECORD
        self.models = {model.name: model for model in _read(self.path) if model.stamp}
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
            write_atomically(self.path, lambda beside: beside.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{self.path} could not be written: {error}") from error

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
