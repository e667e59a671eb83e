"""Plain metrics of texts and boxes, and those of each task (Uni-Med, arXiv 2409.17508, section 4.1)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from hf_ext.errors import HfExtError
from hf_ext.uni_med.boxes import box_iou, parse_boxes

SQUARE = (100, 100)  # `box_ious` compares boxes in the units of the text, hundredths of the image


def bleu1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the mean BLEU-1 of sentences, in 0…1, by NLTK. Words are separated by spaces and compared in lower case.

    Raises:
        HfExtError: NLTK is not installed.
    """
    bleu = nltk_bleu()
    pairs = zip(predictions, references, strict=True)
    return statistics.fmean(bleu.sentence_bleu([b.lower().split()], a.lower().split(), weights=(1,)) for a, b in pairs)


def nltk_bleu() -> ModuleType:
    """Imports NLTK's functions. Raises an HfExtError if it is not installed."""
    try:
        from nltk.translate import bleu_score
    except ImportError as error:
        raise HfExtError("BLEU requires NLTK: pip install nltk.") from error
    return bleu_score


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


def overlap_scores(ious: Sequence[float]) -> dict[str, float]:
    return {"iou": statistics.fmean(ious), "recall@0.5": statistics.fmean(iou > 0.5 for iou in ious)}


def scores(task: str, predictions: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the metrics of a task, each in 0…1: IoU and the share above 0.5 for "refer"; accuracy for "cls" and "qa"; BLEU-1
    and accuracy for all other tasks.

    Args:
        samples: with the right `answer` of each prediction.
    """
    references = [sample["answer"] for sample in samples]
    if task == "refer":
        return overlap_scores(box_ious(predictions, references))
    if task in ("cls", "qa"):
        return {"accuracy": accuracy(predictions, references)}
    return {"bleu1": bleu1(predictions, references), "accuracy": accuracy(predictions, references)}
