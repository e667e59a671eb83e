"""The transfer as a Trainer: writes inputs, lets the teacher label them, distills (Trans-LoRA, arXiv 2405.17258)."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import TrainOutput

from hf_ext.display import markdown_table, percent
from hf_ext.errors import HfExtError
from hf_ext.integration.cards import CARD, has_card, name_in_text, write_card
from hf_ext.integration.modes import evaluating
from hf_ext.trans_lora.adapters import bare, base_of, on_device
from hf_ext.trans_lora.config import TransLoraConfig, chat_variables, synthesis_settings, training_settings
from hf_ext.trans_lora.discriminator import Discriminator, require_discriminator
from hf_ext.trans_lora.embedding import embed, load_encoder
from hf_ext.trans_lora.encoding import Encoder, require_texts
from hf_ext.trans_lora.filters import InputFilter
from hf_ext.trans_lora.generation import Completion, Generator, ModelGenerator
from hf_ext.trans_lora.labels import answer_seeds, label_inputs, split
from hf_ext.trans_lora.reports import TransferReport, describe
from hf_ext.trans_lora.scoring import kl_divergence
from hf_ext.trans_lora.stages import CHECKPOINTS, checkpoint_to_resume, claim, delete_checkpoints, starts_again
from hf_ext.trans_lora.synthesis import SYNTHESIS, Candidate, Prompts, counts, keep_best, write_inputs
from hf_ext.trans_lora.teacher import Teacher, agreement, name_of
from hf_ext.trans_lora.training import AnswerTrainer

DRAWN = 1000  # inputs of a kind that the report embeds


class TransLoraTrainer(AnswerTrainer):
    """Moves what an adapter has learned to another base model, without the task's data (Trans-LoRA, arXiv 2405.17258).

    `train()` runs these stages, with files in args.output_dir:

    1. the teacher answers the seeds (seed_answers.jsonl);
    2. the target model writes synthetic inputs, and a filter selects some of them (synthesis.jsonl);
    3. the teacher labels the kept inputs (labels.jsonl);
    4. the adapter is trained on them as by any Trainer, and a report is written (report.json, report.png).

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
        real_inputs: real inputs of the task, where you still have them. Only the report uses them: it compares the kept and the
            dropped inputs with them. No model is prompted with them or trained on them, and their text is not saved.

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
        inputs: Sequence[str] | Mapping[str, str] | None = None,
        well_formed: Callable[[str], bool] | None = None,
        real_inputs: Sequence[str] = (),
        **kwargs: Any,
    ):
        require_texts(seeds=seeds, inputs=inputs, real_inputs=real_inputs)
        self.encoder = _encoder(processing_class, model, args)
        self.teacher = Teacher(teacher, teacher_processing_class or processing_class, args)
        self.seeds, self.inputs, self.synthesizer, self.well_formed = list(seeds), inputs, synthesizer, well_formed
        self.real_inputs = list(real_inputs)
        self.report: TransferReport | None = None
        _require_data(args, [*self.seeds, *(inputs or []), *self.real_inputs], **kwargs)
        if self.teacher.model is not None and bare(self.teacher.model) is bare(model):
            raise HfExtError("The teacher and the target are one model; load the target once more.")
        self.discriminator = self._load(discriminator)
        if inputs is None:
            require_discriminator(discriminator, args)
            self.teacher.require_for(args)
        elif not inputs:
            raise HfExtError("inputs is empty. Give some, or leave it out to let the target model write them.")
        if args.logits_weight:
            _require_logits(args)
            self.teacher.require_tokens_of(self.encoder)
        if isinstance(model, PeftModel) is (peft_config is not None):
            raise HfExtError("Give a target model and the peft_config of its new adapter, or a PeftModel and no peft_config.")
        if peft_config is not None:
            set_seed(args.seed)  # as Trainer does, but before the adapter is made
            model = get_peft_model(model, peft_config)
            self.encoder = _encoder(processing_class, model, args)  # with its virtual tokens
        with base_of(model):  # which raises if the adapter has changed it
            pass
        if inputs is None:
            Prompts(self.seeds, args, self.encoder).require_room()
        else:
            self.encoder.require_inputs({text: self.encoder.prompt(text) for text in inputs}, 1)
            self.teacher.require_inputs(inputs)
        kwargs.setdefault("data_collator", self.encoder.batch)
        kwargs["eval_dataset"] = kwargs.get("eval_dataset") or []  # until there are inputs to hold out
        super().__init__(model=model, args=args, processing_class=processing_class, **kwargs)

    def _load(self, discriminator: Discriminator | str | os.PathLike | None) -> Discriminator | None:
        if discriminator is None or isinstance(discriminator, Discriminator):
            return discriminator
        if self.teacher.model is None:
            raise HfExtError("With a teacher on a server, load the discriminator first: Discriminator.from_pretrained(…).")
        return Discriminator.from_pretrained(discriminator, self.teacher.model, self.teacher.tokenizer)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Runs all stages. Each resumes from its files.

        Args:
            resume_from_checkpoint: as in Trainer, but defaults to the last checkpoint in output_dir, if there is one. False
                deletes the checkpoints there and starts the training of the adapter again. On the command line, True and False
                mean the same.

        Raises:
            ValueError: there is no such checkpoint.
        """
        again, explicit = starts_again(resume_from_checkpoint), resume_from_checkpoint is not None
        checkpoint = None if again else checkpoint_to_resume(self.args.output_dir, resume_from_checkpoint)
        self.ask_about_seeds()
        candidates = self.synthesize() if self.inputs is None else []
        trained, held_out = self.label(candidates)
        prompts = [self.encoder.prompt(text) for text, _ in trained + held_out]
        samples = self.encoder.samples(prompts, [label for _, label in trained + held_out])
        self.train_dataset = samples[: len(trained)]
        if not self.eval_dataset:
            self.eval_dataset = samples[len(trained) :]
        if again:
            delete_checkpoints(self.args.output_dir)
        settings = training_settings(self.model, self.args, self.model.active_adapters[0])
        settings |= {name: getattr(self.args, name) for name in ("prompt_template", "system_prompt", "chat_template_kwargs")}
        settings |= {"labels (a checksum)": xxhash.xxh3_64(str(trained).encode()).hexdigest()}
        claim(Path(self.args.output_dir), "training", settings, [CHECKPOINTS], anew=explicit)
        with self.teacher.on(self.args.device) if self.args.logits_weight else contextlib.nullcontext():
            result = super().train(checkpoint, *args, **kwargs)
        self.report = self._report(candidates, trained, held_out)
        if self.is_world_process_zero():
            self.report.save(self.args.output_dir)
        return result

    def ask_about_seeds(self) -> list[Completion]:
        """Returns the teacher's answers to the seeds, and writes them to seed_answers.jsonl.

        Raises:
            HfExtError: no answer is complete, so no synthetic input would have a label.
        """
        return answer_seeds(self.teacher, self.seeds, self.args, self._count)

    @property
    def _count(self) -> int:
        """Returns the number of inputs that the user asks for."""
        return self.args.num_samples if self.inputs is None else len(self.inputs)

    def synthesize(self) -> list[Candidate]:
        """Returns the inputs that the target model wrote and the filter has checked. synthesis.jsonl contains the same.

        Raises:
            HfExtError: too few inputs pass, or the file belongs to another transfer.
        """
        args, path = self.args, Path(self.args.output_dir, SYNTHESIS)
        checks = InputFilter(args, self.encoder, self.teacher, self.discriminator, self.well_formed)
        settings = {"kind": "transfer", "target": name_of(self.model), "seeds": self.seeds, "chat": self.encoder.chats}
        claim(path.parent, "inputs", settings | checks.settings() | synthesis_settings(args), [SYNTHESIS])
        held_out = round(args.held_out_share * args.num_samples)
        needed = args.num_samples + held_out
        by_excess = args.filter == "token_excess"
        pool = math.ceil(needed / args.keep_share) if by_excess else needed
        with base_of(self.model) as base, on_device(base, args.device):
            writer = self.synthesizer or ModelGenerator.of(base, self.encoder, args)
            best = f", which are the best {percent(args.keep_share, 0)} of them" if by_excess else ""
            of_which = f" ({args.num_samples:,} asked for and {held_out:,} held out{best})"
            candidates = write_inputs(
                writer, self.encoder, self.seeds, args, path, pool, checks.judge, checks.accepts, of_which
            )
        return keep_best(candidates, needed, path) if by_excess else candidates

    def label(self, candidates: Sequence[Candidate] = ()) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Returns the kept inputs with the teacher's answers, for training and held out, as in labels.jsonl. An answer is no
        label if it is empty, reached max_label_length, or does not fit into the target's context with its prompt.

        Raises:
            HfExtError: no input has a label, or the file belongs to another transfer.
        """
        labels: Mapping[str, str | None]
        if self.inputs is None:
            labels = {candidate.input: candidate.label for candidate in candidates or self.synthesize() if candidate.kept}
        else:
            labels = self.inputs if isinstance(self.inputs, Mapping) else dict.fromkeys(self.inputs)
        inputs = list(labels if self.inputs is None else self.inputs)
        # The target's tokenizer may make more tokens of an answer than the teacher's.
        answered = label_inputs(self.teacher, inputs, labels, self.args)
        pairs = [pair for pair in answered if self.encoder.holds(self.encoder.prompt(pair[0]), pair[1])]
        if not pairs:
            raise HfExtError(
                f"None of the answers fits with its prompt into the target model's context of {self.encoder.limit} tokens. "
                "Lower max_label_length, or give shorter inputs."
            )
        return split(pairs, round(self.args.held_out_share * self._count), self.args.seed)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Returns the cross-entropy CE of the teacher's text. With logits_weight w, returns (1 − w) CE + w T² KL(teacher ‖
        student), with the distributions of KL at temperature T (Hinton et al., arXiv 1503.02531)."""
        weight, T = self.args.logits_weight, self.args.distillation_temperature
        if not weight:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, dict(inputs), True, num_items_in_batch)
        teacher = self.teacher.model
        assert teacher is not None  # require_tokens_of refuses a server
        if teacher.device != labels.device:
            teacher.to(labels.device)
        with torch.no_grad(), evaluating(teacher):
            taught = teacher(**inputs).logits
        divergence = kl_divergence(outputs["logits"], taught, labels, self.encoder.encoder_decoder, T)
        divergence = T * T * divergence / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            divergence = divergence * self.accelerator.num_processes
        loss = (1 - weight) * loss + weight * divergence
        return (loss, outputs) if return_outputs else loss

    def _report(
        self, candidates: list[Candidate], trained: list[tuple[str, str]], held_out: list[tuple[str, str]]
    ) -> TransferReport:
        args = self.args
        kept = [candidate.input for candidate in candidates if candidate.kept] if self.inputs is None else list(self.inputs)
        texts = {
            "seeds": self.seeds,
            "kept": kept,
            "dropped": [candidate.input for candidate in candidates if not candidate.kept and candidate.score is not None],
        }
        agreed = None
        if held_out:
            agreed = agreement(self.accelerator.unwrap_model(self.model), self.encoder, held_out, args)
            self.log({"agreement": agreed})
        embeddings = self._embed(texts | {"real": self.real_inputs})
        real = embeddings.pop("real")
        return TransferReport(
            source=self.teacher.name,
            target=name_of(self.model),
            prompt=self.encoder.prompt("{input}"),
            filter=args.filter if self.inputs is None else "inputs given",
            counts=counts(candidates) or {"kept": len(kept)},
            trained=len(trained),
            held_out=len(held_out),
            unlabelled=len(kept) - len(trained) - len(held_out),
            agreement=agreed,
            encoder=args.embedding_model or name_of(self.model),
            **describe(texts, embeddings, real),
        )

    def _embed(self, texts: Mapping[str, Sequence[str]]) -> dict[str, torch.Tensor]:
        """Returns embeddings of at most DRAWN texts of each kind."""
        draws = {name: random.Random(self.args.seed).sample(part, min(len(part), DRAWN)) for name, part in texts.items()}
        if self.args.embedding_model:
            model, tokenizer = load_encoder(self.args.embedding_model)
            return {name: embed(part, model.to(self.args.device), tokenizer) for name, part in draws.items()}
        with base_of(self.model) as base:
            return {name: embed(part, base, self.encoder.tokenizer) for name, part in draws.items()}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the adapter and the tokenizer as a Trainer does. A folder without a model card gets one with the report:
        PEFT's card does not name the prompt, without which the adapter answers worse."""
        folder = Path(output_dir or self.args.output_dir)
        is_first = not has_card(folder)
        super().save_model(output_dir, _internal_call)
        if self.report is not None and self.args.should_save and is_first:
            (folder / CARD).unlink(missing_ok=True)
            base = self.accelerator.unwrap_model(self.model).get_base_model()
            _write_card(folder, self.report, type(base).__name__)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Keeps the card of `save_model` for `push_to_hub`. Trainer's would say that the data are not known."""
        if self.report is None:
            super().create_model_card(*args, **kwargs)


def _write_card(folder: Path, report: TransferReport, base_class: str) -> None:
    write_card(
        folder,
        "trans_lora_adapter",
        [report.target],
        "adapter",
        tags=["trans-lora"],
        library="peft",
        base_class=base_class,
        source=name_in_text(report.source),
        seeds=len(report.lengths["seeds"]),
        filter=report.filter,
        prompt=report.prompt,
        figures=markdown_table(("", ""), report.rows()),
    )


def _encoder(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, args: TransLoraConfig) -> Encoder:
    return Encoder(tokenizer, model, args.prompt_template, "The target's", args.system_prompt, chat_variables(args))


def _require_data(
    args: TransLoraConfig, texts: Sequence[str], train_dataset: Any = None, eval_dataset: Any = None, **_: Any
) -> None:
    """Checks the data that a user gives, and that the rest can be written."""
    if train_dataset is not None:
        raise HfExtError("The training data are written by the models. For inputs of your own give inputs=[…].")
    if not all(text.strip() for text in texts):
        raise HfExtError("One of the seeds, or of the inputs, is empty.")
    if args.eval_strategy != "no" and not eval_dataset and args.held_out_share == 0:
        raise HfExtError("There is nothing to evaluate on with held_out_share=0; raise it, or give an eval_dataset.")
    if args.embedding_model:
        AutoConfig.from_pretrained(args.embedding_model)  # so that a missing model is noticed before the run


def _require_logits(args: TransLoraConfig) -> None:
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True):
        raise HfExtError(
            "logits_weight needs logits, which use_liger_kernel does not compute. Set "
            'liger_kernel_config={"fused_linear_cross_entropy": False}, or leave one of the options out.'
        )
