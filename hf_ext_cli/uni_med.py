"""Uni-Med's command."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from hf_ext_cli.command import Group, Result, path


def groups(parsers: argparse._SubParsersAction) -> list[Group]:
    group = Group(
        "Load a checkpoint of Uni-Med's authors in Transformers",
        "$ hf-ext convert-uni-med checkpoint_0.pth my-uni-med \\\n"
        "    --vision Salesforce/blip2-opt-2.7b --text meta-llama/Llama-2-7b-chat-hf",
        parsers,
    )

    parser = group.command(
        convert_uni_med,
        "write the checkpoint for from_pretrained, its LoRA to OUT/adapter",
        "  hf-ext convert-uni-med checkpoint_0.pth my-uni-med --vision Salesforce/blip2-opt-2.7b \\\n"
        "    --text meta-llama/Llama-2-7b-chat-hf",
    )
    parser.add_argument(
        "checkpoint", type=path, metavar="CKPT", help=".pth file; only tensors and plain values are read from it"
    )
    parser.add_argument("out", type=path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--vision", type=path, required=True, help="folder or Hub id of the vision tower, such as a BLIP-2 with ViT-g"
    )
    parser.add_argument("--text", type=path, required=True, help="folder or Hub id of the language model")
    return [group]


def convert_uni_med(args: argparse.Namespace) -> Result:
    from hf_ext import uni_med

    made = uni_med.convert_checkpoint(args.checkpoint, args.out, args.vision, args.text)
    return Result(str(made), asdict(made))
