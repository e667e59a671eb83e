"""A small vision tower and a small language model for Uni-Med, which need no downloads."""

import copy
import random
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from parts.blood_smears import CELLS, TASKS, Box, Photo, mirrored, random_window
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SegformerConfig,
    SegformerModel,
    Trainer,
    TrainingArguments,
    ViTImageProcessorPil,
    set_seed,
)

WIDTH, HEIGHT, PATCH = 160, 128, 16  # pixels that the vision tower sees, and of each of its tokens
TOKENS = (WIDTH // PATCH) * (HEIGHT // PATCH)
TOKEN = r"<\d+>|</?Img>|\[/?\w+\]|\w+|[^\w\s]"


class Coverage(nn.Module):
    """Trains a vision tower to tell how much of each part of the image, 4 by 4 to a token, each kind of cell covers."""

    def __init__(self, tower: PreTrainedModel, size: int):
        super().__init__()
        self.tower, self.head = tower, nn.Linear(size, 16 * len(CELLS))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.head(self.tower(pixel_values).last_hidden_state.movedim(1, -1)).movedim(-1, 1)
        weight = torch.tensor([1.0, 1.0, 5.0], device=found.device)[:, None, None]  # platelets are small
        return {"loss": F.binary_cross_entropy_with_logits(F.pixel_shuffle(found, 4), labels, pos_weight=weight)}


def coverage(cells: list[tuple[str, Box]]) -> torch.Tensor:
    """Returns the covered share of each part of an image, (kinds, height, width)."""
    height, width = 4 * HEIGHT // PATCH, 4 * WIDTH // PATCH
    found = torch.zeros(len(CELLS), height, width)
    for name, box in cells:
        across, down = (
            ((torch.arange(parts) + 1).clamp(max=box[i + 2] * parts) - torch.arange(parts).clamp(min=box[i] * parts)).clamp(0)
            for i, parts in ((0, width), (1, height))
        )
        kind = list(CELLS.values()).index(name)
        found[kind] = torch.maximum(found[kind], down[:, None] * across)
    return found


def train_tower(photos: list[Photo], steps: int, training: TrainingArguments, folder: Path) -> None:
    """Writes a Segformer that was trained on the boxes of photos."""
    set_seed(0)
    processor = ViTImageProcessorPil(size={"height": HEIGHT, "width": WIDTH})
    sizes = [24, 48, 96]
    tower = SegformerModel(
        SegformerConfig(
            num_encoder_blocks=3, depths=[1, 1, 3], hidden_sizes=sizes, sr_ratios=[8, 4, 2], patch_sizes=[7, 3, 3],
            strides=[4, 2, 2], num_attention_heads=[1, 2, 4], mlp_ratios=[2, 2, 2], drop_path_rate=0.0,
        )
    )  # fmt: skip
    rng, views = random.Random(0), []
    for _ in range(32 * steps * training.world_size):
        photo = rng.choice([photo for photo in photos if photo.cells])
        kind = rng.choice(sorted({name for name, _ in photo.cells}))
        box = rng.choice([box for name, box in photo.cells if name == kind])
        zoomed = mirrored(photo.around(box, rng.uniform(1.1, 1.6)), rng)
        views.append((photo, zoomed if rng.random() < 0.25 else random_window(rng)))

    def collate(rows: list[tuple[Photo, Box]]) -> dict[str, torch.Tensor]:
        images = [photo.picture(window) for photo, window in rows]
        labels = torch.stack([coverage(photo.look(window)) for photo, window in rows])
        return {**processor(images, return_tensors="pt"), "labels": labels}

    arguments = copy.copy(training)
    arguments.max_steps, arguments.per_device_train_batch_size, arguments.learning_rate = steps, 32, 2e-3
    arguments.output_dir = str(folder)
    trainer = Trainer(Coverage(tower, sizes[-1]), arguments, collate, views)
    trainer.train()
    if trainer.is_world_process_zero():
        tower.save_pretrained(folder)
        processor.save_pretrained(folder)
    trainer.accelerator.wait_for_everyone()


def make_language_model(texts: list[str], folder: Path) -> None:
    """Writes an untrained Llama and its tokenizer, with a token for each frequent word and for each coordinate."""
    marks = ["<pad>", "</s>", "<unk>", "<Img>", "</Img>", "[INST]", "[/INST]", *(f"[{task}]" for task in TASKS)]
    coordinates = [f"<{i}>" for i in range(101)]
    counts = Counter(word for text in texts for word in re.findall(TOKEN, text))
    vocabulary = list(dict.fromkeys(marks + coordinates + [word for word, count in counts.items() if count > 2]))
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(TOKEN), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    set_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # coordinates that are near one another start near one another
        waves = torch.arange(101)[:, None] / 100 * torch.pi * torch.arange(8)
        start = vocabulary.index(coordinates[0])
        model.get_input_embeddings().weight[start : start + 101] = waves.cos() @ torch.randn(8, config.hidden_size) * 0.01
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
