"""The size of a compressed checkpoint is estimated from some of its tensors, and nothing is written."""

import pytest
import torch
from tiny_checkpoints import contents, write_folder

from hf_ext import fm_delta
from hf_ext.errors import CheckpointError


def layers(count: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.q_proj.weight": torch.randn(64, 64, generator=generator) for i in range(count)}


@pytest.fixture
def folders(tmp_path):
    """Folders of a base of twelve layers with a vocabulary, and of a fine-tune."""
    base = layers(12, 0) | {"embed.weight": torch.randn(500, 64, generator=torch.Generator().manual_seed(2))}
    noise = layers(12, 1) | {"embed.weight": torch.zeros(500, 64)}
    tuned = {name: weight + 1e-4 * noise[name] for name, weight in base.items()}
    return write_folder(tmp_path / "tuned", tuned), write_folder(tmp_path / "base", base)


@pytest.mark.parametrize("level", [1, 2])
def test_the_estimate_reads_two_of_equal_layers(folders, tmp_path, level):
    tuned, base = folders
    before = contents(tmp_path)
    estimate = fm_delta.estimate(tuned, base, level=level)
    assert contents(tmp_path) == before
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "small", level=level)
    sizes = [tensor.compressed_bytes for tensor in fm_delta.inspect(tmp_path / "small").tensors]
    assert estimate.compressed_bytes == pytest.approx(sum(sizes), rel=0.05)
    assert estimate.original_bytes == 4 * (12 * 64 * 64 + 500 * 64)
    assert estimate.sampled_bytes == 4 * (2 * 64 * 64 + 500 * 64)
    assert "about" in estimate.summary() and str(base) in estimate.summary()


def test_an_estimate_needs_no_base(folders):
    alone = fm_delta.estimate(folders[0], None)
    assert alone.base is None and 0.8 < alone.ratio < 1
    assert fm_delta.estimate(*folders).ratio < alone.ratio


def test_unusable_sources_have_no_estimate(folders, tmp_path):
    tuned, base = folders
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "small")
    with pytest.raises(CheckpointError, match="compressed already"):
        fm_delta.estimate(tmp_path / "small", base)
    with pytest.raises(CheckpointError, match="is not a folder"):
        fm_delta.estimate(tmp_path / "none", base)
