"""The weights of a model's folder: how their headers say they are stored, all of them, or none if a part is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import require_no_task
from hf_ext.storage.layout import SHARD, all_weights, indices_in, no_weights, read_index, save_of, select_weights
from hf_ext.storage.safetensors_file import SafetensorsFile

AGAIN = "Download or save the model again."
#: Metadata entry of compressed files: their record.
KEY = "fm_delta"
#: Metadata entry of files that hold parts of several models; its value is the method that puts the models together.
PARTS_OF = "parts_of"


class Kind(Enum):
    """How the weights of a model are stored. Its value completes an error about a folder of another kind."""

    PLAIN = "holds plain weights."
    COMPRESSED = "is compressed already."
    MERGE = "holds several models merged into one; `hf-ext extract` writes one of them."


def kind_of(headers: Iterable[Mapping[str, str]]) -> Kind:
    """Returns how weights are stored, by the metadata of their files."""
    entries = set().union(*headers)
    return Kind.MERGE if PARTS_OF in entries else Kind.COMPRESSED if KEY in entries else Kind.PLAIN


def open_weights(folder: Path, variants: bool = False) -> list[SafetensorsFile]:
    """Opens the safetensors files that `from_pretrained` reads; with `variants`, every file of weights in a folder. Raises
    CheckpointError if there are no weights, or some of them are missing, and CorruptFileError if a file is damaged."""
    require_no_task(folder)
    files = [SafetensorsFile(path) for path in (all_weights(folder) if variants else select_weights(folder))]
    if not files:
        raise no_weights(folder)
    require_all(files)
    return files


def open_plain_weights(folder: Path) -> list[SafetensorsFile]:
    """As `open_weights`. Also raises CheckpointError if the weights are not plain."""
    files = open_weights(folder)
    if (kind := kind_of(file.metadata for file in files)) is not Kind.PLAIN:
        raise CheckpointError(
            f"{folder} {kind.value} Restore its weights first (`hf-ext decompress`, or `extract` of a merge)."
        )
    return files


def require_all(files: Sequence[SafetensorsFile]) -> None:
    """Checks that the weights of one folder are complete: no shard or tensor that an index lists is missing, and, without an
    index, none of the shards that their names count. Raises CheckpointError if something is missing, or nothing says which of
    two sets of shards is the model."""
    folder, opened = files[0].path.parent, {file.path.name: file for file in files}
    whole = {save_of(file.path) for file in files if not SHARD.search(file.path.name)}  # single files, which are read first
    for index in indices_in(folder):
        listed = read_index(index)
        if save_of(index) in whole or opened.keys().isdisjoint(listed.values()):
            continue
        whole.add(save_of(index))
        lacking = sorted({*listed.values()} - opened.keys())
        if not lacking:
            held = {name for shard in {*listed.values()} for name in opened[shard].entries}
            lacking = sorted(listed.keys() - held)
        if lacking:
            raise CheckpointError(f"{folder} is incomplete: '{lacking[0]}', which {index.name} lists, is missing. {AGAIN}")
    shards: dict[str, dict[str, set[str]]] = {}
    for name in opened:
        if (shard := SHARD.search(name)) and save_of(Path(name)) not in whole:
            shards.setdefault(save_of(Path(name)), {}).setdefault(shard["count"], set()).add(shard["number"])
    for save, counts in shards.items():
        count, numbers = counts.popitem()
        if counts:
            raise CheckpointError(
                f"{folder} holds two sets of shards of '{save}', of {int(count)} files and of {int(counts.popitem()[0])}, and "
                "no index lists those of the model. Move the others away."
            )
        lacking = sorted({f"{number + 1:05}" for number in range(int(count))} - numbers)
        if lacking:
            raise CheckpointError(f"{folder} is incomplete: shard {lacking[0]} of {count} of '{save}' is missing. {AGAIN}")
