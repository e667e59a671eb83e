"""The `hf-ext` command: parse, call, show."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hf_ext import __version__, fm_delta
from hf_ext.errors import HfExtError


def compress(args: argparse.Namespace) -> None:
    fm_delta.compress_checkpoint(args.src, args.base, args.out, revision=args.revision)
    print(fm_delta.inspect(args.out).summary())


def decompress(args: argparse.Namespace) -> None:
    fm_delta.decompress_checkpoint(args.src, args.out, base=args.base)
    print(f"{args.out} holds the original files.")


def inspect(args: argparse.Namespace) -> None:
    report = fm_delta.inspect(args.src)
    if args.plot:
        report.plot(args.plot)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)


def verify(args: argparse.Namespace) -> None:
    count = fm_delta.verify(args.src, base=args.base)
    print(f"All {count} tensors of {args.src} come out as they were saved.")


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(
        prog="hf-ext", description="Compress fine-tuned checkpoints against their base model, without loss."
    )
    main.add_argument("--version", action="version", version=f"hf_ext {__version__}")
    commands = main.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(run, help: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            run.__name__,
            help=help,
            description=help,
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    sub = command(
        compress,
        "Write a model's folder again with its weights as differences from a base model; from_pretrained loads it.",
        "hf-ext compress my-bert --base bert-base-uncased --out my-bert-small",
    )
    sub.add_argument("src", metavar="SRC", help="folder of the fine-tuned model, with safetensors weights")
    sub.add_argument("--base", required=True, help="folder or Hub id of the model it was fine-tuned from")
    sub.add_argument("--revision", metavar="REV", help="branch, tag or commit of the base on the Hub (default: main)")
    sub.add_argument("--out", required=True, help="folder to write")

    sub = command(
        decompress,
        "Give back the original folder, every file byte for byte.",
        "hf-ext decompress my-bert-small --out my-bert",
    )
    sub.add_argument("src", metavar="SRC", help="compressed folder")
    sub.add_argument("--out", required=True, help="folder to write")
    sub.add_argument("--base", help="folder or Hub id of the base, if it is no longer where SRC's config.json says")

    sub = command(
        inspect,
        "Show how large each tensor and each kind of tensor is, without decoding; the base is not needed.",
        "hf-ext inspect my-bert-small --plot sizes.png",
    )
    sub.add_argument("src", metavar="SRC", help="compressed folder or file")
    sub.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    sub.add_argument("--plot", metavar="FILE.png", help="also draw the size by layer (needs matplotlib)")

    sub = command(
        verify,
        "Decode every tensor and compare it with the checksum it was saved with.",
        "hf-ext verify my-bert-small",
    )
    sub.add_argument("src", metavar="SRC", help="compressed folder")
    sub.add_argument("--base", help="folder or Hub id of the base, if it is no longer where SRC's config.json says")
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        args.run(args)
    except (HfExtError, OSError) as error:
        print(f"hf-ext: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hf-ext: interrupted; nothing was changed.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
