"""`fm_delta.open` reads single tensors and rows as `safe_open` does. test_hub.py opens repositories."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_checkpoints import compressed_pair, fine_tune, flip_bit, pair, weights, write_folder

from hf_ext import fm_delta
from hf_ext.errors import BaseModelError, CorruptFileError

INDICES = (slice(3, 7), slice(None), slice(1, 9, 2), slice(90, 9999), slice(5, 2), 2, -1, (slice(2, 5), slice(3, 4)), (..., 3))
INDICES += (True, False, (True, slice(1, 3)), None, (None, 2), np.int64(5), [3, 1], (2, True), (2, ..., -1), torch.tensor([7]))


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_and_slices_equal_those_of_safe_open(tmp_path, shards):
    src, _, small = compressed_pair(tmp_path, torch.bfloat16, shards)
    expected = fine_tune(weights(torch.bfloat16))
    for folder in (src, small):
        with fm_delta.open(folder) as checkpoint:
            assert sorted(checkpoint.keys()) == sorted(expected) == sorted(checkpoint) and len(checkpoint) == 7
            for path in src.glob("*.safetensors"):
                with safe_open(path, "pt") as file:
                    for name in file.keys():
                        assert torch.equal(checkpoint.get_tensor(name), file.get_tensor(name))
                        part = checkpoint.get_slice(name)
                        assert part.get_shape() == file.get_slice(name).get_shape()
                        assert part.get_dtype() == file.get_slice(name).get_dtype()
            for index in INDICES:
                assert torch.equal(checkpoint.get_slice("lm_head.weight")[index], expected["lm_head.weight"][index])
            with pytest.raises(IndexError):
                checkpoint.get_slice("lm_head.weight")[0, 0, 0]


@pytest.mark.parametrize("shards", [1, 3])
def test_reading_a_tensor_checks_its_payload_and_no_other(tmp_path, shards):
    *_, small = compressed_pair(tmp_path, shards=shards)
    path = max(small.glob("*.safetensors"))
    with safe_open(path, "pt") as file:
        *_, damaged = sorted(file.keys(), key=lambda name: file.get_tensor(name).data_ptr())
    flip_bit(path)  # of the last payload
    with fm_delta.open(small) as checkpoint:
        for name in {*checkpoint.keys()} - {damaged}:
            assert torch.equal(checkpoint.get_tensor(name), fine_tune(weights())[name])
        with pytest.raises(CorruptFileError, match=f"{path}: Tensor '{damaged}' is damaged: checksum mismatch"):
            checkpoint.get_tensor(damaged)


def test_odd_tensors_have_parts_too(tmp_path):
    tensors = {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "flags": torch.tensor([True, False])}
    write_folder(tmp_path / "model", tensors)
    fm_delta.compress_checkpoint(tmp_path / "model", write_folder(tmp_path / "base", tensors), tmp_path / "small")
    for folder in ("model", "small"):
        checkpoint = fm_delta.open(tmp_path / folder)
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.get_tensor(name), tensor) and torch.equal(checkpoint.get_slice(name)[...], tensor)
        assert checkpoint.get_slice("empty")[:].shape == (0, 4)
        assert torch.equal(checkpoint.get_slice("flags")[()], tensors["flags"])
        with pytest.raises(IndexError):
            checkpoint.get_slice("flags")[2]


def test_a_tensor_is_writable_and_outlives_the_checkpoint(tmp_path):
    src, base = pair(tmp_path)
    with fm_delta.open(src) as checkpoint:
        whole, part = checkpoint.get_tensor("lm_head.weight"), checkpoint.get_slice("lm_head.weight")[:2]
        with pytest.raises(KeyError, match="has no tensor 'nothing'"):
            checkpoint.get_tensor("nothing")
    with pytest.raises(ValueError, match="closed"):
        checkpoint.get_tensor("lm_head.weight")
    before = (src / "model.safetensors").read_bytes()
    whole.zero_()
    part.zero_()
    assert (src / "model.safetensors").read_bytes() == before


def test_the_base_of_a_chain_may_be_given(tmp_path):
    _, base, small = compressed_pair(tmp_path)
    expected = fine_tune(fine_tune(weights()), seed=2)
    fm_delta.compress_checkpoint(write_folder(tmp_path / "newer", expected), small, tmp_path / "chain")
    small.rename(tmp_path / "moved")
    with pytest.raises(BaseModelError, match="is needed to read this checkpoint.*--base"):
        fm_delta.open(tmp_path / "chain")
    checkpoint = fm_delta.open(tmp_path / "chain", base=tmp_path / "moved")
    assert torch.equal(checkpoint.get_tensor("lm_head.weight"), expected["lm_head.weight"])
    with pytest.raises(BaseModelError, match="is another model or revision"):
        fm_delta.open(tmp_path / "chain", base=base)
