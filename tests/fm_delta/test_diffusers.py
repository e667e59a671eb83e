"""Models and pipelines of diffusers: compressed by the usual commands, loaded by diffusers itself, every bit equal."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from local_hub import LocalHub
from processes import python
from tiny_checkpoints import assert_restored, contents, edit_settings
from tiny_models import assert_same_weights

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, HfExtError, emr, fm_delta

pytest.importorskip("diffusers")

from diffusers import BitsAndBytesConfig, UNet2DConditionModel  # noqa: E402
from diffusers.quantizers.base import DiffusersQuantizer  # noqa: E402
from tiny_diffusers import MODELS, load, model, pipeline, tuned  # noqa: E402

COMPONENTS = ("text_encoder", "unet", "vae")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline, a fine-tune of it with the same autoencoder, and the fine-tune compressed. Tests only read them."""
    place = tmp_path_factory.mktemp("pipelines")
    pipeline(model("unet")).save_pretrained(place / "base")
    pipeline(tuned("unet"), text_seed=2).save_pretrained(place / "tuned")
    fm_delta.compress_checkpoint(place / "tuned", place / "base", place / "small", verify=True)
    return place


SHARDS_OF_A_VARIANT = {"max_shard_size": "10KB", "variant": "v"}
WAYS = {  # options of saving and of loading
    "one file": ({}, {}),
    "variant": ({"variant": "fp16"}, {"variant": "fp16", "torch_dtype": torch.float16}),
    "shards": ({"max_shard_size": "10KB"}, {"device_map": "auto"}),
    "shards of a variant": (SHARDS_OF_A_VARIANT, {"variant": "v", "torch_dtype": torch.bfloat16, "device_map": "cpu"}),
}


@pytest.mark.parametrize("name, way", [(name, way) for name in MODELS for way in WAYS if name == "unet" or way == "one file"])
def test_a_loaded_model_has_the_same_bits_and_is_an_ordinary_one(tmp_path: Path, name: str, way: str) -> None:
    (saving, loading), base, plain = WAYS[way], model(name), tuned(name)
    base.save_pretrained(tmp_path / "base")
    plain.save_pretrained(tmp_path / "plain", **saving)
    fm_delta.compress_checkpoint(tmp_path / "plain", tmp_path / "base", tmp_path / "small")
    expected = type(plain).from_pretrained(tmp_path / "plain", **loading)
    loaded = type(plain).from_pretrained(tmp_path / "small", **loading)
    assert_same_weights(loaded, expected)
    for one in (loaded, expected):
        one.register_to_config(_name_or_path="")
        one.save_pretrained(tmp_path / ("loaded" if one is loaded else "expected"), **saving)
    assert contents(tmp_path / "loaded") == contents(tmp_path / "expected")
    pickle.loads(pickle.dumps(copy.deepcopy(loaded))).to(torch.float64)
    assert loaded.dequantize() is loaded
    assert_restored(tmp_path / "small", tmp_path / "plain")


def test_a_pipeline_comes_back_byte_for_byte(place: Path, tmp_path: Path) -> None:
    plain, small = load(place / "tuned"), load(place / "small")
    for name in COMPONENTS:
        assert_same_weights(getattr(small, name), getattr(plain, name))
    fm_delta.decompress_checkpoint(place / "small", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(place / "tuned")
    fm_delta.decompress_checkpoint(place / "small", tmp_path / "back")  # an earlier result
    small.save_pretrained(tmp_path / "plain")
    assert_same_weights(load(tmp_path / "plain").unet, plain.unet)
    assert not [path for path in tmp_path.rglob("*.json") if "hf_ext" in path.read_text()]


def test_an_unchanged_component_is_not_stored_again(place: Path) -> None:
    report = fm_delta.inspect(place / "small")
    values = [tensor for tensor in report.tensors if tensor.name.startswith("vae/")]
    assert len(report.tensors) == fm_delta.verify(place / "small") and report.base == "../base"
    assert sum(tensor.compressed_bytes for tensor in values) < 200 * len(values)
    assert report.compressed_bytes == sum(path.stat().st_size for path in (place / "small").rglob("*.safetensors"))


def test_the_base_of_a_pipeline_and_of_a_component_is_found(place: Path, tmp_path: Path) -> None:
    candidates = [place / "base", place / "base" / "vae", place / "tuned" / "scheduler"]
    for src, base in (("tuned", "base"), ("tuned/unet", "base/unet")):
        assert fm_delta.find_base(place / src, candidates).require().name == str(place / base)
    report = fm_delta.compress_all([place / "tuned"], tmp_path / "all", candidates=candidates, verify=True)
    assert not report.failed
    alone, batch = contents(place / "small"), contents(tmp_path / "all" / "tuned")
    assert alone.keys() == batch.keys()
    assert all(alone[name] == batch[name] for name in alone if not name.endswith("/config.json"))  # they name the base
    again = fm_delta.compress_all([place / "tuned"], tmp_path / "all", place / "base")
    assert again.models == report.models
    assert [model.name for model in fm_delta.compress_all(place, tmp_path / "more", place / "base").failed] == ["small"]


def test_smaller_shards_replace_earlier_weights(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "small", tmp_path / "out")
    load(place / "tuned").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    fm_delta.compress_checkpoint(tmp_path / "shards", place / "base", tmp_path / "out")
    assert not (tmp_path / "out" / "unet" / WEIGHTS).exists()
    assert_same_weights(load(tmp_path / "out").unet, load(place / "tuned").unet)


def test_enabled_models_save_compressed_alone_and_in_a_pipeline(place: Path, tmp_path: Path) -> None:
    unet = fm_delta.enable(tuned("unet", 5), place / "base" / "unet")
    pipeline(unet).save_pretrained(tmp_path / "pipeline", variant="fp16")
    assert_same_weights(load(tmp_path / "pipeline", variant="fp16").unet, tuned("unet", 5))
    for number, enabled in enumerate((unet, copy.deepcopy(unet), pickle.loads(pickle.dumps(unet)))):
        enabled.save_pretrained(tmp_path / str(number), max_shard_size="20KB")
        fm_delta.verify(tmp_path / str(number))
    enabled.load_state_dict(tuned("unet", 6).state_dict())
    loaded = UNet2DConditionModel.from_pretrained(tmp_path / "0")
    assert_same_weights(fm_delta.enable(loaded, place / "base" / "unet"), tuned("unet", 5))
    fm_delta.disable(unet).save_pretrained(tmp_path / "plain")
    with pytest.raises(CorruptFileError, match="not compressed"):
        fm_delta.inspect(tmp_path / "plain")


def test_plain_components_beside_compressed_ones_are_other_files(place: Path, tmp_path: Path) -> None:
    pipe = pipeline(fm_delta.enable(tuned("unet", 5), place / "base" / "unet"))
    pipe.save_pretrained(tmp_path / "mixed")
    pipe.register_modules(unet=fm_delta.disable(pipe.unet))
    pipe.save_pretrained(tmp_path / "plain")
    assert (
        fm_delta.verify(tmp_path / "mixed") == len(fm_delta.inspect(tmp_path / "mixed").tensors) == len(pipe.unet.state_dict())
    )
    assert_restored(tmp_path / "mixed", tmp_path / "plain")
    with pytest.raises(CheckpointError, match="compressed already"):
        fm_delta.compress_checkpoint(tmp_path / "mixed", place / "base", tmp_path / "again")
    with pytest.raises(CheckpointError, match="holds something else"):
        fm_delta.compress_checkpoint(tmp_path / "plain", place / "base", tmp_path / "mixed")
    with pytest.raises(CheckpointError, match="leave safe_serialization=False out"):
        fm_delta.enable(pipe.unet, place / "base" / "unet").save_pretrained(tmp_path / "bin", safe_serialization=False)


def test_a_folder_of_pipelines_and_models_is_compressed_in_part(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "tuned", tmp_path / "all" / "a damaged one")
    (tmp_path / "all" / "a damaged one" / "model_index.json").write_text("{")
    shutil.copytree(place / "tuned", tmp_path / "all" / "pipeline")
    shutil.copytree(place / "tuned" / "unet", tmp_path / "all" / "unet")
    report = fm_delta.compress_all(tmp_path / "all", tmp_path / "pipelines", place / "base")
    assert [model.name for model in report.failed] == ["a damaged one", "unet"]
    report = fm_delta.compress_all(tmp_path / "all", tmp_path / "models", place / "base" / "unet")
    assert [model.name for model in report.failed] == ["a damaged one", "pipeline"]


def test_weights_in_float8_load_as_they_are_or_not_at_all(tmp_path: Path) -> None:
    model("vae").to(torch.float8_e4m3fn).save_pretrained(tmp_path / "plain")
    fm_delta.compress_checkpoint(tmp_path / "plain", None, tmp_path / "small")
    kind = type(model("vae"))
    assert_same_weights(kind.from_pretrained(tmp_path / "small"), kind.from_pretrained(tmp_path / "plain"))
    with pytest.raises(CheckpointError, match="float8 .* without torch_dtype="):
        kind.from_pretrained(tmp_path / "small", torch_dtype=torch.bfloat16)


HUB = """
from pathlib import Path
from hf_ext import fm_delta
from huggingface_hub import HfApi
from tiny_models import assert_same_weights
from tiny_diffusers import load, model, pipeline, tuned
pipeline(model("unet")).push_to_hub("user/base")
pipeline(tuned("unet")).save_pretrained("tuned")
fm_delta.compress_checkpoint("tuned", "user/base", "small")
assert fm_delta.inspect("small").base == "user/base", fm_delta.inspect("small").base
HfApi().create_repo("user/small")
HfApi().upload_folder(repo_id="user/small", folder_path="small")
fm_delta.enable(tuned("unet", 3), "user/base/unet").push_to_hub("user/unet")
for candidates in (["user/base"], None):  # None: the models in the cache
    assert fm_delta.find_base("tuned", candidates).require().name == "user/base"
    assert fm_delta.find_base("tuned/unet", candidates).require().name == "user/base/unet"
report = fm_delta.compress_all(["tuned"], "all", "user/base", verify=True)
assert not report.failed and report.models[0].compressed_bytes == fm_delta.inspect("small").compressed_bytes
Path("tuned/vae/other.bin").write_bytes(b"beside safetensors")
Path("tuned/checker").mkdir()
Path("tuned/checker/model.bin").write_bytes(b"alone")
Path("tuned/checker/config.json").write_text("{}")
HfApi().create_repo("user/tuned")
HfApi().upload_folder(repo_id="user/tuned", folder_path="tuned")
fm_delta.compress_checkpoint("user/tuned", "user/base", "with-bin")
fm_delta.compress_checkpoint("user/tuned/vae", "user/base/vae", "vae-alone")
assert Path("with-bin/checker/model.bin").exists()
assert not Path("with-bin/vae/other.bin").exists() and not Path("vae-alone/other.bin").exists()
"""

LOAD = """
import hf_ext
from diffusers import UNet2DConditionModel
from tiny_models import assert_same_weights
from tiny_diffusers import load, tuned
assert_same_weights(load("user/small").unet, tuned("unet"))
assert_same_weights(UNet2DConditionModel.from_pretrained("user/small", subfolder="unet"), tuned("unet"))
assert_same_weights(UNet2DConditionModel.from_pretrained("user/unet"), tuned("unet", 3))
"""


def test_the_hub(tmp_path: Path) -> None:
    with LocalHub() as hub:
        hub.run(tmp_path, HUB)
        settings = json.loads(hub.repos["user/small"].at("main").files["unet/config.json"].content)["quantization_config"]
        assert settings["base"] == "user/base/unet" and settings["revision"] == hub.repos["user/base"].at("main").id
        hub.run(tmp_path / "elsewhere", LOAD, home=tmp_path / "fresh")


def without(*names: str):
    def change(pipeline: Path) -> None:
        for name in names:
            shutil.rmtree(pipeline / name)

    return change


def other_unet(pipeline: Path) -> None:
    model("flux").save_pretrained(pipeline / "unet")


def damaged(pipeline: Path) -> None:
    (pipeline / "vae" / WEIGHTS).write_bytes((pipeline / "vae" / WEIGHTS).read_bytes()[:-9])


@pytest.mark.parametrize(
    ("of_base", "change", "message"),
    [
        (True, without("text_encoder"), "no folder .* the base of the component 'text_encoder'"),
        (True, damaged, "vae.* the base of the component 'vae'"),
        (False, damaged, "vae"),
        (False, without(*COMPONENTS), "none of its components holds safetensors weights"),
        (False, lambda pipeline: (pipeline / "model_index.json").write_text("{"), "model_index.json is not JSON"),
    ],
)
def test_bad_pipelines(place: Path, tmp_path: Path, of_base: bool, change, message: str) -> None:
    for name in ("base", "tuned"):
        shutil.copytree(place / name, tmp_path / name)
    change(tmp_path / ("base" if of_base else "tuned"))
    with pytest.raises(HfExtError, match=message):
        fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pipeline_of_another_class_is_not_the_base(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "base", tmp_path / "base")
    other_unet(tmp_path / "base")
    done = python("-m", "hf_ext.cli", "compress", place / "tuned", "--base", tmp_path / "base", "--out", tmp_path / "out")
    assert done.returncode == 1 and "unet is not the base of" in done.stderr and not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="is a model of diffusers, which has no tasks"):
        emr.merge(place / "base" / "unet", {"one": place / "tuned" / "unet"}, tmp_path / "out", method="emr")


def test_names_in_the_list_of_components_lead_into_no_other_folder(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "small", tmp_path / "a" / "small")
    shutil.copytree(place / "tuned" / "unet", tmp_path / "a" / "outside")
    listed = {"../outside": [], "..": [], "unet": [], "": [], "vae": [None, None], "x" * 300: []}
    (tmp_path / "a" / "small" / "model_index.json").write_text(json.dumps(listed))
    assert {tensor.name.partition("/")[0] for tensor in fm_delta.inspect(tmp_path / "a" / "small").tensors} == {"unet"}
    fm_delta.decompress_checkpoint(tmp_path / "a" / "small", tmp_path / "b" / "back")
    assert contents(tmp_path / "b").keys() == {f"back/{name}" for name in contents(tmp_path / "a" / "small")}


def test_links_to_components_of_another_pipeline_stay_links(place: Path, tmp_path: Path) -> None:
    for name in ("base", "tuned"):
        shutil.copytree(place / name, tmp_path / name)
    shutil.rmtree(tmp_path / "tuned" / "vae")
    (tmp_path / "tuned" / "vae").symlink_to("../base/vae")
    before = contents(tmp_path / "base")
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small", verify=True)
    fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")
    assert contents(tmp_path / "base") == before and contents(tmp_path / "back") == contents(tmp_path / "tuned")
    assert (tmp_path / "small" / "vae").is_symlink() and (tmp_path / "back" / "vae").is_symlink()
    assert_same_weights(load(tmp_path / "small").vae, model("vae"))


def test_loading_says_what_is_wrong(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "unet"
    shutil.copytree(place / "small" / "unet", small)
    edit_settings(small, base=str(tmp_path / "nowhere"))
    with pytest.raises(BaseModelError, match="If the base has moved"):
        UNet2DConditionModel.from_pretrained(small)
    edit_settings(small, base=str(place / "tuned" / "unet"))
    with pytest.raises(BaseModelError, match="is another model or revision"):
        UNet2DConditionModel.from_pretrained(small)
    settings = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(CheckpointError, match="as its BitsAndBytesConfig says.*hf-ext decompress"):
        UNet2DConditionModel.from_pretrained(place / "small" / "unet", quantization_config=settings)
    UNet2DConditionModel.from_pretrained(place / "small" / "unet", quantization_config=None)
    monkeypatch.delattr(DiffusersQuantizer, "maybe_update_state_dict")
    with pytest.raises(CheckpointError, match="requires diffusers>=0.39 .*hf-ext decompress"):
        UNet2DConditionModel.from_pretrained(place / "small" / "unet")


def test_plain_weights_under_a_compressed_config_load(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "small" / "unet", tmp_path / "unet")
    shutil.copy(place / "tuned" / "unet" / WEIGHTS, tmp_path / "unet")
    assert_same_weights(UNet2DConditionModel.from_pretrained(tmp_path / "unet"), tuned("unet"))
