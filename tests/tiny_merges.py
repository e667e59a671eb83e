"""Fine-tunes of one tiny base, as folders, to merge."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_models import bert, perturb, tokenizer
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, PreTrainedModel

from hf_ext import emr

#: By method, options of `emr.merge` that keep something of a change as random as that of a tiny model.
METHODS: dict[str, dict] = {"emr": {"method": "emr"}, "switch": {"method": "switch", "bits": 8}}
LABELS = {"trec": 6, "cr": 2, "subj": 2, "sst2": 2}


def classifier(labels: int, seed: int) -> BertForSequenceClassification:
    """A fine-tune of the tiny BERT with a head of its own."""
    body, model = perturb(bert(), seed), bert(labels)
    model.load_state_dict({k: v for k, v in body.state_dict().items() if not k.startswith("classifier")}, strict=False)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.weight)
    model.config.id2label = {i: f"label {seed}-{i}" for i in range(labels)}
    model.config.label2id = {label: i for i, label in model.config.id2label.items()}
    return model


def write_tasks(folder: Path, labels: dict[str, int] = LABELS) -> tuple[Path, dict[str, Path]]:
    """Folders of a base and of its fine-tunes: copies of what is made once for all tests."""
    made = Path(os.environ["TINY_MODELS"], hashlib.sha256(repr(labels).encode()).hexdigest())
    if not made.exists():
        stage = Path(tempfile.mkdtemp(dir=made.parent))
        bert().bert.save_pretrained(stage / "base")
        for seed, (task, count) in enumerate(labels.items(), 1):
            classifier(count, seed).save_pretrained(stage / task)
            tokenizer().save_pretrained(stage / task)
        with suppress(OSError):  # another worker was faster
            stage.rename(made)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder / "base", {task: folder / task for task in labels}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a plain checkpoint."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def extracted(merged: Path, task: str, out: Path) -> dict[str, torch.Tensor]:
    """Extracts a task into a folder, and returns its tensors."""
    emr.extract(merged, task, out, overwrite=True)
    return tensors_of(out)


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def plain(folder: Path, auto: type = AutoModelForSequenceClassification, **options) -> PreTrainedModel:
    return auto.from_pretrained(folder, **options)
