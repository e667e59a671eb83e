"""The model card of a Uni-Med model, with its tasks and its connector."""

from __future__ import annotations

from huggingface_hub import ModelCard
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ext.integration.card_marks import metadata_of
from hf_ext.integration.model_cards import model_card
from hf_ext.integration.origins import name_in_text
from hf_ext.storage.hub import hub_id
from hf_ext.uni_med.configuration_uni_med import QA


def uni_med_card(model: PreTrainedModel) -> ModelCard:
    """Returns the card of a Uni-Med model in its current state."""
    config, parts = model.config, (model.config.vision_config, model.config.text_config)
    sizes = [sum(parameter.numel() for parameter in model.connector.parameters())]
    sizes += [part.num_parameters() for part in (model.vision_tower, model.language_model)]
    router = f"{config.router}, of {config.router_input}"
    if config.router == "sparse":
        router += f", {config.num_experts_per_tok} of {config.num_experts} experts a visual token"
    connector, vision, text = (f"{size:,}" for size in sizes)
    return model_card(
        "uni_med",
        _bases(model),
        "finetune",
        tags=["uni-med", *(model.model_tags or [])],
        task="image-text-to-text",
        vision=_name(parts[0]),
        text=_name(parts[1]),
        task_names=", ".join(f"`{task}`" for task in [*config.tasks, QA]),
        first_task=config.tasks[0],
        connector=config.connector,
        experts=config.num_experts if config.connector.startswith("moe") else None,
        router=router if config.router in ("soft", "sparse") else config.router,
        resampling=f"{config.resampling}, {config.resampling_rate} into one",
        vision_parameters=vision,
        connector_parameters=connector,
        text_parameters=text,
    )


def _bases(model: PreTrainedModel) -> list[str]:
    """Returns the Hub id of the model, or the models that it was built from, according to its parts or its model card."""
    if hub_id(model.name_or_path):
        return [model.name_or_path]
    parts = [part.name_or_path for part in (model.config.vision_config, model.config.text_config) if part.name_or_path]
    bases = parts or (metadata_of(model.name_or_path) or {}).get("base_model") or []
    return bases if isinstance(bases, list) else [bases]


def _name(part: PreTrainedConfig) -> str:
    return name_in_text(part.name_or_path) if part.name_or_path else f"a {part.model_type}"
