"""Extracts a LoRA from a fine-tune: the leading singular components of the change of each linear layer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from hf_ext.errors import BaseModelError, CheckpointError, HfExtError
from hf_ext.fm_delta.base_search import unrelated
from hf_ext.fm_delta.lora_evaluation import Evaluation
from hf_ext.fm_delta.lora_factors import Changes, Factors, Pair
from hf_ext.fm_delta.lora_ranks import Aim
from hf_ext.fm_delta.lora_report import LayerLora, LoraReport
from hf_ext.integration.lora_layers import PREFIX, TOKENS, LoraLayers, lora_layers, require_unquantized
from hf_ext.integration.model_cards import adapter_card, outdated, write_card
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.files import require_another_folder, staged_folder
from hf_ext.storage.guards import places_of
from hf_ext.storage.hub import downloaded
from hf_ext.storage.layout import ADAPTER
from hf_ext.storage.open import open_checkpoint
from hf_ext.storage.source import NoBase, TensorSource

HEADER = 256  # bytes of a file's header for each tensor, at most


class Lora(NamedTuple):
    """A LoRA that is not written yet.

    Attributes:
        parts: the model's parts.
        factors: by layer.
        whole: the tensors that the adapter holds whole, by parameter.
        omitted: energies of the changes that it does not carry.
        original_size: bytes of the fine-tune's tensors.
    """

    parts: LoraLayers
    factors: Mapping[str, Factors]
    whole: Mapping[str, torch.Tensor]
    omitted: Mapping[str, float | None]
    original_size: int


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
) -> LoraReport:
    """Writes the best LoRA of a fine-tune, as an adapter that PEFT loads.

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
        texts: of a causal language model, on which to compare the losses of base, fine-tune and base with LoRA.

    Raises:
        CheckpointError: a model has no safetensors weights or is quantized, two tensors differ in shape, or nothing changed.
        BaseModelError: the base cannot be read, or the fine-tune is not one of it.
        HfExtError: `rank`, `energy` or `max_size` is impossible.
    """
    aim = Aim(rank, energy, max_size)
    folder = downloaded(fine_tune)
    require_unquantized(folder)
    source = open_checkpoint(folder)
    prior = _base_of(source, base, revision)
    require_another_folder(Path(out), [folder, *source.paths, *map(Path, places_of(prior))])
    lora = best_lora(folder, source, prior, aim, modules_to_save)
    evaluation = None if texts is None else Evaluation(folder, lora.parts.task, prior.name, prior.revision, texts)
    return write_lora(lora, prior.name, Path(out), evaluation)


def best_lora(
    folder: Path,
    source: TensorSource,
    prior: TensorSource,
    aim: Aim,
    modules_to_save: bool = False,
    with_experts: bool = True,
) -> Lora:
    """Computes the best LoRA of a fine-tune. Arguments and errors are those of `extract_lora`.

    Args:
        folder: of the fine-tune, with its config.json.
        source, prior: the tensors of the fine-tune and of the base.
        with_experts: include the experts of a mixture.
    """
    parts = lora_layers(folder, source.names(), prior.names(), with_experts)
    layers = Changes(source, prior, {layer: Pair(place.tensor, place.twin) for layer, place in parts.layers.items()}, parts)
    names = [*parts.layers, *parts.experts]
    others = Changes(source, prior, {name: Pair(tensor, twin) for name, (tensor, twin) in parts.others.items()})
    largest = max((min(layers.shape(layer)) for layer in names), default=0)
    if aim.rank is not None and aim.rank > largest:
        raise HfExtError(f"rank={aim.rank} is larger than the smaller side of any linear layer of {folder}, at most {largest}.")
    changed = {name: change for name, change in others.energies(parts.others).items() if change}
    if modules_to_save:
        parts.carry_others(changed, others.rows)
    whole = {name: source.read(tensor).to_torch() for name, tensor in parts.whole.items()}
    whole |= {f"{module}.{TOKENS}": source.read(tensor).to_torch()[rows] for module, (tensor, rows) in parts.tokens.items()}
    if aim.max_size is not None:
        rest = sum(tensor.nbytes + HEADER for tensor in whole.values()) + 2 * HEADER * len(names)
        if rest >= aim.max_size:
            raise HfExtError(
                f"max_size={aim.max_size} is too small: without any component, the adapter takes up to {rest} bytes."
            )
        aim = replace(aim, max_size=aim.max_size - rest)
    factors = layers.factors(names, aim)
    if not factors:
        raise CheckpointError(
            f"No linear layer of {folder} differs from that of the base {prior}: there is nothing to extract."
        )
    omitted = {name: change for name, change in changed.items() if name in parts.others}
    size = sum(source.entry(name).nbytes for name in source.names())
    return Lora(parts, factors, whole, omitted, size)


def _base_of(source: TensorSource, base: str | os.PathLike | None, revision: str | None) -> TensorSource:
    """Opens the base, and checks that the fine-tune is one of it."""
    recorded = source.base if isinstance(source, DeltaCheckpoint) else NoBase()
    if base is None:
        if isinstance(recorded, NoBase):
            raise BaseModelError(f"{source} records no base. Give the model that it was fine-tuned from (--base).")
        return recorded
    prior = open_checkpoint(base, revision)
    require_unquantized((prior.folder() if isinstance(prior, Checkpoint) else None) or prior.paths[0].parent)
    chain = [recorded]
    while isinstance(chain[-1], DeltaCheckpoint):
        chain.append(chain[-1].base)
    if isinstance(recorded, NoBase):
        if reason := unrelated(source.name, base, revision):
            raise BaseModelError(f"{reason} `hf-ext find-base {source.name}` looks for the base.")
    elif prior.fingerprint not in [link.fingerprint for link in chain if not isinstance(link, NoBase)]:
        raise BaseModelError(f"{source} was compressed against {recorded}, and {prior} is another model.")
    return prior


def write_lora(lora: Lora, base: str, out: Path, evaluation: Evaluation | None = None) -> LoraReport:
    """Writes the adapter's folder, all of it or nothing, and returns the report. `base` is the base's folder or Hub id."""
    parts, factors, whole, omitted, original_size = lora
    layers = []
    for layer, (left, right, change) in factors.items():
        kept = float(((left.double().mT @ left.double()) * (right.double() @ right.double().mT)).sum())
        layers.append(LayerLora(layer, right.shape[-2], change, kept, left.nbytes + right.nbytes))
    config = parts.config({layer.layer: layer.rank for layer in layers}, base)
    state = {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    places = parts.places(config) if config.target_parameters else {}
    for layer, (left, right, _) in factors.items():
        B, A = (right.mT, left.mT) if (parts.layers | parts.experts)[layer].transposed else (left, right)
        if layer in places:  # PEFT holds the experts' matrices in one
            A, B = A.flatten(0, 1), B.permute(1, 2, 0).flatten(1)
        name = f"{PREFIX}{places.get(layer, layer)}"
        state |= {f"{name}.lora_A.weight": A.contiguous(), f"{name}.lora_B.weight": B.contiguous()}
    carried = [*parts.modules(parts.whole), *(f"{module} ({len(rows)} rows)" for module, (_, rows) in parts.tokens.items())]
    with staged_folder(out, outdated(out)) as stage:
        save_file(state, stage / ADAPTER, metadata={"format": "pt"})
        config.save_pretrained(stage)
        size = (stage / ADAPTER).stat().st_size
        report = LoraReport(layers, size, original_size, carried, omitted)
        figures = {"origin": "a full fine-tune", "description": report.description()}
        card = adapter_card("lora", base, config.task_type, {"lora"}, type(parts.model).__name__, **figures)
        write_card(stage, card, out)
    return report if evaluation is None else replace(report, losses=evaluation.losses(out))
