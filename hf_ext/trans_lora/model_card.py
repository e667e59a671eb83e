"""Model cards of a transfer and of a discriminator, with their figures."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from hf_ext.trans_lora.report import TransferReport

PAPER = "Trans-LoRA ([arXiv 2405.17258](https://arxiv.org/abs/2405.17258))"


def discriminator_card(task: str, metrics: dict[str, float], base: str) -> ModelCard:
    data = ModelCardData(base_model=base, library_name="peft", tags=["trans-lora", "discriminator"])
    lines = [
        f"# Discriminator of {task}",
        "An adapter that says of a text whether it is one of the task's own inputs, rather than one that the base model made "
        f"up. {PAPER} sifts synthetic inputs with it when it moves an adapter of the task to another base "
        "model without the task's data.",
        "```python\nfrom hf_ext import trans_lora\n\n"
        'discriminator = trans_lora.Discriminator.from_pretrained("…")\nprint(discriminator.score(["…"]))\n```',
    ]
    if metrics:
        kept = {"real_kept": "real inputs", "synthetic_kept": "inputs that the base model wrote"}
        lines.append(
            "Of inputs that it was not trained on it keeps "
            + " and ".join(f"{100 * value:.0f} % of the {kept[name]}" for name, value in metrics.items())
            + "."
        )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n")


def write_transfer_card(folder: Path, report: TransferReport) -> None:
    """Puts the report into the README.md that PEFT has written to a folder; one that a user wrote stays as it is."""
    path = folder / "README.md"
    found = ModelCard.load(path) if path.exists() else None
    if found is not None and "[More Information Needed]" not in found.text and "trans-lora" not in (found.data.tags or []):
        return
    data = found.data if found is not None else ModelCardData(library_name="peft")
    data.tags = sorted({*(data.tags or []), "trans-lora"})
    figures = "\n".join(["| | |", "|---|---|", *(f"| {name.strip()} | {value} |" for name, value in report.rows())])
    parts = [
        f"# {Path(report.target).name}, with what an adapter of {Path(report.source).name} had learned",
        f"{PAPER} moved it here without the task's data: {report.target} wrote inputs like {len(report.lengths['seeds'])} "
        f"seeds, the filter sifted them ({report.filter}), and {report.source} with its adapter answered them.",
        figures,
    ]
    if (folder / "report.png").exists():
        parts.append("![What became of the inputs, their lengths, and a map of them](report.png)")
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n").save(path)
