"""Each task has its metrics, plain ones and the authors', and a model is asked as its users ask it."""

import pytest
import torch
from tiny_uni_med import image, processor, rows, uni_med

from hf_ext.uni_med import accuracy, authors_scores, bleu1, box_ious, evaluate, first_words, scores
from hf_ext.uni_med.evaluation.answers import answer
from hf_ext.uni_med.evaluation.authors_metrics import (
    containment_accuracy,
    normalize_answer,
    normalized_accuracy,
    normalized_bleu1,
    normalized_f1,
    pixel_box_ious,
    report_bleu1,
)


def samples(*answers: str, **columns: list) -> list[dict]:
    return [{"answer": text} | {name: values[i] for name, values in columns.items()} for i, text in enumerate(answers)]


def test_bleu1_is_the_share_of_words_with_brevity_penalty():
    assert bleu1(["the red cell"], ["The red cell"]) == 1
    assert bleu1(["the blue cell"], ["the red cell"]) == pytest.approx(2 / 3)
    assert bleu1(["the the the"], ["the red cell"]) == pytest.approx(1 / 3)  # counts are clipped
    assert bleu1(["the"], ["the red"]) == pytest.approx(torch.e**-1)  # exp(1 - 2 / 1)
    assert bleu1(["", "red"], ["red", "red"]) == 0.5


def test_boxes_are_compared_by_their_overlap():
    predictions = ["{<0><0><50><50>}", "no box", "{ <0> <0> <25> <50> } {<0><0><9><9>}"]
    assert box_ious(predictions, ["{<0><0><50><50>}"] * 3) == [1, 0, 0.5]
    assert scores("refer", predictions, samples(*["{<0><0><50><50>}"] * 3)) == {"iou": 0.5, "recall@0.5": pytest.approx(1 / 3)}
    with pytest.raises(ValueError, match="answer of sample 1 has no box: 'none'"):
        box_ious(["", ""], ["{<0><0><50><50>}", "none"])


def test_each_task_has_its_metrics():
    right = samples("a", "c")
    assert scores("cls", ["A ", "b"], right) == {"accuracy": 0.5} == scores("qa", ["A ", "b"], right)
    for task in ("vqa", "identify", "caption"):
        assert scores(task, ["red cell", "b"], samples("red cell", "c")) == {"bleu1": 0.5, "accuracy": 0.5}
    with pytest.raises(ValueError, match="longer"):
        accuracy(["a"], ["a", "b"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes.", "yes"),
        ("The left lung.", "left lung"),
        ("none", "0"),
        ("Two nodules, a mass", "2 nodules mass"),
        ("left-lung", "left lung"),
        ("left - lung", "left lung"),
        ("left-lung - mass", "leftlung mass"),  # VQA's rule: beside a space once, the sign vanishes everywhere
        ("12,000 cells/mm", "12000 cellsmm"),
        ("3.5 cm.", "3.5 cm"),
        ("dont, wont, theyre", "don't won't they're"),
        ("The", ""),
    ],
)
def test_answers_are_normalized_as_in_vqa(text, expected):
    assert normalize_answer(text) == expected


def test_the_authors_text_metrics_are_of_normalized_answers():
    assert normalized_accuracy(["Yes.", "The left lung", "two"], ["yes", "left lung", "three"]) == pytest.approx(2 / 3)
    assert accuracy(["Yes.", "The left lung"], ["yes", "left lung"]) == 0
    assert containment_accuracy(["Yes, it is.", "no", "nodule"], ["yes", "yes", "No"]) == pytest.approx(2 / 3)
    assert normalized_bleu1(["The left lung.", "the lung"], ["left lung", "left lung"]) == pytest.approx((1 + torch.e**-1) / 2)
    # Words of the prediction: left, left, heart; two of them are in the reference, and one word is missed.
    assert normalized_f1(["left left heart", "no"], ["left lung", "yes"]) == pytest.approx((4 / 6 + 0) / 2)


def test_report_bleu1_is_corpus_bleu_on_treebank_tokens():
    report = "Heart size is normal. No effusion; lungs aren't clear."
    assert report_bleu1(["heart size is normal , no effusion lungs are n't clear"], [report]) == 1
    # 2 of 3 and 2 of 2 words are right: 4 / 5. The references have 8 words, so exp(1 - 8 / 5).
    bleu = report_bleu1(["heart is large.", "no effusion."], ["the heart is not big.", "No effusion now"])
    assert bleu == pytest.approx(0.8 * torch.e ** (1 - 8 / 5), rel=1e-6)
    assert report_bleu1(["", "clear."], ["clear", "Clear"]) == 1 and report_bleu1([""], ["clear"]) == 0
    assert report_bleu1(["(clear)"], ["clear"]) == pytest.approx(1 / 3)  # brackets are words, as in COCO's evaluation


def test_the_authors_iou_is_of_pixels_that_count_their_edges():
    # From 0 to 9 are 10 pixels: 10 x 10 of 20 x 10.
    assert pixel_box_ious(["{<0><0><9><9>}"], [(0, 0, 19, 9)], [(100, 100)]) == [0.5]
    # 10 % of 200 and of 50 pixels: (20, 5, 100, 25) against (20, 5, 100, 25).
    assert pixel_box_ious(["{ <10> <10> <50> <50> }."], [(20, 5, 100, 25)], [(200, 50)]) == [1]
    texts = ["it is {<0><0><9><9>}", "", "{<0><0><9>}", "{<50><50><60><60>}", "{<9><9><0><0>}"]
    assert pixel_box_ious(texts, [(0, 0, 9, 9)] * 5, [(100, 100)] * 5) == [0] * 5


def test_the_authors_metrics_of_each_task():
    predictions, right = ["Yes, it is.", "the left lung"], samples("yes", "Left lung.", closed=[True, False])
    assert authors_scores("cls", predictions, right) == {"accuracy": 0.5} == authors_scores("qa", predictions, right)
    bleu, f1 = pytest.approx((1 / 3 + 1) / 2), pytest.approx((2 * 1 / (3 + 1) + 1) / 2)
    assert authors_scores("identify", predictions, right) == {"bleu1": bleu, "f1": f1, "accuracy": 0.5}
    assert authors_scores("vqa", predictions, right) == {"bleu1": bleu, "f1": f1, "closed_accuracy": 1}
    assert authors_scores("vqa", predictions, samples("yes", "left lung")) == {"bleu1": bleu, "f1": f1}
    report = authors_scores("caption", ["<unk>one two", ""], samples("one " * 60, "clear"))
    assert report["bleu1"] == pytest.approx(0.5 * torch.e ** (1 - 50 / 2))  # the reference is cut to 50 words
    boxes = samples("{<0><0><9><9>}", box=[(0, 0, 19, 9)], size=[(100, 100)])
    assert authors_scores("refer", ["{<0><0><9><9>}"], boxes) == {"iou": 0.5, "recall@0.5": 0}
    with pytest.raises(ValueError, match="Sample 0 has no box and no size, which the authors' IoU requires"):
        authors_scores("refer", ["{<0><0><9><9>}"], samples("{<0><0><9><9>}"))
    assert first_words(" one  two\n\nthree ", 2) == "one two" and len(first_words("w " * 99).split()) == 50


def test_evaluate_generates_answers_and_scores_them():
    model, make = uni_med().train(), processor()
    data = {
        "cells": [{"image": image(i), "text": "what is there ?", "task": "cls", "answer": "red"} for i in range(5)],
        "questions": [row for row in rows() if row["task"] == "qa"],
    }
    for row, text in zip(data["cells"], answer(model.eval(), make, data["cells"], max_new_tokens=3, do_sample=False)):
        inputs = make(images=row["image"], text=row["text"], task="cls", return_tensors="pt")
        alone = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert text == make.decode(alone, skip_special_tokens=True).strip()
        row["answer"] = text  # so that it is right
    data["cells"][0]["answer"] = "something else"
    result = evaluate(model.train(), make, data, batch_size=2, max_new_tokens=3)
    assert result.metrics["cells"] == {"accuracy": 0.8} and len(result.predictions["cells"]) == 5
    assert set(result.metrics["questions"]) == {"accuracy"}
    assert model.training
    table = str(result).splitlines()
    assert table[0].split() == ["data", "metric", "value", "samples"]
    assert table[2].split() == ["cells", "accuracy", "0.800", "5"]


def test_metrics_may_use_any_column_but_the_image():
    boxes = [{"image": image(i), "text": "where ?", "task": "refer", "answer": "{<0><0><9><9>}"} for i in range(2)]
    with pytest.raises(ValueError, match="Sample 0 has no box"):
        evaluate(uni_med(), processor(), {"boxes": boxes}, score=authors_scores, max_new_tokens=2)
    boxes = [row | {"box": (0, 0, 9, 9), "size": (80, 48)} for row in boxes]
    result = evaluate(uni_med(), processor(), {"boxes": boxes}, score=authors_scores, max_new_tokens=2)
    assert result.metrics["boxes"] == {"iou": 0, "recall@0.5": 0}


def test_data_that_cannot_be_measured_is_an_error():
    model = uni_med()
    for data, message in (
        ({"none": []}, "'none' is empty"),
        ({"all": rows()}, "'all' mixes the tasks caption, cls, qa, vqa"),
        ({"some": [rows()[1], rows()[1] | {"task": None}]}, "'some' mixes the tasks None, "),
        ({"cells": rows()[:1], "typo": [rows()[1] | {"task": "vpa"}]}, "'typo': there is no task 'vpa'; they are"),
        ({"boxes": [rows()[0] | {"task": "refer"}]}, "sample 0 has no box"),
        ({"open": [rows()[1] | {"answer": None}]}, "'open': the answer of sample 0 is None"),
        ({"short": [rows()[1], {"task": "qa"}]}, "'short': sample 1 has no image, text, answer, only task"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(model, processor(), data, max_new_tokens=2)
    with pytest.raises(ValueError, match="The processor has the tasks"):
        evaluate(model, processor(tasks=["cls", "vqa"]), {"all": rows()[:1]}, max_new_tokens=2)
