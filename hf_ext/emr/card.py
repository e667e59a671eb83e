"""The model card of a merge."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import ModelCard

from hf_ext.display import markdown_table, megabytes
from hf_ext.emr.reports import COLUMNS, MergeReport
from hf_ext.integration.card_marks import metadata_of
from hf_ext.integration.model_cards import model_card
from hf_ext.integration.origins import class_of, license_of, name_in_text, task_of
from hf_ext.storage.config_file import CONFIG, read_config


def merge_card(folder: Path, report: MergeReport, models: Iterable[object] = ()) -> ModelCard:
    """Returns the card of the merge in a folder.

    Args:
        report: of the merge.
        models: the models that were merged. The card names those with a Hub id.
    """
    config = read_config(folder / CONFIG)
    base, revision = (config["quantization_config"].get(key) for key in ("base", "revision"))
    names = [os.fspath(model) for model in models if isinstance(model, str | os.PathLike)]
    return model_card(
        "emr",
        [base, *names],
        "merge",
        tags=["emr-merging", "merge"],
        task=task_of(config),
        licensed_by=[base, *(name for name in names if license_of([name]))],
        base=name_in_text(base),
        revision=revision,
        model_class=class_of(config),
        tasks=[task.task for task in report.tasks],
        size=megabytes(report.bytes),
        figures=markdown_table(COLUMNS, report.rows()),
    )


def models_of(folder: Path) -> list[str]:
    """Returns the models that a merge was made from, according to its card."""
    bases = (metadata_of(folder) or {}).get("base_model") or []
    return bases if isinstance(bases, list) else [bases]
