"""Each task has its metrics, and a model is asked as its users ask it."""

import pytest
import torch
from tiny_uni_med import image, processor, rows, uni_med

from hf_ext.uni_med import accuracy, bleu1, box_ious, evaluate, scores
from hf_ext.uni_med.evaluation import answer


def samples(*answers: str) -> list[dict]:
    return [{"answer": text} for text in answers]


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
    def score(task, predictions, samples):
        return {"right": sum(set(sample) == {"text", "task", "answer", "weight"} for sample in samples) / len(predictions)}

    data = [row | {"weight": 2} for row in rows()[:1] * 2]
    assert evaluate(uni_med(), processor(), {"cells": data}, score=score, max_new_tokens=2).metrics["cells"] == {"right": 1}


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
