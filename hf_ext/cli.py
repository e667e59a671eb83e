"""The `hf-ext` command: parse, call, show."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from importlib.metadata import entry_points
from pathlib import Path

from accelerate import PartialState
from peft import LoraConfig, PeftConfig, PromptTuningConfig
from transformers import AutoConfig, HfArgumentParser

from hf_ext import PissaConfig, TransLoraConfig, __version__, emr, fm_delta, trans_lora, uni_med
from hf_ext.emr.artifact import is_merge
from hf_ext.emr.writing import RESCALE
from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.fm_delta.codec import DEFAULT_LEVEL, LEVELS
from hf_ext.folder import all_weights

GOES_ON = "{out} has what was done, run again to go on"
ANY_OPTION = (
    "Any option of TransLoraConfig, and so of TrainingArguments, may follow by its own name:\n"
    "  --filter token_excess  --num_samples 500  --learning_rate 2e-4  --num_train_epochs 20  --bf16"
)


def compress(args: argparse.Namespace) -> None:
    base, revision = args.base, args.revision
    if base is None:
        require_base_for_revision(args)
        found = fm_delta.find_base(args.src)
        base, revision = found.require().name, found.require().revision
        print(found.summary())
    fm_delta.compress_checkpoint(args.src, base, args.out, revision, args.verify, args.delete_source, args.level)
    print(fm_delta.inspect(args.out).summary())


def compress_all(args: argparse.Namespace) -> int:
    require_base_for_revision(args)
    sources = args.folder[0] if len(args.folder) == 1 and not is_checkpoint(args.folder[0]) else args.folder
    with scheduler(args.scheduler) if args.scheduler else contextlib.nullcontext() as executor:
        report = fm_delta.compress_all(
            sources,
            args.out,
            args.base,
            args.revision,
            workers=args.workers,
            executor=executor,
            verify=args.verify,
            delete_source=args.delete_source,
            level=args.level,
        )
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 1 if report.failed else 0


def find_base(args: argparse.Namespace) -> None:
    report = fm_delta.find_base(args.src, args.candidates or None)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)


def require_base_for_revision(args: argparse.Namespace) -> None:
    if args.revision and not args.base:
        raise HfExtError("--revision says which commit of the base; give --base too.")


def is_checkpoint(folder: str) -> bool:
    return Path(folder).is_dir() and bool(all_weights(Path(folder)))


@contextlib.contextmanager
def scheduler(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster, as an executor."""
    try:
        from distributed import Client
    except ImportError as error:
        raise HfExtError("--scheduler needs Dask: pip install 'dask[distributed]' (or hf_ext[cluster]).") from error
    with Client(address) as client:
        yield client.get_executor(pure=False)  # a second run with the same arguments is to look again


def decompress(args: argparse.Namespace) -> None:
    fm_delta.decompress_checkpoint(args.src, args.out, base=args.base)
    print(f"{args.out} holds the original files.")


def compress_series(args: argparse.Namespace) -> None:
    print(fm_delta.compress_series(args.run_folder, args.base, args.revision))


def remove_checkpoint(args: argparse.Namespace) -> None:
    fm_delta.remove_checkpoint(args.src, args.rebase)
    print(f"{args.src} is deleted.")


def inspect(args: argparse.Namespace) -> None:
    report = emr.report(args.src) if is_merge(args.src) else fm_delta.inspect(args.src)
    if args.plot:
        report.plot(args.plot)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)


def verify(args: argparse.Namespace) -> None:
    count = (emr if is_merge(args.src) else fm_delta).verify(args.src, base=args.base)
    print(f"All {count} tensors of {args.src} come out as they were saved.")


def merge(args: argparse.Namespace) -> None:
    names = [name for name, _ in args.task]
    for name in names:
        if names.count(name) > 1:
            raise CheckpointError(f"There are two tasks called '{name}'; give each a name of its own.")
    show(emr.merge(args.base, dict(args.task), args.out, args.rescale, args.revision), args)


def add_task(args: argparse.Namespace) -> None:
    show(emr.add_task(args.src, *args.task, args.out, args.reelect, args.rescale, args.base), args)


def extract(args: argparse.Namespace) -> None:
    emr.extract(args.src, args.task, args.out, base=args.base)
    print(f"{args.out} holds the model of task '{args.task}'.")


def run(args: argparse.Namespace) -> int:
    found = entry_points(group="console_scripts", name=args.program)
    if not found:
        raise HfExtError(f"There is no command '{args.program}' in this Python environment ({sys.prefix}).")
    sys.argv = [args.program, *args.arguments]
    return min(found, key=lambda point: point.value).load()()


def convert_uni_med(args: argparse.Namespace) -> None:
    print(uni_med.convert_checkpoint(args.checkpoint, args.out, args.vision, args.text))


def train_discriminator(args: argparse.Namespace) -> None:
    model, tokenizer = trans_lora.load_model(args.source_model)
    settings = training_arguments(args)
    inputs = trans_lora.read_inputs(args.inputs)
    seeds = trans_lora.read_inputs(args.seeds) if args.seeds else None
    discriminator = trans_lora.train_discriminator(
        model, tokenizer, inputs, task=args.task, args=settings, peft_config=peft_config(args, args.source_model), seeds=seeds
    )
    if PartialState().is_main_process:
        discriminator.save_pretrained(args.out)
        figures = ", ".join(f"{name} {value:.2f}" for name, value in discriminator.metrics.items())
        print(f"{args.out} holds the discriminator of {args.task}" + (f" ({figures})." if figures else "."))
    PartialState().wait_for_everyone()


def transfer(args: argparse.Namespace) -> None:
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
    if trainer.is_world_process_zero():
        print(trainer.report)


def training_arguments(args: argparse.Namespace) -> TransLoraConfig:
    """What the command line says beyond the command's own options."""
    options = HfArgumentParser(TransLoraConfig, prog="hf-ext", exit_on_error=False)
    try:
        return options.parse_args_into_dataclasses([*args.rest, "--output_dir", args.out])[0]
    except argparse.ArgumentError as error:
        raise HfExtError(str(error)) from error


def peft_config(args: argparse.Namespace, model: str) -> PeftConfig:
    """The adapter that the command line asks for."""
    kind = "SEQ_2_SEQ_LM" if AutoConfig.from_pretrained(model).is_encoder_decoder else "CAUSAL_LM"
    if args.peft_type == "prompt_tuning":
        return PromptTuningConfig(task_type=kind, num_virtual_tokens=args.rank)
    config = PissaConfig if args.peft_type == "pissa" else LoraConfig
    modules = args.target_modules if len(args.target_modules) > 1 else args.target_modules[0]
    options = {"use_dora": True} if args.peft_type == "dora" else {}
    return config(task_type=kind, r=args.rank, lora_alpha=args.rank, target_modules=modules, **options)


def show(report: emr.MergeReport, args: argparse.Namespace) -> None:
    """Prints what a merge has become."""
    print(report if args.report else report.summary())
    if args.report:
        report.plot(Path(args.out, "report.png"))


def named(text: str) -> tuple[str, str]:
    """NAME=PATH as a pair."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=PATH")
    return name, path


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(
        prog="hf-ext",
        description="Compress fine-tuned checkpoints against their base model, without loss; merge many into one folder; "
        "move an adapter to another base model; convert Uni-Med's checkpoints.",
    )
    main.add_argument("--version", action="version", version=f"hf_ext {__version__}")
    commands = main.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(run, help: str, example: str, **options) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            run.__name__.replace("_", "-"),
            help=help,
            description=help,
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )
        sub.set_defaults(run=run, left="nothing was changed")
        return sub

    sub = command(
        compress,
        "Write a model's folder again with its weights as differences from a base model; from_pretrained loads it.",
        "hf-ext compress my-bert --base bert-base-uncased --out my-bert-small",
    )
    sub.add_argument("src", metavar="SRC", help="folder of the fine-tuned model, with safetensors weights")
    sub.add_argument("--base", help="folder or Hub id of the model it was fine-tuned from (default: what find-base is sure of)")
    sub.add_argument("--out", required=True, help="folder to write")
    add_compress_arguments(sub)
    sub.set_defaults(left="{src} is as it was, or {out} is whole")

    sub = command(
        compress_all,
        "Compress many fine-tunes, each to OUT/its name; run again, it goes on where it was.",
        "hf-ext compress-all my-models --base bert-base-uncased --out my-models-small --workers 4 --verify",
    )
    sub.add_argument("folder", metavar="FOLDER", nargs="+", help="folder whose subfolders are models, or the models' folders")
    sub.add_argument("--base", help="folder or Hub id of the model all were fine-tuned from (default: find each one's)")
    sub.add_argument("--out", required=True, help="folder to write")
    sub.add_argument("--workers", type=positive, default=1, metavar="N", help="processes that share the cores (default: 1)")
    sub.add_argument("--scheduler", metavar="ADDRESS", help="let the workers of a Dask cluster do it, such as tcp://host:8786")
    sub.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    add_compress_arguments(sub)
    sub.set_defaults(left=GOES_ON)

    sub = command(
        find_base,
        "Tell which model a checkpoint was fine-tuned from, by what it says itself and by its weights.",
        "hf-ext find-base my-bert bert-base-uncased some-other-bert",
    )
    sub.add_argument("src", metavar="SRC", help="folder of the fine-tuned model, with safetensors weights")
    sub.add_argument(
        "candidates",
        metavar="CANDIDATE",
        nargs="*",
        help="folder or Hub id of what may be its base (default: all of the local Hub cache)",
    )
    sub.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")

    sub = command(
        decompress,
        "Give back the original folder, every file byte for byte.",
        "hf-ext decompress my-bert-small --out my-bert",
    )
    sub.add_argument("src", metavar="SRC", help="compressed folder")
    sub.add_argument("--out", required=True, help="folder to write")
    sub.add_argument("--base", help="folder or Hub id of the base, if it is no longer where SRC's config.json says")

    sub = command(
        compress_series,
        "Compress the checkpoints of a training run in place, each against the base or the next newer one.",
        "hf-ext compress-series my-run --base bert-base-uncased",
    )
    sub.set_defaults(left="every checkpoint is whole, run again to go on")
    sub.add_argument("run_folder", metavar="RUN", help="output_dir of a training that is over, with folders checkpoint-N")
    sub.add_argument("--base", required=True, help="folder or Hub id of the model that the run started from")
    sub.add_argument("--revision", metavar="REV", help="branch, tag or commit of the base on the Hub (default: main)")

    sub = command(
        remove_checkpoint,
        "Delete a checkpoint of a compressed run, unless others need it.",
        "hf-ext remove-checkpoint my-run/checkpoint-500 --rebase",
    )
    sub.set_defaults(left="every checkpoint is whole, run again to go on")
    sub.add_argument("src", metavar="RUN/checkpoint-N", help="folder of the checkpoint")
    sub.add_argument("--rebase", action="store_true", help="store those that need it against another, then delete it")

    sub = command(
        inspect,
        "Show how large each tensor of a compressed checkpoint is, or how close each task of a merge is to its own model; "
        "the base is not needed.",
        "hf-ext inspect my-bert-small --plot sizes.png",
    )
    sub.add_argument("src", metavar="SRC", help="compressed folder or file, or folder of a merge")
    sub.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    sub.add_argument("--plot", metavar="FILE.png", help="also draw it (needs matplotlib)")

    sub = command(
        verify,
        "Decode every tensor and compare it with the checksum it was saved with; of a merge, read every mask too.",
        "hf-ext verify my-bert-small",
    )
    sub.add_argument("src", metavar="SRC", help="compressed folder, or folder of a merge")
    sub.add_argument("--base", help="folder or Hub id of the base, if it is no longer where SRC's config.json says")

    sub = command(
        merge,
        "Merge fine-tunes of one base model into one folder (EMR-Merging); from_pretrained loads it, set_task switches.",
        "hf-ext merge --base bert-base-uncased --task cola=my-cola --task sst2=my-sst2 --out my-bert-merged --report",
    )
    sub.add_argument("--base", required=True, help="folder or Hub id of the model that all were tuned from")
    sub.add_argument("--revision", metavar="REV", help="branch, tag or commit of the base on the Hub (default: main)")
    add_merge_arguments(
        sub, "a checkpoint (plain or compressed) or a PEFT adapter; once a task, the first loads by default", "append"
    )

    sub = command(
        add_task,
        "Add a task to a merge; the other tasks stay as they are to the last bit.",
        "hf-ext add-task my-bert-merged --task mnli=my-mnli --out my-bert-more",
    )
    sub.add_argument("src", metavar="SRC", help="folder of the merge")
    sub.add_argument("--base", help="folder or Hub id of the base, if it is no longer where SRC's config.json says")
    sub.add_argument("--reelect", action="store_true", help="elect anew, which changes the other tasks a little")
    add_merge_arguments(sub, "the new task: a checkpoint (plain or compressed) or a PEFT adapter")

    sub = command(
        extract,
        "Write one task of a merge as a plain checkpoint, for tools that know nothing of merges.",
        "hf-ext extract my-bert-merged --task sst2 --out my-sst2-again",
    )
    sub.add_argument("src", metavar="SRC", help="folder of the merge")
    sub.add_argument("--task", required=True, help="name of the task")
    sub.add_argument("--out", required=True, help="folder to write")
    sub.add_argument("--base", help="folder or Hub id of the base, if it is no longer where SRC's config.json says")

    sub = command(
        run,
        "Run another tool's command with hf_ext imported, so that it loads what this package writes.",
        "hf-ext run transformers serve my-model-small",
    )
    sub.add_argument("program", metavar="PROGRAM", help="a command of this Python environment, such as transformers or lm_eval")
    sub.add_argument("arguments", metavar="…", nargs=argparse.REMAINDER, help="its arguments")

    sub = command(
        convert_uni_med,
        "Write a checkpoint of Uni-Med's authors' code as a folder that from_pretrained loads, and its LoRA to OUT/adapter.",
        "hf-ext convert-uni-med checkpoint_0.pth my-uni-med --vision Salesforce/blip2-opt-2.7b --text Llama-2-7b-chat-hf",
    )
    sub.add_argument("checkpoint", metavar="CKPT", help=".pth file; only tensors and plain values are read from it")
    sub.add_argument("out", metavar="OUT", help="folder to write")
    sub.add_argument("--vision", required=True, help="folder or Hub id of the vision tower, such as a BLIP-2 with ViT-g")
    sub.add_argument("--text", required=True, help="folder or Hub id of the language model")

    sub = command(
        train_discriminator,
        "Train what tells a task's own inputs from made-up ones, while its data are there; transfer sifts with it.",
        "hf-ext train-discriminator --source-model Llama-2-7b-hf --inputs boolean.jsonl --task boolean --out boolean-d\n\n"
        f"{ANY_OPTION}",
        allow_abbrev=False,
    )
    sub.add_argument("--source-model", required=True, help="folder or Hub id of the base model that the task's adapter is of")
    sub.add_argument("--inputs", metavar="FILE.jsonl", required=True, help='the task\'s inputs, a line each: {"input": "…"}')
    sub.add_argument("--task", required=True, help="the task's name, which the model is asked about")
    sub.add_argument("--seeds", metavar="FILE.jsonl", help="what made-up inputs are written from (default: some of these)")
    add_adapter_arguments(sub)

    sub = command(
        transfer,
        "Move an adapter to another base model, without the task's data (Trans-LoRA).",
        "hf-ext transfer --source-model Llama-2-7b-hf --source-adapter my-lora --target-model gemma-7b\n"
        "  --discriminator boolean-d --seeds seeds.jsonl --out my-lora-on-gemma --learning_rate 2e-4 --num_samples 250\n\n"
        f"A run that was killed goes on from where it was. {ANY_OPTION}",
        allow_abbrev=False,
    )
    sub.add_argument("--source-model", required=True, help="folder or Hub id of the base model that the adapter is of")
    sub.add_argument("--source-adapter", required=True, help="folder or Hub id of the adapter, of any PEFT type")
    sub.add_argument("--target-model", required=True, help="folder or Hub id of the base model to move to")
    sub.add_argument("--seeds", metavar="FILE.jsonl", required=True, help='a few real inputs, a line each: {"input": "…"}')
    sub.add_argument("--discriminator", help="folder or Hub id; without one, --filter token_excess or --filter none")
    sub.add_argument("--discriminator-model", help="its base model, if it is not the source model: in a chain of transfers")
    sub.add_argument("--server", metavar="URL", help="OpenAI-compatible server that has the target model, to write the inputs")
    sub.add_argument("--server-model", metavar="NAME", help="what the server calls it (default: as --target-model)")
    add_adapter_arguments(sub)
    return main


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above zero")
    return int(text)


def add_compress_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--revision", metavar="REV", help="branch, tag or commit of the base on the Hub (default: main)")
    sub.add_argument("--verify", action="store_true", help="decode everything and compare it with the source, byte for byte")
    sub.add_argument(
        "--level",
        type=int,
        choices=LEVELS,
        default=DEFAULT_LEVEL,
        help=f"1 is fast, {LEVELS[-1]} searches longest for what makes it small (default: {DEFAULT_LEVEL})",
    )
    sub.add_argument("--delete-source", action="store_true", help="then delete the source; implies --verify")


def add_adapter_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", required=True, help="folder to write")
    kinds = ("lora", "dora", "pissa", "prompt_tuning")
    sub.add_argument("--peft-type", choices=kinds, default=kinds[0], help="kind of the new adapter (default: lora)")
    sub.add_argument("--rank", type=int, default=16, help="its rank, or how many virtual tokens it has (default: 16)")
    sub.add_argument(
        "--target-modules", nargs="+", default=["all-linear"], metavar="NAME", help="layers that get it (default: all-linear)"
    )
    sub.set_defaults(takes_rest=True, left=GOES_ON)


def add_merge_arguments(sub: argparse.ArgumentParser, task: str, action: str = "store") -> None:
    sub.add_argument("--task", metavar="NAME=PATH", type=named, action=action, required=True, help=task)
    sub.add_argument("--out", required=True, help="folder to write")
    sub.add_argument(
        "--rescale",
        choices=RESCALE,
        default=RESCALE[0],
        help="a rescaler for each tensor (default), or one for the whole model as in the paper",
    )
    sub.add_argument(
        "--report",
        action="store_true",
        help="show how close each task is to its own model, and draw it to OUT/report.png (needs matplotlib)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    commands = parser()
    args, args.rest = commands.parse_known_args(arguments)
    takes_rest = getattr(args, "takes_rest", False)
    if args.rest and not takes_rest:
        commands.error(f"unrecognized arguments: {' '.join(args.rest)}")
    try:
        return args.run(args) or 0
    except (HfExtError, OSError, ValueError) as error:
        if not isinstance(error, HfExtError | OSError) and not takes_rest:
            raise  # a fault of ours; where options of Transformers and PEFT are taken, it is what they say to those
        print(f"hf-ext: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hf-ext: interrupted; {args.left.format(**vars(args))}.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
