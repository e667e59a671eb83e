"""Extracts a LoRA from a fine-tune: the leading singular components of the change of each linear layer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_ext.adapters.adapter_source import AdapterSource
from hf_ext.display import percent
from hf_ext.errors import BaseModelError, CheckpointError, HfExtError
from hf_ext.integration import versions
from hf_ext.integration.cards import write_card
from hf_ext.lora_extraction.factors import Aim, Changes, Factors
from hf_ext.lora_extraction.report import LayerLora, LoraReport
from hf_ext.lora_extraction.roles import LEFT_OUT, Parts, Role, sort
from hf_ext.storage.config_file import CONFIG, read_config
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.files import require_another_folder, staged_folder
from hf_ext.storage.guards import require_place
from hf_ext.storage.hub import downloaded
from hf_ext.storage.layout import ADAPTER, ADAPTER_CONFIG, DIFFUSERS_LORA, models_in
from hf_ext.storage.likeness import unrelated
from hf_ext.storage.plain_writer import write_files
from hf_ext.storage.prefetch import progress
from hf_ext.storage.safetensors_file import ComputedFile, RawTensor, SafetensorsFile
from hf_ext.storage.source import NoBase, TensorSource
from hf_ext.storage.stored import Stored, open_counterpart

HEADER = 256  # bytes of a file's header for each tensor, at most
MOST_TOKENS = 1024  # of a text
WRITER = {"writer": "hf_ext extract-lora"}  # in the metadata of the file: a later extraction may overwrite it
OPTIONS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules")  # of LoraConfig: those of all its versions
TOKENS = "token_adapter.trainable_tokens_delta"  # the rows of an embedding there, after the module's name


def extract_lora(
    fine_tune: str | os.PathLike,
    base: str | os.PathLike | None,
    out: str | os.PathLike,
    *,
    rank: int | None = None,
    energy: float | None = None,
    max_size: int | None = None,
    revision: str | None = None,
    modules_to_save: bool = False,
    texts: Sequence[str] | None = None,
    overwrite: bool = False,
) -> LoraReport:
    """Writes a LoRA that approximates the change of a fine-tune, as an adapter that PEFT loads. Of a diffusers model, writes
    the file that `load_lora_weights` reads; of a pipeline, that of its UNet or transformer.

    The leading singular components of a layer's change become its LoRA (randomized subspace iteration: Halko, Martinsson, Tropp
    2011). Heads that the base does not have are in the adapter whole. Memory: a few tensors and the adapter in float32.

    Args:
        fine_tune: folder or Hub id of the fine-tune, plain or compressed.
        base: folder or Hub id of the model that it was fine-tuned from, plain or compressed. None for the base that a
            compressed fine-tune records.
        out: folder to write. On failure it is unchanged.
        rank: rank of all layers, except those with fewer rows or columns. With `energy` or `max_size`, the largest rank of a
            layer. Without all three, 32.
        energy: share of the energy of all layers' changes (the sum of their squares) to keep, above 0 and up to 1. Each layer
            gets a rank of its own, so that the adapter is the smallest.
        max_size: size of the adapter's weights in bytes. Each layer gets a rank of its own, so that the adapter keeps the most
            energy.
        revision: branch, tag or commit of the base on the Hub.
        modules_to_save: also carry changed norms and embeddings, whole or as their changed rows. PEFT loads such an adapter,
            many servers do not.
        texts: of a causal language model, on which to compare the losses of base, fine-tune and base with LoRA. Only the first
            1024 tokens of each count.
        overwrite: replace files of a folder that holds something else than an extracted LoRA.

    Raises:
        CheckpointError: `out` holds something else, a model has no safetensors weights or is quantized, two tensors differ in
            shape, or nothing changed.
        BaseModelError: the base cannot be read, or the fine-tune is not one of it.
        HfExtError: `rank`, `energy` or `max_size` is impossible, or `texts` are given and the fine-tune is not a causal
            language model with a tokenizer.
    """
    aim, target = Aim(rank, energy, max_size), Path(out)
    require_another_folder(target, [fine_tune, base])
    require_place(target, overwrite or partial(_is_result, target))
    pipeline = downloaded(fine_tune)
    models = _open(pipeline, base, revision)
    (place, (source, prior)), *components = models.items()
    folder = pipeline / place
    require_another_folder(target, [folder, *(path for pair in models.values() for one in pair for path in one.paths)])
    if (folder / ADAPTER_CONFIG).exists():  # beside the model that it belongs to: from_pretrained loads both
        source = AdapterSource(folder, source)

    parts = _sort(folder, source, prior)
    if modules_to_save and parts.library == "diffusers":
        raise HfExtError("modules_to_save=True is not supported: diffusers loads no norms and embeddings with a LoRA.")
    layers = parts.having(Role.LORA)
    tokens = None if texts is None else _tokens(folder, parts, texts)
    changes = Changes(source, prior, {name: (part.tensor, part.twin) for name, part in parts.parts.items()}, layers)
    if not layers:
        raise CheckpointError(
            f"No linear layer of {folder} that PEFT can adapt is in the base {prior} under a name that loading knows. If "
            "both have some, load both with Transformers, save them again, and give the new folders."
        )
    largest = max(min(changes.compared[name].shape) for name in layers)
    if rank is not None and rank > largest:
        raise HfExtError(f"rank={rank} is larger than the smaller side of any linear layer of {folder}, at most {largest}.")
    changed = changes.energies(parts.having(*LEFT_OUT))
    if modules_to_save:
        parts = parts.with_changed(changed.keys() | (changes.resized & layers.keys()), changes.rows)
    layers, left_out = parts.having(Role.LORA), parts.having(*LEFT_OUT)
    resize = fitting = None  # numbers of tokens that the base must get, or keep, to load the adapter
    if parts.embedding in changes.resized:
        new, old = changes.compared[parts.embedding].rows
        resize, fitting = (None, old) if parts.embedding in left_out else (new, None)
    if fitting is not None and any(int(ids.max()) >= fitting for ids in tokens or []):
        raise HfExtError(f"The texts (--eval) hold tokens that the base {prior} lacks. Give texts without them.")

    state = {name: source.read(part.tensor).to_torch() for name, part in parts.having(Role.WHOLE).items()}
    for part in parts.having(Role.ROWS).values():
        state[f"{part.module}.{TOKENS}"] = source.read(part.tensor).to_torch()[[*part.rows]]
    factors = _fit(changes, layers, aim, sum(tensor.nbytes + HEADER for tensor in state.values()) + 2 * HEADER * len(layers))
    if not factors:
        raise CheckpointError(
            f"No linear layer of {folder} that PEFT can adapt differs from that of the base {prior}: "
            "there is nothing to extract."
        )

    omitted = {name: change for name, change in changed.items() if name in left_out}
    omitted |= changes.energies(name for name in layers if name not in factors)
    for component, pair in components:
        omitted |= _component_changes(component, *pair)
    report = LoraReport(
        [
            LayerLora(layers[name].module, len(right), change, kept, left.nbytes + right.nbytes)
            for name, (left, right, change, kept) in factors.items()
        ],
        size=0,
        original_size=sum(source.entry(name).nbytes for name in source.names()),
        whole=[*parts.whole_modules, *(f"{part.module} ({len(part.rows)} rows)" for part in parts.having(Role.ROWS).values())],
        omitted=omitted,
        added_tokens=max(changes.compared[parts.embedding].rows[0] - fitting, 0) if fitting is not None else 0,
        resize=resize,
    )
    size = _write(parts, state, factors, report, prior.name.removesuffix(f"/{place}"), target, fitting, overwrite)
    losses = {} if tokens is None else _losses(folder, prior, target, tokens, resize)
    return replace(report, size=size, losses=losses)


def _open(pipeline: Path, base: str | os.PathLike | None, revision: str | None) -> dict[str, tuple[TensorSource, TensorSource]]:
    """Opens a fine-tune and its base, under the name ''. Of a pipeline, opens all components, by name, that to which
    `load_lora_weights` adds a LoRA first."""
    places = models_in(pipeline)
    first = next((name for name in ("transformer", "unet") if name in places), "")
    return {place: _open_pair(pipeline / place, place, base, revision) for place in dict.fromkeys([first, *places])}


def _open_pair(
    folder: Path, place: str, base: str | os.PathLike | None, revision: str | None
) -> tuple[TensorSource, TensorSource]:
    """Opens a model and its base, or the component `place` of the base. Checks that the model is a fine-tune of the base."""
    stored = Stored(os.fspath(folder))
    stored.require_unquantized()
    source: TensorSource = stored.tensors()
    link = source
    recorded: list[TensorSource] = []  # the base of a compressed fine-tune, the base of that base, …
    while isinstance(link, DeltaCheckpoint) and not isinstance(link.base, NoBase):
        link = link.base
        recorded.append(link)
    if base is None:
        if not recorded:
            raise BaseModelError(f"{source} records no base. Give the model that it was fine-tuned from (--base).")
        return source, recorded[0]
    prior = open_counterpart(base, place, revision)
    if not recorded and (reason := unrelated(source, prior)):
        raise BaseModelError(f"{reason} `hf-ext find-base {source.name}` looks for the base.")
    if recorded and all(model.fingerprint != prior.fingerprint for model in recorded):
        raise BaseModelError(f"{source} was compressed against {recorded[0]}, and {prior} is another model.")
    return source, prior


def _sort(folder: Path, source: TensorSource, prior: TensorSource) -> Parts:
    """Sorts the tensors of a fine-tune by their roles. The errors are those of `roles.sort`.

    Raises:
        ImportError: the model is one of diffusers, which is not installed.
    """
    config = read_config(folder / CONFIG)
    if "_class_name" not in config:
        return sort(folder, config, source, prior)
    versions.require("A LoRA of a diffusers model", "diffusers>=0.39")
    from hf_ext.lora_extraction import diffusers_lora

    return diffusers_lora.sort(folder, config, source, prior)


def _fit(changes: Changes, layers: Iterable[str], aim: Aim, rest: int) -> dict[str, Factors]:
    """Returns the factors of the layers that changed; none if none did.

    Args:
        rest: size of all else in the adapter's file, in bytes.

    Raises:
        HfExtError: the aim's size is too small for one component.
    """
    if aim.max_size is None:
        return changes.factors(layers, aim)
    if rest >= aim.max_size:
        raise HfExtError(f"max_size={aim.max_size} is too small: without any component, the adapter takes up to {rest} bytes.")
    factors = changes.factors(layers, replace(aim, max_size=aim.max_size - rest))
    if not factors and (needed := min((changes.compared[layer].cost for layer in changes.energies(layers)), default=0)):
        raise HfExtError(f"max_size={aim.max_size} is too small: with one component, the adapter takes {rest + needed} bytes.")
    return factors


def _component_changes(component: str, source: TensorSource, prior: TensorSource) -> dict[str, float | None]:
    """Returns the energies of the changes of a component of a pipeline, by component and tensor."""
    pairs = {name: (name, name if name in prior else "") for name in source.names()}
    return {f"{component}.{name}": change for name, change in Changes(source, prior, pairs, ()).energies(pairs).items()}


def _write(
    parts: Parts,
    whole: Mapping[str, torch.Tensor],
    factors: Mapping[str, Factors],
    report: LoraReport,
    base: str,
    out: Path,
    tokens: int | None,
    overwrite: bool,
) -> int:
    """Writes the adapter's folder, all of it or nothing. Returns the size of its weights.

    Args:
        tokens: number of tokens of the base, if the adapter loads into a base with another number than the fine-tune's.

    Raises:
        CheckpointError: PEFT would not load all of the adapter.
    """
    state = dict(whole)
    for name, (left, right, _, _) in factors.items():
        module = parts.parts[name].module
        layer = parts.model.get_submodule(module)
        B, A = (right.T, left.T) if isinstance(layer, Conv1D) else (left, right)
        kernel = layer.weight.shape[2:]
        A, B = A.reshape(len(A), -1, *kernel), B.reshape(*B.shape, *[1 for _ in kernel])
        state |= {f"{module}.lora_A.weight": A.contiguous(), f"{module}.lora_B.weight": B.contiguous()}
    config = parts.config({layer.layer: layer.rank for layer in report.layers}, base)
    metadata, kind = {"format": "pt"} | WRITER, type(parts.model).__name__
    if parts.library == "diffusers":
        options = {f"{parts.prefix}{name}": getattr(config, name) for name in OPTIONS}
        metadata["lora_adapter_metadata"] = json.dumps(options, default=sorted)
    with staged_folder(out, overwrite=overwrite or partial(_is_result, out)) as stage:
        tensors = {f"{parts.prefix}{name}": RawTensor.from_torch(tensor) for name, tensor in state.items()}
        entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        write_files([ComputedFile(parts.file, entries, tensors.__getitem__, metadata)], stage, "Writing")
        if parts.library == "peft":
            config.save_pretrained(stage)
        try:
            lost = sorted(parts.lost(parts.model, stage, tokens))
        except Exception as error:  # of many types
            raise CheckpointError(f"PEFT cannot load this LoRA of a {kind}: {error}") from error
        if lost:
            raise CheckpointError(f"PEFT cannot load this LoRA of a {kind}: '{lost[0]}' does not fit.")
        description = (
            f"It approximates the change of {len(report.layers)} layers, with rank {config.r} and less.\n"
            f"It keeps {percent(report.energy)} of the energy of the change (relative error {percent(report.error)})."
        )
        figures = {"description": description, "base_class": kind, "resize": report.resize}
        write_card(stage, "lora", [base], "adapter", target=out, tags=["lora"], library=parts.library, **figures)
        return (stage / parts.file).stat().st_size


def _is_result(out: Path) -> bool:
    """Checks whether a folder holds a LoRA that was extracted earlier."""
    files = [out / name for name in (ADAPTER, DIFFUSERS_LORA) if (out / name).is_file()]
    return bool(files) and all(WRITER.items() <= SafetensorsFile(file).metadata.items() for file in files)


def read_texts(path: str | os.PathLike) -> list[str]:
    """Reads a file with an object {"text": "…"} in each line.

    Raises:
        HfExtError: the file cannot be read, or has other contents.
    """
    try:
        texts = [json.loads(line)["text"] for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("a text is missing")
    except OSError as error:
        raise HfExtError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise HfExtError(f'{path} must hold an object {{"text": "…"}} in each line: {error}') from error
    return texts


def _tokens(folder: Path, parts: Parts, texts: Iterable[str]) -> list[torch.Tensor]:
    """Returns the tokens of texts for a causal language model."""
    if parts.task != "CAUSAL_LM":
        raise HfExtError(f"{folder} is not a causal language model: texts (--eval) cannot evaluate it.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise HfExtError(f"{folder} has no tokenizer, which texts (--eval) require: {error}") from error
    options = {"return_tensors": "pt", "truncation": True, "max_length": MOST_TOKENS}
    return [tokenizer(text, **options).input_ids for text in texts]


def _losses(
    folder: Path, base: TensorSource, adapter: Path, texts: Sequence[torch.Tensor], resize: int | None
) -> dict[str, float]:
    """Returns the mean loss of a token, in nats, of each model. Loads one model at a time.

    Args:
        resize: number of tokens that the base must have, if it is another one.
    """

    @torch.inference_mode()
    def loss(model: PreTrainedModel | PeftModel) -> float:
        total = count = 0.0
        with progress("Evaluating", len(texts)) as bar:
            for tokens in texts:
                if tokens.shape[1] > 1:
                    total += float(model.eval()(input_ids=tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
                    count += tokens.shape[1] - 1
                bar.update()
        return total / max(count, 1)

    model = AutoModelForCausalLM.from_pretrained(base.name, revision=base.revision or "main", dtype="auto")
    if resize is not None:
        model.resize_token_embeddings(resize)
    results = {"base": loss(model)}
    results["base + LoRA"] = loss(PeftModel.from_pretrained(model, adapter))
    del model
    return results | {"fine-tune": loss(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))}
