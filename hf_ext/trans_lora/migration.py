"""Moving an adapter to another base by several methods: copying it, TiTok and Trans-LoRA. The best one is kept."""

from __future__ import annotations

import copy
import shutil
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from accelerate import PartialState
from peft import PeftModel

from hf_ext.display import percent, table
from hf_ext.errors import HfExtError
from hf_ext.integration.cards import CARD
from hf_ext.storage.files import staged_folder, write_json
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.labels import LABELS, SEEDS, Pairs
from hf_ext.trans_lora.pipeline import Source, TransferRequest, load_model, with_adapter
from hf_ext.trans_lora.stages import RECORD
from hf_ext.trans_lora.synthesis import SYNTHESIS, Candidate, in_shares
from hf_ext.trans_lora.teacher import Teacher, agreement, teacher_encoder
from hf_ext.trans_lora.trainer import TransLoraTrainer

REPORT = "report.json"
OF_A_RUN = {SEEDS, SYNTHESIS, LABELS, RECORD, REPORT, "report.png", "training_args.bin", CARD}  # rather than of an adapter


@dataclass(frozen=True)
class Attempt:
    """The result of one method of moving an adapter.

    Attributes:
        method: "copy", "titok" or "trans_lora".
        score: share of the evidence's inputs that the new adapter answers word for word; None if the method does not apply.
        seconds: time in this run, without the inputs and labels that the methods share.
        prompt: the adapter's prompt, with {input} in place of an input.
        reason: why the method does not apply.
    """

    method: str
    score: float | None
    seconds: float
    prompt: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class MigrationReport:
    """The methods that were tried, and their scores. `str()` gives a table.

    Attributes:
        source, target: the models.
        evidence: description of the scores.
        teacher: score of the source model with its adapter; None if its answers are the evidence.
        shared_seconds: time in this run for the inputs and labels that "titok" and "trans_lora" share.
        attempts: in the order of the run.
    """

    source: str
    target: str
    evidence: str
    teacher: float | None
    shared_seconds: float
    attempts: list[Attempt]

    @property
    def best(self) -> Attempt:
        """The attempt with the highest score, and the cheapest among equals."""
        return max(self.attempts, key=lambda one: -1.0 if one.score is None else one.score)

    def to_dict(self) -> dict:
        return asdict(self) | {"best": self.best.method}

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the methods, their scores and their seconds."""
        rows = [] if self.teacher is None else [("source model with its adapter", percent(self.teacher), "")]
        if self.shared_seconds:
            rows.append(("inputs and labels", "", f"{self.shared_seconds:.0f}"))
        for one in self.attempts:
            score = f"not possible: {one.reason}" if one.score is None else percent(one.score)
            rows.append((one.method, score, f"{one.seconds:.0f}"))
        return rows

    @property
    def header(self) -> tuple[str, str, str]:
        return "method", self.evidence, "seconds"

    def __str__(self) -> str:
        return f"{table(self.header, self.rows())}\n\n{self.source} → {self.target}: by {self.best.method}"


def migrate(request: TransferRequest, *, test: Pairs | None = None, target_score: float = 1.0) -> MigrationReport:
    """Moves an adapter by several methods, the cheapest first, and keeps the best result in args.output_dir.

    "copy" puts the adapter on the target unchanged, if its weights fit and the tokenizers are the same. "titok" trains one
    on the inputs with the highest token excess (arXiv 2510.04682). "trans_lora" trains one on inputs that the discriminator
    keeps, if there is a discriminator. Each has a folder of its own in args.output_dir. The last two share the inputs that the
    target writes. A run that was killed resumes, and its folder has the best adapter so far.

    Args:
        request: as in `transfer`. Ignores `args.filter`, because each method has its own filter; `peft_config` is that of the
            adapter that "titok" or "trans_lora" trains.
        test: inputs of the task with the correct answers. The score is then the accuracy on them. Without a test, it is the
            agreement with the source model and its adapter on held-out synthetic inputs.
        target_score: score at which the run stops: it tries no further method.

    Raises:
        HfExtError: the models, the adapter and the discriminator do not go together, or there is nothing to score with.
    """
    if test is None and request.args.held_out_share == 0:
        raise HfExtError("There is nothing to compare on with held_out_share=0; raise it, or give a test (--test).")
    request.require_target()
    methods = _Methods(request)
    report, pairs = methods.evidence(test)
    for method in ("copy", "titok", *(["trans_lora"] if request.discriminator else [])):
        start = time.monotonic()
        try:
            model, encoder = getattr(methods, method)()
        except _NotPossible as error:
            attempt = Attempt(method, None, time.monotonic() - start, reason=str(error))
        else:
            score = agreement(model, encoder, pairs, request.args)
            attempt = Attempt(method, score, time.monotonic() - start, encoder.prompt("{input}"))
        report.attempts.append(attempt)
        if report.best.score is not None:
            _publish(report, request.args, request.peft_config.task_type)
        if attempt.score is not None and attempt.score >= target_score:
            break
    return report


class _NotPossible(HfExtError):
    """An error that rules out one method, but not the others."""


class _Methods:
    """The methods of moving one adapter. They share the teacher, the inputs that the target writes, and their labels."""

    def __init__(self, request: TransferRequest):
        self.request, self.args = request, request.args
        self.source = Source(request)
        self.teacher = Teacher(self.source.teacher, self.source.tokenizer, request.args)

    def evidence(self, test: Pairs | None) -> tuple[MigrationReport, Pairs]:
        """Returns the report, without attempts, and the inputs with the answers that the score counts.

        Raises:
            HfExtError: there are none.
        """
        names = self.request.source_model, self.request.target_model
        start = time.monotonic()
        pairs = self.written[1] if test is None else test
        if not pairs:
            raise HfExtError("There is nothing to compare on: raise num_samples or held_out_share, or give a test (--test).")
        if test is None:
            evidence = f"agreement on {len(pairs):,} held-out inputs"
            return MigrationReport(*names, evidence, None, time.monotonic() - start, []), pairs
        with self.teacher.on(self.args.device):
            answers = in_shares([text for text, _ in pairs], self.teacher.answers)
        accuracy = sum(answer == correct for answer, (_, correct) in zip(answers, pairs)) / len(pairs)
        return MigrationReport(*names, f"accuracy on {len(pairs):,} test inputs", accuracy, 0.0, []), pairs

    def copy(self) -> tuple[PeftModel, Encoder]:
        target, tokenizer = load_model(self.request.target_model)
        if tokenizer.get_vocab() != self.source.tokenizer.get_vocab():
            raise _NotPossible("the tokenizers differ")
        try:
            model = with_adapter(target, self.request.source_adapter, self.request.target_model)
        except HfExtError as error:
            raise _NotPossible("the adapter does not fit the target's layers") from error
        config = model.active_peft_config
        config.base_model_name_or_path, config.revision = self.request.target_model, None
        folder = Path(self.args.output_dir, "copy")
        if PartialState().is_main_process:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return model.eval(), teacher_encoder(tokenizer, model, self.args, "The target's")

    def titok(self) -> tuple[PeftModel, Encoder]:
        if self.source.discriminator is None:
            return self._trained(self._trainer("titok"))
        candidates, held_out = self.written
        apart = {text for text, _ in held_out}
        pool = [one.input for one in candidates if one.score is not None and one.input not in apart]
        with self.teacher.on(self.args.device):
            judged = zip(pool, in_shares(pool, self.teacher.excess))
        ranked = sorted(((score, text, label) for text, (score, label) in judged if score is not None and label), reverse=True)
        count = min(self.args.num_samples, round(self.args.keep_share * len(ranked)))
        return self._trained(self._trainer("titok", {text: label for _, text, label in ranked[: max(1, count)]}))

    def trans_lora(self) -> tuple[PeftModel, Encoder]:
        return self._trained(self._trainer("trans_lora"))

    @cached_property
    def written(self) -> tuple[list[Candidate], Pairs]:
        """Returns all inputs that the target wrote, and the held-out inputs with their labels."""
        trainer = self._trainer("titok" if self.source.discriminator is None else "trans_lora")
        trainer.ask_about_seeds()
        candidates = trainer.synthesize()
        return candidates, trainer.label(candidates)[1]

    def _trainer(self, method: str, inputs: dict[str, str] | None = None) -> TransLoraTrainer:
        args = copy.copy(self.args)
        args.output_dir = str(Path(args.output_dir, method))
        args.filter = "discriminator" if method == "trans_lora" else "token_excess"
        return self.request.trainer(self.source, args, inputs=inputs)

    def _trained(self, trainer: TransLoraTrainer) -> tuple[PeftModel, Encoder]:
        trainer.train(self.args.resume_from_checkpoint)
        trainer.save_model()
        return trainer.accelerator.unwrap_model(trainer.model), trainer.encoder


def _publish(report: MigrationReport, args: TransLoraConfig, task_type: str | None) -> None:
    """Writes the best adapter so far and the report to args.output_dir."""
    if PartialState().is_main_process:
        best, out = report.best, Path(args.output_dir)
        with staged_folder(out) as stage:
            for path in (out / best.method).iterdir():
                if path.is_file() and path.name not in OF_A_RUN:
                    shutil.copy2(path, stage / path.name)
            write_json(stage / REPORT, report.to_dict())
    PartialState().wait_for_everyone()
