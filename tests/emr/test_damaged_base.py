"""A base that was damaged after the merge gives the exact tensors or an error, and `verify` finds the damage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_folder
from tiny_merges import METHODS

from hf_ext import HfExtError, emr
from hf_ext.emr.folder import MergeFolder
from hf_ext.storage.native import FLOATS
from hf_ext.storage.safetensors_file import SafetensorsFile, torch_dtype

FLIPS = 12  # of a bit each, spread over the base's data


def tensors(base_type: str, task_type: str, seed: int) -> dict[str, torch.Tensor]:
    """Weights as training in bf16 leaves them, in a wider type: most payloads are then coded without the base's low bits."""
    generator = torch.Generator().manual_seed(0)
    base = {"layer.weight": torch.randn(24, 16, generator=generator), "layer.bias": torch.zeros(16)}
    if not seed:
        return {name: tensor.to(torch_dtype(base_type)) for name, tensor in base.items()}
    generator.manual_seed(seed)
    tuned = {name: tensor + torch.randn(tensor.shape, generator=generator) / 64 for name, tensor in base.items()}
    return {name: tensor.bfloat16().to(torch_dtype(task_type)) for name, tensor in tuned.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task_type", FLOATS)
@pytest.mark.parametrize("base_type", FLOATS)
def test_a_flipped_bit_of_the_base_is_found_or_harmless(tmp_path, base_type, task_type, method):
    if (task_type, method) == ("F64", "switch"):
        pytest.skip("float64 cannot be coded")
    base = write_folder(tmp_path / "base", tensors(base_type, task_type, 0))
    tasks = {f"t{seed}": write_folder(tmp_path / f"t{seed}", tensors(base_type, task_type, seed)) for seed in (1, 2)}
    emr.merge(base, tasks, tmp_path / "merged", **METHODS[method])
    merged = MergeFolder(tmp_path / "merged")
    expected = {(task, name): merged.tensor(task, name).data for task in tasks for name in merged.source(task).names()}
    path = base / "model.safetensors"
    content, start = path.read_bytes(), 8 + len(SafetensorsFile(path).header_bytes)
    noticed = 0
    for place in np.linspace(start, len(content) - 1, FLIPS, dtype=int):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            merged = MergeFolder(tmp_path / "merged")
            for (task, name), data in expected.items():
                assert np.array_equal(merged.tensor(task, name).data, data), (place, task, name)
        except HfExtError:
            noticed += 1
            with pytest.raises(HfExtError):
                emr.verify(tmp_path / "merged")
        else:
            emr.verify(tmp_path / "merged")
    assert noticed
