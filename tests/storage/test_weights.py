"""No method takes a source of which a part is missing, or one that is quantized: not as a fine-tune, a task or a base."""

import json

import pytest
from tiny_checkpoints import edit_config, fine_tune, pair, weights, write_folder, write_safetensors
from tiny_models import bert

from hf_ext import emr, fm_delta
from hf_ext.errors import HfExtError
from hf_ext.storage.config_file import quantization_of
from hf_ext.storage.weights import open_weights


def taken(src, other, out):
    """Every way to use `src`, as a function. It takes `other` where it needs another model."""
    return {
        "compress": lambda: fm_delta.compress_checkpoint(src, other, out),
        "compress, no base": lambda: fm_delta.compress_checkpoint(src, None, out, verify=True),
        "compress, as base": lambda: fm_delta.compress_checkpoint(other, src, out),
        "compress_all": lambda: raised(fm_delta.compress_all([src], out, other)),
        "find_base": lambda: fm_delta.find_base(src, [other]),
        "find_base, as base": lambda: raised_unread(fm_delta.find_base(other, [src])),
        "enable": lambda: fm_delta.enable(bert(), src),
        "switch": lambda: fm_delta.switch(bert(), src),
        "extract_lora": lambda: fm_delta.extract_lora(src, other, out),
        "extract_lora, as base": lambda: fm_delta.extract_lora(other, src, out),
        "merge": lambda: emr.merge(other, {"task": src}, out),
        "merge, as base": lambda: emr.merge(src, {"task": other}, out, method="switch"),
    }


def raised(report):
    raise HfExtError(report.failed[0].error)


def raised_unread(report):
    assert report.verdict == "none"
    raise HfExtError(report.candidates[0].why)


USES = [*taken(None, None, None)]


def incomplete(folder, kind):
    """A model of three shards without one of its parts, and the name of that."""
    write_folder(folder, fine_tune(weights()), shards=3)
    second, index = folder / "model-00002-of-00003.safetensors", folder / "model.safetensors.index.json"
    if kind == "a tensor":
        listed = json.loads(index.read_text())
        listed["weight_map"]["gone.weight"] = second.name
        index.write_text(json.dumps(listed))
        return "gone.weight"
    if kind == "another set of shards":
        index.unlink()
        write_safetensors(folder / "model-00001-of-00001.safetensors", weights())
        return "two sets of shards"
    second.unlink()
    if kind == "a shard":
        return second.name
    index.unlink()
    return "shard 00002 of 00003"


@pytest.mark.parametrize("kind", ["a shard", "a shard without an index", "a tensor", "another set of shards"])
@pytest.mark.parametrize("use", USES)
def test_what_is_missing_is_named_before_anything_is_written(tmp_path, use, kind):
    name = incomplete(tmp_path / "src", kind)
    write_folder(tmp_path / "other", weights())
    with pytest.raises(HfExtError, match=name):
        taken(tmp_path / "src", tmp_path / "other", tmp_path / "out")[use]()
    assert not list(tmp_path.glob("out/**/*.safetensors"))


def test_leftovers_of_another_save_do_not_count(tmp_path):
    folder = write_folder(tmp_path, weights(), shards=2)
    write_safetensors(folder / "model-00001-of-00003.safetensors", weights())
    assert len(open_weights(folder)) == 2 and len(open_weights(folder, variants=True)) == 3
    write_safetensors(folder / "model.safetensors", weights())
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert len(open_weights(folder)) == 1 and len(open_weights(folder, variants=True)) == 3


def test_a_variant_is_complete_by_its_own_index(tmp_path):
    folder = write_folder(tmp_path, weights(), shards=2)
    for path in [*folder.glob("*-of-*"), folder / "model.safetensors.index.json"]:
        path.rename(
            folder
            / path.name.replace(".safetensors", ".fp16.safetensors", 1).replace(
                "fp16.safetensors.index.json", "safetensors.index.fp16.json"
            )
        )
    write_safetensors(folder / "model.safetensors", weights())
    index = folder / "model.safetensors.index.fp16.json"
    index.write_text(index.read_text().replace(".safetensors", ".fp16.safetensors"))
    assert len(open_weights(folder, variants=True)) == 3
    (folder / "model-00002-of-00002.fp16.safetensors").unlink()
    assert len(open_weights(folder)) == 1
    with pytest.raises(HfExtError, match="model-00002-of-00002.fp16.safetensors"):
        open_weights(folder, variants=True)


FP8 = {"quant_method": "fp8"}
QUANTIZED = {
    "at the top": {"quantization_config": FP8},
    "nested": {"thinker_config": {"text_config": {"quantization_config": FP8}}},
    "in a part of another name": {"decoder": {"quantization_config": FP8}},
    "of compressed-tensors": {"compression_config": FP8},
}


@pytest.mark.parametrize("where", QUANTIZED)
@pytest.mark.parametrize("use", [use for use in USES if use not in ("compress, no base", "find_base")])
def test_a_quantized_model_is_refused_beside_a_plain_one(tmp_path, use, where):
    src, other = pair(tmp_path)
    edit_config(src, **QUANTIZED[where])
    with pytest.raises(HfExtError, match=r"is quantized \(fp8\)"):
        taken(src, other, tmp_path / "out")[use]()
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("use", [use for use in USES if use != "enable"])
def test_the_folder_of_a_task_is_refused_by_name(tmp_path, use):
    src, other = pair(tmp_path)
    edit_config(src, quantization_config={"quant_method": "hf_ext.emr", "task": "cola"})
    with pytest.raises(HfExtError, match="holds task 'cola' of a merge"):
        taken(src, other, tmp_path / "out")[use]()


def test_an_entry_of_this_package_or_an_empty_one_is_no_quantization():
    for entry in ({"quant_method": "hf_ext.fm_delta"}, {}, None):
        assert quantization_of({"quantization_config": entry, "text_config": {"quantization_config": entry}}) is None
