"""The transfer as a Trainer: writes inputs, lets the teacher label them, distills (Trans-LoRA, arXiv 2405.17258)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from peft import PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import TrainOutput

from hf_ext.display import markdown_table
from hf_ext.errors import HfExtError
from hf_ext.integration.cards import CARD, has_card, name_in_text, write_card
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.discriminator import Discriminator
from hf_ext.trans_lora.encoding import Encoder, require_texts
from hf_ext.trans_lora.generation import Generator
from hf_ext.trans_lora.models import adapter_digest, bare, base_of, name_of
from hf_ext.trans_lora.report import TransferReport
from hf_ext.trans_lora.scoring import AnswerTrainer
from hf_ext.trans_lora.stages import begin_training, checkpoint_to_resume
from hf_ext.trans_lora.synthesis import Candidate, Prompts, counts, write_inputs
from hf_ext.trans_lora.teacher import Pairs, Teacher, agreement, split


class TransLoraTrainer(AnswerTrainer):
    """Moves what an adapter has learned to another base model, without the task's data (Trans-LoRA, arXiv 2405.17258).

    `train()` runs these stages, with files in args.output_dir:

    1. the teacher answers the seeds (seed_answers.jsonl);
    2. the target model writes synthetic inputs, and a filter selects some of them (synthesis.jsonl);
    3. the teacher labels the kept inputs (labels.jsonl);
    4. the adapter is trained on them as by any Trainer, and a report is written (report.json).

    A killed run resumes from these files and the Trainer's checkpoints.

    Args:
        model: the target model; a `PeftModel` of it, if `peft_config` is None.
        args: see `TransLoraConfig`.
        processing_class: the target model's tokenizer.
        teacher: the source model with its adapter, of any PEFT type, or merged; or a `Server` with this model.
        teacher_processing_class: the teacher's tokenizer; by default the target's. A server needs only its chat template.
        seeds: a few real inputs of the task, without answers.
        discriminator: the discriminator, or the folder or Hub id of a saved one, which is loaded onto the teacher's base model.
        peft_config: configuration of the new adapter, of any type.
        synthesizer: a `Server` that writes the inputs. By default, the target model writes them.
        inputs: inputs to label and train on instead of synthetic ones, optionally with their labels. They are written to
            labels.jsonl.
        well_formed: function that returns whether a text can be an input of the task. Others are dropped before the filter.

    Attributes:
        report: the `TransferReport`, after `train()`.

    Raises:
        HfExtError: the models, tokenizers, seeds or files of output_dir do not fit together.
    """

    eval_dataset: Any  # as Trainer takes it

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        args: TransLoraConfig,
        *,
        processing_class: PreTrainedTokenizerBase,
        teacher: PreTrainedModel | PeftModel | Generator,
        teacher_processing_class: PreTrainedTokenizerBase | None = None,
        seeds: Sequence[str] = (),
        discriminator: Discriminator | str | os.PathLike | None = None,
        peft_config: PeftConfig | None = None,
        synthesizer: Generator | None = None,
        inputs: Sequence[str] | Mapping[str, str | None] | None = None,
        well_formed: Callable[[str], bool] | None = None,
        **kwargs: Any,
    ):
        _require_data(args, seeds, inputs, kwargs)
        self.teacher = Teacher(teacher, teacher_processing_class or processing_class, args)
        self.seeds, self.synthesizer, self.well_formed = list(seeds), synthesizer, well_formed
        self.inputs = None if inputs is None else _different(inputs)
        self.count = args.num_samples if self.inputs is None else len(self.inputs)  # that the user asks for
        self.report: TransferReport | None = None
        self.seconds: dict[str, float] = {}
        if self.teacher.model is not None and bare(self.teacher.model) is bare(model):
            raise HfExtError("The teacher and the target are one model; load the target once more.")
        self.discriminator = self._load(discriminator) if self.inputs is None and args.filter == "discriminator" else None
        if isinstance(model, PeftModel) is (peft_config is not None):
            raise HfExtError("Give a target model and the peft_config of its new adapter, or a PeftModel and no peft_config.")
        if peft_config is not None:
            set_seed(args.seed)  # as Trainer does, but before the adapter is made
            model = get_peft_model(model, peft_config)
        template, system = args.prompt_template, args.system_prompt
        self.encoder = Encoder(processing_class, model, template, "The target's", system, args.chat_variables)
        with base_of(model):  # which raises if the adapter has changed it
            pass
        if self.inputs is None:
            self.prompts = Prompts(self.seeds, args, self.encoder)
            self.prompts.require_room()
        else:
            for encoder, room in ((self.encoder, 1), (self.teacher.encoder, args.max_label_length)):
                encoder.require_inputs({text: encoder.prompt(text) for text in self.inputs}, room)
        kwargs.setdefault("data_collator", self.encoder.batch)
        kwargs["eval_dataset"] = kwargs.get("eval_dataset") or []  # until there are inputs to hold out
        super().__init__(model=model, args=args, processing_class=processing_class, **kwargs)

    def _load(self, discriminator: Discriminator | str | os.PathLike | None) -> Discriminator:
        if discriminator is None:
            raise HfExtError("filter='discriminator' needs a discriminator. Give one, or take filter='none'.")
        if isinstance(discriminator, Discriminator):
            return discriminator
        if self.teacher.model is None:
            raise HfExtError("With a teacher on a server, load the discriminator first: Discriminator.from_pretrained(…).")
        return Discriminator.from_pretrained(discriminator, self.teacher.model, self.teacher.encoder.tokenizer)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Runs all stages. Each resumes from its files.

        Args:
            resume_from_checkpoint: as in Trainer, but defaults to the last checkpoint in output_dir, if there is one. False
                deletes the checkpoints there and starts the training of the adapter again. On the command line, True and False
                mean the same.

        Raises:
            ValueError: there is no such checkpoint.
        """
        folder = Path(self.args.output_dir)
        checkpoint_to_resume(folder, resume_from_checkpoint)  # an error now, rather than after the first stages
        with self._timed("answers to the seeds"):
            self.teacher.answer_seeds(self.seeds, self.count)
        with self._timed("inputs"):
            candidates = self.synthesize() if self.inputs is None else []
        with self._timed("labels"):
            trained, held_out = self.label(candidates)
        samples = self.encoder.samples(
            [self.encoder.prompt(text) for text, _ in trained + held_out], [label for _, label in trained + held_out]
        )
        self.train_dataset = samples[: len(trained)]
        if not self.eval_dataset:
            self.eval_dataset = samples[len(trained) :]
        settings = self.args.training_settings(self.model.peft_config[self.model.active_adapters[0]])
        settings |= self.args.named("prompt_template", "system_prompt", "chat_template_kwargs")
        settings |= {"labels (a checksum)": xxhash.xxh3_64(str(trained).encode()).hexdigest()}
        checkpoint = begin_training(folder, settings, resume_from_checkpoint)
        with self._timed("training"):
            result = super().train(checkpoint, *args, **kwargs)
        self.report = self._report(candidates, trained, held_out)
        if self.is_world_process_zero():
            self.report.save(folder)
        return result

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Records the seconds of a stage."""
        start = time.monotonic()
        yield
        self.seconds[stage] = time.monotonic() - start

    def synthesize(self) -> list[Candidate]:
        """Returns the inputs that the target model wrote and the filter has checked. synthesis.jsonl contains the same.

        Raises:
            HfExtError: too few inputs pass, or the file belongs to another transfer.
        """
        args, judge = self.args, self.discriminator
        settings = {"kind": "transfer", "target": name_of(self.model), "chat": self.encoder.chats}
        settings |= args.named("num_samples", "filter", "held_out_share", "seed")
        if judge is not None:
            settings |= {"task": judge.task, "question": judge.prompt, "discriminator": adapter_digest(judge.model)}
        held_out = round(args.held_out_share * args.num_samples)
        return write_inputs(
            self.synthesizer or self.model,
            self.prompts,
            args.num_samples + held_out,
            settings,
            None if judge is None else lambda inputs: judge.score(inputs, args.generation_batch_size, args.device),
            self._accepts,
            f" ({args.num_samples:,} asked for and {held_out:,} held out)",
        )

    def _accepts(self, text: str) -> bool:
        """Checks whether a text passes the user's test and fits into the context of all models."""
        fits = self.encoder.fits(self.encoder.prompt(text), self.args.max_label_length) and self.teacher.fits(text)
        fits = fits and (self.discriminator is None or self.discriminator.fits(text))
        return fits and (self.well_formed is None or self.well_formed(text))

    def label(self, candidates: Sequence[Candidate] = ()) -> tuple[Pairs, Pairs]:
        """Returns the kept inputs with the teacher's answers, for training and held out, as in labels.jsonl. An answer is no
        label if it is empty, reached max_label_length, or does not fit into the target's context with its prompt.

        Raises:
            HfExtError: no input has a label, or the file belongs to another transfer.
        """
        inputs = self.inputs
        if inputs is None:
            inputs = dict.fromkeys(candidate.input for candidate in candidates or self.synthesize() if candidate.kept)
        # The target's tokenizer may make more tokens of an answer than the teacher's.
        pairs = [pair for pair in self.teacher.label(inputs) if self.encoder.holds(self.encoder.prompt(pair[0]), pair[1])]
        if not pairs:
            raise HfExtError(
                f"None of the answers fits with its prompt into the target model's context of {self.encoder.limit} tokens. "
                "Lower max_label_length, or give shorter inputs."
            )
        return split(pairs, round(self.args.held_out_share * self.count), self.args.seed)

    def _report(self, candidates: list[Candidate], trained: Pairs, held_out: Pairs) -> TransferReport:
        agreed = None
        if held_out:
            with self._timed("agreement"):
                agreed = agreement(self.accelerator.unwrap_model(self.model), self.encoder, held_out, self.args)
            self.log({"agreement": agreed})
        numbers = counts(candidates) if self.inputs is None else {"kept": len(self.inputs)}
        return TransferReport(
            source=self.teacher.name,
            target=name_of(self.model),
            adapter=str(self.args.output_dir),
            prompt=self.encoder.prompt("{input}"),
            filter=self.args.filter if self.inputs is None else "inputs given",
            seeds=len(self.seeds),
            counts=numbers,
            trained=len(trained),
            held_out=len(held_out),
            unlabelled=numbers["kept"] - len(trained) - len(held_out),
            agreement=agreed,
            seconds={stage: round(seconds, 1) for stage, seconds in self.seconds.items()},
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the adapter and the tokenizer as a Trainer does. A folder without a model card gets one with the report:
        PEFT's card does not name the prompt, without which the adapter answers worse."""
        folder = Path(output_dir or self.args.output_dir)
        is_first = not has_card(folder)
        super().save_model(output_dir, _internal_call)
        if self.report is not None and self.args.should_save and is_first:
            (folder / CARD).unlink(missing_ok=True)
            write_card(
                folder,
                "trans_lora_adapter",
                [self.report.target],
                "adapter",
                tags=["trans-lora"],
                library="peft",
                base_class=type(self.accelerator.unwrap_model(self.model).get_base_model()).__name__,
                source=name_in_text(self.report.source),
                seeds=self.report.seeds,
                filter=self.report.filter,
                prompt=self.report.prompt,
                figures=markdown_table(("", ""), self.report.rows()),
            )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Keeps the card of `save_model` for `push_to_hub`. Trainer's would say that the data are not known."""
        if self.report is None:
            super().create_model_card(*args, **kwargs)


def _different(inputs: Sequence[str] | Mapping[str, str | None]) -> dict[str, str | None]:
    """Returns inputs with their labels. Keeps the first of those that differ only in spaces around them, so that no held-out
    input is also trained on."""
    kept: dict[str, str] = {}
    for text in inputs:
        kept.setdefault(text.strip(), text)
    return {text: inputs[text] if isinstance(inputs, Mapping) else None for text in kept.values()}


def _require_data(
    args: TransLoraConfig,
    seeds: Sequence[str],
    inputs: Sequence[str] | Mapping[str, str | None] | None,
    options: Mapping[str, Any],
) -> None:
    """Checks the data that a user gives, among them those in the options of Trainer."""
    require_texts(seeds=seeds, inputs=inputs)
    if options.get("train_dataset") is not None:
        raise HfExtError("The training data are written by the models. For inputs of your own give inputs=[…].")
    if inputs is not None and not inputs:
        raise HfExtError("inputs is empty. Give some, or leave it out to let the target model write them.")
    if not all(text.strip() for text in [*seeds, *(inputs or [])]):
        raise HfExtError("One of the seeds, or of the inputs, is empty.")
    labels = inputs.values() if isinstance(inputs, Mapping) else ()
    if bad := [label for label in labels if label is not None and not (isinstance(label, str) and label.strip())]:
        raise HfExtError(
            f"inputs has the label {bad[0]!r}, which is no text. Give texts, or None where the teacher is to answer."
        )
    if args.eval_strategy != "no" and not options.get("eval_dataset") and args.held_out_share == 0:
        raise HfExtError("There is nothing to evaluate on with held_out_share=0; raise it, or give an eval_dataset.")
