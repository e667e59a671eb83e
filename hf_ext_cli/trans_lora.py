"""Trans-LoRA's commands. What they do not know themselves are options of TransLoraConfig."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hf_ext_cli.command import GOES_ON, Group, Parser, Result, UsageError, add_out, path

if TYPE_CHECKING:
    from peft import PeftConfig

    from hf_ext import TransLoraConfig

ANY_OPTION = """\
Any option of TransLoraConfig, and so of TrainingArguments, may follow by its own name, as in
  --learning_rate 2e-4  --num_train_epochs 20  --bf16"""
KINDS = ("lora", "dora", "pissa", "prompt_tuning")


def groups(parsers: argparse._SubParsersAction) -> list[Group]:
    group = Group(
        "Move an adapter to another base model, without its training data (Trans-LoRA)",
        "$ hf-ext train-discriminator --source-model Llama-2-7b-hf \\\n"
        "    --inputs boolean.jsonl --task boolean --out boolean-d     # while there are data\n"
        "$ hf-ext transfer --source-model Llama-2-7b-hf --source-adapter my-lora \\\n"
        "    --target-model gemma-7b --discriminator boolean-d --seeds five.jsonl --out my-lora-on-gemma",
        parsers,
    )

    parser = group.command(
        train_discriminator,
        "train what tells a task's own inputs from made-up ones",
        "  hf-ext train-discriminator --source-model Llama-2-7b-hf --inputs boolean.jsonl --task boolean --out boolean-d",
        f"Do it while the task's data are there; transfer sifts with it.\n\n{ANY_OPTION}",
        GOES_ON,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--source-model", type=path, required=True, help="folder or Hub id of the model that the task's adapter is of"
    )
    parser.add_argument(
        "--inputs", type=path, metavar="FILE.jsonl", required=True, help='the task\'s inputs, a line each: {"input": "…"}'
    )
    parser.add_argument("--task", required=True, help="the task's name, which the model is asked about")
    parser.add_argument(
        "--seeds", type=path, metavar="FILE.jsonl", help="what made-up inputs are written from (default: some of these)"
    )
    add_adapter(parser)

    parser = group.command(
        transfer,
        "write inputs, have the old adapter answer them, train a new one on them",
        "  hf-ext transfer --source-model Llama-2-7b-hf --source-adapter my-lora --target-model gemma-7b \\\n"
        "    --discriminator boolean-d --seeds seeds.jsonl --out my-lora-on-gemma --learning_rate 2e-4 --num_samples 250",
        f"A run that was killed goes on from where it was.\n\n{ANY_OPTION}  --filter token_excess  --num_samples 500",
        GOES_ON,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--source-model", type=path, required=True, help="folder or Hub id of the base model that the adapter is of"
    )
    parser.add_argument("--source-adapter", type=path, required=True, help="folder or Hub id of the adapter, of any PEFT type")
    parser.add_argument("--target-model", type=path, required=True, help="folder or Hub id of the base model to move to")
    parser.add_argument(
        "--seeds", type=path, metavar="FILE.jsonl", required=True, help='a few real inputs, a line each: {"input": "…"}'
    )
    parser.add_argument(
        "--discriminator", type=path, help="folder or Hub id; without one, --filter token_excess or --filter none"
    )
    parser.add_argument(
        "--discriminator-model", type=path, help="its base model, if it is not the source model: in a chain of transfers"
    )
    parser.add_argument("--server", metavar="URL", help="OpenAI-compatible server with the target model, to write the inputs")
    parser.add_argument("--server-model", metavar="NAME", help="what the server calls it (default: as --target-model)")
    add_adapter(parser)
    return [group]


def add_adapter(parser: Parser) -> None:
    add_out(parser)
    parser.add_argument("--peft-type", choices=KINDS, default=KINDS[0], help="kind of the new adapter (default: lora)")
    parser.add_argument("--rank", type=int, default=16, help="its rank, or how many virtual tokens it has (default: 16)")
    parser.add_argument(
        "--target-modules", nargs="+", default=["all-linear"], metavar="NAME", help="layers that get it (default: all-linear)"
    )
    parser.set_defaults(takes_rest=True)


def train_discriminator(args: argparse.Namespace) -> Result | None:
    from accelerate import PartialState

    from hf_ext import trans_lora

    settings = training_arguments(args)
    model, tokenizer = trans_lora.load_model(args.source_model)
    inputs = trans_lora.read_inputs(args.inputs)
    seeds = trans_lora.read_inputs(args.seeds) if args.seeds else None
    discriminator = trans_lora.train_discriminator(
        model, tokenizer, inputs, task=args.task, args=settings, peft_config=peft_config(args, args.source_model), seeds=seeds
    )
    first = PartialState().is_main_process
    if first:
        discriminator.save_pretrained(args.out)
    PartialState().wait_for_everyone()
    figures = ", ".join(f"{name} {value:.2f}" for name, value in discriminator.metrics.items())
    text = f"{args.out} holds the discriminator of {args.task}" + (f" ({figures})." if figures else ".")
    return Result(text, {"out": args.out, "task": args.task, "metrics": discriminator.metrics}) if first else None


def transfer(args: argparse.Namespace) -> Result | None:
    from hf_ext import trans_lora

    settings = training_arguments(args)
    server = trans_lora.Server(args.server, args.server_model or args.target_model) if args.server else None
    trainer = trans_lora.transfer(
        args.source_model,
        args.source_adapter,
        args.target_model,
        trans_lora.read_inputs(args.seeds),
        settings,
        peft_config(args, args.target_model),
        args.discriminator,
        args.discriminator_model,
        server,
    )
    return Result(str(trainer.report), trainer.report.to_dict()) if trainer.is_world_process_zero() else None


def training_arguments(args: argparse.Namespace) -> TransLoraConfig:
    """What the command line says beyond the command's own options."""
    from transformers import HfArgumentParser

    from hf_ext import TransLoraConfig

    options = HfArgumentParser(TransLoraConfig, prog="hf-ext", exit_on_error=False)
    try:
        settings, unknown = options.parse_args_into_dataclasses([*args.rest, "--output_dir", args.out], True)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}")
    return settings


def peft_config(args: argparse.Namespace, model: str) -> PeftConfig:
    """The adapter that the command line asks for."""
    from peft import LoraConfig, PromptTuningConfig
    from transformers import AutoConfig

    from hf_ext import PissaConfig
    from hf_ext.trans_lora.encoding import loading

    with loading(model):
        kind = "SEQ_2_SEQ_LM" if AutoConfig.from_pretrained(model).is_encoder_decoder else "CAUSAL_LM"
    if args.peft_type == "prompt_tuning":
        return PromptTuningConfig(task_type=kind, num_virtual_tokens=args.rank)
    config = PissaConfig if args.peft_type == "pissa" else LoraConfig
    modules = args.target_modules if len(args.target_modules) > 1 else args.target_modules[0]
    options = {"use_dora": True} if args.peft_type == "dora" else {}
    return config(task_type=kind, r=args.rank, lora_alpha=args.rank, target_modules=modules, **options)
