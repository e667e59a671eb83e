"""A Uni-Med model of a few thousand weights: an image of 32 x 64 pixels is 32 patches and 8 tokens of the language model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_models import VOCABULARY, gpt2, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
)

from hf_ext import UniMedConfig, UniMedForConditionalGeneration, UniMedProcessor

HEIGHT, WIDTH, PATCH, TOKENS = 32, 64, 8, 8
WORDS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<Img>", "</Img>", "{", "}"]
WORDS += [f"[{task}]" for task in ("vqa", "refer", "identify", "caption", "cls")]
WORDS += "how many cells are there ? is this a cell where the what one two three yes no red blue platelet".split()
WORDS += [f"w{i}" for i in range(VOCABULARY - len(WORDS))]
IMAGE_TOKEN_ID = VOCABULARY  # outside the language model's


@cache
def _vit() -> ViTModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return ViTModel(ViTConfig(**sizes, image_size=(HEIGHT, WIDTH), patch_size=PATCH), add_pooling_layer=False)


def blip2() -> Blip2ForConditionalGeneration:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    text = {"model_type": "opt", "vocab_size": 99, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1}
    config = Blip2Config(
        vision_config=small | {"image_size": 32, "patch_size": PATCH, "initializer_range": 0.02},
        qformer_config=small | {"encoder_hidden_size": 32, "vocab_size": 99},
        text_config=text | {"num_attention_heads": 2, "word_embed_proj_dim": 32},
    )
    torch.manual_seed(0)
    return Blip2ForConditionalGeneration(config)


def build_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=64, **options
    )
    fast.add_tokens(["<Img>", "</Img>"])
    return fast


def image_processor() -> ViTImageProcessorPil:
    return ViTImageProcessorPil(size={"height": HEIGHT, "width": WIDTH})


def processor(**options: Any) -> UniMedProcessor:
    return UniMedProcessor(image_processor(), build_tokenizer(), num_image_tokens=TOKENS, **options)


def config(text: Any = None, **options: Any) -> UniMedConfig:
    text = llama().config if text is None else text
    return UniMedConfig(vision_config=_vit().config, text_config=text, image_token_id=IMAGE_TOKEN_ID, **options)


def uni_med(text: Any = None, **options: Any) -> UniMedForConditionalGeneration:
    """Seeded, in eval mode; options are those of the configuration."""
    settings = config(text, **options)
    torch.manual_seed(0)
    return UniMedForConditionalGeneration(settings).eval()


def save_parts(folder: Path, gpt: bool = False) -> tuple[Path, Path]:
    """A pretrained vision tower and a pretrained language model, each in a folder with what reads its inputs."""
    vision, text = folder / "vision", folder / "text"
    _vit().save_pretrained(vision)
    image_processor().save_pretrained(vision)
    (gpt2() if gpt else llama()).save_pretrained(text)
    build_tokenizer().save_pretrained(text)
    return vision, text


def image(seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (48, 80, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def rows() -> list[dict[str, Any]]:
    """Samples of four tasks, one of them without an image."""
    return [
        {"image": image(0), "text": "how many cells are there ?", "task": "vqa", "answer": "two"},
        {"image": None, "text": "is this a cell ?", "task": "qa", "answer": "yes"},
        {"image": image(1), "text": "what is there ?", "task": "cls", "answer": "red platelet"},
        {"image": image(2), "text": "where the red cell is ?", "task": "caption", "answer": "the red cell is there"},
    ]


def batch(answers: bool = True, samples: list[dict[str, Any]] | None = None) -> dict[str, torch.Tensor]:
    samples = rows() if samples is None else samples
    columns = {"images": "image", "text": "text", "task": "task"} | ({"answers": "answer"} if answers else {})
    inputs = {name: [row[column] for row in samples] for name, column in columns.items()}
    return dict(processor()(**inputs, return_tensors="pt"))


@torch.no_grad()
def assert_likeliest(model: Any, inputs: dict[str, torch.Tensor], ids: torch.Tensor) -> None:
    """Each token that a model wrote after the inputs is the likeliest, up to rounding: by one pass over the whole text.

    Args:
        ids: (rows, prompt + written), as `generate` returns them.
    """
    length = inputs["input_ids"].shape[1]
    written = ids[:, length:]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(written)], 1)
    logits = model(**inputs | {"input_ids": ids, "attention_mask": mask}).logits[:, length - 1 : -1]
    assert written.shape[1] > 0 and torch.equal(ids[:, :length], inputs["input_ids"])
    torch.testing.assert_close(logits.gather(-1, written[..., None])[..., 0], logits.amax(-1), rtol=0, atol=1e-4)
