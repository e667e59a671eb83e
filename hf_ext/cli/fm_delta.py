"""FM-Delta's commands."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated

import typer

from hf_ext.cli.command import (
    RESUMABLE,
    Force,
    Json,
    MovedBase,
    Out,
    Result,
    Revision,
    Section,
    Verbose,
    argument,
    flag,
    missing_config,
    mistake,
    option,
)
from hf_ext.display import bytes_of
from hf_ext.storage.delta import DEFAULT_LEVEL, LEVELS

section = Section(
    "Store a fine-tune in a fraction of its size, without loss (FM-Delta)",
    "$ hf-ext compress my-bert --base google-bert/bert-base-uncased --out my-bert-small\n"
    "$ hf-ext verify my-bert-small\n"
    "$ hf-ext decompress my-bert-small --out my-bert-again\n"
    "$ hf-ext compress-all my-models --out my-models-small --workers 4 --verify",
)

Src = Annotated[str, argument("SRC", "Folder or Hub id of the fine-tuned model, with safetensors weights.")]
Verify = Annotated[bool, flag("--verify", "Decode every tensor and compare it with the checksum of the source's.")]


@section.command(
    "copy a model, storing weights as differences from a base",
    "  hf-ext compress my-bert --base google-bert/bert-base-uncased --out my-bert-small\n"
    "  hf-ext compress my-bert --out my-bert-small    # finds the base\n"
    "  hf-ext compress my-bert --base /mnt/bert --base-id google-bert/bert-base-uncased \\\n"
    "    --out my-bert-small\n"
    "  hf-ext compress my-model --no-base --out my-model-small    # a base model",
    "OUT contains every file of SRC, with compressed weights. from_pretrained loads the same bits from OUT as from SRC, on any "
    "machine that has the base or can download it. Without --base, the command searches for the base, as find-base does.",
    "{out} is unchanged, or has the whole model",
)
def compress(
    src: Src,
    out: Out,
    base: Annotated[str | None, option("--base", "Folder or Hub id of the model that SRC was fine-tuned from.")] = None,
    no_base: Annotated[bool, flag("--no-base", "Compress the weights without a base, such as those of a base model.")] = False,
    revision: Revision = None,
    base_id: Annotated[
        str | None, option("--base-id", "Hub id to record for the base, if --base is a local copy of it.", "ORG/NAME")
    ] = None,
    verify: Verify = False,
    level: Annotated[
        int,
        typer.Option(
            "--level", min=LEVELS[0], max=LEVELS[-1], metavar="N", help=f"{LEVELS[0]} is fastest, {LEVELS[-1]} compresses best."
        ),
    ] = DEFAULT_LEVEL,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    if no_base and base:
        raise mistake("cannot be combined with --base", "--no-base")
    require_base(base, revision=revision, base_id=base_id)
    from hf_ext import fm_delta
    from hf_ext.fm_delta.base_search import require_related
    from hf_ext.fm_delta.compress import is_result
    from hf_ext.storage.files import require_another_folder
    from hf_ext.storage.guards import require_place
    from hf_ext.storage.hub import downloaded

    require_another_folder(Path(out), [src, base])
    require_place(Path(out), force or (lambda: is_result(Path(out))))
    finding, src = "", str(downloaded(src))
    if base is None and not no_base:
        report = fm_delta.find_base(src)
        base, revision, finding = report.require().name, report.require().revision, f"{report.summary()}\n"
    elif base:
        require_related(src, base, revision)
    written = fm_delta.compress_checkpoint(src, base, out, revision, verify, level, base_id, overwrite=force)
    verified = f"\nAll {len(written.tensors)} tensors decode to those of {src}." if verify else ""
    stays = ""
    if written.base and os.path.isabs(written.base):
        stays = f"\nThe base is recorded as {written.base}, which other machines lack. "
        stays += "Record its Hub id with --base-id, or put OUT beside the base: then both can move together."
    text = f"{finding}{written.summary()}{verified}{stays}{missing_config(out)}"
    return Result(text, written.to_dict() | {"tensors": len(written.tensors)})  # `hf-ext inspect` lists them


@section.command(
    "restore the original folder, every file byte for byte",
    "  hf-ext decompress my-bert-small --out my-bert\n"
    "  hf-ext decompress my-bert-small --out my-bert --base /mnt/bert    # the base moved",
)
def decompress(
    src: Annotated[str, argument("SRC", "Compressed folder, or its id on the Hub.")],
    out: Out,
    base: MovedBase = None,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    from hf_ext import fm_delta

    fm_delta.decompress_checkpoint(src, out, base=base, overwrite=force)
    return Result(f"{out} holds the original weights, and the other files of {src}.{missing_config(out)}", {"out": out})


@section.command(
    "find the model that a checkpoint was fine-tuned from",
    "  hf-ext find-base my-bert    # searches its model card and the local Hub cache\n"
    "  hf-ext find-base my-bert google-bert/bert-base-uncased ../other-bert",
    "Tries the models that config.json and the model card name, then compares a few KB of each tensor. It can report "
    "another fine-tune of the same base. Such a model works as a base too, but then you must keep it. The exit code is 1 if "
    "no candidate fits. --verbose shows how the candidates compare.",
)
def find_base(
    src: Src,
    candidates: Annotated[
        list[str] | None, argument("CANDIDATE", "Folders or Hub ids of possible bases; defaults to the local Hub cache.")
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> Result:
    from hf_ext import fm_delta

    report = fm_delta.find_base(src, candidates or None)
    text = str(report) if verbose else report.summary()
    if report.candidates and not verbose and report.verdict != "sure":
        text += " --verbose shows how the candidates compare."
    return Result(text, report.to_dict(), failed=report.best is None)


@section.command(
    "extract a LoRA from a fine-tune, for PEFT and for servers",
    "  hf-ext extract-lora my-llama --base meta-llama/Llama-3.2-1B --out my-lora --rank 16\n"
    "  hf-ext extract-lora my-llama --base my-base --out my-lora --max-size 50MB\n"
    "  hf-ext extract-lora my-llama --base my-base --out my-lora --energy 0.9 \\\n"
    "    --eval texts.jsonl\n"
    "  hf-ext extract-lora my-llama-small --out my-lora    # compressed",
    "A layer's LoRA consists of the leading singular components of the layer's change. With --energy or --max-size, each layer "
    "gets a rank of its own. Prints the share of the change that the LoRA keeps, and the changes that it does not carry.\n\n"
    "Without --base, SRC must be compressed: the base is then the one that SRC records.",
)
def extract_lora(
    src: Annotated[str, argument("SRC", "Folder or Hub id of the fine-tuned model, plain or compressed.")],
    out: Out,
    base: Annotated[str | None, option("--base", "Folder or Hub id of the model that SRC was fine-tuned from.")] = None,
    rank: Annotated[
        int | None,
        option("--rank", "Rank of all layers (32); with --energy or --max-size, the largest rank of a layer.", "N", min=1),
    ] = None,
    energy: Annotated[
        float | None,
        option("--energy", "Share of the adapted layers' change that the smallest adapter keeps.", "SHARE", min=0, max=1),
    ] = None,
    max_size: Annotated[
        str | None, option("--max-size", "Size of the adapter, such as 50MB, with the most energy.", "SIZE")
    ] = None,
    texts: Annotated[
        str | None,
        option("--eval", 'Compare losses on these texts of a language model, one per line: {"text": "…"}', "FILE.jsonl"),
    ] = None,
    verbose: Verbose = False,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    size = None if max_size is None else bytes_of(max_size)
    if max_size is not None and size is None:
        raise mistake(f"'{max_size}' is not a size such as 50MB", "--max-size")
    if max_size is not None and size == math.inf:
        raise mistake(f"{max_size[:9]}… is more than any file holds", "--max-size")
    from hf_ext import fm_delta
    from hf_ext.lora_extraction.extract import read_texts

    read = read_texts(texts) if texts else None
    most = None if size is None else round(size)
    report = fm_delta.extract_lora(src, base, out, rank=rank, energy=energy, max_size=most, texts=read, overwrite=force)
    return Result(str(report) if verbose else report.summary(), report.to_dict())


@section.command(
    "compress many fine-tunes; skip those that are done",
    "  hf-ext compress-all my-models --base google-bert/bert-base-uncased \\\n"
    "    --out my-models-small --workers 4 --verify\n"
    "  hf-ext compress-all my-bert my-gpt2 --out small --candidates bert-base gpt2\n"
    "  hf-ext compress-all my-models --out small --scheduler tcp://host:8786",
    "OUT/compress_all.json records the result for each model. Failures do not stop the run; the exit code is then 1. Run the "
    "command again to resume.",
    RESUMABLE,
)
def compress_all(
    folder: Annotated[list[str], argument("FOLDER", "Folder of models, or the models' own folders.")],
    out: Out,
    base: Annotated[
        str | None,
        option("--base", "Folder or Hub id of the base of all models. Defaults to searching for the base of each model."),
    ] = None,
    revision: Revision = None,
    candidates: Annotated[
        list[str] | None,
        option("--candidates", "Without --base: possible bases (folders or Hub ids). Defaults to the local Hub cache.", "DIR…"),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, metavar="N", help="Number of processes. They share the machine's cores.")
    ] = 1,
    scheduler: Annotated[
        str | None, option("--scheduler", "Use the workers of a Dask cluster, such as tcp://host:8786.", "ADDRESS")
    ] = None,
    verify: Verify = False,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    require_base(base, revision=revision)
    if candidates and base:
        raise mistake("cannot be combined with --base", "--candidates")
    from hf_ext import fm_delta
    from hf_ext.storage.layout import all_weights, weights_instead

    only = Path(folder[0])
    is_model = only.is_dir() and (all_weights(only) or weights_instead(only))
    sources = only if len(folder) == 1 and not is_model else folder
    with dask_cluster(scheduler) if scheduler else contextlib.nullcontext() as executor:
        report = fm_delta.compress_all(
            sources,
            out,
            base,
            revision,
            workers=workers,
            executor=executor,
            verify=verify,
            candidates=candidates or None,
            overwrite=force,
        )
    return Result(str(report), report.to_dict(), failed=bool(report.failed))


@contextlib.contextmanager
def dask_cluster(address: str) -> Iterator[Executor]:
    """Yields the workers of a Dask cluster as an executor."""
    try:
        from distributed import Client
        from distributed.comm import get_address_host_port
    except ImportError as error:
        raise ImportError("--scheduler requires Dask: pip install 'dask[distributed]'.") from error
    try:
        get_address_host_port(address)
    except ValueError as error:
        raise mistake(f"'{address}' is not an address: {error}", "--scheduler") from None
    with Client(address) as client:
        yield client.get_executor(pure=False)  # else Dask returns cached results for the same arguments


def require_base(base: str | None, revision: str | None = None, base_id: str | None = None) -> None:
    """Checks that options about the base come with --base."""
    if revision and not base:
        raise mistake("requires --base, whose revision it selects", "--revision")
    if base_id and not base:
        raise mistake("requires --base, the folder with the local copy of this model", "--base-id")
    if base_id:
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        from hf_ext.storage.hub import split_id

        try:
            validate_repo_id(split_id(base_id)[0])
        except HFValidationError:
            raise mistake(f"'{base_id}' is not a Hub id such as org/name", "--base-id") from None
