"""PiSSA adapters of diffusers' models: saved as LoRAs that diffusers loads, also where this package is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hosts import adapters_of_transformers
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from test_pissa import config
from tiny_adapters import difference, moved
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from hf_ext import PissaConfig

pytest.importorskip("diffusers")

from diffusers.training_utils import _collate_lora_metadata  # noqa: E402
from tiny_diffusers import KINDS, Kind  # noqa: E402

FILE = {"weight_name": "pytorch_lora_weights.safetensors", "use_safetensors": True}  # which is searched online otherwise
PATTERNS = {"lora_alpha": 6, "rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_v": 3.5}}
OPTIONS = {
    "alpha": {"lora_alpha": 7},
    "patterns": PATTERNS,
    "rsLoRA": PATTERNS | {"use_rslora": True, "target_modules": r".*attn.*\.(to_q|to_v)"},
    "DoRA": PATTERNS | {"use_dora": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def adapted(kind: Kind, options: dict) -> nn.Module:
    model = kind.build().requires_grad_(False)
    # Convolutions of the UNet and of SD 3 are among these.
    model.add_adapter(config(**{"target_modules": ["to_q", "to_v", "conv1", "proj", "proj_mlp"]} | options))
    return model


def save(kind: Kind, model: nn.Module, folder: Path) -> None:
    """Saves the adapter as diffusers' training scripts do."""
    layers = {f"{kind.component}_lora_layers": get_peft_model_state_dict(model)}
    kind.pipeline.save_lora_weights(folder, **layers, **_collate_lora_metadata({kind.component: model}))


@every_option
@every_kind
def test_the_saved_adapter_loads_as_an_equal_lora_and_resumes_in_diffusers_scripts(tmp_path, kind, options):
    model = moved(adapted(kind, options))
    expected = kind.output(model)
    model.save_lora_adapter(tmp_path / "model")
    loaded = kind.build()
    loaded.load_lora_adapter(tmp_path / "model", prefix=None, **FILE)
    save(kind, model, tmp_path / "pipeline")
    pipe = kind.pipe()
    pipe.load_lora_weights(tmp_path / "pipeline", **FILE)
    for one in (loaded, getattr(pipe, kind.component)):
        assert type(one.peft_config["default_0"]) is LoraConfig
        assert difference(kind.output(one), expected) < 1e-5
    assert difference(kind.output(kind.build()), expected) > 1e-3
    again, prefix = adapted(kind, options), f"{kind.component}."
    saved = load_file(tmp_path / "pipeline" / FILE["weight_name"])
    state = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    assert not set_peft_model_state_dict(again, state, "default").unexpected_keys
    for (name, one), (other, two) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert (name, one.requires_grad) == (other, two.requires_grad)
        torch.testing.assert_close(one, two)


@adapters_of_transformers
def test_text_encoders_of_pipelines_load_theirs(tmp_path):
    kind = KINDS["unet"]

    def encoder() -> CLIPTextModel:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        return CLIPTextModel(CLIPTextConfig(vocab_size=99, bos_token_id=1, eos_token_id=2, **sizes)).requires_grad_(False)

    @torch.no_grad()
    def output(model: CLIPTextModel) -> torch.Tensor:
        return model.eval()(torch.arange(3, 9)[None]).last_hidden_state

    model = encoder()
    model.add_adapter(PissaConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=6, rank_pattern={"q_proj": 2}))
    moved(model)
    layers, metadata = get_peft_model_state_dict(model), _collate_lora_metadata({"text_encoder": model})
    kind.pipeline.save_lora_weights(tmp_path, text_encoder_lora_layers=layers, **metadata)
    pipe = kind.pipe()
    pipe.register_modules(text_encoder=encoder())
    pipe.load_lora_weights(tmp_path, **FILE)
    assert difference(output(pipe.text_encoder), output(model)) < 1e-5
