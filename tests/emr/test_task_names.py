"""Tasks whose files have other names for the weights, or tie others, merge as the same tasks under one set of names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from repeats import some
from safetensors.torch import save_file
from tiny_architectures import build
from tiny_checkpoints import edit_config
from tiny_merges import same_tensors, tensors_of
from tiny_models import bert, llama, perturb, qwen_moe, t5
from transformers import BertModel, PreTrainedModel

from hf_ext import CheckpointError, emr, fm_delta
from hf_ext.emr.folder import MergeFolder

HEAD, EMBEDDING, T5_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight", "encoder.embed_tokens.weight"
Edit = Callable[[dict], dict]


def tied_llama() -> PreTrainedModel:
    return llama(tied=True)


def masked_bert() -> PreTrainedModel:
    return build("BertForMaskedLM")


def bart() -> PreTrainedModel:
    return build("BartForConditionalGeneration")


def llava() -> PreTrainedModel:
    """Its two towers have layers of the same names."""
    return build("LlavaForConditionalGeneration")


def renamed(*pairs: tuple[str, str]) -> Edit:
    def edit(tensors: dict) -> dict:
        for old, new in pairs:
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        return tensors

    return edit


def without_prefix(prefix: str) -> Edit:
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def twice(name: str, origin: str) -> Edit:
    return lambda tensors: tensors | {name: tensors[origin].clone()}


def plain(tensors: dict) -> dict:
    return tensors


GAMMA = renamed(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
NEW_LLAVA = renamed(
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("vision_tower", "model.vision_tower"),
    ("multi_modal", "model.multi_modal"),
)


def write(model: PreTrainedModel, folder: Path, edit: Edit = plain) -> Path:
    model.save_pretrained(folder)
    save_file(edit(tensors_of(folder)), folder / "model.safetensors", {"format": "pt"})
    return folder


def states(merged: Path, kind: type[PreTrainedModel], out: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of every task in memory. The extracted checkpoint and the switched model have the same."""
    model, tasks = kind.from_pretrained(merged), {}
    for task in [*model.tasks, model.tasks[0]]:
        model.set_task(task)
        tasks[task] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    emr.verify(merged)
    for task, state in tasks.items():
        emr.extract(merged, task, out / task)
        same_tensors(kind.from_pretrained(out / task).state_dict(), state)
    return tasks


def merged_states(build: Callable[[], PreTrainedModel], edits: tuple[Edit, ...], place: Path) -> tuple[dict, int]:
    """The weights of the two tasks of a merge whose files are edited, and how many tensors it elects."""
    model = build()
    models = (model, perturb(model, 1), perturb(model, 2))
    base, a, b = (write(*parts) for parts in zip(models, (place / name for name in ("base", "a", "b")), edits))
    emr.merge(base, {"a": a, "b": b}, place / "merged", method="emr")
    return states(place / "merged", type(model), place / "extracted"), len(MergeFolder(place / "merged").elected.names())


@pytest.fixture(scope="module")
def unedited(tmp_path_factory) -> Callable[..., tuple[dict, int]]:
    return cache(lambda build: merged_states(build, (plain,) * 3, tmp_path_factory.mktemp("plain")))


@some(
    "build, edits",
    [
        (bert, (GAMMA, plain, GAMMA)),
        (bert, (without_prefix("bert."), GAMMA, without_prefix("bert."))),
        (masked_bert, (plain, twice("cls.predictions.decoder.bias", "cls.predictions.bias"), plain)),
        (tied_llama, (plain, renamed((EMBEDDING, HEAD)), renamed((EMBEDDING, HEAD)))),
        (tied_llama, (renamed((EMBEDDING, HEAD)), plain, renamed((EMBEDDING, HEAD)))),
        (tied_llama, (twice(HEAD, EMBEDDING), plain, without_prefix("model."))),
        (t5, (renamed(("shared", "decoder.embed_tokens")), twice(T5_EMBEDDING, "shared.weight"), plain)),
        (llava, (plain, NEW_LLAVA, plain)),
        (qwen_moe, (without_prefix("model."), plain, without_prefix("model."))),
    ],
    [
        (bert, (plain, GAMMA, plain)),
        (bert, (plain, plain, without_prefix("bert."))),
        (tied_llama, (plain, renamed((EMBEDDING, HEAD)), plain)),
        (tied_llama, (plain, plain, twice(HEAD, EMBEDDING))),
        (t5, (plain, renamed(("shared", "encoder.embed_tokens")), plain)),
        (bart, (plain, renamed(("model.shared", "model.encoder.embed_tokens")), renamed(("model.shared", "lm_head")))),
        (llava, (NEW_LLAVA, plain, plain)),
        (qwen_moe, (plain, without_prefix("model."), plain)),
    ],
)
def test_names_make_no_difference(tmp_path, unedited, build, edits):
    expected, elected = unedited(build)
    tasks, count = merged_states(build, edits, tmp_path)
    assert count == elected
    for task in ("a", "b"):
        same_tensors(tasks[task], expected[task])


@pytest.mark.parametrize("order", ["tied first", "tied last", "added", "added to ties"])
@some(
    "build, one, other",
    [(tied_llama, EMBEDDING, HEAD)],
    [
        (t5, "shared.weight", HEAD),
        (masked_bert, "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ],
)
def test_a_task_that_breaks_a_tie_leaves_the_others_tied(tmp_path, build, one, other, order):
    model = build()
    base, tied = write(model, tmp_path / "base"), write(perturb(model, 1), tmp_path / "tied")
    seed = 1 if order.startswith("added") else 2
    apart = write(perturb(model, seed), tmp_path / "apart", lambda tensors: tensors | {other: tensors[one] + 0.05})
    tasks = {"tied": tied, "apart": apart}
    if order == "tied last":
        tasks = {"apart": apart, "tied": tied}
    if order.startswith("added"):
        first, second = ("tied", "apart") if order == "added to ties" else ("apart", "tied")
        emr.merge(base, {first: tasks[first]}, tmp_path / "first", method="emr")
        emr.add_task(tmp_path / "first", {second: tasks[second]}, tmp_path / "merged")
    else:
        emr.merge(base, tasks, tmp_path / "merged", method="emr")
    results = states(tmp_path / "merged", type(model), tmp_path / "out")
    assert torch.equal(results["tied"][other], results["tied"][one])
    assert torch.equal(results["apart"][other], type(model).from_pretrained(tasks["apart"]).state_dict()[other])
    assert not torch.equal(results["apart"][other], results["apart"][one])
    if order == "tied first":  # its plain checkpoint holds the weight once, as before
        assert tensors_of(tmp_path / "out/tied").keys() == tensors_of(tied).keys()
        model = fm_delta.switch(type(model).from_pretrained(tied), tmp_path / "out/tied")
        same_tensors(model.state_dict(), results["tied"])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}, "ignores '_orig_mod.* random"),
        (
            lambda tensors: tensors | {"lm_head.weight": torch.empty(0)},
            r"'lm_head.weight' of task 'a' is \[0\], but \[96, 64\]",
        ),
        (lambda tensors: tensors | {"model.norm.weight": torch.empty(0)}, r"'model.norm.weight' of task 'a' is \[0\], but"),
    ],
    ids=["of a compiled model", "an empty head", "an empty norm"],
)
def test_weights_that_from_pretrained_does_not_load_are_named(tmp_path, edit, message):
    base, a = write(llama(), tmp_path / "base"), write(perturb(llama(), 1), tmp_path / "a", edit)
    with pytest.raises(CheckpointError, match=message):
        emr.merge(base, {"a": a}, tmp_path / "merged", method="emr")
    assert not (tmp_path / "merged").exists()


def test_two_forms_of_one_weight_are_named(tmp_path):
    model = qwen_moe()
    base, a = write(model, tmp_path / "base"), write(perturb(model, 1), tmp_path / "a")
    b = write(perturb(model, 2), tmp_path / "b", lambda tensors: perturb(model, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"experts\.0\..*experts\.down_proj.* are two forms of one weight"):
        emr.merge(base, {"a": a, "b": b}, tmp_path / "merged", method="emr")


def test_a_tower_under_names_that_no_rule_explains_is_refused(tmp_path):
    model = llava()
    base = write(model, tmp_path / "base", renamed(("language_model", "text")))
    a = write(perturb(model, 1), tmp_path / "a", renamed(("language_model.model", "body.decoder")))
    for folder in (base, a):
        edit_config(folder, architectures=["OwnModel"])
    with pytest.raises(CheckpointError, match=r"'body\.decoder\.layers\.0\..*seems to be 'text\.model\.layers\.0\."):
        emr.merge(base, {"a": a}, tmp_path / "merged", method="emr")


def test_names_of_a_class_of_its_own_are_compared_by_their_ends(tmp_path):
    model = bert().bert
    base = write(model, tmp_path / "base")
    a, b = write(perturb(model, 1), tmp_path / "a", GAMMA), write(perturb(model, 2), tmp_path / "b")
    for folder in (a, b):
        edit_config(folder, architectures=["OwnModel"])
    emr.merge(base, {"a": a, "b": b}, tmp_path / "merged", method="emr")
    states(tmp_path / "merged", BertModel, tmp_path / "out")
