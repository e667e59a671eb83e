"""`fm_delta.find_base` ranks candidates by config.json, model card and weights, and reports `sure` only without doubt."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from local_hub import LocalHub
from tiny_checkpoints import CONFIG, fine_tune, pair, weights, write_folder

from hf_ext import fm_delta
from hf_ext.errors import BaseModelError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """tuned and its base, and two strangers of the same shapes; and an empty Hub cache."""
    pair(tmp_path)
    for i in range(2):
        write_folder(tmp_path / f"stranger{i}", weights(seed=10 + i))
    return tmp_path


def verdicts(report):
    return {Path(candidate.name).name: candidate.verdict for candidate in report.candidates}


def test_the_base_is_found_among_strangers(folder):
    report = fm_delta.find_base(folder / "tuned", [folder / "stranger0", folder / "base", folder / "stranger1"])
    assert report.verdict == "sure" and report.require() is report.best
    assert report.best.name == str(folder / "base")
    assert verdicts(report) == {"base": "sure", "stranger0": "no", "stranger1": "no"}
    assert str(report).endswith(f"The base of {folder / 'tuned'} is {folder / 'base'}.")
    assert json.loads(json.dumps(report.to_dict()))["candidates"][0]["why"] == "the weights agree"


@pytest.mark.parametrize("tuned", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_base_ranks_before_siblings_in_any_float_type(tmp_path, tuned, base):
    origin = weights()
    src = write_folder(tmp_path / "src", {name: tensor.to(tuned) for name, tensor in fine_tune(origin, 1).items()})
    other = fine_tune(fine_tune(origin, 2), 3)
    sibling = write_folder(tmp_path / "sibling", {name: tensor.to(base) for name, tensor in other.items()})
    expected = write_folder(tmp_path / "base", {name: tensor.to(base) for name, tensor in origin.items()})
    report = fm_delta.find_base(src, [sibling, expected])
    assert report.best is not None
    if not base == torch.bfloat16 != tuned:  # whose steps are wider than the training's
        assert report.require().name == str(expected)


def test_of_two_that_are_equally_near_none_is_the_base(folder):
    """Siblings whose changes are small beside the type's steps."""
    base = weights(torch.bfloat16)
    write_folder(folder / "base", base)
    write_folder(folder / "tuned", fine_tune(weights()))
    sibling = dict(base)
    sibling["model.norm.weight"] = base["model.norm.weight"] * 1.01
    write_folder(folder / "sibling", sibling)
    shutil.copytree(folder / "base", folder / "copy")
    report = fm_delta.find_base(folder / "tuned", [folder / "sibling", folder / "base", folder / "stranger0"])
    assert verdicts(report) == {"base": "likely", "sibling": "likely", "stranger0": "no"}
    assert "one of these, which are equally near" in report.summary() and f"{folder / 'sibling'}" in report.summary()
    with pytest.raises(BaseModelError, match="equally near: .*--base"):
        report.require()
    assert fm_delta.find_base(folder / "tuned", [folder / "copy", folder / "base"]).verdict == "sure"
    report = fm_delta.find_base(folder / "tuned", [folder / "copy", folder / "sibling", folder / "base"])
    assert verdicts(report) == dict.fromkeys(("base", "copy", "sibling"), "likely")


def test_prefixes_and_new_heads_do_not_hide_the_base(tmp_path):
    base = {name.removeprefix("model."): tensor for name, tensor in weights().items() if name != "lm_head.weight"}
    tuned = {name: tensor for name, tensor in fine_tune(weights()).items() if name != "lm_head.weight"}
    tuned |= {"score.weight": torch.randn(3, 16, generator=torch.Generator().manual_seed(0))}
    report = fm_delta.find_base(write_folder(tmp_path / "tuned", tuned), [write_folder(tmp_path / "base", base)])
    assert report.verdict == "sure"


VARIANTS = {
    "fewer layers": lambda base: {name: tensor for name, tensor in base.items() if "layers.1" not in name},
    "more layers": lambda base: base | {n.replace("1", "2"): tensor for n, tensor in base.items() if "layers.1" in n},
    "wider layers": lambda base: base | {"model.layers.1.mlp.up_proj.weight": torch.ones(65, 16)},
    "another type": dict,
    "half of the names": lambda base: {name: base[name] for name in ("model.embed_tokens.weight", "lm_head.weight")},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_another_architecture_is_never_sure(folder, name):
    config = CONFIG.replace("bert", "roberta") if name == "another type" else CONFIG
    other = write_folder(folder / "other", VARIANTS[name](weights()), config)
    report = fm_delta.find_base(folder / "tuned", [other])
    assert report.verdict == "likely"
    with pytest.raises(BaseModelError, match=f"perhaps {other} .*--base"):
        report.require()
    assert fm_delta.find_base(folder / "tuned", [other, folder / "base"]).best.name == str(folder / "base")


def test_other_names_or_shapes_are_no_base(folder):
    names = write_folder(folder / "names", {f"x{i}.w": tensor for i, tensor in enumerate(weights().values())})
    shapes = write_folder(folder / "shapes", {name: torch.ones(*tensor.shape, 2) for name, tensor in weights().items()})
    report = fm_delta.find_base(folder / "tuned", [names, shapes])
    assert report.verdict == "none" and report.best is None
    assert set(verdicts(report).values()) == {"no"}
    assert "None of 2 candidates" in str(report)


def test_weights_that_agree_only_in_part_are_likely_at_most(folder):
    mixed = fine_tune(weights(), seed=3) | {"model.embed_tokens.weight": weights(seed=9)["model.embed_tokens.weight"]}
    mixed |= {"lm_head.weight": weights(seed=9)["lm_head.weight"]}
    report = fm_delta.find_base(folder / "tuned", [write_folder(folder / "mixed", mixed)])
    assert report.verdict == "likely" and report.best.why == "the weights agree in part"


def test_the_checkpoint_is_no_candidate_but_its_copy_is(folder):
    copy = write_folder(folder / "copy", fine_tune(weights()))
    (folder / "link").symlink_to(folder / "tuned")
    report = fm_delta.find_base(folder / "tuned", [folder / "tuned", folder / "link", copy, folder / "base"])
    assert [candidate.name for candidate in report.candidates] == [str(copy), str(folder / "base")]
    assert report.best.bits == 0 and report.verdict == "sure"


def test_an_unreadable_candidate_is_a_row_and_stops_nothing(folder):
    fm_delta.compress_checkpoint(folder / "tuned", folder / "base", folder / "small")
    (folder / "stranger0/model.safetensors").write_bytes(b"broken")
    report = fm_delta.find_base(
        folder / "tuned", [folder / "none", folder / "small", folder / "stranger0", folder / "base", "no/such-model"]
    )
    assert verdicts(report) == dict.fromkeys(("none", "small", "stranger0", "such-model"), "unreadable") | {"base": "sure"}
    assert "no folder" in str(report) and "compressed already" in str(report)


# ---- what the checkpoint says ------------------------------------------------------------------------------------------


def name_in_config(folder, name):
    (folder / "tuned/config.json").write_text(json.dumps(json.loads(CONFIG) | {"_name_or_path": str(name)}))


def name_in_card(folder, *names):
    text = json.dumps(names[0] if len(names) == 1 else [str(name) for name in names])
    (folder / "tuned/README.md").write_text(f"---\nlicense: mit\nbase_model: {text}\n---\n\n# A model\n")


@pytest.mark.parametrize("named_in", ["config.json", "README.md", "README.md, after another"])
def test_a_named_base_that_fits_ends_the_search(folder, named_in):
    if named_in == "config.json":
        name_in_config(folder, folder / "base")
    else:
        name_in_card(folder, *([folder / "stranger0"] if "another" in named_in else []), str(folder / "base"))
    report = fm_delta.find_base(folder / "tuned", [folder / "stranger1"])
    assert report.best.name == str(folder / "base") and named_in.partition(",")[0] in report.best.why
    assert "stranger1" not in verdicts(report) and len(report.candidates) == 1 + ("another" in named_in)


def test_a_named_base_must_fit_too(folder):
    name_in_config(folder, folder / "stranger0")
    name_in_card(folder, "no/such-model")
    report = fm_delta.find_base(folder / "tuned", [folder / "base"])
    assert verdicts(report) == {"base": "sure", "stranger0": "no", "such-model": "unreadable"}
    assert fm_delta.find_base(folder / "tuned", []).verdict == "none"


def test_invalid_base_names_in_files_are_ignored(folder):
    name_in_config(folder, folder / "tuned")
    for card in ("---\nbase_model: [3, {a: b}]\n---\n", "---\n: [\n---\n", "no card", ""):
        (folder / "tuned/README.md").write_text(card)
        assert fm_delta.find_base(folder / "tuned", []).candidates == []
    assert "config.json and model card name none" in str(fm_delta.find_base(folder / "tuned", []))


# ---- the Hub's cache -----------------------------------------------------------------------------------------------------

FIND = """
import json
from huggingface_hub import HfApi, constants, snapshot_download
from hf_ext import fm_delta

folders = {"base": "base", "stranger": "stranger0", "shards": "shards", "empty": "empty", "partial": "shards"}
for repo, folder in folders.items():
    HfApi().create_repo(f"user/{repo}")
    HfApi().upload_folder(folder_path=folder, repo_id=f"user/{repo}")
    snapshot_download(f"user/{repo}", allow_patterns=["*.json", "*1-of*"] if repo == "partial" else None)
constants.HF_HUB_OFFLINE = True
report = fm_delta.find_base("tuned")
fm_delta.compress_checkpoint("tuned", report.require().name, "out", report.best.revision, verify=True)
print(json.dumps([report.to_dict(), json.load(open("out/config.json"))["quantization_config"]]))
"""


def test_the_default_candidates_are_the_cached_models(folder):
    write_folder(folder / "shards", fine_tune(weights(), seed=7), shards=2)
    (folder / "empty").mkdir()
    (folder / "empty/config.json").write_text(CONFIG)
    with LocalHub() as hub:
        report, settings = json.loads(hub.run(folder, FIND))
    by_name = {candidate["name"]: candidate["verdict"] for candidate in report["candidates"]}
    assert by_name == {"user/base": "sure", "user/shards": "sure", "user/stranger": "no"}
    best = report["candidates"][0]
    assert best["name"] == settings["base"] == "user/base"
    assert best["revision"] == settings["revision"] and len(best["revision"]) == 40
