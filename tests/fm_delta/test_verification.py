"""`verify` compares everything before success is reported; `delete_source` removes nothing that is not safe elsewhere."""

import shutil
import sys
from functools import partial

import pytest
from kills import killed
from repeats import repeats
from test_recovery import as_nobody, everybodys_folder  # noqa: F401, a fixture
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder

from hf_ext import fm_delta
from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.fm_delta import compress

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills and limits processes as Linux does")


@pytest.fixture
def folders(tmp_path):
    src, base = pair(tmp_path, shards=2)
    (src / "1_Pooling").mkdir()
    (src / "1_Pooling/config.json").write_text("{}")
    (src / "vocab.txt").write_text("words")
    return src, base, tmp_path / "small"


def fault(monkeypatch, change):
    """Between compressing and verifying, `change` is called with the folder that was compressed into."""
    write = compress.write_with_card

    def faulty(sets, base, out, *arguments, **options):
        write(sets, base, out, *arguments, **options)
        change(out)

    monkeypatch.setattr(compress, "write_with_card", faulty)


def test_what_is_compressed_and_verified_is_what_is_compressed(folders, tmp_path):
    src, base, out = folders
    before = contents(src)
    fm_delta.compress_checkpoint(src, base, out)
    fm_delta.compress_checkpoint(src, base, tmp_path / "again", verify=True)
    assert contents(tmp_path / "again") == contents(out) and contents(src) == before


@pytest.mark.parametrize("file", ["vocab.txt", "1_Pooling/config.json", "config.json", "weights"])
def test_any_file_that_would_come_out_otherwise_is_found(folders, monkeypatch, file):
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
    for options in ({"verify": True}, {"delete_source": True}):
        with pytest.raises(CorruptFileError, match=f"{name}.* of {src} does not come out"):
            fm_delta.compress_checkpoint(src, base, out, **options)
        assert contents(src) == before and not out.exists()


def test_the_source_is_deleted_when_all_is_well(folders):
    src, base, out = folders
    before = contents(src)
    fm_delta.compress_checkpoint(src, base, out, delete_source=True)
    assert sorted(path.name for path in src.parent.iterdir()) == ["base", "small"]
    fm_delta.decompress_checkpoint(out, src)
    assert contents(src) == before


def test_a_needed_source_is_refused_before_any_work(folders, tmp_path, monkeypatch):
    src, base, out = folders
    shutil.copytree(base, src / "base")
    (tmp_path / "links").mkdir()
    shutil.copytree(base, src / "elsewhere")
    (tmp_path / "links/model.safetensors").symlink_to(src / "elsewhere/model.safetensors")
    shutil.copytree(base, tmp_path / "inner")
    (src / "linked").symlink_to(tmp_path / "inner")
    (tmp_path / "link").symlink_to(src)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    for source, reference, target in (
        (src, base, src / "out"),
        ("tuned", base, "tuned/deep/out"),
        (src, base, tmp_path),
        (src, src / "base", out),
        (src, tmp_path / "links", out),
        (src, src / "linked", out),
        ("link", base, out),
    ):
        with pytest.raises(CheckpointError, match="delete"):
            fm_delta.compress_checkpoint(source, reference, target, delete_source=True)
    assert contents(tmp_path) == before


@linux
def test_a_source_without_permission_is_kept_with_an_error(everybodys_folder):  # noqa: F811
    src, base = pair(everybodys_folder)
    before = contents(src)
    (everybodys_folder / "open").mkdir()
    (everybodys_folder / "open").chmod(0o777)
    out = everybodys_folder / "open/small"
    code, answer = as_nobody(lambda: fm_delta.compress_checkpoint(src, base, out, delete_source=True))
    assert code == 0 and answer.startswith(f"CheckpointError: {src} could not be deleted: ")
    assert contents(src) == before and fm_delta.verify(out) == 7


@linux
@repeats("stride", 10, 1)
def test_a_killed_command_leaves_the_source_or_the_result(folders, tmp_path, stride):
    src, base, out = folders
    fm_delta.compress_checkpoint(src, base, tmp_path / "expected")
    before, after = contents(src), contents(tmp_path / "expected")
    start, place, seen = tmp_path / "start", tmp_path / "place", set()
    shutil.copytree(src, start / "tuned")
    work = partial(fm_delta.compress_checkpoint, place / "tuned", base, place / "out", delete_source=True)
    for _ in killed(place, start, work, stride):
        whole = (place / "tuned").exists() and contents(place / "tuned") == before
        done = (place / "out").exists() and contents(place / "out") == after
        assert whole or done and not (place / "tuned").exists()
        seen.add((whole, done))
    assert [path.name for path in place.iterdir()] == ["out"] and contents(place / "out") == after
    assert stride > 1 or seen == {(True, False), (True, True), (False, True)}


def test_out_may_be_the_parent_of_the_source(folders):
    src, base, _ = folders
    fm_delta.compress_checkpoint(src, base, src.parent, verify=True)
    assert (src.parent / "vocab.txt").read_text() == "words" and not list(src.parent.glob(".*"))
    assert fm_delta.verify(src.parent) == 7
