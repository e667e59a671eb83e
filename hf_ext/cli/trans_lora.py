"""Trans-LoRA's commands. Their options are the fields of a request, of TransLoraConfig and of TrainingArguments."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import typer

from hf_ext.cli.command import RESUMABLE, Force, Json, Out, Result, Section, mistake

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
# Options of TrainingArguments that these commands replace.
INSTEAD = {"output_dir": "give the folder as --out", "push_to_hub": "upload the result: hf upload ORG/NAME OUT"}
SOFT_PROMPT = "Answer the following question correctly:"  # the paper's initial text of prompt tuning
ANY: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


def setting(help: str, **default: Any) -> Any:
    """Declares an option: a field whose help a parser shows."""
    return field(metadata={"help": help}, **default)


@dataclass(kw_only=True)
class NewAdapter:
    """The options of the adapter that a command trains."""

    peft_type: Literal["lora", "dora", "pissa", "prompt_tuning"] = setting(
        "Type of the new adapter: lora, dora, pissa or prompt_tuning.", default="lora"
    )
    rank: int = setting("Rank of the new adapter, or its number of virtual tokens.", default=16)
    target_modules: list[str] | None = setting(
        "Layers with the adapter. Defaults to all-linear, with --paper to query and value.", default=None
    )
    paper: int | None = setting(
        "Use the paper's settings for a data set of this many inputs, except where you give an option: num_samples, "
        "discriminator_prompt, the layers of the adapter, and the start of prompt tuning.",
        default=None,
    )

    def config(self, model: str) -> PeftConfig:
        """Returns the configuration of the adapter on a model; with `paper`, that of the paper's adapters."""
        from peft import LoraConfig, PromptTuningConfig
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_MODULES
        from transformers import AutoConfig

        from hf_ext import PissaConfig
        from hf_ext.trans_lora.models import loading

        with loading(model):
            config = AutoConfig.from_pretrained(model)
        task_type = "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"
        if self.peft_type == "prompt_tuning":
            text = {"prompt_tuning_init_text": SOFT_PROMPT, "tokenizer_name_or_path": model}
            start: dict[str, Any] = {} if self.paper is None else {"prompt_tuning_init": "TEXT"} | text
            return PromptTuningConfig(task_type=task_type, num_virtual_tokens=self.rank, **start)
        modules: list[str] | str = "all-linear"
        if self.target_modules:
            modules = self.target_modules if len(self.target_modules) > 1 else self.target_modules[0]
        elif self.paper is not None:  # PEFT knows other names of query and value in many families
            modules = DEFAULT_MODULES.get(config.model_type, ["q_proj", "v_proj"])
        options: dict[str, Any] = {"task_type": task_type, "r": self.rank, "lora_alpha": self.rank, "target_modules": modules}
        return PissaConfig(**options) if self.peft_type == "pissa" else LoraConfig(**options, use_dora=self.peft_type == "dora")


@dataclass(kw_only=True)
class DiscriminatorRequest:
    """The options of `train-discriminator`."""

    source_model: str = setting("Folder or Hub id of the base model of the task's adapter.")
    inputs: str = setting('File with the task\'s inputs, one per line: {"input": "…"}')
    task: str = setting("Name of the task. The prompts contain it.")
    seeds: str | None = setting("File with examples for the synthetic inputs. Defaults to some of --inputs.", default=None)


@dataclass(kw_only=True)
class TransferRequest:
    """The options of `transfer`."""

    source_model: str = setting("Folder or Hub id of the base model of the adapter.")
    source_adapter: str = setting("Folder or Hub id of the adapter, of any PEFT type.")
    target_model: str = setting("Folder or Hub id of the base model to move the adapter to.")
    seeds: str = setting('File with a few real inputs, one per line: {"input": "…"}')
    discriminator: str | None = setting("Folder or Hub id. If you have none, use --filter none.", default=None)
    discriminator_model: str | None = setting("Base model of the discriminator. Defaults to --source-model.", default=None)
    server: str | None = setting("URL of an OpenAI-compatible server with the target model, which writes inputs.", default=None)
    server_model: str | None = setting("Name of the model on the server. Defaults to --target-model.", default=None)


def dashed(name: str) -> str:
    return name.replace("_", "-")


def more(text: str, request: type, example: str) -> str:
    """Returns the help of a command with the options that it does not declare itself."""
    rows = ["\b\nOptions of the request:"]
    for item in (*fields(request), *fields(NewAdapter)):
        default = "required" if item.default is MISSING else item.default and f"default: {item.default}"
        help = item.metadata["help"] + (f" [{default}]" if default else "")
        rows.append(fill(f"  --{dashed(item.name):<21} {help}", 86, subsequent_indent=" " * 26))
    rest = "Also takes every field of TransLoraConfig (most used: docs/trans_lora.md) and of Transformers' TrainingArguments"
    return "\n\n".join([text, "\n".join(rows), f"{rest}, for example:", f"\b\n {example}"])


@section.command(
    "train a classifier of a task's real and synthetic inputs",
    "  hf-ext train-discriminator --source-model Llama-2-7b-hf --inputs boolean.jsonl \\\n"
    "    --task boolean --out boolean-d --learning-rate 2e-4 --num-train-epochs 5",
    more(
        "Train it while you have the task's data. `hf-ext transfer` filters synthetic inputs with it.",
        DiscriminatorRequest,
        "--learning-rate 2e-4  --num-train-epochs 20  --bf16",
    ),
    RESUMABLE,
    **ANY,
)
def train_discriminator(context: typer.Context, out: Out, force: Force = False, as_json: Json = False) -> Result | None:
    request, adapter, settings = parsed(context, out, DiscriminatorRequest, "inputs", "seeds")
    from accelerate import PartialState

    from hf_ext import trans_lora
    from hf_ext.storage.files import require_another_folder
    from hf_ext.storage.guards import require_place
    from hf_ext.trans_lora.stages import is_run

    source = request.source_model
    require_another_folder(Path(out), [source])
    require_place(Path(out), force or (lambda: is_run(Path(out))))
    model, tokenizer = trans_lora.load_model(source)
    discriminator = trans_lora.train_discriminator(
        model,
        tokenizer,
        trans_lora.read_inputs(request.inputs),
        task=request.task,
        args=settings,
        peft_config=adapter.config(source),
        seeds=trans_lora.read_inputs(request.seeds) if request.seeds else None,
    )
    discriminator.require_better_than_chance(f"The discriminator of {request.task}")
    first = PartialState().is_main_process
    if first:
        discriminator.save_pretrained(out, overwrite=True)
    PartialState().wait_for_everyone()
    figures = ", ".join(f"{name} {value:.2f}" for name, value in discriminator.metrics.items())
    text = f"{out} holds the discriminator of {request.task}" + (f" ({figures})." if figures else ".")
    return Result(text, {"out": out, "task": request.task, "metrics": discriminator.metrics}) if first else None


@section.command(
    "train a new adapter on the old one's answers to new inputs",
    "  hf-ext transfer --source-model Llama-2-7b-hf --source-adapter my-lora \\\n"
    "    --target-model gemma-7b --discriminator boolean-d --seeds seeds.jsonl \\\n"
    "    --out my-lora-on-gemma --learning-rate 2e-4 --num-train-epochs 5",
    more(
        "To resume a run that was killed, run the same command again.",
        TransferRequest,
        "--learning-rate 2e-4  --bf16  --filter none  --num-samples 500",
    ),
    RESUMABLE,
    **ANY,
)
def transfer(context: typer.Context, out: Out, force: Force = False, as_json: Json = False) -> Result | None:
    request, adapter, settings = parsed(context, out, TransferRequest, "seeds")
    if request.discriminator is None and settings.filter == "discriminator":
        raise mistake("give one, or choose --filter none", "--discriminator")
    from hf_ext import trans_lora

    server = None
    if request.server:
        server = trans_lora.Server(request.server, request.server_model or request.target_model, options=settings.sampling)
    trainer = trans_lora.transfer(
        request.source_model,
        request.source_adapter,
        request.target_model,
        trans_lora.read_inputs(request.seeds),
        settings,
        adapter.config(request.target_model),
        discriminator=request.discriminator,
        discriminator_model=request.discriminator_model,
        overwrite=force,
        synthesizer=server,
    )
    report = trainer.report if trainer.is_world_process_zero() else None
    return Result(str(report), report.to_dict()) if report else None


def parsed(context: typer.Context, out: str, request: type, *files: str) -> tuple[Any, NewAdapter, TransLoraConfig]:
    """Parses the options that a command does not declare itself; `files` names those that are paths of files."""
    for word in context.args:
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in INSTEAD:
            raise mistake(INSTEAD[name], word.partition("=")[0])
    from transformers import HfArgumentParser

    from hf_ext import TransLoraConfig
    from hf_ext.trans_lora.config import paper_settings

    class Parser(HfArgumentParser):
        def error(self, message: str) -> Any:
            raise mistake(message)

    parts = (request, NewAdapter, TransLoraConfig)
    parser = Parser(parts, prog="hf-ext", allow_abbrev=False)  # type: ignore[arg-type]
    words = [*context.args, "--output_dir", out]
    options, unknown = parser.parse_known_args(words)
    if unknown:
        names = [f"--{dashed(item.name)}" for part in parts for item in fields(part)]  # type: ignore[arg-type]
        similar = " or ".join(get_close_matches(dashed(unknown[0].partition("=")[0]), names, 2))
        hint = f". Did you mean {similar}?" if similar else ""
        raise mistake(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    for name in files:
        path = getattr(options, name)
        if path is not None and not os.path.isfile(path):
            raise mistake(f"there is no file '{path}'", f"--{name}")
    if options.paper is not None:
        rate = {"learning_rate": 2e-3} if options.peft_type == "prompt_tuning" else {}
        parser.set_defaults(**paper_settings(options.paper), **rate)
    return parser.parse_args_into_dataclasses(words)
