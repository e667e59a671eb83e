"""Tiny vision-language models with random weights, one of each family with a known projector, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import randn
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY, IMAGE = 96, 90  # size, and the placeholder of an image token
SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
ENDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
TEXT = SMALL | ENDS | dict(num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=512, head_dim=8)
VISION = SMALL | dict(image_size=16, patch_size=4, hidden_size=24)
MERGING = dict(depth=2, hidden_size=24, out_hidden_size=32, num_heads=2, patch_size=4, intermediate_size=32)  # Qwen's and GLM's
QWEN = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
PLACEHOLDERS = dict(video_token_id=IMAGE + 1, vision_start_token_id=88)
PINS = [[16, 32], [32, 16], [32, 32]]
PIXELS = (3, 3, 16, 16)

Inputs = dict[str, torch.Tensor]
Built = tuple[PreTrainedModel, Inputs]


def batch(tokens: list[int], pixels: torch.Tensor, before: int = 3, **more: Any) -> Inputs:
    """Returns a batch with `tokens[i]` placeholders in row i, after the token `before`, padded on the left."""
    rows = [[1, 5 + i, before, *[IMAGE] * count, 7, 8, 9 + i] for i, count in enumerate(tokens)]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, **more}


def built(family: str, inputs: Inputs, vision: Any, text: Any, **options: Any) -> Built:
    config = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    return model(config(vision_config=vision, text_config=text, image_token_id=IMAGE, **options)), inputs


def text(family: str, **options: Any) -> PretrainedConfig:
    return getattr(transformers, f"{family}Config")(**TEXT, **options)


def clip() -> PretrainedConfig:
    return transformers.CLIPVisionConfig(**VISION)


def siglip() -> PretrainedConfig:
    return transformers.SiglipVisionConfig(**VISION, vision_use_head=False)


def llava() -> Built:
    return built("Llava", batch([16] * 3, randn(PIXELS)), clip(), text("Llama"), vision_feature_layer=-1)


def vip_llava() -> Built:
    return built("VipLlava", batch([16] * 3, randn(PIXELS)), clip(), text("Llama"), vision_feature_layers=[-2, -1])


def _patches() -> Inputs:
    """Images of 3, 5 and 3 patches, of which the text sees 16 + 4 · 8 + 4 and so on."""
    return batch([52, 88, 52], randn(3, 5, 3, 16, 16), image_sizes=torch.tensor([[16, 32], [32, 32], [16, 32]]))


def llava_next() -> Built:
    return built("LlavaNext", _patches(), clip(), text("Llama"), vision_feature_layer=-1, image_grid_pinpoints=PINS)


def llava_onevision() -> Built:
    inputs = _patches() | {"batch_num_images": torch.tensor([1, 1, 1])}
    options = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_grid_pinpoints": PINS}
    return built("LlavaOnevision", inputs, siglip(), text("Qwen2"), video_token_id=IMAGE + 1, **options)


def gemma3() -> Built:
    inputs = batch([4] * 3, randn(PIXELS))
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return built("Gemma3", inputs, siglip(), text("Gemma3Text", sliding_window=64), mm_tokens_per_image=4)


def paligemma() -> Built:
    inputs = batch([16] * 3, randn(PIXELS))
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    return built("PaliGemma", inputs, siglip(), text("Gemma"), projection_dim=32)


def _qwen(family: str, vision: dict[str, Any], **options: Any) -> Built:
    grid = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 4, 4]])  # patches; four become one token
    inputs = batch([4, 8, 4], randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4), 88, image_grid_thw=grid)
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    return built(family, inputs, vision, QWEN, **PLACEHOLDERS, **options)


def qwen2_vl() -> Built:
    return _qwen("Qwen2VL", dict(depth=2, embed_dim=24, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2))


def qwen2_5_vl() -> Built:
    return _qwen("Qwen2_5_VL", MERGING | dict(window_size=16, fullatt_block_indexes=[1]))


def qwen3_vl() -> Built:
    return _qwen("Qwen3VL", MERGING | dict(num_position_embeddings=64, deepstack_visual_indexes=[0]))


def glm4v() -> Built:
    return _qwen("Glm4v", MERGING | dict(image_size=32), image_start_token_id=86, image_end_token_id=87)


def _idefics(family: str) -> Built:
    inputs = batch([4, 4, 8], randn(3, 2, 3, 16, 16))
    inputs["pixel_values"][:2, 1] = 0  # the first two samples have one image, the third has two
    return built(family, inputs, VISION, text("Llama"), scale_factor=2, pad_token_id=0)


def idefics3() -> Built:
    return _idefics("Idefics3")


def smolvlm() -> Built:
    return _idefics("SmolVLM")


def mistral3() -> Built:
    vision = transformers.PixtralVisionConfig(**VISION | {"image_size": 32, "head_dim": 6})
    inputs = batch([4, 8, 4], randn(3, 3, 16, 32), image_sizes=torch.tensor([[16, 16], [16, 32], [16, 16]]))
    return built("Mistral3", inputs, vision, text("Mistral"), spatial_merge_size=2, vision_feature_layer=-1)


def internvl() -> Built:
    sizes = {"image_size": [16, 16], "patch_size": [4, 4]}
    vision = transformers.AutoConfig.for_model("internvl_vision", **VISION | sizes)
    return built("InternVL", batch([4, 8, 4], randn(4, 3, 16, 16)), vision, text("Qwen2"), downsample_ratio=0.5)


BUILDERS: tuple[Callable[[], Built], ...] = (
    llava, vip_llava, llava_next, llava_onevision, gemma3, paligemma, qwen2_vl, qwen2_5_vl, qwen3_vl, glm4v, idefics3, smolvlm,
    mistral3, internvl,
)  # fmt: skip
FAMILIES = {builder.__name__: builder for builder in BUILDERS}


def build(family: str) -> Built:
    """Returns a model in eval mode and a batch of three samples."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    return model.eval(), inputs
