"""Model cards of PiSSA and QPiSSA adapters, and of LoRAs that `convert_to_lora` makes."""

from __future__ import annotations

from huggingface_hub import ModelCard
from peft import LoraConfig

from hf_ext.display import markdown_table
from hf_ext.integration.model_cards import adapter_card
from hf_ext.pissa.reports import PissaReport

NAMES = {"pissa": "a PiSSA adapter", "qpissa": "a QPiSSA adapter", "lora": "a LoRA"}


def pissa_card(config: LoraConfig, report: PissaReport, trained_class: str | None = None) -> ModelCard:
    """Returns the card of a saved adapter.

    Args:
        report: what the adapter started from; without layers if that is not known.
        trained_class: class of the model that was trained.
    """
    kind = "qpissa" if config.peft_type == "QPISSA" else "pissa"
    known = {"summary": report.summary(), "figures": markdown_table(*report.table())} if report.layers else {}
    tags = [kind] if kind == "qpissa" else [kind, "lora"]
    return adapter_card(kind, config.base_model_name_or_path, config.task_type, tags, trained_class, config=config, **known)


def conversion_card(config: LoraConfig, origin: str, errors: str) -> ModelCard:
    """Returns the card of a LoRA that `convert_to_lora` made of an adapter of the kind `origin`."""
    text = f"It is the best approximation of rank {config.r} of the adapter's change of each layer:\n{errors}."
    figures = {"origin": NAMES[origin], "description": text}
    trained = (config.auto_mapping or {}).get("base_model_class")
    return adapter_card("lora", config.base_model_name_or_path, config.task_type, {origin, "lora"}, trained, **figures)
