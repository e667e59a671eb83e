"""Files that were written once and must always load."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hf_ext import fm_delta

GOLDEN = Path(__file__).parent / "golden"

# SHA-256 of the file that was compressed: every float type, untouched rows, a resized embedding, a base of another type,
# a new head, integers, NaN and infinities.
ORIGINALS = {"v1": "5f3065a47b3d0ff1a85f06c1c3e807a2bce1553da6e6dc52df92d807efe6acb0"}


@pytest.mark.parametrize("version", ORIGINALS)
def test_files_of_every_version_decompress_to_what_they_were(version: str, tmp_path: Path) -> None:
    fm_delta.decompress_checkpoint(GOLDEN / version, tmp_path / "out", base=GOLDEN / "base")
    restored = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert hashlib.sha256(restored).hexdigest() == ORIGINALS[version]
