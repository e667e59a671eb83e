"""Tiny vision-language models with random weights, one of each family with a known projector, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PixtralVisionConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)

VOCABULARY, IMAGE = 96, 90  # size, and the placeholder of an image token
SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TEXT = SMALL | dict(
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    head_dim=8,
)
VISION = SMALL | dict(image_size=16, patch_size=4, hidden_size=24)

MERGING = dict(depth=2, hidden_size=24, out_hidden_size=32, num_heads=2, patch_size=4, intermediate_size=32)  # Qwen's and GLM's
PLACEHOLDERS = dict(image_token_id=IMAGE, video_token_id=IMAGE + 1, vision_start_token_id=88)

Built = tuple[PreTrainedModel, dict[str, torch.Tensor]]


def batch(tokens: list[int], pixels: torch.Tensor, before: int = 3, **more: Any) -> dict[str, torch.Tensor]:
    """Returns a batch with `tokens[i]` placeholders in row i, after the token `before`, padded on the left."""
    rows = [[1, 5 + i, before, *[IMAGE] * count, 7, 8, 9 + i] for i, count in enumerate(tokens)]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, **more}


def llava() -> Built:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_id=IMAGE, vision_feature_layer=-1
    )
    return LlavaForConditionalGeneration(config), batch([16, 16, 16], torch.randn(3, 3, 16, 16))


def vip_llava() -> Built:
    config = VipLlavaConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        vision_feature_layers=[-2, -1],
    )
    return VipLlavaForConditionalGeneration(config), batch([16, 16, 16], torch.randn(3, 3, 16, 16))


def llava_next() -> Built:
    pins = [[16, 32], [32, 16], [32, 32]]
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        image_grid_pinpoints=pins,
    )
    sizes = torch.tensor([[16, 32], [32, 32], [16, 32]])  # 3, 5 and 3 patches, of which the text sees 16 + 4 · 8 + 4 and so on
    return LlavaNextForConditionalGeneration(config), batch([52, 88, 52], torch.randn(3, 5, 3, 16, 16), image_sizes=sizes)


def llava_onevision() -> Built:
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=Qwen2Config(**TEXT),
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    sizes = torch.tensor([[16, 32], [32, 32], [16, 32]])
    return LlavaOnevisionForConditionalGeneration(config), batch(
        [52, 88, 52], torch.randn(3, 5, 3, 16, 16), image_sizes=sizes, batch_num_images=torch.tensor([1, 1, 1])
    )


def gemma3() -> Built:
    text = Gemma3TextConfig(**TEXT, sliding_window=64)
    vision = SiglipVisionConfig(**VISION, vision_use_head=False)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE)
    inputs = batch([4, 4, 4], torch.randn(3, 3, 16, 16))
    return Gemma3ForConditionalGeneration(config), inputs | {"token_type_ids": (inputs["input_ids"] == IMAGE).long()}


def paligemma() -> Built:
    vision = SiglipVisionConfig(**VISION, vision_use_head=False)
    config = PaliGemmaConfig(vision_config=vision, text_config=GemmaConfig(**TEXT), image_token_id=IMAGE, projection_dim=32)
    inputs = batch([16, 16, 16], torch.randn(3, 3, 16, 16))
    return PaliGemmaForConditionalGeneration(config), inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


def _qwen_inputs() -> dict[str, torch.Tensor]:
    grid = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 4, 4]])  # patches; four become one token
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4)
    inputs = batch([4, 8, 4], pixels, PLACEHOLDERS["vision_start_token_id"], image_grid_thw=grid)
    return inputs | {"mm_token_type_ids": (inputs["input_ids"] == IMAGE).int()}


def _qwen_text() -> dict[str, Any]:
    return TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}


def qwen2_vl() -> Built:
    vision = dict(depth=2, embed_dim=24, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2)
    config = Qwen2VLConfig(text_config=_qwen_text(), vision_config=vision, **PLACEHOLDERS)
    return Qwen2VLForConditionalGeneration(config), _qwen_inputs()


def qwen2_5_vl() -> Built:
    vision = MERGING | dict(window_size=16, fullatt_block_indexes=[1])
    config = Qwen2_5_VLConfig(text_config=_qwen_text(), vision_config=vision, **PLACEHOLDERS)
    return Qwen2_5_VLForConditionalGeneration(config), _qwen_inputs()


def qwen3_vl() -> Built:
    vision = MERGING | dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
    config = Qwen3VLConfig(text_config=_qwen_text(), vision_config=vision, **PLACEHOLDERS)
    return Qwen3VLForConditionalGeneration(config), _qwen_inputs()


def glm4v() -> Built:
    marks = dict(image_start_token_id=86, image_end_token_id=87)
    config = Glm4vConfig(text_config=_qwen_text(), vision_config=MERGING | dict(image_size=32), **PLACEHOLDERS, **marks)
    return Glm4vForConditionalGeneration(config), _qwen_inputs()


def _idefics(config: type, model: type) -> Built:
    vision = dict(**VISION)
    built = config(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_id=IMAGE, scale_factor=2, pad_token_id=0)
    return model(built), batch([4, 4, 8], torch.randn(3, 2, 3, 16, 16))


def idefics3() -> Built:
    model, inputs = _idefics(Idefics3Config, Idefics3ForConditionalGeneration)
    inputs["pixel_values"][:2, 1] = 0  # the first two samples have one image, the third has two
    return model, inputs


def smolvlm() -> Built:
    model, inputs = _idefics(SmolVLMConfig, SmolVLMForConditionalGeneration)
    inputs["pixel_values"][:2, 1] = 0
    return model, inputs


def mistral3() -> Built:
    vision = PixtralVisionConfig(**VISION | {"image_size": 32, "head_dim": 6})
    config = Mistral3Config(
        vision_config=vision,
        text_config=MistralConfig(**TEXT),
        image_token_id=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    sizes = torch.tensor([[16, 16], [16, 32], [16, 16]])
    return Mistral3ForConditionalGeneration(config), batch([4, 8, 4], torch.randn(3, 3, 16, 32), image_sizes=sizes)


def internvl() -> Built:
    vision = AutoConfig.for_model("internvl_vision", **VISION | {"image_size": [16, 16], "patch_size": [4, 4]})
    config = InternVLConfig(vision_config=vision, text_config=Qwen2Config(**TEXT), image_token_id=IMAGE, downsample_ratio=0.5)
    return InternVLForConditionalGeneration(config), batch([4, 8, 4], torch.randn(4, 3, 16, 16))


FAMILIES: dict[str, Callable[[], Built]] = {
    function.__name__: function
    for function in (
        llava,
        vip_llava,
        llava_next,
        llava_onevision,
        gemma3,
        paligemma,
        qwen2_vl,
        qwen2_5_vl,
        qwen3_vl,
        glm4v,
        idefics3,
        smolvlm,
        mistral3,
        internvl,
    )
}


def build(family: str) -> Built:
    """Returns a model in eval mode and a batch of three samples."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    return model.eval(), inputs
