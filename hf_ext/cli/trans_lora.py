"""Trans-LoRA's commands. TransLoraConfig parses the options that they do not declare."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from hf_ext.cli.command import RESUMABLE, Json, Out, Result, Section, mistake, option

if TYPE_CHECKING:
    from peft import PeftConfig

    from hf_ext import TransLoraConfig

section = Section(
    "Move an adapter to another base model, without its training data (Trans-LoRA)",
    "$ hf-ext train-discriminator --source-model Llama-2-7b-hf \\\n"
    "    --inputs boolean.jsonl --task boolean --out boolean-d \\\n"
    "    --learning-rate 2e-4 --num-train-epochs 5    # while you have the data\n"
    "$ hf-ext transfer --source-model Llama-2-7b-hf --source-adapter my-lora \\\n"
    "    --target-model gemma-7b --discriminator boolean-d --seeds five.jsonl \\\n"
    "    --out my-lora-on-gemma --learning-rate 2e-4 --num-train-epochs 5",
)
ANY_OPTION = "Also takes every field of TransLoraConfig and of TrainingArguments as an option, for example:\n\n\b\n "
# Options of TrainingArguments that these commands replace.
INSTEAD = {"output_dir": "give the folder as --out", "push_to_hub": "upload the result: hf upload ORG/NAME OUT"}
ANY: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


def lines(name: str, help: str) -> Any:
    """Declares an option with a file of JSON lines."""
    return option(name, help, "FILE.jsonl")


def require_files(**options: str | None) -> None:
    """Checks that the files of these options exist, before anything heavy is imported."""
    for name, path in options.items():
        if path is not None and not os.path.isfile(path):
            raise mistake(f"there is no file '{path}'", f"--{dashed(name)}")


PeftType = Annotated[Literal["lora", "dora", "pissa", "prompt_tuning"], typer.Option(help="Type of the new adapter.")]
Rank = Annotated[int, option("--rank", "Rank of the new adapter, or its number of virtual tokens.", "N", min=1)]
TargetModules = Annotated[
    list[str] | None,
    option(
        "--target-modules",
        "Layers with the adapter, with commas or spaces between. Defaults to all-linear, with --paper to query and value.",
        "NAME…",
    ),
]
Paper = Annotated[
    int | None,
    option(
        "--paper",
        "Use the paper's settings for a data set of SIZE inputs, except where you give an option. They concern num_samples, "
        "near_duplicate_threshold, discriminator_prompt, the layers of the adapter, and the start of prompt tuning.",
        "SIZE",
    ),
]


@section.command(
    "train a classifier of a task's real and synthetic inputs",
    "  hf-ext train-discriminator --source-model Llama-2-7b-hf --inputs boolean.jsonl \\\n"
    "    --task boolean --out boolean-d --learning-rate 2e-4 --num-train-epochs 5",
    "Train it while you have the task's data. `hf-ext transfer` filters synthetic inputs with it.\n\n"
    f"{ANY_OPTION} --learning-rate 2e-4  --num-train-epochs 20  --bf16",
    RESUMABLE,
    **ANY,
)
def train_discriminator(
    context: typer.Context,
    source_model: Annotated[str, option("--source-model", "Folder or Hub id of the base model of the task's adapter.")],
    inputs: Annotated[str, lines("--inputs", 'The task\'s inputs, one per line: {"input": "…"}')],
    task: Annotated[str, option("--task", "Name of the task. The prompts contain it.", "NAME")],
    out: Out,
    seeds: Annotated[
        str | None, lines("--seeds", "Example inputs for the synthetic inputs. Defaults to some of --inputs.")
    ] = None,
    peft_type: PeftType = "lora",
    rank: Rank = 16,
    target_modules: TargetModules = None,
    paper: Paper = None,
    as_json: Json = False,
) -> Result | None:
    require_files(inputs=inputs, seeds=seeds)
    settings = training_arguments(context, out, paper, peft_type)
    from accelerate import PartialState

    from hf_ext import trans_lora
    from hf_ext.storage.files import require_another_folder
    from hf_ext.trans_lora.discriminator import require_better_than_chance

    require_another_folder(Path(out), [Path(source_model)] if os.path.isdir(source_model) else [])
    model, tokenizer = trans_lora.load_model(source_model)
    discriminator = trans_lora.train_discriminator(
        model,
        tokenizer,
        trans_lora.read_inputs(inputs),
        task=task,
        args=settings,
        peft_config=peft_config(peft_type, rank, target_modules, source_model, paper),
        seeds=trans_lora.read_inputs(seeds) if seeds else None,
    )
    require_better_than_chance(discriminator.metrics, f"The discriminator of {task}")
    first = PartialState().is_main_process
    if first:
        discriminator.save_pretrained(out)
    PartialState().wait_for_everyone()
    figures = ", ".join(f"{name} {value:.2f}" for name, value in discriminator.metrics.items())
    text = f"{out} holds the discriminator of {task}" + (f" ({figures})." if figures else ".")
    return Result(text, {"out": out, "task": task, "metrics": discriminator.metrics}) if first else None


def request_of(
    context: typer.Context,
    source_model: Annotated[str, option("--source-model", "Folder or Hub id of the base model of the adapter.")],
    source_adapter: Annotated[str, option("--source-adapter", "Folder or Hub id of the adapter, of any PEFT type.")],
    target_model: Annotated[str, option("--target-model", "Folder or Hub id of the base model to move the adapter to.")],
    seeds: Annotated[str, lines("--seeds", 'A few real inputs, one per line: {"input": "…"}')],
    out: Out,
    discriminator: str | None,
    discriminator_model: Annotated[
        str | None, option("--discriminator-model", "Base model of the discriminator. Defaults to --source-model.")
    ] = None,
    server: Annotated[
        str | None, option("--server", "OpenAI-compatible server with the target model, which writes the inputs.", "URL")
    ] = None,
    server_model: Annotated[
        str | None, option("--server-model", "Name of the target model on the server. Defaults to --target-model.", "NAME")
    ] = None,
    peft_type: PeftType = "lora",
    rank: Rank = 16,
    target_modules: TargetModules = None,
    paper: Paper = None,
) -> Any:
    """Returns a `TransferRequest` of the options that `transfer` and `migrate` share."""
    require_files(seeds=seeds)
    settings = training_arguments(context, out, paper, peft_type)
    from hf_ext import trans_lora

    sampling = cast("dict[str, Any]", settings.generation_kwargs or {})  # TrainingArguments has parsed JSON
    return trans_lora.TransferRequest(
        source_model,
        source_adapter,
        target_model,
        trans_lora.read_inputs(seeds),
        settings,
        peft_config(peft_type, rank, target_modules, target_model, paper),
        discriminator,
        discriminator_model,
        trans_lora.Server(server, server_model or target_model, options=sampling) if server else None,
    )


def with_shared_options(command: Callable[..., Result | None]) -> Callable[..., Result | None]:
    """Declares the options of `request_of` in place of a command's `**options`."""
    declared, shared = (inspect.signature(function, eval_str=True).parameters for function in (command, request_of))
    parameters = {name: parameter for name, parameter in (shared | declared).items() if name != "options"}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    )
    return command


@section.command(
    "train a new adapter on the old one's answers to new inputs",
    "  hf-ext transfer --source-model Llama-2-7b-hf --source-adapter my-lora \\\n"
    "    --target-model gemma-7b --discriminator boolean-d --seeds seeds.jsonl \\\n"
    "    --out my-lora-on-gemma --learning-rate 2e-4 --num-train-epochs 5",
    "To resume a run that was killed, run the same command again.\n\n"
    f"{ANY_OPTION} --learning-rate 2e-4  --bf16  --filter token_excess  --num-samples 500",
    RESUMABLE,
    **ANY,
)
@with_shared_options
def transfer(
    context: typer.Context,
    discriminator: Annotated[
        str | None,
        option("--discriminator", "Folder or Hub id. If you have none, use --filter token_excess or --filter none."),
    ] = None,
    real_inputs: Annotated[
        str | None, lines("--real-inputs", "Real inputs to compare the synthetic ones with. Only the report uses them.")
    ] = None,
    as_json: Json = False,
    **options: Any,
) -> Result | None:
    if discriminator is None and not any(word.partition("=")[0] == "--filter" for word in context.args):
        raise mistake("give one, or choose --filter token_excess or --filter none", "--discriminator")
    require_files(real_inputs=real_inputs)
    request = request_of(context, discriminator=discriminator, **options)
    from hf_ext import trans_lora

    trainer = trans_lora.transfer(request, real_inputs=trans_lora.read_inputs(real_inputs) if real_inputs else ())
    report = trainer.report if trainer.is_world_process_zero() else None
    return Result(str(report), report.to_dict()) if report else None


@section.command(
    "move an adapter by several methods, and keep the best",
    "  hf-ext migrate --source-model SmolLM2-135M --source-adapter my-lora \\\n"
    "    --target-model SmolLM2-135M-Instruct --seeds seeds.jsonl --out my-lora-migrated \\\n"
    "    --learning-rate 2e-4 --num-train-epochs 5",
    "Copies the adapter if it fits the target, trains one by TiTok, and, with --discriminator, one by Trans-LoRA. Writes the "
    "best adapter to OUT, each adapter to a folder in OUT, and a report with the scores and times. The score is the accuracy "
    "on --test or, without --test, the agreement with the old adapter on held-out synthetic inputs.\n\n"
    "To resume a run that was killed, run the same command again.\n\n"
    f"{ANY_OPTION} --learning-rate 2e-4  --num-train-epochs 20  --bf16  --num-samples 500",
    RESUMABLE,
    **ANY,
)
@with_shared_options
def migrate(
    context: typer.Context,
    discriminator: Annotated[str | None, option("--discriminator", "Folder or Hub id. Trans-LoRA requires it.")] = None,
    test: Annotated[
        str | None, lines("--test", 'Inputs with correct answers, one per line: {"input": "…", "output": "…"}')
    ] = None,
    target_score: Annotated[
        float, option("--target-score", "Stop at the first method with this score (0 to 1).", "SCORE")
    ] = 1.0,
    as_json: Json = False,
    **options: Any,
) -> Result | None:
    require_files(test=test)
    request = request_of(context, discriminator=discriminator, **options)
    from accelerate import PartialState

    from hf_ext import trans_lora

    report = trans_lora.migrate(request, test=trans_lora.read_pairs(test) if test else None, target_score=target_score)
    return Result(str(report), report.to_dict()) if PartialState().is_main_process else None


def training_arguments(context: typer.Context, out: str, paper: int | None, peft_type: str) -> TransLoraConfig:
    """Parses the options that the command does not declare.

    Args:
        paper: size of a data set, with which the paper's settings are the defaults.
        peft_type: type of the new adapter.
    """
    declared = [name.lstrip("-") for item in context.command.params for name in item.opts]
    names = [*fields, *declared] if (fields := option_names()) else []
    for word in context.args:
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in INSTEAD:
            raise mistake(INSTEAD[name], word.partition("=")[0])
        if names and word.startswith("--") and not {name, name.removeprefix("no_")} & {*names}:  # --no_NAME is for a flag
            raise unrecognized([word], names)
    from transformers import HfArgumentParser

    from hf_ext import TransLoraConfig
    from hf_ext.trans_lora.config import paper_settings

    parser = HfArgumentParser(TransLoraConfig, prog="hf-ext", exit_on_error=False, allow_abbrev=False)  # type: ignore[arg-type]
    if paper is not None:
        rate = {"learning_rate": 2e-3} if peft_type == "prompt_tuning" else {}
        parser.set_defaults(**paper_settings(paper), **rate)
    try:
        settings, unknown = parser.parse_args_into_dataclasses([*context.args, "--output_dir", out], True)
    except argparse.ArgumentError as error:
        raise mistake(error.message, error.argument_name) from error
    if unknown:
        raise unrecognized(unknown, names)
    return settings


def unrecognized(words: list[str], names: list[str]) -> Exception:
    """Returns the error for options that nothing declares; `names` are those that exist."""
    similar = " or ".join(get_close_matches(dashed(words[0].partition("=")[0]), [f"--{dashed(name)}" for name in names], 2))
    return mistake(f"unrecognized arguments: {' '.join(words)}" + (f". Did you mean {similar}?" if similar else ""))


def dashed(name: str) -> str:
    return name.replace("_", "-")


def option_names() -> list[str]:
    """Returns the options of TransLoraConfig and TrainingArguments, from the sources of the classes: importing them takes
    seconds. Returns none of a class that is elsewhere; its own parser then finds mistakes later."""
    transformers = importlib.util.find_spec("transformers")
    host = Path(transformers.origin or "").with_name("training_args.py") if transformers else Path()
    names = []
    for path, name in (
        (Path(__file__).parents[1] / "trans_lora" / "config.py", "TransLoraConfig"),
        (host, "TrainingArguments"),
    ):
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        fields = [
            item.target.id
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == name
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        if not fields:
            return []
        names += fields
    return list(dict.fromkeys(names))


def peft_config(kind: str, rank: int, target_modules: list[str] | None, model: str, paper: int | None) -> PeftConfig:
    """Returns the configuration of the new adapter; with `paper`, that of the paper's adapters."""
    from peft import LoraConfig, PromptTuningConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_MODULES
    from transformers import AutoConfig

    from hf_ext import PissaConfig
    from hf_ext.trans_lora.encoding import loading
    from hf_ext.trans_lora.prompts import PAPERS_SOFT_PROMPT

    with loading(model):
        config = AutoConfig.from_pretrained(model)
    task_type = "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"
    if kind == "prompt_tuning":
        text = {"prompt_tuning_init_text": PAPERS_SOFT_PROMPT, "tokenizer_name_or_path": model}
        start: dict[str, Any] = {} if paper is None else {"prompt_tuning_init": "TEXT"} | text
        return PromptTuningConfig(task_type=task_type, num_virtual_tokens=rank, **start)
    modules: list[str] | str
    if target_modules:
        names = [name for text in target_modules for name in text.split(",") if name]
        modules = names if len(names) > 1 else names[0]
    elif paper is not None:  # PEFT knows other names of query and value in many families
        modules = DEFAULT_MODULES.get(config.model_type, ["q_proj", "v_proj"])
    else:
        modules = "all-linear"
    options: dict[str, Any] = {"task_type": task_type, "r": rank, "lora_alpha": rank, "target_modules": modules}
    return PissaConfig(**options) if kind == "pissa" else LoraConfig(**options, use_dora=kind == "dora")
