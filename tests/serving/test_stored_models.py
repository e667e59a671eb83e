"""Servers tell from a name which models this package must decode."""

import json

import pytest

from hf_ext.serving.stored_models import StoredModel


def test_a_name_may_end_in_a_task_unless_it_is_a_folder(tmp_path):
    (tmp_path / "model#1").mkdir()
    assert StoredModel.named("org/merge#stories", "v1") == StoredModel("org/merge", "v1", "stories")
    assert StoredModel.named(f"{tmp_path}/model#1") == StoredModel(f"{tmp_path}/model#1")


@pytest.mark.parametrize(("method", "is_encoded"), [("hf_ext.fm_delta", True), ("hf_ext.emr", True), ("fp8", False)])
def test_the_config_says_whether_the_weights_are_encoded(tmp_path, method, is_encoded):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    assert StoredModel.named(f"{tmp_path}#task").is_encoded() == is_encoded


@pytest.mark.parametrize("name", ["/nowhere", "./model.gguf", "s3://bucket/model", "org/not-in-the-cache", "model.gguf"])
def test_other_models_are_left_to_the_server(name):
    assert not StoredModel.named(name).is_encoded()
