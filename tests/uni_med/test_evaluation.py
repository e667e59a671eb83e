"""Each task has the paper's metric, and a model is asked as its users ask it."""

import pytest
import torch
from tiny_uni_med import image, processor, rows, uni_med

from hf_ext.uni_med import accuracy, answer, bleu1, box_ious, evaluate, scores


def test_bleu1_is_the_share_of_words_with_the_penalty_for_short_answers():
    assert bleu1(["the red cell"], ["The red cell"]) == 1
    assert bleu1(["the blue cell"], ["the red cell"]) == pytest.approx(2 / 3)
    assert bleu1(["the the the"], ["the red cell"]) == pytest.approx(1 / 3)  # counts are clipped
    assert bleu1(["the"], ["the red"]) == pytest.approx(torch.e**-1)  # exp(1 - 2 / 1)
    assert bleu1(["", "red"], ["red", "red"]) == 0.5


def test_boxes_are_compared_by_their_overlap():
    predictions = ["{<0><0><50><50>}", "no box", "{ <0> <0> <25> <50> } {<0><0><9><9>}"]
    assert box_ious(predictions, ["{<0><0><50><50>}"] * 3) == [1, 0, 0.5]
    assert scores("refer", predictions, ["{<0><0><50><50>}"] * 3) == {"iou": 0.5, "recall@0.5": pytest.approx(1 / 3)}
    with pytest.raises(ValueError, match="answer of sample 1 has no box: 'none'"):
        box_ious(["", ""], ["{<0><0><50><50>}", "none"])


def test_each_task_has_its_metrics():
    assert scores("cls", ["A ", "b"], ["a", "c"]) == {"accuracy": 0.5} == scores("qa", ["A ", "b"], ["a", "c"])
    for task in ("vqa", "identify", "caption"):
        assert scores(task, ["red cell", "b"], ["red cell", "c"]) == {"bleu1": 0.5, "accuracy": 0.5}
    with pytest.raises(ValueError, match="longer"):
        accuracy(["a"], ["a", "b"])


def test_a_model_is_asked_and_measured():
    model, make = uni_med().train(), processor()
    data = {
        "cells": [{"image": image(i), "text": "what is there ?", "task": "cls", "answer": "red"} for i in range(5)],
        "questions": [row for row in rows() if row["task"] == "qa"],
    }
    for row, found in zip(data["cells"], answer(model.eval(), make, data["cells"], max_new_tokens=3, do_sample=False)):
        inputs = make(images=row["image"], text=row["text"], task="cls", return_tensors="pt")
        alone = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert found == make.decode(alone, skip_special_tokens=True).strip()
        row["answer"] = found  # so that it is right
    data["cells"][0]["answer"] = "something else"
    found = evaluate(model.train(), make, data, batch_size=2, max_new_tokens=3)
    assert found.metrics["cells"] == {"accuracy": 0.8} and len(found.predictions["cells"]) == 5
    assert set(found.metrics["questions"]) == {"accuracy"}
    assert model.training
    table = str(found).splitlines()
    assert table[0].split() == ["data", "metric", "value", "samples"] and table[2].split() == [
        "cells",
        "accuracy",
        "0.800",
        "5",
    ]


def test_data_that_cannot_be_measured_is_an_error():
    model, make = uni_med(), processor()
    with pytest.raises(ValueError, match="'none' is empty"):
        evaluate(model, make, {"none": []})
    with pytest.raises(ValueError, match="'all' mixes the tasks caption, cls, qa, vqa"):
        evaluate(model, make, {"all": rows()}, max_new_tokens=2)
    boxes = [rows()[0] | {"task": "refer"}]
    with pytest.raises(ValueError, match="sample 0 has no box"):
        evaluate(model, make, {"boxes": boxes}, max_new_tokens=2)
    with pytest.raises(ValueError, match="'open': the answer of sample 0 is None"):
        evaluate(model, make, {"open": [rows()[1] | {"answer": None}]}, max_new_tokens=2)
    with pytest.raises(ValueError, match="The processor has the tasks"):
        evaluate(model, processor(tasks=["cls", "vqa"]), {"all": rows()[:1]}, max_new_tokens=2)
