"""The metrics of the paper's figures, as the authors' scripts compute them (Uni-Med, arXiv 2409.17508, section 4.1)."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_ext.uni_med.boxes import PATTERN, Box, box_iou
from hf_ext.uni_med.evaluation.metrics import bleu1, nltk_bleu, overlap_scores

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
    return bleu1([normalize_answer(text) for text in predictions], [normalize_answer(text) for text in references])


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
    authors' for "caption". Pairs with an empty text are left out; 0 if none is left.

    Raises:
        HfExtError: NLTK is not installed.
    """
    bleu = nltk_bleu()
    pairs = [(a, b) for a, b in zip(predictions, references, strict=True) if a and b]
    if not pairs:
        return 0.0
    return float(bleu.corpus_bleu([[_report_words(b)] for _, b in pairs], [_report_words(a) for a, _ in pairs], weights=(1,)))


def _report_words(text: str) -> list[str]:
    from nltk.tokenize import TreebankWordTokenizer

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
        if match := PATTERN.match(text.replace("<unk>", "").replace(" ", "")):
            x1, y1, x2, y2 = (int(value) / 100 for value in match.groups())
            ious.append(box_iou((x1 * width, y1 * height, x2 * width, y2 * height), box, edge=1))
        else:
            ious.append(0.0)
    return ious


def first_words(text: str, count: int = 50) -> str:
    """Returns a text's first words, with single spaces between them. The authors cut questions and answers to 50 words."""
    return " ".join(re.sub(r"\s{2,}", " ", text).strip(" \n").split(" ")[:count])


def authors_scores(task: str, predictions: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the metrics of a task as the authors' scripts compute them, each in 0…1, for `evaluate(…, score=authors_scores)`.
    References are cut to 50 words.

    | task | metrics, of `hf_ext.uni_med.evaluation.authors_metrics` |
    |---|---|
    | "vqa" | `normalized_bleu1`, `normalized_f1`; `containment_accuracy` of the closed questions, if samples have `closed` |
    | "refer" | mean of `pixel_box_ious`, and the share above 0.5 |
    | "identify" | `normalized_bleu1`, `normalized_f1`, `normalized_accuracy` |
    | "caption" | `report_bleu1`; `normalized_f1` of the pairs without an empty text |
    | all others | `normalized_accuracy`; there is no script for "qa" |

    Args:
        samples: with the right `answer` of each prediction. Samples of "refer" have `box` (left, top, right, bottom in pixels)
            and `size` (width, height of the image); those of "vqa" may have `closed` (bool).

    Raises:
        ValueError: a sample of "refer" has no box or no size.
    """
    if task == "refer":
        for i, sample in enumerate(samples):
            if missing := [name for name in ("box", "size") if sample.get(name) is None]:
                raise ValueError(f"Sample {i} has no {' and no '.join(missing)}, which the authors' IoU requires.")
        ious = pixel_box_ious(predictions, [sample["box"] for sample in samples], [sample["size"] for sample in samples])
        return overlap_scores(ious)
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
