"""Training data of several tasks: mixing by ratio, and batches of mixed tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import BatchFeature

from hf_ext.errors import HfExtError
from hf_ext.uni_med.processing_uni_med import UniMedProcessor

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

COLUMNS = ("image", "text", "task", "answer")
RATIOS = {"qa": 2, "vqa": 5, "refer": 4, "identify": 4, "caption": 8, "cls": 4}  # the paper's


def mix_datasets(
    datasets: Mapping[str, Dataset | IterableDataset],
    ratios: Mapping[str, float] = RATIOS,
    seed: int = 42,
    stopping_strategy: str = "all_exhausted",
) -> Dataset | IterableDataset:
    """Mixes data sets by drawing samples at random, by ratio (`datasets.interleave_datasets`).

    Args:
        datasets: by name, with the columns image, text, task and answer. Apply a `with_transform` that loads images to
            the result.
        ratios: by name; defaults to the paper's, for data sets named after their task.
        stopping_strategy: "all_exhausted" ends when every sample was drawn; "first_exhausted" ends with the shortest data set.

    Raises:
        HfExtError: datasets is not installed.
        ValueError: there are no data sets, or one has no ratio or no samples.
    """
    if not datasets:
        raise ValueError("There are no data sets to mix.")
    try:
        from datasets import interleave_datasets
    except ImportError as error:
        raise HfExtError("mix_datasets requires datasets: pip install datasets.") from error
    if missing := [name for name in datasets if not ratios.get(name, 0) > 0]:
        raise ValueError(f"There is no ratio for {', '.join(missing)}: give ratios={{name: number, …}}.")
    if empty := [name for name, data in datasets.items() if hasattr(data, "__len__") and not len(data)]:
        raise ValueError(f"There are no samples of {', '.join(empty)}: check how it was read or filtered, or leave it out.")
    total = sum(ratios[name] for name in datasets)
    return interleave_datasets(
        list(datasets.values()), [ratios[name] / total for name in datasets], seed=seed, stopping_strategy=stopping_strategy
    )


def check_columns(row: Mapping[str, Any], where: str) -> None:
    """Raises a ValueError if a sample lacks one of the four columns. `where` names the sample."""
    if missing := [name for name in COLUMNS if name not in row]:
        raise ValueError(f"{where} has no {', '.join(missing)}, only {', '.join(row)}.")


@dataclass
class UniMedCollator:
    """Makes a training batch of samples with image, text, task and answer. Tasks may be mixed, and an image may be None.

    `Trainer` requires remove_unused_columns=False with it. A sample without one of the four columns raises a ValueError.

    Args:
        max_length: longest row in tokens; None for what the tokenizer allows.
    """

    processor: UniMedProcessor
    max_length: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> BatchFeature:
        for i, row in enumerate(rows):
            check_columns(row, f"Sample {i}")
        images, texts, tasks, answers = ([row[name] for row in rows] for name in COLUMNS)
        options = {"max_length": self.max_length, "return_tensors": "pt"}
        return self.processor(images=images, text=texts, task=tasks, answers=answers, **options)
