"""`verify` decodes every tensor of the result before the result is written."""

import pytest
from tiny_checkpoints import contents, pair

from hf_ext import fm_delta
from hf_ext.errors import CorruptFileError
from hf_ext.fm_delta import compress


@pytest.fixture
def folders(tmp_path):
    src, base = pair(tmp_path, shards=2)
    (src / "vocab.txt").write_text("tokens")
    return src, base, tmp_path / "small"


def test_verifying_changes_no_byte_of_the_result(folders, tmp_path):
    src, base, out = folders
    before = contents(src)
    fm_delta.compress_checkpoint(src, base, out)
    fm_delta.compress_checkpoint(src, base, tmp_path / "again", verify=True)
    assert contents(tmp_path / "again") == contents(out) and contents(src) == before


def test_a_damaged_result_is_not_written(folders, monkeypatch):
    src, base, out = folders
    before, write = contents(src), compress.write_with_card

    def faulty(sets, base, out, *arguments, **options):
        write(sets, base, out, *arguments, **options)
        path = out / "model-00002-of-00002.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(compress, "write_with_card", faulty)
    with pytest.raises(CorruptFileError, match="is damaged"):
        fm_delta.compress_checkpoint(src, base, out, verify=True)
    assert contents(src) == before and not out.exists()


def test_out_may_be_the_parent_of_the_source(folders):
    src, base, _ = folders
    fm_delta.compress_checkpoint(src, base, src.parent, verify=True)
    assert (src.parent / "vocab.txt").read_text() == "tokens" and not list(src.parent.glob(".*"))
    assert fm_delta.verify(src.parent) == 7
