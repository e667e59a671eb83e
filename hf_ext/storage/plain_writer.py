"""Plain safetensors files, written tensor by tensor from any function that computes tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory

from hf_ext.storage.files import write_json
from hf_ext.storage.layout import INDEX
from hf_ext.storage.prefetch import Prefetcher, progress
from hf_ext.storage.safetensors_file import ComputedFile, RawTensor, TensorFile, byte_size


def shards_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    compute: Callable[[str], RawTensor],
    out: Path,
    max_shard_size: int | str,
    metadata: Mapping[str, str] | None = None,
) -> list[ComputedFile]:
    """Returns the files of a checkpoint, sharded as by `save_pretrained`, and writes the index into `out` if there are several.
    The tensors are given by dtype and shape; `compute` returns one by name, from several threads. The metadata go into the
    files' headers."""
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: byte_size(*tensor),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    if split.is_sharded:
        write_json(out / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    return [
        ComputedFile(file, {name: tensors[name] for name in names}, compute, {"format": "pt"} | dict(metadata or {}))
        for file, names in split.filename_to_tensors.items()
    ]


def write_files(files: Sequence[TensorFile], out: Path, what: str) -> None:
    """Writes files into a folder under their own names, with a progress bar labeled `what`."""
    with progress(what, sum(len(file.entries) for file in files)) as bar:
        for file in files:
            with open(out / file.path.name, "wb") as target:
                target.write(len(file.header_bytes).to_bytes(8, "little") + file.header_bytes)
                sizes = {name: entry.nbytes for name, entry in file.entries.items()}
                for _, tensor in Prefetcher(file.__getitem__, sizes):
                    target.write(tensor.data)
                    bar.update()
