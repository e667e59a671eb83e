"""Models that are compressed without a base need nothing but their own files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_corruption import READERS, forge_file
from tiny_checkpoints import assert_restored, compressed_pair, fine_tune, pair, weights, write_folder
from tiny_models import bert
from transformers import AutoModelForSequenceClassification

from hf_ext import fm_delta
from hf_ext.errors import BaseModelError, CorruptFileError
from hf_ext.storage.delta.file import CompressedFile


@pytest.mark.parametrize("dtype, shards", [(torch.float32, 1), (torch.bfloat16, 3), (torch.float64, 1)], ids=str)
def test_a_model_comes_back_byte_for_byte(tmp_path, dtype, shards):
    src = write_folder(tmp_path / "model", weights(dtype) | {"steps": torch.arange(40)}, shards=shards)
    fm_delta.compress_checkpoint(src, None, tmp_path / "small", verify=True)
    assert fm_delta.verify(tmp_path / "small") == 8
    assert_restored(tmp_path / "small", src)
    report = fm_delta.inspect(tmp_path / "small")
    assert (report.base, report.revision) == (None, None) and report.summary().endswith(" %), without a base")
    assert {tensor.how for tensor in report.tensors} <= {"alone", "stored"}
    settings = json.loads((tmp_path / "small/config.json").read_text())["quantization_config"]
    assert (settings["base"], settings["revision"]) == (None, None)
    assert all(CompressedFile(path).base is None for path in (tmp_path / "small").glob("*.safetensors"))


def test_bf16_weights_take_at_most_66_per_cent(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = 0.02 * torch.exp(torch.randn(1024, 1, generator=generator) / 2)
    tensor = (torch.randn(1024, 768, generator=generator) * rows).bfloat16()
    src = write_folder(tmp_path / "model", {"model.embed_tokens.weight": tensor})
    fm_delta.compress_checkpoint(src, None, tmp_path / "small")
    assert fm_delta.inspect(tmp_path / "small").ratio < 0.66


def test_it_loads_opens_can_be_a_base_and_be_switched_to(tmp_path):
    bert().save_pretrained(tmp_path / "model")
    fm_delta.compress_checkpoint(tmp_path / "model", None, tmp_path / "base")
    plain = load_file(tmp_path / "model/model.safetensors")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())
    tuned = fine_tune(plain)
    write_folder(tmp_path / "tuned", tuned, (tmp_path / "model/config.json").read_text())
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small")
    shutil.rmtree(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
    assert all(torch.equal(tensor, tuned[name]) for name, tensor in model.state_dict().items())
    fm_delta.switch(model, tmp_path / "base")
    with fm_delta.open(tmp_path / "base") as checkpoint:
        assert all(torch.equal(checkpoint.get_tensor(name), tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())


def test_a_base_for_weights_without_one_is_an_error(tmp_path):
    src, base = pair(tmp_path)
    fm_delta.compress_checkpoint(src, None, tmp_path / "small")
    for read in (fm_delta.verify, fm_delta.open):
        with pytest.raises(BaseModelError, match="was compressed without a base, but '.*base' is given"):
            read(tmp_path / "small", base=base)
    for options in ({"revision": "main"}, {"base_id": "org/name"}):
        with pytest.raises(ValueError, match="base is None"):
            fm_delta.compress_checkpoint(src, None, tmp_path / "other", **options)
    config = tmp_path / "small/config.json"
    config.write_text(config.read_text().replace('"base": null', f'"base": {json.dumps(str(base))}'))
    with pytest.raises(BaseModelError, match="was compressed without a base, but '.*base' is given"):
        fm_delta.verify(tmp_path / "small")


def test_a_payload_that_needs_an_unrecorded_base_is_refused(tmp_path):
    *_, small = compressed_pair(tmp_path)
    forge_file(small / "model.safetensors", {"base": None})
    for read in (*READERS, lambda folder: fm_delta.open(folder, base=None).get_tensor("lm_head.weight")):
        with pytest.raises((CorruptFileError, BaseModelError), match="records no base|was compressed without a base"):
            read(small)
    (small / "config.json").unlink()
    for read in (*READERS, lambda folder: fm_delta.open(folder).get_tensor("lm_head.weight")):
        with pytest.raises(CorruptFileError, match="tensor '.*' needs '.*' of a base, but the file records no base"):
            read(small)


def test_shards_with_and_without_a_base_are_not_mixed(tmp_path):
    src, _, small = compressed_pair(tmp_path, shards=2)
    fm_delta.compress_checkpoint(src, None, tmp_path / "alone")
    shutil.copy(tmp_path / "alone/model-00001-of-00002.safetensors", small)
    with pytest.raises(CorruptFileError, match="belongs to another save"):
        fm_delta.verify(small)


def test_enable_requires_a_base():
    with pytest.raises(BaseModelError, match="must be a folder or a Hub id, not None"):
        fm_delta.enable(bert(), None)
