"""A LoRA of a fine-tuned model or pipeline of diffusers, as diffusers loads it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_adapters import difference
from tiny_models import perturb
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel
from valid_cards import valid_card

from hf_ext import BaseModelError, CheckpointError, HfExtError, fm_delta

diffusers = pytest.importorskip("diffusers")

from tiny_diffusers import KINDS, Kind  # noqa: E402

FILE = {"weight_name": "pytorch_lora_weights.safetensors", "use_safetensors": True}  # which is searched online otherwise


def saved(kind: Kind, folder: Path) -> tuple[nn.Module, nn.Module]:
    """Saves a model and a fine-tune of it, in which everything has changed. Returns both."""
    base = kind.build()
    tuned = perturb(base)
    base.save_pretrained(folder / "base")
    tuned.save_pretrained(folder / "tuned")
    return base, tuned


@pytest.mark.parametrize("name, aim", [*((name, {"energy": 1.0}) for name in KINDS), ("unet", {"rank": 3}),
                                       ("unet", {"max_size": 90_000})])  # fmt: skip
def test_diffusers_loads_the_change_of_every_layer(tmp_path, name, aim):
    kind = KINDS[name]
    base, tuned = saved(kind, tmp_path)
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", **aim)
    layers = {name for name, module in base.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    carried = {layer.layer for layer in report.layers}
    assert carried == layers or "max_size" in aim and carried < layers and report.size <= aim["max_size"]
    parameters = dict(tuned.named_parameters())
    assert report.omitted.keys() == parameters.keys() - {f"{name}.weight" for name in carried}
    pipe, expected = kind.pipe(base), kind.build()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*inconsistency|.*missing keys")
        pipe.load_lora_weights(tmp_path / "lora", **FILE)
    for layer in report.layers:
        before, after = expected.get_parameter(f"{layer.layer}.weight"), parameters[f"{layer.layer}.weight"]
        change = base.get_submodule(layer.layer).get_delta_weight("default_0")
        error = torch.linalg.norm(after - before - change) / torch.linalg.norm(after - before)
        assert error.item() == pytest.approx(layer.error, abs=1e-3) and layer.error < ("energy" not in aim or 1e-3)
        before.data += change
    assert (
        difference(kind.output(base), kind.output(expected)) < 1e-4 < difference(kind.output(kind.build()), kind.output(base))
    )


def test_a_pipeline_gives_the_lora_of_its_unet(tmp_path):
    kind = KINDS["unet"]

    def pipeline(seed: int, folder: Path) -> None:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        torch.manual_seed(0)
        encoder = CLIPTextModel(CLIPTextConfig(vocab_size=99, bos_token_id=1, eos_token_id=2, **sizes))
        pipe = kind.pipe()
        pipe.register_modules(text_encoder=encoder)
        if seed:
            pipe.register_modules(unet=perturb(pipe.unet, seed), text_encoder=perturb(encoder, seed))
        pipe.save_pretrained(folder)

    pipeline(0, tmp_path / "base")
    pipeline(1, tmp_path / "tuned")
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=2)
    assert any(name.startswith("text_encoder.") for name in report.omitted)
    assert {layer.layer for layer in report.layers} >= {"conv_in", "mid_block.attentions.0.proj_in"}
    alone = fm_delta.extract_lora(tmp_path / "tuned/unet", tmp_path / "base/unet", tmp_path / "alone", rank=2)
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small")
    fm_delta.extract_lora(tmp_path / "small", None, tmp_path / "again", rank=2)
    files = [(tmp_path / name / FILE["weight_name"]).read_bytes() for name in ("lora", "alone", "again")]
    assert files[0] == files[1] == files[2] and alone.layers == report.layers
    data, text = valid_card(tmp_path / "lora")
    assert data.library_name == "diffusers" and "load_lora_weights" in text
    fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=1)  # it replaces its own result
    with safe_open(tmp_path / "lora" / FILE["weight_name"], "pt") as file:
        assert file.get_slice("unet.conv_out.lora_A.weight").get_shape() == [1, 8, 3, 3]


def test_what_has_no_lora_is_an_error(tmp_path):
    kind, out = KINDS["unet"], tmp_path / "lora"
    saved(kind, tmp_path)
    with pytest.raises(HfExtError, match="modules_to_save=True is not supported"):
        fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", out, modules_to_save=True)
    with pytest.raises(HfExtError, match="is not a causal language model"):
        fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", out, texts=["words"])
    kind.pipe().save_pretrained(tmp_path / "pipeline")
    for tuned, base, message in (
        ("tuned", "pipeline", "holds a diffusers pipeline. Give the folder of one component"),
        ("pipeline", "base", "is the base of the component 'unet'"),
    ):
        with pytest.raises(BaseModelError, match=message):
            fm_delta.extract_lora(tmp_path / tuned, tmp_path / base, out)
    model = diffusers.AutoencoderTiny(encoder_block_out_channels=[8], decoder_block_out_channels=[8],
                                      num_encoder_blocks=[1], num_decoder_blocks=[1])  # fmt: skip
    model.save_pretrained(tmp_path / "vae")
    with pytest.raises(
        CheckpointError, match="no LoRA of the AutoencoderTiny in .*: `load_lora_weights` of a pipeline adds none"
    ):
        fm_delta.extract_lora(tmp_path / "vae", tmp_path / "vae", out)
    assert not out.exists()
