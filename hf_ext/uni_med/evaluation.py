"""Evaluation of a model: its answers to the samples of each task, and their metrics (arXiv 2409.17508, section 4.1)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from hf_ext.display import table
from hf_ext.errors import HfExtError
from hf_ext.integration.modes import evaluating
from hf_ext.uni_med.boxes import box_iou, parse_boxes
from hf_ext.uni_med.configuration_uni_med import QA
from hf_ext.uni_med.data import check_columns
from hf_ext.uni_med.processing_uni_med import UniMedProcessor

SQUARE = (100, 100)  # `box_ious` compares boxes in the units of the text, hundredths of the image


def bleu1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the mean BLEU-1 of sentences, in 0…1, by NLTK. Words are separated by spaces and compared in lower case.

    Raises:
        HfExtError: NLTK is not installed.
    """
    try:
        from nltk.translate.bleu_score import sentence_bleu
    except ImportError as error:
        raise HfExtError("BLEU requires NLTK: pip install nltk.") from error
    pairs = zip(predictions, references, strict=True)
    return statistics.fmean(sentence_bleu([b.lower().split()], a.lower().split(), weights=(1,)) for a, b in pairs)


def accuracy(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the share of predictions that equal their reference, ignoring case and surrounding spaces."""
    return statistics.fmean(a.strip().lower() == b.strip().lower() for a, b in zip(predictions, references, strict=True))


def box_ious(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """Returns the intersection over union of the first boxes of each pair; 0 if the prediction has none.

    Raises:
        ValueError: a reference has no box.
    """
    ious = []
    for i, (a, b) in enumerate(zip(predictions, references, strict=True)):
        if not (expected := parse_boxes(b, SQUARE)):
            raise ValueError(f"The answer of sample {i} has no box: {b!r}.")
        boxes = parse_boxes(a, SQUARE)
        ious.append(box_iou(boxes[0], expected[0]) if boxes else 0.0)
    return ious


def scores(task: str, predictions: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the metrics of a task, each in 0…1: IoU and the share above 0.5 for "refer"; accuracy for "cls" and "qa"; BLEU-1
    and accuracy for all other tasks.

    Args:
        samples: with the right `answer` of each prediction.
    """
    references = [sample["answer"] for sample in samples]
    if task == "refer":
        ious = box_ious(predictions, references)
        return {"iou": statistics.fmean(ious), "recall@0.5": statistics.fmean(iou > 0.5 for iou in ious)}
    if task in ("cls", "qa"):
        return {"accuracy": accuracy(predictions, references)}
    return {"bleu1": bleu1(predictions, references), "accuracy": accuracy(predictions, references)}


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`. `str()` gives a table.

    Attributes:
        metrics: for each data set, values in 0…1 by name.
        predictions: for each data set, the model's answers in order.
    """

    metrics: dict[str, dict[str, float]]
    predictions: dict[str, list[str]]

    def __str__(self) -> str:
        rows = [
            (name, metric, f"{value:.3f}", str(len(self.predictions[name])))
            for name, values in self.metrics.items()
            for metric, value in values.items()
        ]
        return table(("data", "metric", "value", "samples"), rows)


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel,
    processor: UniMedProcessor,
    datasets: Mapping[str, Sequence[Mapping[str, Any]]],
    batch_size: int = 16,
    score: Callable[[str, Sequence[str], Sequence[Mapping[str, Any]]], dict[str, float]] = scores,
    **generation: Any,
) -> Evaluation:
    """Generates answers greedily and computes the metrics of each task.

    Args:
        datasets: by name; each is a sequence of {"image", "text", "task", "answer"}, all of one task. "image" may be None
            or a list.
        score: function of (task, predictions, samples) that returns values by name: `scores` or your own. The samples have
            all columns but the image.
        generation: options of `generate`, such as max_new_tokens=50.

    Raises:
        ValueError: a data set is empty, lacks a column, mixes tasks, or has an unknown task or an answer that cannot be
            measured; or the tasks of model and processor differ.
    """
    generation = {"do_sample": False, "num_beams": 1} | generation
    if processor.tasks != model.config.tasks:
        raise ValueError(f"The processor has the tasks {processor.tasks}, and the model {model.config.tasks}.")
    tasks = (None, *processor.tasks, QA)
    samples_by_name = {name: _samples(f"The data set '{name}'", data, tasks, score) for name, data in datasets.items()}
    metrics, predictions = {}, {}
    with evaluating(model), tqdm(total=sum(map(len, datasets.values())), desc="Answering") as bar:
        for name, data in datasets.items():
            answers = []
            for start in range(0, len(data), batch_size):
                rows = [data[i] for i in range(start, min(start + batch_size, len(data)))]
                answers += answer(model, processor, rows, **generation)
                bar.update(len(rows))
            task, samples = samples_by_name[name]
            metrics[name], predictions[name] = score(task, answers, samples), answers
    return Evaluation(metrics, predictions)


def _samples(
    where: str, data: Sequence[Mapping[str, Any]], tasks: Sequence[str | None], score: Callable[..., dict[str, float]]
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the task and the samples of a data set, without images. Raises errors before any answer is generated."""
    samples = []
    for i in range(len(data)):
        check_columns(row := data[i], f"{where}: sample {i}")
        samples.append({key: value for key, value in row.items() if key != "image"})
        if not isinstance(row["answer"], str):
            raise ValueError(f"{where}: the answer of sample {i} is {row['answer']!r}, not a text.")
    if not samples:
        raise ValueError(f"{where} is empty.")
    task, *more = {sample["task"] for sample in samples}
    if more:
        raise ValueError(f"{where} mixes the tasks {', '.join(sorted(map(str, [task, *more])))}; give a data set for each.")
    if task not in tasks:
        raise ValueError(f"{where}: there is no task '{task}'; they are {', '.join(filter(None, tasks))}.")
    score(task, [sample["answer"] for sample in samples], samples)
    return task, samples


def answer(
    model: PreTrainedModel, processor: UniMedProcessor, rows: Sequence[Mapping[str, Any]], **generation: Any
) -> list[str]:
    """Returns the model's answers to a batch of samples with image, text and task."""
    images, texts, tasks = ([row[name] for row in rows] for name in ("image", "text", "task"))
    inputs = processor(images=images, text=texts, task=tasks, return_tensors="pt").to(model.device)
    out = model.generate(**inputs, **generation)[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.batch_decode(out, skip_special_tokens=True)]
