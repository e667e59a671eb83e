"""Extracts a LoRA from a fine-tune: the leading singular components of the change of each linear layer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_ext.adapters.adapter_source import AdapterSource
from hf_ext.adapters.landing import require_loadable
from hf_ext.adapters.lora_layers import LoraLayers, Pair, lora_layers
from hf_ext.display import percent
from hf_ext.errors import BaseModelError, CheckpointError, HfExtError
from hf_ext.integration import versions
from hf_ext.integration.cards import write_card
from hf_ext.lora_extraction.factors import Aim, Changes, Factors
from hf_ext.lora_extraction.report import LayerLora, LoraReport
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
    models = _open(downloaded(fine_tune), base, revision)
    folder, source, prior = models.folder, models.source, models.base
    for paths in models.paths:
        require_another_folder(target, [folder, *paths])
    if (folder / ADAPTER_CONFIG).exists():  # beside the model that it belongs to: from_pretrained loads both
        source = AdapterSource(folder, source)
    parts = _sorted(folder, source, prior)
    if modules_to_save and parts.library == "diffusers":
        raise HfExtError("modules_to_save=True is not supported: diffusers loads no norms and embeddings with a LoRA.")
    tokens = None if texts is None else _tokens(folder, parts, texts)
    changes = Changes(source, prior, parts.layers | parts.others, parts.layers)
    if not parts.layers:
        raise CheckpointError(
            f"No linear layer of {folder} that PEFT can adapt is in the base {prior} under a name that loading knows. If "
            "both have some, load both with Transformers, save them again, and give the new folders."
        )
    largest = max(min(changes.shape(layer)) for layer in parts.layers)
    if rank is not None and rank > largest:
        raise HfExtError(f"rank={rank} is larger than the smaller side of any linear layer of {folder}, at most {largest}.")
    changed, resized = changes.energies(parts.others), changes.resized()
    if modules_to_save:
        parts = parts.with_changed(changed, changes.rows, resized.keys() & parts.layers.keys())
    resize = _resize(parts, resized, tokens, prior)
    state = {name: source.read(tensor).to_torch() for name, tensor in parts.whole.items()}
    state |= {f"{module}.{TOKENS}": source.read(tensor).to_torch()[rows] for module, (tensor, rows) in parts.tokens.items()}
    rest = sum(tensor.nbytes + HEADER for tensor in state.values()) + 2 * HEADER * len(parts.layers)
    factors = _fit(changes, parts.layers, aim, rest)
    if not factors:
        raise CheckpointError(
            f"No linear layer of {folder} that PEFT can adapt differs from that of the base {prior}: "
            "there is nothing to extract."
        )
    omitted = {
        **{name: change for name, change in changed.items() if name in parts.others},
        **{
            f"{layer}.weight": change
            for layer, change in changes.energies(layer for layer in parts.layers if layer not in factors).items()
        },
        **_component_changes(models.components),
    }
    size = sum(source.entry(name).nbytes for name in source.names())
    report = LoraReport([], 0, size, parts.carried, omitted, added_tokens=resize.added, resize=resize.base)
    name = prior.name.removesuffix(f"/{models.place}")
    report = _write(parts, factors, state, name, target, report, resize.fitting, overwrite)
    return report if tokens is None else replace(report, losses=_losses(folder, prior, target, tokens, resize.base))


@dataclass(frozen=True)
class _Models:
    """A fine-tune and its base, with the other components of a pipeline, by name.

    Attributes:
        place: the component of the pipeline to which the LoRA belongs; empty for a model.
        folder: of the fine-tune.
    """

    place: str
    folder: Path
    source: TensorSource
    base: TensorSource
    components: Mapping[str, tuple[TensorSource, TensorSource]]

    @property
    def paths(self) -> list[Sequence[Path]]:
        """The files of all models."""
        return [one.paths for pair in [(self.source, self.base), *self.components.values()] for one in pair]


@dataclass(frozen=True)
class _Resize:
    """Other numbers of tokens than the fine-tune's.

    Attributes:
        added: number of tokens that the adapter lacks.
        base: number of tokens that the base must have to load the adapter, if it is another one.
        fitting: number of tokens of the base, if the adapter fits only that.
    """

    added: int = 0
    base: int | None = None
    fitting: int | None = None


def _open(pipeline: Path, base: str | os.PathLike | None, revision: str | None) -> _Models:
    """Opens a fine-tune and its base. Of a pipeline, opens all components."""
    places = models_in(pipeline)
    place = next((name for name in ("transformer", "unet") if name in places), "")  # to which `load_lora_weights` adds a LoRA
    source, prior = _open_pair(pipeline, place, base, revision)
    components = {name: _open_pair(pipeline, name, base, revision) for name in places if name != place}
    return _Models(place, pipeline / place, source, prior, components)


def _resize(
    parts: LoraLayers, resized: Mapping[str, tuple[int, int]], tokens: Iterable[torch.Tensor] | None, base: TensorSource
) -> _Resize:
    """Returns how the number of tokens of the base and of the adapter differ. Raises HfExtError if the base lacks tokens of the
    texts and the adapter does not add them."""
    rows = resized.get(f"{parts.embedding}.weight")
    if rows is None:
        return _Resize()
    tuned, prior = rows
    if f"{parts.embedding}.weight" not in parts.others:
        return _Resize(base=tuned)
    if any(int(ids.max()) >= prior for ids in tokens or []):
        raise HfExtError(f"The texts (--eval) hold tokens that the base {base} lacks. Give texts without them.")
    return _Resize(added=max(tuned - prior, 0), fitting=prior)


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
    if not factors and (needed := min((changes.cost(layer) for layer in changes.energies(layers)), default=0)):
        raise HfExtError(f"max_size={aim.max_size} is too small: with one component, the adapter takes {rest + needed} bytes.")
    return factors


def _component_changes(components: Mapping[str, tuple[TensorSource, TensorSource]]) -> dict[str, float | None]:
    """Returns the energies of the changes of a pipeline's components, by component and tensor."""
    energies: dict[str, float | None] = {}
    for component, (source, prior) in components.items():
        pairs = {name: Pair(name, name if name in prior else "") for name in source.names()}
        changes = Changes(source, prior, pairs, ()).energies(pairs)
        energies |= {f"{component}.{name}": change for name, change in changes.items()}
    return energies


def _open_pair(
    folder: Path, place: str, base: str | os.PathLike | None, revision: str | None
) -> tuple[TensorSource, TensorSource]:
    """Opens the model in a place of a folder, and its base."""
    stored = Stored(os.fspath(folder / place))
    stored.require_unquantized()
    source = stored.tensors()
    return source, _base_of(source, place, base, revision)


def _base_of(source: TensorSource, place: str, base: str | os.PathLike | None, revision: str | None) -> TensorSource:
    """Opens the base, or its component of this name, and checks that the fine-tune is one of it."""
    recorded = source.base if isinstance(source, DeltaCheckpoint) else NoBase()
    if base is None:
        if isinstance(recorded, NoBase):
            raise BaseModelError(f"{source} records no base. Give the model that it was fine-tuned from (--base).")
        return recorded
    prior = open_counterpart(base, place, revision)
    if isinstance(recorded, NoBase):
        if reason := unrelated(source, prior):
            raise BaseModelError(f"{reason} `hf-ext find-base {source.name}` looks for the base.")
        return prior
    link: TensorSource = source
    while isinstance(link, DeltaCheckpoint):
        link = link.base
        if not isinstance(link, NoBase) and link.fingerprint == prior.fingerprint:
            return prior
    raise BaseModelError(f"{source} was compressed against {recorded}, and {prior} is another model.")


def _sorted(folder: Path, source: TensorSource, prior: TensorSource) -> LoraLayers:
    """Sorts a model's parameters by the way in which a LoRA can carry them.

    Raises:
        CheckpointError: as `lora_layers` does.
        ImportError: the model is one of diffusers, which is not installed.
    """
    if "_class_name" not in read_config(folder / CONFIG):
        return lora_layers(folder, source, prior)
    versions.require("A LoRA of a diffusers model", "diffusers>=0.39")
    from hf_ext.adapters.diffusers_lora import diffusers_layers

    return diffusers_layers(folder, source, prior)


def _write(
    parts: LoraLayers,
    factors: Mapping[str, Factors],
    whole: Mapping[str, torch.Tensor],
    base: str,
    out: Path,
    report: LoraReport,
    tokens: int | None,
    overwrite: bool,
) -> LoraReport:
    """Writes the adapter's folder, all of it or nothing. Returns the report with the layers and the size.

    Args:
        tokens: number of tokens of the base, if the adapter loads into a base with another number than the fine-tune's.

    Raises:
        CheckpointError: PEFT would not load all of the adapter.
    """
    state = dict(whole)
    for layer, (left, right, change, kept) in factors.items():
        report.layers.append(LayerLora(layer, len(right), change, kept, left.nbytes + right.nbytes))
        B, A = (right.T, left.T) if parts.layers[layer].transposed else (left, right)
        kernel = parts.model.get_submodule(layer).weight.shape[2:]
        A, B = A.reshape(len(A), -1, *kernel), B.reshape(*B.shape, *[1 for _ in kernel])
        state |= {f"{layer}.lora_A.weight": A.contiguous(), f"{layer}.lora_B.weight": B.contiguous()}
    config = parts.config({layer.layer: layer.rank for layer in report.layers}, base)
    with staged_folder(out, overwrite=overwrite or partial(_is_result, out)) as stage:
        tensors = {f"{parts.prefix}{name}": RawTensor.from_torch(tensor) for name, tensor in state.items()}
        entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        metadata = {"format": "pt"} | WRITER | parts.metadata(config)
        write_files([ComputedFile(parts.file, entries, tensors.__getitem__, metadata)], stage, "Writing")
        if parts.file == ADAPTER:
            config.save_pretrained(stage)
        require_loadable(type(parts.model), lambda: parts.lost(stage, tokens))
        report = replace(report, size=(stage / parts.file).stat().st_size)
        description = (
            f"It approximates the change of {len(report.layers)} layers, with rank {config.r} and less.\n"
            f"It keeps {percent(report.energy)} of the energy of the change (relative error {percent(report.error)})."
        )
        figures = {"description": description, "base_class": type(parts.model).__name__, "resize": report.resize}
        write_card(stage, "lora", [base], "adapter", target=out, tags=["lora"], library=parts.library, **figures)
    return report


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


def _tokens(folder: Path, parts: LoraLayers, texts: Iterable[str]) -> list[torch.Tensor]:
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
