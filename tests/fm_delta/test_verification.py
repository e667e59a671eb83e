"""`verify` compares every file and tensor with the source before the result is written."""

import shutil

import pytest
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder

from hf_ext import fm_delta
from hf_ext.errors import CorruptFileError
from hf_ext.fm_delta import compress


@pytest.fixture
def folders(tmp_path):
    src, base = pair(tmp_path, shards=2)
    (src / "1_Pooling").mkdir()
    (src / "1_Pooling/config.json").write_text("{}")
    (src / "vocab.txt").write_text("tokens")
    return src, base, tmp_path / "small"


def fault(monkeypatch, change):
    """Between compressing and verifying, `change` is called with the folder that was compressed into."""
    write = compress.write_with_card

    def faulty(sets, base, out, *arguments, **options):
        write(sets, base, out, *arguments, **options)
        change(out)

    monkeypatch.setattr(compress, "write_with_card", faulty)


def test_verifying_changes_no_byte_of_the_result(folders, tmp_path):
    src, base, out = folders
    before = contents(src)
    fm_delta.compress_checkpoint(src, base, out)
    fm_delta.compress_checkpoint(src, base, tmp_path / "again", verify=True)
    assert contents(tmp_path / "again") == contents(out) and contents(src) == before


@pytest.mark.parametrize("file", ["vocab.txt", "1_Pooling/config.json", "config.json", "weights"])
def test_any_file_that_would_come_out_otherwise_stops_the_command(folders, monkeypatch, file):
    src, base, out = folders
    before = contents(src)
    other = write_folder(src.parent / "other", fine_tune(weights(), seed=5), shards=2)
    fm_delta.compress_checkpoint(other, base, src.parent / "swap")

    def change(stage):
        if file == "weights":  # a sound file, but of other weights
            shutil.copy(src.parent / "swap/model-00002-of-00002.safetensors", stage)
        else:
            (stage / file).write_text((stage / file).read_text().replace("16", "17") + " ")

    fault(monkeypatch, change)
    name = "Tensor 'model" if file == "weights" else file
    with pytest.raises(CorruptFileError, match=f"{name}.* of {src} does not come out"):
        fm_delta.compress_checkpoint(src, base, out, verify=True)
    assert contents(src) == before and not out.exists()


def test_out_may_be_the_parent_of_the_source(folders):
    src, base, _ = folders
    fm_delta.compress_checkpoint(src, base, src.parent, verify=True)
    assert (src.parent / "vocab.txt").read_text() == "tokens" and not list(src.parent.glob(".*"))
    assert fm_delta.verify(src.parent) == 7
