"""A report lists the sizes of all tensors, and its sums are the sizes of the files."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_checkpoints import compressed_pair, fine_tune, weights, write_folder

from hf_ext import fm_delta
from hf_ext.storage.delta.file import CompressedFile


@pytest.fixture
def report(tmp_path):
    """Of a checkpoint with a tensor of every kind and way of storing."""
    base = weights() | {"model.layers.10.mlp.up_proj.weight": torch.randn(64, 16)}
    tuned = fine_tune(base) | {
        "model.embed_tokens.weight": torch.cat([fine_tune(base)["model.embed_tokens.weight"], torch.randn(4, 16)]),
        "model.layers.10.mlp.up_proj.weight": torch.randn(64, 16).bfloat16(),
        "classifier.weight": torch.randn(40, 16) * 0.02,
        "position_ids": torch.arange(32),
        "scale": torch.tensor(1.0),
        "nothing": torch.empty(0, 3),
    }
    src, folder = write_folder(tmp_path / "tuned", tuned), write_folder(tmp_path / "base", base)
    fm_delta.compress_checkpoint(src, folder, tmp_path / "small")
    return fm_delta.inspect(tmp_path / "small")


@pytest.mark.parametrize("shards", [1, 3])
def test_the_sums_are_the_sizes_of_the_files(tmp_path, shards):
    src, base, small = compressed_pair(tmp_path, shards=shards)
    report = fm_delta.inspect(small)
    files = [CompressedFile(path) for path in small.glob("*.safetensors")]
    assert len(files) == shards
    assert report.original_bytes == sum(path.stat().st_size for path in src.glob("*.safetensors"))
    assert report.compressed_bytes == sum(path.stat().st_size for path in small.glob("*.safetensors"))
    assert report.ratio == report.compressed_bytes / report.original_bytes
    assert sum(tensor.original_bytes for tensor in report.tensors) == sum(4 * tensor.numel() for tensor in weights().values())
    assert {tensor.name: tensor.compressed_bytes for tensor in report.tensors} == {
        name: file.payload(name).size for file in files for name in file.original
    }
    assert sum(tensor.parameters for tensor in report.tensors) == sum(tensor.numel() for tensor in weights().values())
    assert (report.base, report.revision) == (f"../{base.name}", None)


def test_every_tensor_has_its_kind_type_shape_and_method(report):
    rows = {tensor.name: (tensor.kind, tensor.how, tensor.dtype, tensor.shape, tensor.parameters) for tensor in report.tensors}
    assert rows == {
        "model.embed_tokens.weight": ("embedding", "resized", "F32", (100, 16), 1600),
        "model.layers.0.self_attn.q_proj.weight": ("attention", "delta", "F32", (16, 16), 256),
        "model.layers.0.mlp.up_proj.weight": ("mlp", "delta", "F32", (64, 16), 1024),
        "model.layers.1.self_attn.q_proj.weight": ("attention", "delta", "F32", (16, 16), 256),
        "model.layers.1.mlp.up_proj.weight": ("mlp", "delta", "F32", (64, 16), 1024),
        "model.layers.10.mlp.up_proj.weight": ("mlp", "alone", "BF16", (64, 16), 1024),
        "model.norm.weight": ("norm", "delta", "F32", (16,), 16),
        "lm_head.weight": ("other", "delta", "F32", (96, 16), 1536),
        "classifier.weight": ("other", "alone", "F32", (40, 16), 640),
        "position_ids": ("other", "alone", "I64", (32,), 32),
        "scale": ("other", "stored", "F32", (), 1),
        "nothing": ("other", "stored", "F32", (0, 3), 0),
    }
    names = [tensor.name for tensor in report.tensors]
    assert names.index("model.layers.1.mlp.up_proj.weight") < names.index("model.layers.10.mlp.up_proj.weight")
    bits = {tensor.name: tensor.bits_per_parameter for tensor in report.tensors}
    assert 16 < bits["position_ids"] < 64 and 0 < bits["lm_head.weight"] < 32


KINDS = {
    "embedding": ["bert.embeddings.word_embeddings.weight", "transformer.wte.weight"],
    "norm": ["transformer.h.0.ln_1.weight", "bert.encoder.layer.0.attention.output.LayerNorm.weight"],
    "attention": [
        "bert.encoder.layer.0.attention.output.dense.weight",
        "transformer.h.0.attn.c_attn.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ],
    "mlp": [
        "bert.encoder.layer.0.intermediate.dense.weight",
        "bert.encoder.layer.0.output.dense.weight",
        "transformer.h.0.mlp.c_fc.weight",
        "model.layers.0.block_sparse_moe.experts.3.w1.weight",
    ],
    "other": ["score.weight", "²", "٣.4.weight", "", "x.1.weight"],
}


def test_names_of_the_usual_models_have_the_right_kind(tmp_path):
    kinds = {name: kind for kind, names in KINDS.items() for name in names}
    src = write_folder(tmp_path / "tuned", {name: torch.zeros(3) for name in kinds})
    fm_delta.compress_checkpoint(src, write_folder(tmp_path / "base", weights()), tmp_path / "small")
    report = fm_delta.inspect(tmp_path / "small")
    assert {tensor.name: tensor.kind for tensor in report.tensors} == kinds
    report.plot(tmp_path / "plot.png")


def test_the_text_lists_every_tensor_every_kind_and_the_sum(report):
    text = str(report)
    for tensor in report.tensors:
        assert f"{tensor.name} " in text and f"{tensor.compressed_bytes:,}" in text
    kinds = report.kind_table().splitlines()
    assert {line.split()[0] for line in kinds[2:]} == {tensor.kind for tensor in report.tensors} | {"all"}
    assert kinds[-1].split()[:2] == ["all", f"{sum(tensor.parameters for tensor in report.tensors):,}"]
    assert text.endswith(report.summary())
    assert f"({100 * report.ratio:.1f} %)" in report.summary() and report.base in report.summary()
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_the_json_has_what_the_report_has(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ratio"] == report.ratio and data["base"] == report.base and data["revision"] is None
    assert data["compressed_bytes"] == report.compressed_bytes and data["original_bytes"] == report.original_bytes
    assert [(row["name"], row["how"], tuple(row["shape"])) for row in data["tensors"]] == [
        (tensor.name, tensor.how, tensor.shape) for tensor in report.tensors
    ]


def test_inspecting_needs_no_base_and_no_config(tmp_path):
    _, base, small = compressed_pair(tmp_path)
    before = fm_delta.inspect(small)
    shutil.rmtree(base)
    (small / "config.json").unlink()
    assert replace(fm_delta.inspect(small), base=before.base) == before
