"""Compressed files of every format version decode to what they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference_codec as reference
import xxhash
from golden_checkpoints import DELTAS, sha256, tensors, write_folder

from hf_ext import fm_delta
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.delta.payload import CODED, MIXED, VERSION, row_length
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
    coded = {name: header for name, header in file.headers.items() if header.mode in (CODED, MIXED)}
    assert {header.dtype for header in coded.values()} == set(FLOATS)
    assert {(header.mode, header.narrow) for header in coded.values()} == {(CODED, ""), (CODED, "BF16"), (MIXED, "F16")}
    for name, header in coded.items():
        prediction, code = None, FLOATS[header.narrow or header.dtype]
        if header.base_values:
            kind = reference.TYPES[FLOATS[header.base_dtype]]
            bits = checkpoint.read(header.base_name).data.view(kind.unsigned)[: header.base_values]
            same = FLOATS[header.base_dtype] == code  # else a NaN would lose its payload
            prediction = bits if same else reference.cast(bits, FLOATS[header.base_dtype], code)
        sizes = header.values, row_length(header.shape), header.base_values
        body = file.payload(name)[header.body :].tobytes()
        if header.mode == MIXED:
            decoded = reference.decode_mixed(body, FLOATS[header.dtype], code, *sizes[:2])
        else:
            decoded = reference.decode_body(body, prediction, code, *sizes)
            decoded = reference.cast(decoded, code, FLOATS[header.dtype]) if header.narrow else decoded
        assert xxhash.xxh3_64_intdigest(decoded.tobytes()) == header.checksum


def test_there_are_files_of_every_version() -> None:
    assert [folder.name for folder in FOLDERS] == [f"v{version}" for version in range(1, VERSION + 1)]
