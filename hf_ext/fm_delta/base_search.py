"""The search for the base of a checkpoint: first among the models that its files name, then by comparing weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from huggingface_hub import CacheNotFound, scan_cache_dir

from hf_ext.display import table
from hf_ext.errors import BaseModelError, CheckpointError, HfExtError
from hf_ext.integration.cards import CARD, metadata_of
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.config_file import CONFIG, read_config
from hf_ext.storage.hub import downloaded, within
from hf_ext.storage.layout import PIPELINE, models_in, select_weights
from hf_ext.storage.likeness import LIKELY_SHARE, Likeness, likeness, unrelated
from hf_ext.storage.stored import Stored, open_counterpart, plain_base

SURE_AGREEMENT, SURE_SHARE = 0.6, 0.8  # see likeness.py
NEAR = 1.01  # bits per parameter, as a multiple of the best candidate's, that do not tell which of two is the base

VERDICTS = ("sure", "likely", "no", "unreadable")


@dataclass(frozen=True)
class Candidate:
    """A model that may be the base.

    Attributes:
        name: folder or Hub id.
        revision: commit on the Hub; None for a folder.
        verdict: "sure", "likely", "no", or "unreadable".
        why: the reason for the verdict.
        bits, agreement, shared: see `Likeness`; None if it is unreadable.
    """

    name: str
    revision: str | None
    verdict: str
    why: str
    bits: float | None = None
    agreement: float | None = None
    shared: float | None = None

    def __str__(self) -> str:
        return self.name + (f" at {self.revision}" if self.revision else "")


@dataclass(frozen=True)
class BaseReport:
    """The result of `find_base`, with the best candidate first. `str()` gives a table."""

    src: str
    candidates: list[Candidate]

    @property
    def verdict(self) -> str:
        """The verdict on the best candidate: "sure" or "likely"; "none" if no candidate fits."""
        best = self.candidates[0].verdict if self.candidates else "none"
        return best if best in ("sure", "likely") else "none"

    @property
    def best(self) -> Candidate | None:
        """The best candidate; None if no candidate fits."""
        return None if self.verdict == "none" else self.candidates[0]

    @property
    def nearest(self) -> list[Candidate]:
        """The best candidate, and those that may as well be the base; empty if no candidate fits."""
        best = self.best
        return [] if best is None else [best, *(other for other in self.candidates[1:] if _is_tied(other, best))]

    def require(self) -> Candidate:
        """Returns the base if the verdict is "sure".

        Raises:
            BaseModelError: the verdict is another.
        """
        if self.verdict != "sure":
            why = f" ({self.candidates[0].why})" if self.candidates and len(self.nearest) < 2 else ""
            shows = "--verbose` shows how the candidates compare." if self.candidates else "FOLDER …` searches your folders."
            raise BaseModelError(
                f"{self.summary().removesuffix('.')}{why}. Give the base by name: --base (in Python: base=). "
                f"`hf-ext find-base {self.src} {shows}"
            )
        return self.candidates[0]

    def to_dict(self) -> dict:
        return {"src": self.src, "verdict": self.verdict, "candidates": [asdict(candidate) for candidate in self.candidates]}

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}" if self.candidates else self.summary()

    def table(self) -> str:
        rows = [
            (
                str(candidate),
                candidate.verdict,
                *("–" if part is None else f"{part:.2f}" for part in (candidate.bits, candidate.agreement, candidate.shared)),
                candidate.why,
            )
            for candidate in self.candidates
        ]
        return table(("candidate", "base?", "bits/parameter", "agreement", "shared", "why"), rows)

    def summary(self) -> str:
        if not self.candidates:
            return (
                f"The base of {self.src} is not known: its config.json and model card name none, and there are no candidates "
                "to compare it with."
            )
        if self.best is None:
            return f"None of {len(self.candidates)} candidates fits {self.src}."
        if len(self.nearest) > 1:
            names = ", ".join(map(str, self.nearest))
            return f"The base of {self.src} is one of these, which are equally near: {names}."
        return f"The base of {self.src} is {'' if self.verdict == 'sure' else 'perhaps '}{self.best}."


def find_base(src: str | os.PathLike, candidates: Iterable[str | os.PathLike] | None = None) -> BaseReport:
    """Finds the model that a checkpoint was fine-tuned from.

    First compares the models that its config.json (`_name_or_path`) and its model card (`base_model`) name, and stops if one
    fits. A comparison reads a few KB of each tensor. The verdict "sure" requires the same number and shapes of layers, the same
    `model_type`, and weights that agree. Several that fit are sorted by the estimated bits per parameter; if those of the best
    two differ by less than 1 %, neither is "sure", because one may be another fine-tune of the same base.

    Args:
        src: folder or Hub id of a model with safetensors weights.
        candidates: folders or Hub ids; by default all models in the local Hub cache. Downloads only models that `src` names.

    Raises:
        CheckpointError: `src` has no plain safetensors weights.
    """
    src = downloaded(src)
    place = main_model(src)
    is_component = "_class_name" in read_config(src / CONFIG) or (src.absolute().parent / PIPELINE).exists()
    components = [place] if place else ["", src.absolute().name] if is_component else [""]
    try:
        stored = Stored(within(src, place))
        source = plain_base(stored, stored.quantization)
    except BaseModelError as error:
        raise CheckpointError(f"The base of {src} cannot be searched for: {error}") from error
    source.read_sparsely()
    examine = partial(_examine, source, stored.quantization, components)
    examined = [examine(name, None, name, f"named in {where}") for name, where in _declared(src)]
    if all(candidate.verdict != "sure" for candidate in examined):
        places = (
            _cached(components)
            if candidates is None
            else ((name := os.fspath(candidate), None, name) for candidate in candidates)
        )
        compared = {(candidate.name, candidate.revision) for candidate in examined}
        examined += [
            examine(*candidate)
            for candidate in dict.fromkeys(places)
            if not _is_same(src, candidate[2]) and candidate[:2] not in compared
        ]
    examined.sort(key=lambda candidate: (VERDICTS.index(candidate.verdict), candidate.bits or 0))
    tied = BaseReport(str(src), examined).nearest
    if len(tied) > 1:
        near = max(one.bits or 0 for one in tied)
        examined = [
            replace(one, verdict="likely", why=f"{one.why}, and so do another's")
            if one.verdict == tied[0].verdict and (one.bits or 0) <= near
            else one
            for one in examined
        ]
    return BaseReport(str(src), examined)


def _is_tied(other: Candidate, best: Candidate) -> bool:
    """Checks whether a candidate fits as well as the best one. A copy of it, with the same figures, does not count."""
    if other.verdict != best.verdict or other.bits is None or best.bits is None:
        return False
    return (other.bits, other.agreement) != (best.bits, best.agreement) and other.bits <= NEAR * best.bits


def require_related(src: str | os.PathLike, base: str | os.PathLike, revision: str | None = None) -> None:
    """Raises BaseModelError if a model cannot be the base of `src`: the result would hardly be smaller."""
    for place in models_in(Path(src)):
        stored = Stored(within(src, place))
        opened = open_counterpart(base, place, revision, stored.quantization)
        if reason := unrelated(stored.tensors(), opened, bool(stored.quantization)):
            raise BaseModelError(
                f"{reason} `hf-ext find-base {src}` looks for the base; `hf-ext compress --no-base` needs none. In Python, "
                "fm_delta.compress_checkpoint accepts every base."
            )


def main_model(folder: Path) -> str:
    """Returns the component with the largest weights of a diffusers pipeline; '' for the folder of one model."""

    def size(place: str) -> int:
        return sum(file.stat().st_size for file in select_weights(folder / place))

    models = models_in(folder)
    return models[0] if len(models) == 1 else max(models, key=size)


def _declared(src: Path) -> Iterator[tuple[str, str]]:
    """Yields the bases that a checkpoint's own files name, each with the name of the file."""
    named = [(read_config(src / config).get("_name_or_path"), config) for config in (CONFIG, PIPELINE)]
    bases = metadata_of(src).get("base_model")
    named += [(base, CARD) for base in (bases if isinstance(bases, list) else [bases])]
    seen = set()
    for name, where in named:
        if isinstance(name, str) and name and name not in seen and not _is_same(src, name):
            seen.add(name)
            yield name, where


def _cached(components: list[str]) -> Iterator[tuple[str, str | None, str]]:
    """Yields the models in the local Hub cache that have all their safetensors weights, at the top or in the folder of a
    component: id, commit and folder."""
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        for revision in sorted(repo.revisions, key=lambda revision: (not revision.refs, revision.commit_hash)):
            folders = [revision.snapshot_path / place for place in components]
            if repo.repo_type == "model" and any(map(_has_weights, folders)):
                yield repo.repo_id, revision.commit_hash, str(revision.snapshot_path)


def _has_weights(folder: Path) -> bool:
    try:
        return all(path.exists() for path in select_weights(folder))
    except HfExtError:
        return False


def _is_same(src: Path, place: str) -> bool:
    return os.path.isdir(place) and src.samefile(place)


def _examine(
    source: Checkpoint,
    quantization: str | None,
    components: list[str],
    name: str,
    revision: str | None,
    place: str,
    note: str = "",
) -> Candidate:
    """Compares a candidate with `source`, whose quantization it must have. Looks for the weights in the first of the
    `components` of the candidate's folder that has some. `place` is the folder of a model in the cache, or else the name."""
    try:
        stored, component = open_first(place, components)
        other = plain_base(stored, quantization)
        other.read_sparsely()
        measured = likeness(source, other, LIKELY_SHARE, bool(quantization))
        configs = [read_config(checkpoint.paths[0].parent / CONFIG) for checkpoint in (source, other)]
        kinds = [config.get("model_type") or config.get("_class_name") for config in configs]
    except HfExtError as error:
        return Candidate(name, revision, "unreadable", str(error))
    if len(components) > 1:  # `source` is a component alone, and so is its base
        name = within(name, component)
    verdict, why = _judge(measured, *kinds)
    why = f"{note}: {why}" if note else why
    return Candidate(name, revision or other.revision, verdict, why, measured.bits, measured.agreement, measured.shared)


def open_first(place: str, components: list[str], revision: str | None = None) -> tuple[Stored, str]:
    """Opens the first of these components of a folder or repository that has weights."""
    for component in components:
        stored = Stored(within(place, component), revision)
        try:
            _ = stored.checkpoint
            break
        except BaseModelError:
            if component == components[-1]:
                raise
    return stored, component


def _judge(measured: Likeness, kind: str | None, other: str | None) -> tuple[str, str]:
    """Returns the verdict and its reason, for checkpoints of these `model_type`s."""
    if reason := measured.objection:
        return "no", reason
    if kind != other and None not in (kind, other):
        return "likely", f"the weights agree, but it is of type {other}, not {kind}"
    if not measured.same_layers:
        return "likely", "the weights agree, but its layers differ in number or shape"
    if measured.shared < SURE_SHARE:
        return "likely", "the weights agree, but many tensors have no counterpart"
    if measured.agreement < SURE_AGREEMENT:
        return "likely", "the weights agree in part"
    return "sure", "the weights agree"
