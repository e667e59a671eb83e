"""Data sets are mixed by ratio, and batches by the collator."""

from collections import Counter

import pytest
import torch
from datasets import Dataset
from tiny_uni_med import batch, processor, rows

from hf_ext.uni_med.data import RATIOS, UniMedCollator, mix_datasets


def column(task: str, count: int) -> Dataset:
    return Dataset.from_list([{"text": f"{task} {i}", "task": task, "answer": "yes"} for i in range(count)])


def test_data_sets_are_mixed_by_their_ratios():
    data = {task: column(task, 1000) for task in ("vqa", "caption", "qa")}
    mixed = mix_datasets(data, stopping_strategy="first_exhausted")
    counts = Counter(mixed["task"])
    for task in data:
        expected = RATIOS[task] / sum(RATIOS[name] for name in data)
        assert counts[task] / len(mixed) == pytest.approx(expected, abs=0.04)
    assert mixed["text"] == mix_datasets(data, stopping_strategy="first_exhausted")["text"]
    assert mixed["text"] != mix_datasets(data, seed=1, stopping_strategy="first_exhausted")["text"]
    tasks = list(mixed["task"])
    assert any(tasks[i] != tasks[i + 1] for i in range(4))


def test_all_of_every_data_set_is_used_by_default():
    data = {"small": column("qa", 10), "large": column("vqa", 50)}
    mixed = mix_datasets(data, {"small": 1, "large": 1})
    assert set(mixed["text"]) == {*data["small"]["text"], *data["large"]["text"]}


@pytest.mark.parametrize(("data", "ratios", "message"), [
    ({"qa": 2, "other": 2, "zero": 2}, {"qa": 1, "zero": 0}, "no ratio for other, zero"),
    ({"qa": 2, "vqa": 0}, RATIOS, "no samples of vqa"),
    ({}, RATIOS, "no data sets"),
])  # fmt: skip
def test_data_that_cannot_be_mixed_is_an_error(data, ratios, message):
    with pytest.raises(ValueError, match=message):
        mix_datasets({name: column("qa", count) for name, count in data.items()}, ratios)


def test_the_collator_makes_a_training_batch():
    collated, expected = UniMedCollator(processor())(rows()), batch()
    assert collated.keys() == expected.keys() and all(torch.equal(collated[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="Sample 1 has no image, task, answer, only text"):
        UniMedCollator(processor())([rows()[0], {"text": "what ?"}])
    with pytest.raises(ValueError, match="Sample 0: 20 tokens, but the context has 15"):
        UniMedCollator(processor(), max_length=15)(rows()[2:])
