"""Uni-Med's command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from hf_ext.cli.command import Json, Out, Result, Section, argument, option

section = Section(
    "Load a checkpoint of Uni-Med's authors in Transformers",
    "$ hf-ext convert-uni-med checkpoint_0.pth --out my-uni-med \\\n"
    "    --vision Salesforce/blip2-opt-2.7b --text meta-llama/Llama-2-7b-chat-hf",
)


@section.command(
    "convert the checkpoint, with its LoRA in OUT/adapter",
    "  hf-ext convert-uni-med checkpoint_0.pth --out my-uni-med \\\n"
    "    --vision Salesforce/blip2-opt-2.7b --text meta-llama/Llama-2-7b-chat-hf",
)
def convert_uni_med(
    checkpoint: Annotated[str, argument("CKPT", "The .pth file. The command loads only tensors and plain values from it.")],
    out: Out,
    vision: Annotated[str, option("--vision", "Folder or Hub id of the vision tower, such as a BLIP-2 with ViT-g.")],
    text: Annotated[str, option("--text", "Folder or Hub id of the language model.")],
    as_json: Json = False,
) -> Result:
    from hf_ext import uni_med

    conversion = uni_med.convert_checkpoint(checkpoint, out, vision, text)
    return Result(str(conversion), asdict(conversion))
