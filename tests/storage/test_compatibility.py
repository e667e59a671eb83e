"""Compressed files of every format version decode to what they were made from."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import reference_codec as reference
import xxhash
from golden_checkpoints import DELTAS, sha256, tensors, write_folder

from hf_ext import fm_delta
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.delta.payload import CODED, DEFLATED, MIXED, STACKED, STORED, VERSION, Header, row_length
from hf_ext.storage.native import FLOATS

FOLDERS = sorted(path.parent for path in DELTAS.glob("v*/model.safetensors"))

every_version = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@pytest.fixture
def base(folder: Path, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "base", tensors(int(folder.name[1:]))[0])


@every_version
def test_files_of_every_version_decompress_to_what_they_were(folder: Path, base: Path, tmp_path: Path) -> None:
    fm_delta.decompress_checkpoint(folder, tmp_path / "out", base=base)
    assert sha256(tmp_path / "out" / "model.safetensors") == (folder / "original.sha256").read_text().strip()


@every_version
def test_the_reference_decodes_files_of_every_version(folder: Path, base: Path) -> None:
    file, checkpoint = CompressedFile(folder / "model.safetensors"), Checkpoint(base)
    modes = {(header.mode, header.narrow) for header in file.headers.values()} - {(STORED, ""), (DEFLATED, "")}
    assert modes == {(CODED, ""), (CODED, "BF16"), (MIXED, "F16"), (STACKED, "")}
    assert {header.dtype for header in file.headers.values() if header.mode == CODED} == set(FLOATS)
    for name, header in file.headers.items():
        body, twin, shape = file.payload(name)[header.body :].tobytes(), None, header.shape
        if header.base_values and header.mode != DEFLATED:
            kind = reference.TYPES[FLOATS[header.base_dtype]]
            twin = checkpoint.read(header.base_name).data.view(kind.unsigned)[: header.base_values]
        if header.mode in (CODED, MIXED):
            decoded = decode(header, shape, header.mode | FLOATS.get(header.narrow, 0) << 4, body, twin)
            assert xxhash.xxh3_64_intdigest(decoded) == header.checksum
        elif header.mode == STACKED:
            whole, values = b"", math.prod(shape[-2:])
            for i, (kind, has_base, checksum, part) in enumerate(reference.matrices(body, math.prod(shape[:-2]))):
                prior = twin[i * values : (i + 1) * values] if has_base else None
                whole += (decoded := decode(header, shape[-2:], kind, part, prior))
                assert xxhash.xxh3_64_intdigest(decoded) == checksum
            assert xxhash.xxh3_64_intdigest(whole) == header.checksum


def decode(header: Header, shape: tuple[int, ...], kind: int, body: bytes, twin: np.ndarray | None) -> bytes:
    """Returns the bytes of a tensor, or of a matrix of a stacked one, from its mode byte, its body and the base's values."""
    own = FLOATS[header.dtype]
    mode, code = kind & 15, kind >> 4 or own
    if mode == MIXED:
        return reference.decode_mixed(body, own, code, math.prod(shape), row_length(shape)).tobytes()
    if twin is not None and FLOATS[header.base_dtype] != code:  # otherwise a NaN would lose its payload
        twin = reference.cast(twin, FLOATS[header.base_dtype], code)
    base_values = 0 if twin is None else len(twin)
    decoded = reference.decode_body(body, twin, code, math.prod(shape), row_length(shape), base_values)
    return (decoded if code == own else reference.cast(decoded, code, own)).tobytes()


def test_there_are_files_of_every_version() -> None:
    assert [folder.name for folder in FOLDERS] == [f"v{version}" for version in range(1, VERSION + 1)]
