"""Train a small Uni-Med model from scratch on blood smears and biomedical questions: one model, six tasks, mixed batches.

    git clone https://github.com/Shenggan/BCCD_Dataset; git clone https://github.com/pubmedqa/pubmedqa
    python examples/run_uni_med.py --data BCCD_Dataset/BCCD --pubmedqa pubmedqa/data        # 13 minutes on two cores, no Hub
    python examples/run_uni_med.py --data … --pubmedqa … --connectors moe_mlp mlp --routers soft hard constant sparse
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/run_uni_med.py --data … --pubmedqa …

--data is a VOC folder (Annotations, ImageSets, JPEGImages). --pubmedqa is a folder with ori_pqal.json and
test_ground_truth.json. The script trains a vision tower on the boxes and freezes it. Then each seed trains a connector and a
language model, saved in OUTPUT_DIR/NAME-SEED. The scores are for the images in ImageSets/Main/test.txt. The script also prints
the scores of the best constant answer, and the model's scores when each test sample has the image of another sample. All
options of Transformers' `TrainingArguments` apply.
"""

import copy
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset, Features, List, Value
from PIL import Image
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import (
    HfArgumentParser,
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
from transformers.utils import logging

from hf_ext import UniMedForConditionalGeneration, UniMedProcessor, uni_med
from hf_ext.uni_med import format_box

WIDTH, HEIGHT, PATCH = 160, 128, 16  # pixels that the vision tower sees, and of each of its tokens
TOKENS = (WIDTH // PATCH) * (HEIGHT // PATCH)
CELLS = {"WBC": "white blood cell", "RBC": "red blood cell", "Platelets": "platelet"}
TASKS = ("refer", "identify", "vqa", "caption", "cls")  # those with images; "qa" is the sixth
TOKEN = r"<\d+>|</?Img>|\[/?\w+\]|\w+|[^\w\s]"
NUMBERS = ("no", "one", "two")
RATIOS = {"refer": 4, "identify": 5, "vqa": 3, "caption": 3, "cls": 3, "qa": 1}
SQUARE = (1.0, 1.0)
WHOLE = (0.0, 0.0, 1.0, 1.0)
CORNERS = [(x, y, x + 0.6, y + 0.6) for y in (0.0, 0.4) for x in (0.0, 0.4)]
FEATURES = Features(
    {"photo": Value("int64"), "window": List(Value("float64"))} | {name: Value("string") for name in ("text", "task", "answer")}
)

Box = tuple[float, float, float, float]  # left, top, right, bottom as shares of an image; right < left: seen in a mirror


@dataclass
class Arguments:
    data: str = field(metadata={"help": "Images with boxes: folder BCCD of github.com/Shenggan/BCCD_Dataset."})
    pubmedqa: str = field(metadata={"help": "Questions: folder data of github.com/pubmedqa/pubmedqa."})
    connectors: list[str] = field(default_factory=lambda: ["moe_mlp"], metadata={"help": "linear, mlp, moe_linear or moe_mlp"})
    routers: list[str] = field(default_factory=lambda: ["soft"], metadata={"help": "soft, hard, constant, sparse"})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "A run of each connector for each seed."})
    vision: str | None = field(default=None, metadata={"help": "Folder of a vision tower that an earlier run has trained."})
    vision_steps: int = field(default=850, metadata={"help": "Steps of the vision tower's training."})
    views: int = field(default=18, metadata={"help": "Random views of each training image for each task."})


@dataclass
class Training(TrainingArguments):
    output_dir: str = field(default="uni-med-out", metadata={"help": "Folder for the vision tower, the models and pictures."})
    max_steps: int = field(default=900, metadata={"help": "Steps of each run."})
    learning_rate: float = field(default=1e-3, metadata={"help": "The initial learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=30, metadata={"help": "Steps of its warm-up."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Batch size."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Batch size of the test."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Not used here."})
    logging_steps: float = field(default=150, metadata={"help": "Steps between reports of the loss."})
    save_strategy: str = field(default="no", metadata={"help": "When to save a checkpoint while training."})
    report_to: str = field(default="none", metadata={"help": "Where to log."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "For GPUs."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "No progress bar for each of the runs."})


@dataclass
class Photo:
    """An image and what is in it, as names and boxes."""

    image: Image.Image
    cells: list[tuple[str, Box]]

    def look(self, window: Box) -> list[tuple[str, Box]]:
        """Returns the cells of which at least half is in a window, cut to it, in shares of the window."""
        found = []
        for name, box in self.cells:
            across, down = (sorted((box[j] - window[i]) / (window[i + 2] - window[i]) for j in (i, i + 2)) for i in (0, 1))
            part = max(across[0], 0.0), max(down[0], 0.0), min(across[1], 1.0), min(down[1], 1.0)
            seen = max(part[2] - part[0], 0) * max(part[3] - part[1], 0)
            if seen >= 0.5 * (across[1] - across[0]) * (down[1] - down[0]):
                found.append((name, part))
        return found

    def picture(self, window: Box) -> Image.Image:
        (left, right), (top, bottom) = sorted(window[::2]), sorted(window[1::2])
        size = self.image.width, self.image.height
        part = [share * pixels for share, pixels in zip((left, top, right, bottom), size * 2)]
        image = self.image.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR, part)
        if window[2] < window[0]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if window[3] < window[1] else image

    def around(self, box: Box, zoom: float) -> Box:
        """Returns the window with a cell in its middle."""
        size = zoom * max((box[2] - box[0]) * self.image.width, (box[3] - box[1]) * self.image.height)
        return centered(box, min(size / self.image.width, 1.0), min(size / self.image.height, 1.0))


def centered(box: Box, width: float, height: float) -> Box:
    """Returns a box of a given size around the middle of another, moved into the image."""
    left, top = min(max((box[0] + box[2] - width) / 2, 0), 1 - width), min(max((box[1] + box[3] - height) / 2, 0), 1 - height)
    return left, top, left + width, top + height


def load_photos(folder: str, split: str) -> list[Photo]:
    photos = []
    for name in Path(folder, "ImageSets", "Main", f"{split}.txt").read_text().split():
        image, cells = Image.open(Path(folder, "JPEGImages", f"{name}.jpg")).convert("RGB"), []
        for found in ElementTree.parse(Path(folder, "Annotations", f"{name}.xml")).iter("object"):
            left, top, right, bottom = (int(found.find(f"bndbox/{side}").text) for side in ("xmin", "ymin", "xmax", "ymax"))
            if left < right and top < bottom:
                box = left / image.width, top / image.height, right / image.width, bottom / image.height
                cells.append((CELLS[found.find("name").text], box))
        photos.append(Photo(image.resize((2 * WIDTH, 2 * WIDTH * image.height // image.width)), cells))
    return photos


def random_window(rng: random.Random) -> Box:
    """Returns a random window, mirrored or not. A third of the windows are whole images."""
    size = 1.0 if rng.random() < 1 / 3 else rng.uniform(0.55, 1.0)
    left, top = rng.uniform(0, 1 - size), rng.uniform(0, 1 - size)
    return mirrored((left, top, left + size, top + size), rng)


def mirrored(window: Box, rng: random.Random) -> Box:
    left, top, right, bottom = window
    left, right = rng.choice([(left, right), (right, left)])
    top, bottom = rng.choice([(top, bottom), (bottom, top)])
    return left, top, right, bottom


def place(box: Box) -> str:
    across, down = (min(int(3 * (box[i] + box[i + 2]) / 2), 2) for i in (0, 1))
    return f"{('upper', 'middle', 'lower')[down]} {('left', 'centre', 'right')[across]}"


def report(cells: list[tuple[str, Box]]) -> str:
    white = [box for name, box in cells if name == CELLS["WBC"]]
    where = f" at the {' and the '.join(map(place, white[:2]))}" if white else ""
    platelets = "platelets" if any(name == CELLS["Platelets"] for name, _ in cells) else "no platelets"
    return f"{NUMBERS[min(len(white), 2)]} white blood cell{where} and {platelets} ."


def ask(task: str, photo: Photo, window: Box, kind: str, rng: random.Random) -> dict | None:
    """Returns window, question and answer; None if there is nothing of the kind to ask about."""
    if task == "cls":
        boxes = [box for name, box in photo.cells if name == kind]
        window = mirrored(photo.around(rng.choice(boxes), rng.uniform(1.2, 1.5)), rng) if boxes else window
    cells = photo.look(window)
    boxes = [box for name, box in cells if name == kind]
    white = [box for name, box in cells if name == CELLS["WBC"]]
    if task == "refer" and len(white) == 1:
        text, answer = "where is the white blood cell", format_box(white[0], SQUARE)
    elif task == "identify" and boxes:  # the box has one size for all, as that of the cell would tell what it is
        text, answer = f"what is in {format_box(centered(rng.choice(boxes), 0.2, 0.25), SQUARE)}", kind
    elif task == "vqa":
        text, answer = "how many white blood cells are there", NUMBERS[min(len(white), 2)]
    elif task == "caption":
        text, answer = "describe the image", report(cells)
    elif task == "cls" and boxes:
        text, answer = "what kind of cell is this", kind
    else:
        return None
    return {"window": window, "text": text, "task": task, "answer": answer}


def training_samples(task: str, photos: list[Photo], views: int) -> list[dict]:
    rng, samples = random.Random(task), []
    for number, photo in enumerate(photos):
        kinds = sorted({name for name, _ in photo.cells})
        asked = (ask(task, photo, random_window(rng), rng.choice(kinds), rng) for _ in range(views if kinds else 0))
        samples += [{"photo": number, **sample} for sample in asked if sample]
    return samples


def test_samples(task: str, photos: list[Photo]) -> list[dict]:
    """Returns the test samples: all tasks but the count on whole images, and the count and the report on their corners."""
    rng, samples = random.Random(task), []
    windows = {"vqa": CORNERS, "caption": [WHOLE, *CORNERS]}.get(task, [WHOLE])
    kinds = list(CELLS.values()) if task in ("identify", "cls") else [CELLS["WBC"]]
    for number, photo in enumerate(photos):
        asked = (ask(task, photo, window, kind, rng) for window in windows for kind in kinds)
        samples += [{"photo": number, **sample} for sample in asked if sample]
    return samples


def load_questions(folder: str) -> tuple[list[dict], list[dict]]:
    """Returns the questions of PubMedQA to train on and to test on."""
    found = json.loads(Path(folder, "ori_pqal.json").read_text())
    tests = json.loads(Path(folder, "test_ground_truth.json").read_text())
    rows = {
        name: {"photo": None, "window": None, "text": row["QUESTION"].lower(), "task": "qa", "answer": row["final_decision"]}
        for name, row in found.items()
    }
    return [row for name, row in rows.items() if name not in tests], [rows[name] for name in tests]


def with_images(data: Dataset | list[dict], photos: list[Photo]) -> Dataset:
    """Returns the samples as UniMedCollator takes them. Their images are cut when a batch needs them."""
    data = Dataset.from_list(data, features=FEATURES) if isinstance(data, list) else data

    def cut(rows: dict[str, list]) -> dict[str, list]:
        pairs = zip(rows.pop("photo"), rows.pop("window"))
        return {**rows, "image": [None if number is None else photos[number].picture(window) for number, window in pairs]}

    return data.with_transform(cut)


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


def train_tower(photos: list[Photo], args: Arguments, training: Training, folder: Path) -> None:
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
    for _ in range(32 * args.vision_steps * training.world_size):
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
    arguments.max_steps, arguments.per_device_train_batch_size, arguments.learning_rate = args.vision_steps, 32, 2e-3
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


def place_found(answers: list[str], wanted: list[str]) -> float:
    """Returns the share of reports on one white blood cell that say where it is."""
    pattern = re.compile(r"one white blood cell at the (\w+ \w+) and (?:no )?platelets")
    pairs = [(pattern.match(a), match) for a, b in zip(answers, wanted) if (match := pattern.match(b))]
    return statistics.fmean(bool(a and a[1] == b[1]) for a, b in pairs)


def platelets_found(answers: list[str], wanted: list[str]) -> float:
    """Returns the share of reports that say whether there are platelets."""
    return statistics.fmean(("no platelets" in a) == ("no platelets" in b) for a, b in zip(answers, wanted))


FIGURES = {  # heading: task, and measure of the answers
    "REC: IoU": ("refer", lambda *texts: statistics.fmean(uni_med.box_ious(*texts))),
    "above 0.5": ("refer", lambda *texts: statistics.fmean(iou > 0.5 for iou in uni_med.box_ious(*texts))),
    "REG": ("identify", uni_med.accuracy),
    "count": ("vqa", uni_med.accuracy),
    "BLEU-1": ("caption", uni_med.bleu1),
    "place": ("caption", place_found),
    "platelets": ("caption", platelets_found),
    "cell": ("cls", uni_med.accuracy),
    "PubMedQA": ("qa", uni_med.accuracy),
}


def swapped(samples: list[dict]) -> list[dict]:
    """Returns the samples, each with the image of another."""
    views = [{"photo": sample["photo"], "window": sample["window"]} for sample in samples]
    random.Random(0).shuffle(views)
    return [sample | view for sample, view in zip(samples, views)]


def print_table(found: dict[str, dict[str, list[list[float]]]], test: dict[str, list[dict]]) -> None:
    def line(name: str, cells: list) -> None:
        print(f"{name:24}" + "".join(f"{cell:>11}" for cell in cells))

    def numbers(values: Iterable[float]) -> list[str]:
        return [f"{value:.3f}" for value in values]

    constants = []
    for task, measure in FIGURES.values():
        wanted = [sample["answer"] for sample in test[task]]
        constants.append(max(measure([answer] * len(wanted), wanted) for answer in set(wanted)))
    print()
    line("", [*FIGURES, "GD", "GM"])
    line("test samples", [len(test[task]) for task, _ in FIGURES.values()])
    line("one answer for all", numbers(constants))
    for name, runs in found.items():
        columns = list(zip(*runs["own"]))
        line(name, numbers(map(statistics.fmean, columns)))
        line("  lowest of the seeds", numbers(map(min, columns)))
        line("  highest", numbers(map(max, columns)))
        line("  with swapped images", numbers(map(statistics.fmean, zip(*runs["swapped"]))))
    print("""
REC: box of the white blood cell (WBC). REG: what is in a box, the boxes of one size. Count: of WBCs. BLEU-1, place (of a WBC
that is alone), platelets (or none): of the report. Cell: kind of a cell cut out. GD, GM: cosine and similarity in magnitude of
the tasks' gradients at the connector, means of all pairs. PubMedQA has no images to swap.""")


def main():
    args, training = HfArgumentParser((Arguments, Training)).parse_args_into_dataclasses()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out, started = Path(training.output_dir), time.perf_counter()
    train_photos, test_photos = load_photos(args.data, "trainval"), load_photos(args.data, "test")
    vision, text = Path(args.vision or out / "vision"), out / "text"
    if not args.vision:
        train_tower(train_photos, args, training, vision)
    questions, test_questions = load_questions(args.pubmedqa)
    train = {task: training_samples(task, train_photos, args.views) for task in TASKS} | {"qa": questions}
    test = {task: test_samples(task, test_photos) for task in TASKS} | {"qa": test_questions}
    if training.process_index == 0:
        make_language_model([row[part] for rows in train.values() for row in rows for part in ("text", "answer")], text)
    PartialState().wait_for_everyone()

    processor = UniMedProcessor.from_vision_text_pretrained(vision, text, num_image_tokens=TOKENS // 4)
    collate = uni_med.UniMedCollator(processor)
    shown = {task: random.Random(0).sample(train[task], min(128, len(train[task]))) for task in TASKS}
    batches = {task: collate(list(with_images(rows, train_photos))) for task, rows in shown.items()}
    mixed = uni_med.mix_datasets({task: Dataset.from_list(rows, features=FEATURES) for task, rows in train.items()}, RATIOS)
    mixed = with_images(mixed, train_photos)
    tests = {
        kind: {task: with_images(change(rows), test_photos) for task, rows in test.items()}
        for kind, change in (("own", list), ("swapped", swapped))
    }
    found = {}
    for seed in args.seeds:
        for connector, router in ((c, r) for c in args.connectors for r in (args.routers if c.startswith("moe") else [None])):
            name = f"{connector}-{router}" if router else connector
            set_seed(seed)
            model = UniMedForConditionalGeneration.from_vision_text_pretrained(
                vision, text, connector=connector, router=router or "soft"
            )
            model.vision_tower.requires_grad_(False)
            arguments = copy.copy(training)
            arguments.seed, arguments.output_dir = seed, str(out / f"{name}-{seed}")
            trainer = Trainer(model, arguments, collate, mixed, processing_class=processor)
            trainer.train()
            trainer.save_model()
            if not training.should_save:
                continue
            for kind, data in tests.items():
                answers = uni_med.evaluate(model, processor, data, training.per_device_eval_batch_size, max_new_tokens=24)
                values = [
                    measure(answers.predictions[task], [sample["answer"] for sample in test[task]])
                    for task, measure in FIGURES.values()
                ]
                found.setdefault(name, {}).setdefault(kind, []).append(values)
            pull = uni_med.interference(model, batches)
            pull.plot(out / f"{name}-{seed}" / "interference.png")
            uni_med.feature_map(model, batches).plot(out / f"{name}-{seed}" / "features.png")
            found[name]["own"][-1] += [pull.mean_direction, pull.mean_magnitude]
            print(f"{name}, seed {seed}, {time.perf_counter() - started:.0f} s after the start: {pull.summary()}", flush=True)
    if training.should_save:
        print_table(found, test)


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
