"""One folder with a LoRA that PEFT loads from `lora`, and the exact fine-tune, whose compressed weights refer to the LoRA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_adapters import difference, logits
from tiny_checkpoints import contents, edit_settings, flip_bit
from tiny_models import MODELS, assert_same_weights, fine_tuned, llama, perturb
from transformers import AutoModelForCausalLM
from valid_cards import valid_card

from hf_ext import CheckpointError, CorruptFileError, HfExtError, emr, fm_delta
from hf_ext.cli.main import main
from hf_ext.storage.delta import lora as stored
from hf_ext.storage.open import open_checkpoint, open_files
from hf_ext.storage.safetensors_file import SafetensorsFile

ADAPTER = Path("lora/adapter_model.safetensors")
UP = "model.layers.0.mlp.up_proj"


def compress(folder: Path, name: str = "tuned", **options) -> Path:
    fm_delta.compress_checkpoint(folder / name, folder / "base", folder / "small", **{"lora_rank": 4} | options)
    return folder / "small"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with the fine-tune `tuned`, its `base`, and both of them in `small`."""
    fine_tuned(llama(), tmp_path)
    return compress(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_the_fine_tune_and_its_lora(tmp_path, name, dtype):
    base = MODELS[name].build().to(dtype)
    fine_tuned(base, tmp_path)
    small = compress(tmp_path, verify=True)
    assert_same_weights(*(type(base).from_pretrained(tmp_path / name) for name in ("small", "tuned")))
    fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=4)
    adapters = [load_file(folder / "adapter_model.safetensors") for folder in (small / "lora", tmp_path / "lora")]
    assert adapters[0].keys() == {key for key in adapters[1] if "experts" not in key}
    for key in (key for key in adapters[0] if key.endswith("lora_A.weight")):
        products = [(lora[key.replace("lora_A", "lora_B")].float() @ lora[key].float()) for lora in adapters]
        torch.testing.assert_close(*products, rtol=0, atol=0.02 * products[1].abs().max().item())
    PeftModel.from_pretrained(base, small / "lora")
    fm_delta.decompress_checkpoint(small, tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(tmp_path / "tuned")


def test_the_lora_is_stored_once(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "base")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # changes of rank 3
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                left = torch.randn(layer.out_features, 3, generator=generator)
                layer.weight += left @ torch.randn(3, layer.in_features, generator=generator) * 1e-3
    model.save_pretrained(tmp_path / "tuned")
    small = compress(tmp_path, lora_rank=3)
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "alone")
    (file,) = open_files(small)
    assert all(part.moves for part in file.lora_parts.values())
    assert small.joinpath("model.safetensors").stat().st_size < tmp_path.joinpath("alone/model.safetensors").stat().st_size


def test_a_prediction_is_the_exact_sum_of_products(small):
    (file,) = open_files(small)
    base = open_checkpoint(small.parent / "base")
    for name in file.lora_parts:
        left, right, exponent = file.lora.factors(name)
        A, B = (side.to_torch().double().numpy() for side in file.lora.sides(name))
        exact = np.ldexp((left.astype(int) @ right.astype(int)).astype(float), -exponent)
        assert np.allclose(exact, B @ A, atol=1e-5 * np.abs(B @ A).max())
        before = base.read(name).to_torch().double().numpy()
        moved = file.lora.move(name, base.read(name)).to_torch().numpy()
        assert np.array_equal(moved, (before + exact).astype(np.float32)) or not file.lora_parts[name].moves


def test_a_share_of_the_energy_gives_ranks(tmp_path):
    tuned = fine_tuned(llama(), tmp_path)
    small = compress(tmp_path, lora_rank=8, lora_energy=0.3)
    config = json.loads((small / "lora/adapter_config.json").read_text())
    assert config["r"] <= 8 and config["rank_pattern"]
    assert_same_weights(AutoModelForCausalLM.from_pretrained(small), tuned)


def test_shards_share_a_lora(tmp_path):
    tuned = fine_tuned(llama(), tmp_path)
    tuned.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    small = compress(tmp_path, "shards")
    assert len(open_files(small)) > 2
    assert_same_weights(AutoModelForCausalLM.from_pretrained(small), tuned)
    assert fm_delta.verify(small) == len(tuned.state_dict())
    fm_delta.decompress_checkpoint(small, tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(tmp_path / "shards")


def test_a_model_is_switched_to_the_folder(small):
    model = AutoModelForCausalLM.from_pretrained(small.parent / "base")
    fm_delta.switch(model, small)
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(small.parent / "tuned"))


def test_single_tensors_are_read(small):
    tuned = load_file(small.parent / "tuned/model.safetensors")
    with fm_delta.open(small) as checkpoint:
        for name, tensor in tuned.items():
            assert torch.equal(checkpoint.get_tensor(name), tensor)
            assert torch.equal(checkpoint.get_slice(name)[1:3], tensor[1:3])


def test_a_folder_is_the_base_of_another(tmp_path, small):
    newer = perturb(AutoModelForCausalLM.from_pretrained(small), 7)
    newer.save_pretrained(tmp_path / "newer")
    fm_delta.compress_checkpoint(tmp_path / "newer", small, tmp_path / "chain", lora_rank=2)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "chain"), newer)


def test_the_lora_comes_out_without_the_base(tmp_path, small):
    (tmp_path / "base").rename(tmp_path / "moved")
    edit_settings(small, base="../moved")
    (tmp_path / "moved/model.safetensors").write_bytes(b"")
    report = fm_delta.extract_lora(small, None, tmp_path / "out")
    assert {layer.rank for layer in report.layers} == {4} and report.energy is None
    assert (tmp_path / "out/adapter_model.safetensors").read_bytes() == (small / ADAPTER).read_bytes()


@pytest.mark.parametrize("damage", ["flipped", "another", "cut", "missing", "renamed"])
def test_another_lora_is_an_error(tmp_path, small, damage):
    path = small / ADAPTER
    if damage == "flipped":
        file = SafetensorsFile(path)
        entry = file.entries[f"base_model.model.{UP}.lora_B.weight"]
        flip_bit(path, (8.5 + len(file.header_bytes) + entry.begin) / path.stat().st_size)
    elif damage == "another":
        perturb(llama(), 5).save_pretrained(tmp_path / "other")
        fm_delta.extract_lora(tmp_path / "other", tmp_path / "base", tmp_path / "other-lora", rank=4)
        shutil.copy(tmp_path / "other-lora/adapter_model.safetensors", path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "missing":
        path.unlink()
    else:
        save_file({f"{name}s": tensor for name, tensor in load_file(path).items()}, path)
    model = llama()
    before = logits(model)
    with pytest.raises(CorruptFileError, match="lora/adapter_model.safetensors"):
        fm_delta.switch(model, small)
    assert difference(logits(model), before) == 0
    for read in (AutoModelForCausalLM.from_pretrained, fm_delta.verify, fm_delta.inspect):
        with pytest.raises(CorruptFileError, match="lora/adapter_model.safetensors"):
            read(small)
    with pytest.raises(CorruptFileError, match="lora/adapter_model.safetensors"):
        fm_delta.open(small).get_tensor(f"{UP}.weight")
    with pytest.raises(CorruptFileError, match="lora/adapter_model.safetensors"):
        fm_delta.decompress_checkpoint(small, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_a_forged_lora_is_an_error(small):
    (file,) = open_files(small)
    name = next(iter(file.lora_parts))
    A, B = file.lora.sides(name)
    for sides in ((A, A), (B, A)):
        tensors = {f"{file.lora_parts[name].layer}.lora_{side}.weight": raw.to_torch() for side, raw in zip("AB", sides)}
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, small / ADAPTER)
        layers = {name: (file.lora_parts[name].layer, False)}
        with pytest.raises(CorruptFileError, match="is not the LoRA"):
            stored.StoredLora.written(small / "lora", layers).factors(name)


def test_cards_tell_of_the_lora(small):
    assert "lora" in valid_card(small, "fm_delta")[1]
    valid_card(small / "lora", "lora")


def test_an_old_lora_goes_when_the_folder_is_written_again(tmp_path, small):
    compress(tmp_path, lora_rank=None)
    assert not (small / "lora").exists()
    compress(tmp_path)
    (small / "lora/notes.txt").write_text("mine")
    compress(tmp_path, lora_rank=None)
    assert [path.name for path in (small / "lora").iterdir()] == ["notes.txt"]


def test_an_old_lora_goes_when_another_model_is_saved_there(tmp_path, small):
    model = fm_delta.enable(perturb(llama(), 2), tmp_path / "base")
    model.save_pretrained(small)
    assert not (small / "lora").exists()
    assert_same_weights(AutoModelForCausalLM.from_pretrained(small), model)


def test_impossible_loras_are_errors(tmp_path):
    fine_tuned(llama(), tmp_path)
    for options, error in (
        ({"lora_rank": 0}, HfExtError),
        ({"lora_energy": 2}, HfExtError),
        ({"lora_rank": 1000}, HfExtError),
    ):
        with pytest.raises(error):
            compress(tmp_path, **options)
    with pytest.raises(ValueError, match="require a base"):
        fm_delta.compress_checkpoint(tmp_path / "tuned", None, tmp_path / "small", lora_rank=4)
    (tmp_path / "tuned/lora").mkdir()
    with pytest.raises(CheckpointError, match="Move it away"):
        compress(tmp_path)
    assert not (tmp_path / "small").exists()


def test_the_command_line_writes_and_reads_both(tmp_path, capsys):
    fine_tuned(llama(), tmp_path)
    tuned, base, small = (str(tmp_path / name) for name in ("tuned", "base", "small"))
    assert main(["compress", tuned, "--base", base, "--lora-rank", "6", "--out", small]) == 0
    files = ("model.safetensors", ADAPTER)
    size = sum((tmp_path / "small" / name).stat().st_size for name in files)
    assert fm_delta.inspect(small).compressed_bytes == size
    assert sorted(tensor.rank for tensor in fm_delta.inspect(small).tensors if tensor.rank) == 15 * [6]
    assert main(["verify", small]) == 0 and main(["extract-lora", small, "--out", str(tmp_path / "lora")]) == 0
    assert "15 layers, rank 6" in capsys.readouterr().out
    for options in (["--no-base"], ["--base", base, "--dry-run"]):
        assert main(["compress", tuned, *options, "--lora-rank", "6", "--out", str(tmp_path / "b")]) == 2
    assert main(["extract-lora", small, "--modules-to-save", "--out", str(tmp_path / "b")]) == 1
    assert "modules_to_save requires the base" in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_such_folders_are_merged(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    for seed, name in enumerate("ab", 1):
        perturb(llama(), seed).save_pretrained(tmp_path / f"{name}-plain")
        fm_delta.compress_checkpoint(tmp_path / f"{name}-plain", tmp_path / "base", tmp_path / name, lora_rank=4)
    for tasks, out in (("", "merged"), ("-plain", "expected")):
        emr.merge(tmp_path / "base", {name: tmp_path / f"{name}{tasks}" for name in "ab"}, tmp_path / out)
    for name in "ab":
        emr.extract(tmp_path / "merged", name, tmp_path / "from-small")
        emr.extract(tmp_path / "expected", name, tmp_path / "from-plain")
        weights = [load_file(tmp_path / folder / "model.safetensors") for folder in ("from-small", "from-plain")]
        assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
