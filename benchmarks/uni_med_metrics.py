"""The metrics of the paper's figures, as the authors' scripts compute them (arXiv 2409.17508, section 4.1), beside plain ones.

    python examples/run_uni_med.py --data BCCD_Dataset/BCCD --pubmedqa pubmedqa/data
    python benchmarks/uni_med_metrics.py --data BCCD_Dataset/BCCD --models uni-med-out/moe_mlp-soft-0

It asks each model the test questions of examples/run_uni_med.py about images, and prints both sets of metrics, each in 0…1:

  task      `uni_med.scores`       the authors'
  vqa       BLEU-1, accuracy       BLEU-1 and F1 of normalized words; share of closed questions whose answer has the right one
  identify  BLEU-1, accuracy       BLEU-1, F1 and accuracy of normalized words
  caption   BLEU-1, accuracy       BLEU-1 of all reports together, on tokens of the Penn Treebank; F1
  cls       accuracy               accuracy of normalized words
  refer     IoU of the first box   IoU in pixels; the answer must start with its box; a side from 10 to 19 is ten pixels

Normalized words have no articles and no punctuation: "The left lung." is "left lung". References are cut to 50 words. BLEU-2
to 4, METEOR and ROUGE are not here. The authors tokenize reports with a Java program, here NLTK does; abbreviations may differ.
"""

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import print_table
from nltk.tokenize import TreebankWordTokenizer
from nltk.translate.bleu_score import corpus_bleu
from PIL import Image
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from parts.blood_smears import TASKS, load_photos, test_samples, with_images  # noqa: E402

from hf_ext import UniMedForConditionalGeneration, UniMedProcessor, uni_med  # noqa: E402

Box = tuple[float, float, float, float]

BOX = re.compile(r"\{" + r"<(\d{1,3})>" * 4 + r"\}")
# The normalization of VQA's evaluation, as the authors have it.
ARTICLES = {"a", "an", "the"}
NUMBERS = dict(zip("zero one two three four five six seven eight nine ten".split(), map(str, range(11)))) | {"none": "0"}
CONTRACTIONS = {
    f"{word}{end.replace(chr(39), '')}": f"{word}{end}"
    for end, words in {
        "n't": "ai are ca could did do does had has is might must need ought sha should was were wo would",
        "'ve": "could might must not should they we what where who would you",
        "'ll": "how it somebody someone something they what who why you",
        "'re": "there they what why you",
        "'s": "he how somebody someone that there what when where who why",
        "'d": "he how it someone something there they where who you",
    }.items()
    for word in words.split()
}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
# Tokens that COCO's caption evaluation leaves out. Brackets stay.
REPORT_PUNCTUATION = {"''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"}


def normalize_answer(text: str) -> str:
    """Returns an answer in lower case, without articles and punctuation, number words up to ten as digits, and contractions
    with their apostrophe: the normalization of VQA's evaluation."""
    between_digits = re.search(r"\d,\d", text) is not None
    clean = text
    for sign in PUNCTUATION:
        beside_space = f"{sign} " in text or f" {sign}" in text
        clean = clean.replace(sign, "" if beside_space or between_digits else " ")
    clean = re.sub(r"\.(?!\d)", "", clean)
    words = (NUMBERS.get(word, word) for word in clean.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def normalized_bleu1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the mean BLEU-1 of normalized sentences, in 0…1; the authors' for "vqa" and "identify"."""
    return uni_med.bleu1([normalize_answer(text) for text in predictions], [normalize_answer(text) for text in references])


def normalized_f1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the authors' mean F1 of the words of normalized answers, in 0…1. A word that the reference has once counts as
    often as the prediction has it."""
    scores = []
    for a, b in zip(predictions, references, strict=True):
        predicted, expected = (Counter(normalize_answer(text).split()) for text in (a, b))
        hits = sum(count for word, count in predicted.items() if word in expected)
        missed = sum(count for word, count in expected.items() if word not in predicted)
        scores.append(2 * hits / (hits + predicted.total() + missed) if hits else 0.0)
    return statistics.fmean(scores)


def normalized_accuracy(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the share of answers that equal their reference after normalization; the authors' for "cls" and "identify"."""
    pairs = zip(predictions, references, strict=True)
    return statistics.fmean(normalize_answer(a) == normalize_answer(b) for a, b in pairs)


def containment_accuracy(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the share of answers that contain their reference after normalization, as characters; the authors' for closed
    questions of "vqa"."""
    pairs = zip(predictions, references, strict=True)
    return statistics.fmean(normalize_answer(b) in normalize_answer(a) for a, b in pairs)


def report_bleu1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns BLEU-1 of all reports together, in 0…1, on tokens of the Penn Treebank in lower case and without punctuation; the
    authors' for "caption". Pairs with an empty text are left out; 0 if none is left."""
    pairs = [(a, b) for a, b in zip(predictions, references, strict=True) if a and b]
    if not pairs:
        return 0.0
    return float(corpus_bleu([[_report_words(b)] for _, b in pairs], [_report_words(a) for a, _ in pairs], weights=(1,)))


def _report_words(text: str) -> list[str]:
    tokenize = TreebankWordTokenizer().tokenize
    sentences = re.split(r"(?<=[.?!])\s+", text.lower())  # it takes only the period at the end for punctuation
    return [word for sentence in sentences for word in tokenize(sentence) if word not in REPORT_PUNCTUATION]


def pixel_box_ious(predictions: Sequence[str], boxes: Sequence[Box], sizes: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the intersection over union of the box at the start of each prediction with the box in the image; 0 if the
    prediction does not start with one. The authors' for "refer": an edge is a pixel of its own, so a side from 10 to 19 is ten
    pixels long.

    Args:
        boxes: left, top, right, bottom in pixels, as annotated.
        sizes: width and height of each image in pixels.
    """
    ious = []
    for text, box, (width, height) in zip(predictions, boxes, sizes, strict=True):
        if match := BOX.match(text.replace("<unk>", "").replace(" ", "")):
            x1, y1, x2, y2 = (int(value) / 100 for value in match.groups())
            ious.append(pixel_iou((x1 * width, y1 * height, x2 * width, y2 * height), box))
        else:
            ious.append(0.0)
    return ious


def pixel_iou(box: Box, other: Box) -> float:
    """Returns the intersection over union of two boxes whose right and bottom are pixels of the box."""
    across = max(0.0, min(box[2], other[2]) - max(box[0], other[0]) + 1)
    down = max(0.0, min(box[3], other[3]) - max(box[1], other[1]) + 1)
    areas = [(b[2] - b[0] + 1) * (b[3] - b[1] + 1) for b in (box, other)]
    union = sum(areas) - across * down
    return across * down / union if union > 0 else 0.0


def first_words(text: str, count: int = 50) -> str:
    """Returns a text's first words, with single spaces between them. The authors cut questions and answers to 50 words."""
    return " ".join(re.sub(r"\s{2,}", " ", text).strip(" \n").split(" ")[:count])


def authors_scores(task: str, predictions: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the metrics of a task as the authors' scripts compute them, for `evaluate(…, score=authors_scores)`.

    Args:
        samples: with the right `answer` of each prediction. Samples of "refer" have `box` (left, top, right, bottom in pixels)
            and `size` (width, height of the image); those of "vqa" may have `closed` (bool).
    """
    if task == "refer":
        ious = pixel_box_ious(predictions, [sample["box"] for sample in samples], [sample["size"] for sample in samples])
        return {"iou": statistics.fmean(ious), "recall@0.5": statistics.fmean(iou > 0.5 for iou in ious)}
    answers = [text.lower().replace("<unk>", "").strip() for text in predictions]
    expected = [first_words(sample["answer"]) for sample in samples]
    if task == "caption":
        pairs = [(a, b) for a, b in zip(answers, expected, strict=True) if a and b]
        return {"bleu1": report_bleu1(answers, expected), "f1": normalized_f1(*zip(*pairs)) if pairs else 0.0}
    if task not in ("vqa", "identify"):
        return {"accuracy": normalized_accuracy(answers, expected)}
    metrics = {"bleu1": normalized_bleu1(answers, expected), "f1": normalized_f1(answers, expected)}
    if task == "identify":
        metrics["accuracy"] = normalized_accuracy(answers, expected)
    elif closed := [i for i, sample in enumerate(samples) if sample.get("closed")]:
        metrics["closed_accuracy"] = containment_accuracy([answers[i] for i in closed], [expected[i] for i in closed])
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder BCCD of github.com/Shenggan/BCCD_Dataset")
    parser.add_argument("--models", nargs="+", required=True, help="folders of trained models")
    parser.add_argument("--samples", type=int, default=100, help="test samples of each task at most")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for folder in args.models:
        model = UniMedForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        processor = UniMedProcessor.from_pretrained(folder)
        pixels = processor.image_processor(Image.new("RGB", (640, 480)), return_tensors="pt")["pixel_values"]
        size = pixels.shape[-1], pixels.shape[-2]
        photos = load_photos(args.data, "test", size)
        rows = []
        for task in TASKS:
            samples = test_samples(task, photos)[: args.samples]
            data = with_images(samples, photos)
            answers = uni_med.evaluate(model, processor, {task: data}, max_new_tokens=24).predictions[task]
            boxes = [{"box": box, "size": size} for row in samples for box in uni_med.parse_boxes(row["answer"], size)[:1]]
            samples = [row | box for row, box in zip(samples, boxes)] if task == "refer" else samples
            plain, authors = uni_med.scores(task, answers, samples), authors_scores(task, answers, samples)
            values = [", ".join(f"{name} {value:.3f}" for name, value in found.items()) for found in (plain, authors)]
            rows.append([task, str(len(samples)), *values])
        print_table(folder, ["task", "samples", "plain metrics", "the authors' metrics"], rows)


if __name__ == "__main__":
    main()
