"""Tiny models of diffusers, pipelines around them, and what they compute. Built in code and seeded."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import diffusers
import torch
from tiny_models import perturb
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

BLOCKS = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 32, "norm_num_groups": 2} | BLOCKS
FLUX = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
FLUX |= {"in_channels": 4, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}
SD3 = {"sample_size": 8, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4}
VAE = {"block_out_channels": (4, 8), "norm_num_groups": 2, "latent_channels": 4}
VAE |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
WAN = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4}
WAN |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 32}
TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SD3 |= {"patch_size": 1, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 64}
SD3 |= {"out_channels": 4}


class Kind(NamedTuple):
    """A model's class and configuration, its inputs by shape, and the pipeline that has it as this component."""

    model: type[nn.Module]
    config: dict[str, Any]
    inputs: dict[str, tuple[int, ...]]
    pipeline: type
    component: str

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model(**self.config)

    @torch.no_grad()
    def output(self, model: nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        inputs = {name: torch.rand(shape, generator=generator) for name, shape in self.inputs.items()}
        return model.eval()(**inputs).sample

    def pipe(self, model: nn.Module | None = None) -> Any:
        """A pipeline without other components."""
        names = inspect.signature(self.pipeline.__init__).parameters.keys() - {"self", "requires_safety_checker"}
        return self.pipeline(**dict.fromkeys(names) | {self.component: model or self.build()})


SAMPLE = {"timestep": (1,)}
TOKENS = SAMPLE | {"encoder_hidden_states": (1, 5, 32)}
KINDS = {
    "unet": Kind(
        diffusers.UNet2DConditionModel, UNET, TOKENS | {"sample": (1, 4, 8, 8)}, diffusers.StableDiffusionPipeline, "unet"
    ),
    "flux": Kind(
        diffusers.FluxTransformer2DModel,
        FLUX,
        TOKENS | {"hidden_states": (1, 9, 4), "pooled_projections": (1, 32), "img_ids": (9, 3), "txt_ids": (5, 3)},
        diffusers.FluxPipeline,
        "transformer",
    ),
    "sd3": Kind(
        diffusers.SD3Transformer2DModel,
        SD3,
        TOKENS | {"hidden_states": (1, 4, 8, 8), "pooled_projections": (1, 64)},
        diffusers.StableDiffusion3Pipeline,
        "transformer",
    ),
}

#: By name, a class and a configuration.
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "vae": (diffusers.AutoencoderKL, VAE),
    "wan": (diffusers.WanTransformer3DModel, WAN),  # keeps some weights in float32
} | {name: (kind.model, kind.config) for name, kind in KINDS.items()}


def model(name: str) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    return kind(**config).eval()


def tuned(name: str, seed: int = 1) -> Any:
    return perturb(model(name), seed)


def pipeline(unet: nn.Module, text_seed: int | None = None) -> diffusers.StableDiffusionPipeline:
    """A pipeline with a base's autoencoder and the given UNet, without tokenizer and safety checker."""
    torch.manual_seed(0)
    text = CLIPTextModel(CLIPTextConfig(**TEXT, max_position_embeddings=16)).eval()
    parts = {"unet": unet, "vae": model("vae"), "text_encoder": text if text_seed is None else perturb(text, text_seed)}
    scheduler = diffusers.DDIMScheduler()
    return diffusers.StableDiffusionPipeline(**parts, scheduler=scheduler, **MISSING, requires_safety_checker=False)


MISSING = {"tokenizer": None, "safety_checker": None, "feature_extractor": None}


def load(folder: object, **options: Any) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(folder, **MISSING, **options)
