"""A base that has moved is read from its new place, and no other model is ever read in its stead."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder
from tiny_diffusers import model, pipeline
from tiny_merges import write_tasks

from hf_ext import BaseModelError, CheckpointError, emr, fm_delta
from hf_ext.cli.main import main
from hf_ext.storage.config_file import storage_settings
from hf_ext.storage.open import BASES, rebase


def compressed(place: Path) -> tuple[Path, Path]:
    fm_delta.compress_checkpoint(*pair(place), place / "small")
    return place / "small", place / "base"


def merged(place: Path) -> tuple[Path, Path]:
    base, tasks = write_tasks(place)
    emr.merge(base, tasks, place / "small", accept_conflicts=True)
    return place / "small", base


def compressed_pipeline(place: Path) -> tuple[Path, Path]:
    pipeline(model("unet")).save_pretrained(place / "base")
    fm_delta.compress_checkpoint(place / "base", shutil.copytree(place / "base", place / "copy"), place / "small")
    return place / "small", (place / "copy").rename(place / "elsewhere")


WRITERS = {"fm_delta": (compressed, fm_delta), "emr": (merged, emr)}


@pytest.fixture(params=WRITERS)
def stored(request, tmp_path):
    """A compressed model or a merge with its base, beside each other in the folder `work`, and the method."""
    write, method = WRITERS[request.param]
    (tmp_path / "work").mkdir()
    return *write(tmp_path / "work"), method


def test_a_base_beside_the_folder_moves_with_it(stored, tmp_path):
    small, base, method = stored
    assert storage_settings(small)["base"] == f"../{base.name}"
    (tmp_path / "work").rename(tmp_path / "moved")
    assert method.verify(tmp_path / "moved" / small.name) > 5


def test_the_folder_may_move_alone(stored, tmp_path):
    small, _, method = stored
    (tmp_path / "deeper").mkdir()
    assert method.verify(small.rename(tmp_path / "deeper/small")) > 5


def test_a_folder_behind_a_link_names_the_base_from_where_it_is(tmp_path):
    src, base = pair(tmp_path / "work")
    (tmp_path / "disk").mkdir()
    (tmp_path / "work/small").symlink_to(tmp_path / "disk", target_is_directory=True)
    fm_delta.compress_checkpoint(src, base, tmp_path / "work/small")
    assert storage_settings(tmp_path / "disk")["base"] == str(base)
    (tmp_path / "link").symlink_to(tmp_path / "work", target_is_directory=True)
    fm_delta.compress_checkpoint(src, tmp_path / "link/base", tmp_path / "work/other")
    assert storage_settings(tmp_path / "work/other")["base"] == "../base"


@pytest.mark.parametrize("listed", ["bases", "bases/again", "nothing-there{}bases"])
def test_the_listed_folders_are_searched(stored, tmp_path, monkeypatch, listed):
    small, base, method = stored
    other = write_folder(tmp_path / "bases/a-stranger", weights(seed=5))
    write_folder(tmp_path / "bases/b-damaged", {}, config="{")
    shutil.move(base, tmp_path / "bases/again")
    monkeypatch.setenv(BASES, str(other))
    with pytest.raises(BaseModelError, match=f"no folder.*hf-ext rebase.*{BASES}"):
        method.verify(small)
    monkeypatch.setenv(BASES, os.pathsep.join(str(tmp_path / place) for place in listed.split("{}")))
    assert method.verify(small) > 5


def test_a_damaged_base_and_one_that_the_caller_names_are_not_replaced(stored, tmp_path, monkeypatch):
    small, base, method = stored
    shutil.copytree(base, tmp_path / "bases/base")
    monkeypatch.setenv(BASES, str(tmp_path / "bases"))
    with pytest.raises(BaseModelError, match="no folder"):
        method.verify(small, base=tmp_path / "nowhere")
    (base / "model.safetensors").write_bytes(b"")
    with pytest.raises(BaseModelError, match="work/base"):
        method.verify(small)


def test_a_base_that_is_compressed_itself_is_searched_for(tmp_path, monkeypatch):
    src, base = pair(tmp_path)
    fm_delta.compress_checkpoint(src, base, tmp_path / "bases/small")
    last = write_folder(tmp_path / "last", fine_tune(fine_tune(weights()), 2))
    fm_delta.compress_checkpoint(last, tmp_path / "bases/small", tmp_path / "out")
    (tmp_path / "bases").rename(tmp_path / "moved")
    monkeypatch.setenv(BASES, f"{tmp_path / 'moved'}{os.pathsep}{tmp_path}")
    fm_delta.decompress_checkpoint(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(last)


def test_rebase_changes_config_json_alone(stored, tmp_path, capsys):
    small, base, method = stored
    before = contents(small)
    shutil.move(base, tmp_path / "other/base")
    assert main(["rebase", str(small), "--base", str(tmp_path / "other/base")]) == 0
    assert capsys.readouterr().out == f"{small} now names the base {tmp_path / 'other/base'}.\n"
    after = contents(small)
    assert {name for name in before if before[name] != after[name]} == {"config.json"} and before.keys() == after.keys()
    assert method.verify(small) > 5 and storage_settings(small)["base"] == str(tmp_path / "other/base")
    rebase(small, shutil.move(tmp_path / "other/base", base))
    assert contents(small) == before


def test_a_pipeline_moves_with_its_base_or_finds_it(tmp_path, monkeypatch):
    small, base = compressed_pipeline(tmp_path / "work")
    rebase(small, base)
    assert storage_settings(small / "unet")["base"] == "../../elsewhere/unet"
    assert fm_delta.inspect(small).base == "../elsewhere" and fm_delta.verify(small) > 5
    (tmp_path / "work").rename(tmp_path / "moved")
    assert fm_delta.verify(tmp_path / "moved/small") > 5
    shutil.move(tmp_path / "moved/elsewhere", tmp_path / "bases/base")
    with pytest.raises(BaseModelError, match="no folder"):
        fm_delta.verify(tmp_path / "moved/small")
    monkeypatch.setenv(BASES, str(tmp_path / "bases"))
    assert fm_delta.verify(tmp_path / "moved/small") > 5


def test_folders_of_pipelines_move_with_their_bases(tmp_path):
    pipelines, work = tmp_path / "pipelines", tmp_path / "work"
    pipeline(model("unet")).save_pretrained(work / "base")
    shutil.copytree(work / "base", pipelines / "one")
    fm_delta.compress_all(pipelines, work / "small", work / "base")
    src, base = pair(work / "base/more")  # in the folder of a pipeline
    fm_delta.compress_checkpoint(src, base, work / "base/more/small")
    work.rename(tmp_path / "moved")
    for place in ("small/one", "base/more/small"):
        assert fm_delta.verify(tmp_path / "moved" / place) > 1


def test_a_pipeline_of_which_a_component_has_no_base_is_rebased(tmp_path):
    small, base = compressed_pipeline(tmp_path / "work")
    shutil.rmtree(small / "text_encoder")
    fm_delta.compress_checkpoint(base / "text_encoder", None, small / "text_encoder")
    rebase(small, base)
    assert fm_delta.inspect(small).base == "../elsewhere" and fm_delta.verify(small) > 5


def test_a_stranger_where_a_command_runs_is_not_the_base(stored, tmp_path, monkeypatch):
    small, base, method = stored
    (tmp_path / "far").mkdir()
    moved = small.rename(tmp_path / "far/small")
    write_folder(tmp_path / base.name, weights(seed=5))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # `../base` is the stranger's folder
    assert method.verify(moved) > 5


def test_a_merge_and_a_copy_without_its_base_hide_no_base(tmp_path, monkeypatch):
    small, base = compressed(tmp_path / "work")
    places = tmp_path / "bases"
    emr.merge(base, {"a": tmp_path / "work/tuned"}, places / "a-merge", bits=8, accept_conflicts=True)
    fm_delta.compress_checkpoint(base, tmp_path / "work/tuned", places / "b-compressed")
    shutil.rmtree(tmp_path / "work/tuned")
    shutil.move(base, places / "c-plain")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(BASES, "bases")
    assert fm_delta.verify(small) > 5


def test_rebase_rejects_all_but_the_same_model(stored, tmp_path, monkeypatch):
    small, base, _ = stored
    before = contents(small)
    monkeypatch.setenv(BASES, str(base.parent))
    other = write_folder(tmp_path / "other", fine_tune(weights(), 3))
    for wrong, message in (
        (other, "another model.*Give a folder or Hub id of that base"),
        (tmp_path / "nowhere", "there is no folder .* Give the folder of the model, or its id on the Hub.$"),
        (small, "each other|another model|several models"),
    ):
        with pytest.raises(BaseModelError, match=message):
            rebase(small, wrong)
    for folder in (base, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="holds no compressed model and no merge"):
            rebase(folder, base)
    assert contents(small) == before and not (tmp_path / "nowhere").exists()


def test_compress_says_that_a_path_will_not_travel(tmp_path, capsys):
    src, base = pair(tmp_path)
    arguments = ["compress", str(src), "--base", str(base), "--out"]
    assert main([*arguments, str(tmp_path / "far/deeper/small")]) == 0
    assert capsys.readouterr().out.endswith(
        f"The base is recorded as {base}, which other machines lack. Record its Hub id with --base-id, or put OUT "
        "beside the base: then both can move together.\n"
    )
    for out, recorded in {"beside": "../base", "deeper/small": "../../base", "deeper/id": "org/base"}.items():
        more = ["--base-id", recorded] if out == "deeper/id" else []
        assert main([*arguments, str(tmp_path / out), *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["base"] == recorded
