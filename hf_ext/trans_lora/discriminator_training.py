"""The training of the discriminator, while the task's data is at hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import xxhash
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_ext.errors import HfExtError
from hf_ext.trans_lora.adapters import adapters_kept, bare, base_of, on_device, only
from hf_ext.trans_lora.config import TransLoraConfig, synthesis_settings, training_settings
from hf_ext.trans_lora.discriminator import ANSWER_LENGTH, NAME, Discriminator, encoder_of, second_adapter
from hf_ext.trans_lora.encoding import require_texts
from hf_ext.trans_lora.generation import Generator, ModelGenerator
from hf_ext.trans_lora.prompts import NO, YES, membership_question
from hf_ext.trans_lora.stages import CHECKPOINTS, claim, delete_checkpoints, last_checkpoint, starts_again
from hf_ext.trans_lora.synthesis import SYNTHESIS, write_inputs
from hf_ext.trans_lora.training import AnswerTrainer

Answers = list[tuple[str, str]]  # inputs with YES or NO


def train_discriminator(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    real_inputs: Sequence[str],
    *,
    task: str,
    args: TransLoraConfig,
    peft_config: PeftConfig | None = None,
    seeds: Sequence[str] | None = None,
    synthetic_inputs: Sequence[str] | None = None,
    synthesizer: Generator | None = None,
) -> Discriminator:
    """Trains the discriminator while you have the task's data, on real inputs and inputs that the source model writes.

    The model that writes inputs sees only the seeds of the real inputs, and no real input is saved. args.output_dir receives
    the synthetic inputs and the checkpoints of the training. A killed run resumes from these.

    Args:
        model: the source model, with or without the teacher's adapter. It gets the adapter "discriminator", which is active
            only while it scores.
        real_inputs: the task's inputs, without answers.
        task: name of the task in the question to the model.
        args: settings of the training and of the writing of synthetic inputs, as for the transfer, and the question
            (`discriminator_prompt`).
        peft_config: configuration of the adapter; by default a LoRA on PEFT's default layers.
        seeds: example inputs for the synthetic inputs; by default as many as a prompt shows, drawn from the real inputs.
        synthetic_inputs: existing synthetic inputs, to use instead of writing new ones.
        synthesizer: a `Server` that writes the synthetic inputs. By default, the model writes them.

    Raises:
        HfExtError: there are too few inputs, the tokenizer lacks a token, or the model has adapters of another kind.
    """
    require_texts(real_inputs=real_inputs, seeds=seeds, synthetic_inputs=synthetic_inputs)
    real = _different(real_inputs, max(2, args.num_shots))
    seeds = seeds or random.Random(args.seed).sample(real, args.num_shots)
    if synthetic_inputs is not None and not synthetic_inputs:
        raise HfExtError("synthetic_inputs is empty. Give some, or leave it out to let the model write them.")
    encoder, folder = encoder_of(tokenizer, model), Path(args.output_dir)
    questions = {text: encoder.prompt(membership_question(text, task, args.discriminator_prompt)) for text in real}
    encoder.require_inputs(questions, ANSWER_LENGTH)
    task_type = TaskType.SEQ_2_SEQ_LM if encoder.encoder_decoder else TaskType.CAUSAL_LM
    peft_config = peft_config or LoraConfig(task_type=task_type)
    if getattr(peft_config, "modules_to_save", None):
        raise HfExtError("A discriminator shares the source model, so it cannot replace modules: leave out modules_to_save.")
    settings = {"kind": "discriminator", "task": task, "model": bare(model).name_or_path, "seeds": seeds, "seed": args.seed}
    settings |= {"real inputs (a checksum)": xxhash.xxh3_64("\n".join(real).encode()).hexdigest()}
    claim(folder, "inputs", settings | synthesis_settings(args), [SYNTHESIS])
    if synthetic_inputs is None:
        with base_of(model) as base, on_device(base, args.device):
            writer = synthesizer or ModelGenerator.of(base, encoder, args)
            candidates = write_inputs(writer, encoder, seeds, args, folder / SYNTHESIS, len(real))
        synthetic_inputs = [candidate.input for candidate in candidates if candidate.kept]
    held_out, rows = _split(real, list(synthetic_inputs)[: len(real)], args.seed)
    with adapters_kept(model):
        model = _with_adapter(model, peft_config, args.seed)
        discriminator = Discriminator(model, tokenizer, task, prompt=args.discriminator_prompt)
        _train(discriminator, args, rows, held_out)
    model.eval()
    _evaluate(discriminator, held_out, args.generation_batch_size)
    return discriminator


def _with_adapter(model: PreTrainedModel | PeftModel, peft_config: PeftConfig, seed: int) -> PeftModel:
    """Adds the discriminator's adapter to a model. Only the adapter is active and trainable then."""
    set_seed(seed)  # as Trainer does, but before the adapter is made
    with second_adapter():
        model = get_peft_model(bare(model), peft_config, NAME)
    only(model, NAME, trainable=True)
    return model


def _different(real_inputs: Sequence[str], least: int) -> list[str]:
    """Returns the different real inputs. Raises HfExtError if there are fewer than `least`."""
    real = list(dict.fromkeys(text.strip() for text in real_inputs if text.strip()))
    if len(real) < least:
        raise HfExtError(f"There are {len(real)} different real inputs; give at least {least}, better hundreds.")
    return real


def _train(discriminator: Discriminator, args: TransLoraConfig, rows: Answers, held_out: Answers) -> None:
    """Trains the adapter on inputs with their answers, from the last checkpoint in args.output_dir if there is one."""
    folder, again = Path(args.output_dir), starts_again(args.resume_from_checkpoint)
    settings = training_settings(discriminator.model, args, NAME) | {"discriminator_prompt": discriminator.prompt}
    if again:
        delete_checkpoints(folder)
    claim(folder, "training", settings, [CHECKPOINTS], again)
    encoder = discriminator.encoder

    def samples(pairs: Answers) -> list[dict[str, list[int]]]:
        prompts = [encoder.prompt(discriminator.question(text)) for text, _ in pairs]
        return encoder.samples(prompts, [answer for _, answer in pairs])

    trainer = AnswerTrainer(
        model=discriminator.model,
        args=args,
        train_dataset=samples(rows),
        eval_dataset=samples(held_out),
        data_collator=encoder.batch,
        processing_class=discriminator.tokenizer,
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))


def _evaluate(discriminator: Discriminator, held_out: Answers, batch_size: int) -> None:
    """Adds the shares of real and of synthetic inputs that the discriminator keeps to its metrics."""
    scores = discriminator.score([text for text, _ in held_out], batch_size)
    for name, answer in (("real_kept", YES), ("synthetic_kept", NO)):
        verdicts = [score > 0.5 for score, (_, correct) in zip(scores, held_out) if correct == answer]
        if verdicts:
            discriminator.metrics[name] = sum(verdicts) / len(verdicts)


def _split(real: list[str], synthetic: list[str], seed: int) -> tuple[Answers, Answers]:
    """Returns a tenth of both kinds for evaluation, and the rest for training, as inputs with their answers. Trains on all if
    there are few. Repeats the smaller kind, because a discriminator trained on unequal kinds answers with the larger one."""
    held_out: Answers = []
    rows: Answers = []
    longer = max(len(texts) - len(texts) // 10 for texts in (real, synthetic))
    for texts, answer in ((real, YES), (synthetic, NO)):
        pairs = [(text, answer) for text in texts]
        random.Random(seed).shuffle(pairs)
        count = len(pairs) // 10
        held_out += pairs[:count]
        rows += itertools.islice(itertools.cycle(pairs[count:]), longer)
    return held_out, rows
