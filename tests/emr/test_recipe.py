"""The recipe of a merge stays with it, makes the same merge again, and is refused with one clear sentence if it is wrong."""

import pytest
import yaml
from tiny_checkpoints import contents
from tiny_merges import write_tasks

from hf_ext import emr
from hf_ext.cli.main import main
from hf_ext.emr.recipe import RECIPE, Recipe
from hf_ext.errors import CheckpointError


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_the_recipe_in_a_merge_makes_the_same_merge_again(tmp_path, tasks):
    base, folders = tasks
    emr.merge(base, folders, tmp_path / "merged", rescale="paper")
    recipe = tmp_path / "merged" / RECIPE
    expected = {"base": str(base), "tasks": {name: str(path) for name, path in folders.items()}, "rescale": "paper"}
    assert yaml.safe_load(recipe.read_text()) == expected
    assert main(["merge", str(recipe), "--out", str(tmp_path / "again")]) == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "merged")


def test_a_merge_without_a_recipe_of_its_own_has_none(tmp_path, tasks):
    from transformers import AutoModelForSequenceClassification

    base, folders = tasks
    emr.merge(base, {"cr": folders["cr"]}, tmp_path / "out")
    emr.add_task(tmp_path / "out", "subj", folders["subj"], tmp_path / "more", reelect=True)
    assert (tmp_path / "out" / RECIPE).exists() and not (tmp_path / "more" / RECIPE).exists()
    model = AutoModelForSequenceClassification.from_pretrained(folders["cr"])
    emr.merge(base, {"cr": model}, tmp_path / "out")
    assert not (tmp_path / "out" / RECIPE).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: b", "'tasks' must map the name of each task to its folder"),
        ("base: b\ntasks: {}", "'tasks' must map"),
        ("base: b\ntasks: {a: 1}", "'tasks' must map"),
        ("tasks: {a: b}", "'base' must be the folder or Hub id"),
        ("base: b\ntasks: {a: c}\nrescale: both", "'rescale' must be one of: tensor, paper, tensor_mean"),
        ("base: b\ntasks: {a: c}\nrevision: 1", "'revision' must be text"),
        ("base: b\ntasks: {a: c}\nmerge_method: ties", "keys base, tasks, revision, rescale, not merge_method"),
        ("- base", "must have the keys base and tasks at its top level"),
        ("base: [", "cannot be read"),
        ("base: !!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Recipe.read(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Recipe.read(tmp_path / "none.yaml")
    with pytest.raises(CheckpointError, match="is a folder. Give the file of a recipe, such as .*merge_recipe.yaml"):
        Recipe.read(tmp_path)


def test_a_recipe_and_options_do_not_mix(tmp_path, capsys):
    assert main(["merge", "recipe.yaml", "--base", "b", "--out", "o"]) == 2
    assert "cannot be combined with --base, --task" in capsys.readouterr().err
    assert main(["merge", "--base", "b", "--out", "o"]) == 2
    assert "give the base model and the tasks, or a recipe" in capsys.readouterr().err
