"""Moving an adapter to another base by several methods: copying it, TiTok and Trans-LoRA. The best one is kept."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from accelerate import PartialState
from peft import PeftConfig, PeftModel

from hf_ext.display import markdown_table, percent, table
from hf_ext.errors import HfExtError
from hf_ext.integration.card_marks import CARD
from hf_ext.integration.model_cards import adapter_card, write_card
from hf_ext.integration.origins import name_in_text
from hf_ext.storage.atomic import staged_folder, write_json
from hf_ext.trans_lora.config import TransLoraConfig, chat_variables
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import Generator
from hf_ext.trans_lora.pipeline import Source, load_model, require_target, with_adapter
from hf_ext.trans_lora.stages import RECORD
from hf_ext.trans_lora.synthesis import SYNTHESIS, Candidate, in_shares
from hf_ext.trans_lora.teacher import Teacher, agreement
from hf_ext.trans_lora.trainer import LABELS, SEEDS, TransLoraTrainer

REPORT = "report.json"
OF_A_RUN = {SEEDS, SYNTHESIS, LABELS, RECORD, REPORT, "report.png", "training_args.bin", CARD}  # rather than of an adapter
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Attempt:
    """One method of moving an adapter, tried.

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


def migrate(
    source_model: str,
    source_adapter: str,
    target_model: str,
    seeds: Sequence[str],
    args: TransLoraConfig,
    peft_config: PeftConfig,
    discriminator: str | None = None,
    discriminator_model: str | None = None,
    synthesizer: Generator | None = None,
    test: Pairs | None = None,
    enough: float = 1.0,
) -> MigrationReport:
    """Moves an adapter by several methods, the cheapest first, and keeps the best result in args.output_dir.

    "copy" puts the adapter on the target unchanged, if its weights fit and the tokenizers are the same. "titok" trains one
    on the inputs with the highest token excess (arXiv 2510.04682). "trans_lora" trains one on inputs that the discriminator
    keeps, if there is a discriminator. Each has a folder of its own in args.output_dir. The last two share the inputs that the
    target writes. A run that was killed resumes, and its folder has the best adapter so far.

    Args:
        source_model, source_adapter, target_model, discriminator, discriminator_model, synthesizer: as in `transfer`.
        args: as in `transfer`, but `filter` is ignored, because each method has its own.
        peft_config: configuration of the adapter that "titok" or "trans_lora" trains.
        test: inputs of the task with the correct answers. The score is then the accuracy on them. Without a test, it is the
            agreement with the source model and its adapter on held-out synthetic inputs.
        enough: score at which the run stops: it tries no further method.

    Raises:
        HfExtError: the models, the adapter and the discriminator do not go together, or there is nothing to score with.
    """
    if test is None and args.held_out_share == 0:
        raise HfExtError("There is nothing to compare on with held_out_share=0; raise it, or give a test (--test).")
    require_target(target_model, peft_config)
    ways = _Ways(
        Source(source_model, source_adapter, discriminator, discriminator_model),
        target_model,
        seeds,
        args,
        peft_config,
        synthesizer,
    )
    pairs, shared = test, 0.0
    if pairs is None:
        start = time.monotonic()
        pairs = ways.written[1]
        shared = time.monotonic() - start
    if not pairs:
        raise HfExtError("There is nothing to compare on: raise num_samples or held_out_share, or give a test (--test).")
    what = "agreement on {} held-out inputs" if test is None else "accuracy on {} test inputs"
    teacher = None
    if test is not None:
        with ways.teacher.on(args.device):
            said = in_shares([text for text, _ in pairs], ways.teacher.answers)
        teacher = sum(one == answer for one, (_, answer) in zip(said, pairs)) / len(pairs)
    report = MigrationReport(source_model, target_model, what.format(f"{len(pairs):,}"), teacher, shared, [])
    for method in ("copy", "titok", *(["trans_lora"] if discriminator else [])):
        start = time.monotonic()
        try:
            model, encoder = getattr(ways, method)()
        except _NotPossible as error:
            attempt = Attempt(method, None, time.monotonic() - start, reason=str(error))
        else:
            score = agreement(model, encoder, pairs, args)
            attempt = Attempt(method, score, time.monotonic() - start, encoder.prompt("{input}"))
        report.attempts.append(attempt)
        if report.best.score is not None:
            _publish(report, args, peft_config.task_type)
        if attempt.score is not None and attempt.score >= enough:
            break
    return report


class _NotPossible(HfExtError):
    """An error that rules out one method, but not the others."""


class _Ways:
    """The methods of moving one adapter. They share the teacher, the inputs that the target writes, and their labels."""

    def __init__(
        self,
        source: Source,
        target_model: str,
        seeds: Sequence[str],
        args: TransLoraConfig,
        peft_config: PeftConfig,
        synthesizer: Generator | None,
    ):
        self.source, self.target_model, self.seeds, self.args = source, target_model, seeds, args
        self.peft_config, self.synthesizer = peft_config, synthesizer
        self.teacher = Teacher(source.teacher, source.tokenizer, args)

    def copy(self) -> tuple[PeftModel, Encoder]:
        target, tokenizer = load_model(self.target_model)
        if tokenizer.get_vocab() != self.source.tokenizer.get_vocab():
            raise _NotPossible("the tokenizers differ")
        try:
            model = with_adapter(target, self.source.adapter, self.target_model)
        except HfExtError as error:
            raise _NotPossible("the adapter does not fit the target's layers") from error
        config = model.active_peft_config
        config.base_model_name_or_path, config.revision = self.target_model, None
        folder = Path(self.args.output_dir, "copy")
        if PartialState().is_main_process:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        args = self.args
        asked = (args.teacher_prompt_template, "The target's", args.teacher_system_prompt, chat_variables(args))
        return model.eval(), Encoder(tokenizer, model, *asked)

    def titok(self) -> tuple[PeftModel, Encoder]:
        if self.source.discriminator is None:
            return self._trained(self._trainer("titok"))
        candidates, held_out = self.written
        apart = {text for text, _ in held_out}
        pool = [one.input for one in candidates if one.score is not None and one.input not in apart]
        with self.teacher.on(self.args.device):
            judged = zip(pool, in_shares(pool, self.teacher.excess))
        found = sorted(((score, text, label) for text, (score, label) in judged if score is not None and label), reverse=True)
        count = min(self.args.num_samples, round(self.args.keep_share * len(found)))
        return self._trained(self._trainer("titok", {text: label for _, text, label in found[: max(1, count)]}))

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
        target, tokenizer = load_model(self.target_model)
        args = copy.copy(self.args)
        args.output_dir = str(Path(args.output_dir, method))
        args.filter = "discriminator" if method == "trans_lora" else "token_excess"
        return TransLoraTrainer(
            target,
            args,
            processing_class=tokenizer,
            teacher=self.source.teacher,
            teacher_processing_class=self.source.tokenizer,
            seeds=self.seeds,
            discriminator=self.source.discriminator,
            peft_config=copy.deepcopy(self.peft_config),
            synthesizer=self.synthesizer,
            inputs=inputs,
        )

    def _trained(self, trainer: TransLoraTrainer) -> tuple[PeftModel, Encoder]:
        trainer.train(self.args.resume_from_checkpoint)
        trainer.save_model()
        return trainer.accelerator.unwrap_model(trainer.model), trainer.encoder


def _publish(report: MigrationReport, args: TransLoraConfig, task_type: str | None) -> None:
    """Writes the best adapter so far, its card and the report to args.output_dir."""
    if PartialState().is_main_process:
        best, out = report.best, Path(args.output_dir)
        with staged_folder(out) as stage:
            for path in (out / best.method).iterdir():
                if path.is_file() and path.name not in OF_A_RUN:
                    shutil.copy2(path, stage / path.name)
            card = adapter_card(
                "trans_lora_migration",
                report.target,
                task_type,
                ["trans-lora"],
                source=name_in_text(report.source),
                method=best.method,
                prompt=best.prompt,
                figures=markdown_table(report.header, report.rows()),
            )
            write_card(stage, card, out)
            write_json(stage / REPORT, report.to_dict())
    PartialState().wait_for_everyone()
