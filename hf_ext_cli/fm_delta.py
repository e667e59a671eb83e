"""FM-Delta's commands."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

from hf_ext_cli.command import GOES_ON, MOVED_BASE, Group, Parser, Result, UsageError, add_out, add_revision, add_source, path

LEVELS = (1, 2, 3)  # those of hf_ext.storage.delta.codec, which takes seconds to import
DEFAULT_LEVEL = 2
WHOLE = "every checkpoint is whole, run again to go on"


def groups(parsers: argparse._SubParsersAction) -> list[Group]:
    return [one_model(parsers), many_models(parsers)]


def one_model(parsers: argparse._SubParsersAction) -> Group:
    group = Group(
        "Store a fine-tune in a fraction of its size, without loss (FM-Delta)",
        "$ hf-ext compress my-bert --base google-bert/bert-base-uncased --out my-bert-small\n"
        "$ hf-ext verify my-bert-small\n"
        "$ hf-ext decompress my-bert-small --out my-bert-again",
        parsers,
    )

    parser = group.command(
        compress,
        "write a model's folder again, weights as differences from a base model",
        "  hf-ext compress my-bert --base google-bert/bert-base-uncased --out my-bert-small\n"
        "  hf-ext compress my-bert --out my-bert-small --level 3 --delete-source    # finds the base; checks, then deletes",
        "OUT holds every file of SRC, and loads with from_pretrained as SRC did, bit for bit, where the base can be found.",
        "{out} is as it was, or has the whole model",
    )
    add_source(parser, "folder of the fine-tuned model, with safetensors weights")
    parser.add_argument(
        "--base", type=path, help="folder or Hub id of the model it was tuned from (default: what find-base is sure of)"
    )
    add_out(parser)
    add_compression(parser)

    parser = group.command(
        decompress,
        "give back the original folder, every file byte for byte",
        "  hf-ext decompress my-bert-small --out my-bert\n"
        "  hf-ext decompress my-bert-small --out my-bert --base /mnt/models/bert-base-uncased    # the base has moved",
    )
    add_source(parser, "compressed folder")
    add_out(parser)
    parser.add_argument("--base", type=path, help=MOVED_BASE)

    parser = group.command(
        find_base,
        "tell which model a checkpoint was fine-tuned from",
        "  hf-ext find-base my-bert                                  # among what it names and what the Hub cache holds\n"
        "  hf-ext find-base my-bert google-bert/bert-base-uncased ../other-bert",
        "What config.json and the model card name is tried first; then a few KB of each tensor are compared. Another\n"
        "fine-tune of the same base can pass as one: it works as a base all the same, but must then be kept.",
    )
    add_source(parser, "folder of the fine-tuned model, with safetensors weights")
    parser.add_argument(
        "candidates",
        metavar="CANDIDATE",
        type=path,
        nargs="*",
        help="folder or Hub id of what may be its base (default: all of the local Hub cache)",
    )
    return group


def many_models(parsers: argparse._SubParsersAction) -> Group:
    group = Group(
        "Do the same with a folder full of models, or with the checkpoints of a training run",
        "$ hf-ext compress-all my-models --out my-models-small --workers 4 --verify\n"
        "$ hf-ext compress-series my-run --base google-bert/bert-base-uncased",
        parsers,
    )

    parser = group.command(
        compress_all,
        "compress many fine-tunes, each to OUT/its name; goes on where it was",
        "  hf-ext compress-all my-models --base google-bert/bert-base-uncased --out my-models-small --workers 4 --verify\n"
        "  hf-ext compress-all my-bert my-gpt2 --out small --scheduler tcp://host:8786    # each one's base is found",
        "OUT/compress_all.json tells what became of each model. One that fails stops no other, and makes the exit code 1.",
        GOES_ON,
    )
    parser.add_argument("folder", type=path, metavar="FOLDER", nargs="+", help="folder of models, or the models' own folders")
    parser.add_argument(
        "--base", type=path, help="folder or Hub id of the model all were fine-tuned from (default: find each one's)"
    )
    add_out(parser)
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes that share the cores (default: 1)")
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="let the workers of a Dask cluster do it, such as tcp://host:8786"
    )
    add_compression(parser)

    parser = group.command(
        compress_series,
        "compress the checkpoints of a training run in place",
        "  hf-ext compress-series my-run --base google-bert/bert-base-uncased",
        "Each is stored against the base or the next newer checkpoint, whichever makes it smaller. resume_from_checkpoint and\n"
        "from_pretrained read them as before.",
        WHOLE,
    )
    parser.add_argument(
        "run_folder", type=path, metavar="RUN", help="output_dir of a training that is over, with folders checkpoint-N"
    )
    parser.add_argument("--base", type=path, required=True, help="folder or Hub id of the model that the run started from")
    add_revision(parser)

    parser = group.command(
        remove_checkpoint,
        "delete a checkpoint of a compressed run, unless others need it",
        "  hf-ext remove-checkpoint my-run/checkpoint-500\n"
        "  hf-ext remove-checkpoint my-run/checkpoint-500 --rebase    # those that need it are stored against another",
        left=WHOLE,
    )
    parser.add_argument("src", type=path, metavar="RUN/checkpoint-N", help="folder of the checkpoint")
    parser.add_argument("--rebase", action="store_true", help="store those that need it against another, then delete it")
    return group


def add_compression(parser: Parser) -> None:
    add_revision(parser)
    parser.add_argument("--verify", action="store_true", help="decode everything and compare it with the source, byte for byte")
    parser.add_argument(
        "--level",
        type=int,
        choices=LEVELS,
        default=DEFAULT_LEVEL,
        help=f"1 is fast, {LEVELS[-1]} searches longest for what makes it small (default: {DEFAULT_LEVEL})",
    )
    parser.add_argument("--delete-source", action="store_true", help="delete the source once it is verified; implies --verify")


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above zero")
    return int(text)


def compress(args: argparse.Namespace) -> Result:
    require_base_for_revision(args)
    from hf_ext import fm_delta

    base, revision, found = args.base, args.revision, ""
    if base is None:
        report = fm_delta.find_base(args.src)
        base, revision, found = report.require().name, report.require().revision, f"{report.summary()}\n"
    fm_delta.compress_checkpoint(args.src, base, args.out, revision, args.verify, args.delete_source, args.level)
    made = fm_delta.inspect(args.out)
    return Result(found + made.summary(), made.to_dict())


def decompress(args: argparse.Namespace) -> Result:
    from hf_ext import fm_delta

    fm_delta.decompress_checkpoint(args.src, args.out, base=args.base)
    return Result(f"{args.out} holds the original files.", {"out": args.out})


def find_base(args: argparse.Namespace) -> Result:
    from hf_ext import fm_delta

    report = fm_delta.find_base(args.src, args.candidates or None)
    return Result(str(report), report.to_dict())


def compress_all(args: argparse.Namespace) -> Result:
    require_base_for_revision(args)
    from hf_ext import fm_delta
    from hf_ext.storage.layout import all_weights

    only = Path(args.folder[0])
    sources = only if len(args.folder) == 1 and not (only.is_dir() and all_weights(only)) else args.folder
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
    return Result(str(report), report.to_dict(), failed=bool(report.failed))


@contextlib.contextmanager
def scheduler(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster, as an executor."""
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError("--scheduler needs Dask: pip install 'dask[distributed]'.") from error
    with Client(address) as client:
        yield client.get_executor(pure=False)  # a second run with the same arguments is to look again


def compress_series(args: argparse.Namespace) -> Result:
    from hf_ext import fm_delta

    report = fm_delta.compress_series(args.run_folder, args.base, args.revision)
    return Result(str(report), report.to_dict())


def remove_checkpoint(args: argparse.Namespace) -> Result:
    from hf_ext import fm_delta

    fm_delta.remove_checkpoint(args.src, args.rebase)
    return Result(f"{args.src} is deleted.", {"deleted": args.src})


def require_base_for_revision(args: argparse.Namespace) -> None:
    if args.revision and not args.base:
        raise UsageError("--revision says which commit of the base; give --base too")
