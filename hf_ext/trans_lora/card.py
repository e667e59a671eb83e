"""Model cards of a transfer and of a discriminator, with their figures."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

from hf_ext.display import markdown_table, percent
from hf_ext.integration.model_cards import adapter_card
from hf_ext.integration.origins import name_in_text
from hf_ext.trans_lora.reports import TransferReport


def transfer_card(report: TransferReport, task_type: str | None, folder: Path) -> ModelCard:
    """Returns the card of the new adapter. If its folder has a report.png, the card shows it.

    Args:
        report: of the transfer.
        task_type: PEFT's type of task.
        folder: of the new adapter.
    """
    return adapter_card(
        "trans_lora_adapter",
        report.target,
        task_type,
        ["trans-lora"],
        source=name_in_text(report.source),
        seeds=len(report.lengths["seeds"]),
        filter=report.filter,
        prompt=report.prompt,
        figures=markdown_table(("", ""), report.rows()),
        picture=(folder / "report.png").exists(),
    )


def discriminator_card(task: str, metrics: dict[str, float], base: str, task_type: str | None) -> ModelCard:
    """Returns the card of a discriminator of a task's inputs, an adapter of `base`."""
    kept = {"real_kept": "real inputs", "synthetic_kept": "inputs that the base model wrote"}
    return adapter_card(
        "trans_lora_discriminator",
        base,
        task_type,
        ["trans-lora", "discriminator"],
        task_name=task,
        metrics=" and ".join(f"{percent(value, 0)} of the {kept[name]}" for name, value in metrics.items()),
    )
