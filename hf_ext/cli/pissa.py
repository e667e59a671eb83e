"""PiSSA's command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from hf_ext.cli.command import Json, Out, Result, Section, Verbose, argument, option

section = Section(
    "Convert a PiSSA or QPiSSA adapter into a LoRA (PiSSA)",
    "$ hf-ext convert-to-lora my-pissa --rank 8 --out my-lora",
)


@section.command(
    "convert a PiSSA or QPiSSA adapter, or a larger LoRA, to a LoRA",
    "  hf-ext convert-to-lora my-pissa --rank 8 --out my-lora\n  hf-ext convert-to-lora my-qpissa --out my-lora",
    "The result is the best LoRA of the rank; --verbose shows its error in each layer. Loads the base model on the CPU.",
)
def convert_to_lora(
    src: Annotated[str, argument("SRC", "Folder or Hub id of the adapter.")],
    out: Out,
    rank: Annotated[
        int | None,
        option("--rank", "Rank of the LoRA. Defaults to that of the saved adapter, which loses nothing of PiSSA.", "N", min=1),
    ] = None,
    base: Annotated[
        str | None, option("--base", "Folder or Hub id of the base, if it has moved. Defaults to that in adapter_config.json.")
    ] = None,
    onto: Annotated[
        Literal["original", "quantized"],
        option(
            "--onto",
            "For QPiSSA, the base of the LoRA: the base in full precision, or as load_in_4bit quantizes it.",
            "original|quantized",
        ),
    ] = "original",
    verbose: Verbose = False,
    as_json: Json = False,
) -> Result:
    from hf_ext import pissa
    from hf_ext.integration.adapter_source import load_adapted
    from hf_ext.pissa.config import FILE
    from hf_ext.storage.files import require_another_folder
    from hf_ext.storage.hub import downloaded

    adapter = downloaded(src)
    config = pissa.PissaConfig.from_pretrained(adapter) if (adapter / FILE).exists() else None
    require_another_folder(Path(out), [adapter])
    conversion = pissa.convert_to_lora(load_adapted(adapter, base, config), rank, onto=onto)
    conversion.save_pretrained(out)
    text = str(conversion) if verbose else conversion.summary()
    return Result(text, {"out": out, "layers": [asdict(layer) for layer in conversion.layers]})
