"""No method takes a source of which a part is missing, or that is no plain model: not as a fine-tune, a task or a base."""

import json
import os
import shutil

import pytest
from peft import LoraConfig
from tiny_adapters import small_llama, trained
from tiny_checkpoints import CONFIG, edit_config, fine_tune, weights, write_folder, write_safetensors
from tiny_models import bert

from hf_ext import emr, fm_delta
from hf_ext.errors import HfExtError
from hf_ext.storage.config_file import quantization_of
from hf_ext.storage.layout import MOVING
from hf_ext.storage.weights import PARTS_OF, open_weights


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
        "merge": lambda: emr.merge(other, {"task": src}, out, method="emr"),
        "open": lambda: fm_delta.open(src),
        "merge, as base": lambda: emr.merge(src, {"task": other}, out, method="switch"),
    }


def raised(report):
    raise HfExtError(report.failed[0].error)


def raised_unread(report):
    assert report.verdict == "none"
    raise HfExtError(report.candidates[0].why)


USES = [*taken(None, None, None)]


SECOND, INDEX = "model-00002-of-00003.safetensors", "model.safetensors.index.json"
FP8 = {"quant_method": "fp8"}


def without(*patterns):
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


def replace_by_pickle(folder):
    without("*model*")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def list_another(folder):
    listed = json.loads((folder / INDEX).read_text())
    listed["weight_map"]["gone.weight"] = SECOND
    (folder / INDEX).write_text(json.dumps(listed))


def add_another_set(folder):
    (folder / INDEX).unlink()
    write_safetensors(folder / "model-00001-of-00001.safetensors", weights())


def mark_as_merge(folder):
    write_safetensors(folder / "model-00001-of-00003.safetensors", weights(), {PARTS_OF: "{}"})


def configured(**changes):
    return lambda folder: edit_config(folder, **changes)


def replace_by_compressed(folder):
    fm_delta.compress_checkpoint(folder, folder.with_name("other"), folder.with_name("small"))
    shutil.rmtree(folder)
    folder.with_name("small").rename(folder)
    (folder / "config.json").write_text(CONFIG)  # the weights decide


def replace_by_adapter(folder):
    shutil.rmtree(folder)
    trained(small_llama(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)


#: By what is wrong: how a model of three shards becomes that, the message, and the uses for which it is not wrong.
ALONE = ("compress, no base", "find_base", "open")  # compare no two models
READS_COMPRESSED = ("enable", "switch", "open", "merge", "extract_lora", "extract_lora, as base", "compress, as base")
WRONG = {
    "no folder": (shutil.rmtree, "is not a folder|there is no folder", ()),
    "no weights": (without("*model*"), "src holds no safetensors weights", ()),
    "PyTorch weights": (replace_by_pickle, "save it again", ()),
    "a cut shard": (lambda folder: os.truncate(folder / SECOND, 40), f"{SECOND} is not a readable safetensors file", ()),
    "a pipe": (lambda folder: replace_by_pipe(folder / SECOND), f"{SECOND} is not a file", ()),
    "a pipe as config": (lambda folder: replace_by_pipe(folder / "config.json"), "config.json is not a file", ()),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON", ()),
    "an index of nothing": (lambda folder: (folder / INDEX).write_text("{}"), f"{INDEX} is not an index", ()),
    "being moved": (lambda folder: (folder / MOVING).mkdir(), "is incomplete: a command that wrote to it was interrupted", ()),
    "no shard": (without(SECOND), SECOND, ()),
    "no shard, no index": (without(SECOND, INDEX), "shard 00002 of 00003", ()),
    "no tensor": (list_another, "gone.weight", ()),
    "two sets of shards": (add_another_set, "two sets of shards", ()),
    "quantized": (configured(quantization_config=FP8), r"is quantized \(fp8\)", ALONE),
    "quantized, nested": (
        configured(thinker_config={"text_config": {"quantization_config": FP8}}),
        r"quantized \(fp8\)",
        ALONE,
    ),
    "quantized, in a part": (configured(decoder={"quantization_config": FP8}), r"is quantized \(fp8\)", ALONE),
    "compressed-tensors": (configured(compression_config=FP8), r"is quantized \(fp8\)", ALONE),
    "quantized by a name": (configured(quantization_config="gptq"), "is quantized|is not quantized, but the model is", ALONE),
    "a task": (
        configured(quantization_config={"quant_method": "hf_ext.emr", "task": "cola"}),
        "holds task 'cola' of a merge",
        ("enable",),
    ),
    "a merge": (mark_as_merge, "holds several models merged into one; `hf-ext extract`", ()),
    "compressed": (replace_by_compressed, "is compressed already", READS_COMPRESSED),
    "an adapter": (replace_by_adapter, "holds a PEFT adapter .* stay as they are", ("merge",)),
}


@pytest.mark.parametrize("wrong, use", [(wrong, use) for wrong, row in WRONG.items() for use in USES if use not in row[2]])
def test_what_is_no_plain_model_is_named_before_anything_is_written(tmp_path, use, wrong):
    spoil, message, _ = WRONG[wrong]
    other = write_folder(tmp_path / "other", weights())
    spoil(write_folder(tmp_path / "src", fine_tune(weights()), shards=3))
    with pytest.raises(HfExtError, match=message):
        taken(tmp_path / "src", other, tmp_path / "out")[use]()
    assert not list(tmp_path.glob("out/**/*.safetensors")) and not (tmp_path / "out/config.json").exists()


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


def test_an_entry_of_this_package_or_an_empty_one_is_no_quantization():
    for entry in ({"quant_method": "hf_ext.fm_delta"}, {}, None):
        assert quantization_of({"quantization_config": entry, "text_config": {"quantization_config": entry}}) is None
