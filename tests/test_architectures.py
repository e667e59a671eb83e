"""Every operation on architectures with odd names, ties, shapes and buffers: exact, right to a bound, or refused by name."""

from __future__ import annotations

import shutil
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from tiny_adapters import moved
from tiny_architectures import ARCHITECTURES, Architecture, fine_tune
from tiny_checkpoints import contents
from tiny_merges import same_tensors, tensors_of
from tiny_models import assert_same_weights, same_bits
from transformers import PreTrainedModel

from hf_ext import HfExtError, PissaConfig, emr, fm_delta

#: Operations that are refused: what the error says, by operation and architecture.
REFUSED = {
    # its class appends to a list of its configuration, each time that it builds a model
    ("switch", "LeViT, batch norms"): "has down_ops .* from_pretrained",
    # PEFT refuses LoRAs of all linear layers there, too
    ("pissa", "Mamba-2, an infinite number"): "'out_proj' is incompatible with Mamba",
    # PEFT takes the names of the dense layer and of the shared experts for those of the fused experts
    ("pissa", "GLM-4-MoE, a dense layer and shared experts"): "Leave the experts' projections out of target_modules",
}


class Case:
    """The folders of an architecture: a base, two fine-tunes of it, "one" and "two", and both compressed."""

    def __init__(self, name: str, folder: Path):
        architecture: Architecture = ARCHITECTURES[name]
        model = architecture.build()
        self.name, self.folder, self.kind, self.inputs = name, folder, type(model), architecture.inputs()
        (model.base_model if architecture.bare else model).save_pretrained(folder / "base")
        for seed, task in enumerate(("one", "two"), 1):
            fine_tune(model, seed).save_pretrained(folder / task)
            fm_delta.compress_checkpoint(folder / task, folder / "base", folder / f"small-{task}")

    def load(self, name: str) -> PreTrainedModel:
        torch.manual_seed(0)  # of a head that the base lacks
        return self.kind.from_pretrained(self.folder / name)

    @torch.no_grad()
    def outputs(self, model: torch.nn.Module) -> torch.Tensor:
        outputs = model.eval()(**self.inputs)
        return outputs["logits" if "logits" in outputs else "logits_per_image"]

    def refused(self, operation: str) -> AbstractContextManager:
        """Returns a context that expects the error of the table."""
        message = REFUSED.get((operation, self.name))
        return pytest.raises((ValueError, HfExtError), match=message) if message else nullcontext()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("architecture")
    yield Case(request.param, folder)
    shutil.rmtree(folder)


def same(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Both are equal to the last bit, with the buffers that no file holds."""
    assert_same_weights(model, other)
    for (name, buffer), (_, expected) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert same_bits(buffer, expected), name


def energies(model: PreTrainedModel, other: PreTrainedModel) -> dict[str, float]:
    """The squared distance of each weight and of each statistic. Weights with several names count once."""
    names = {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_floating_point()}
    pairs = zip(model.state_dict().items(), other.state_dict().values(), strict=True)
    return {name: float(((a.double() - b.double()) ** 2).sum()) for (name, a), b in pairs if name in names}


def test_compressed_checkpoints_load_as_the_plain_ones(case: Case):
    for task in ("one", "two"):
        same(case.load(f"small-{task}"), case.load(task))


def test_compressed_checkpoints_are_restored_byte_for_byte(case: Case):
    fm_delta.decompress_checkpoint(case.folder / "small-one", case.folder / "restored")
    assert contents(case.folder / "restored") == contents(case.folder / "one")


def test_models_switch(case: Case):
    model = case.load("small-one")
    with case.refused("switch"):
        fm_delta.switch(model, case.folder / "small-two")
        same(model, case.load("two"))


def test_loaded_models_are_saved_as_plain_ones(case: Case):
    for name in ("small-two", "two"):
        case.load(name).save_pretrained(case.folder / f"saved-{name}")
    same_tensors(*(tensors_of(case.folder / f"saved-{name}") for name in ("small-two", "two")))


def test_merged_tasks_switch_as_they_are_extracted(case: Case):
    emr.merge(case.folder / "base", {task: case.folder / task for task in ("one", "two")}, case.folder / "merged")
    merged, base = case.load("merged"), case.load("base")
    for task in ("two", "one"):
        merged.set_task(task)
        emr.extract(case.folder / "merged", task, case.folder / f"extracted-{task}")
        model, own = case.load(f"extracted-{task}"), case.load(task)
        same(merged, model)
        assert sum(energies(model, own).values()) < sum(energies(base, own).values())  # nearer than the base
        size = {name: tensor.numel() for name, tensor in own.state_dict().items()}
        left = {name for name, energy in energies(model, base).items() if energy == 0 and size[name] > 100}
        assert not left - {name for name, energy in energies(own, base).items() if energy == 0}
        statistics = [name for name, _ in own.named_buffers() if name in size]
        assert all(torch.equal(model.get_buffer(name), own.get_buffer(name)) for name in statistics)


@pytest.mark.parametrize("modules_to_save", [False, True])
def test_peft_loads_what_an_extracted_lora_reports(case: Case, modules_to_save: bool):
    with case.refused("extract"):
        tuned, out = case.load("one"), case.folder / f"lora-{modules_to_save}"
        report = fm_delta.extract_lora(case.folder / "one", case.folder / "base", out, rank=8, modules_to_save=modules_to_save)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            model = PeftModel.from_pretrained(case.load("base"), out)
        assert case.outputs(model).isfinite().all()
        change, rest = (sum(energies(tuned, other).values()) for other in (case.load("base"), model.merge_and_unload()))
        reported = report.change - report.kept + sum(energy for energy in report.omitted.values() if energy)
        assert rest < reported + 1e-4 * change  # the factors' rounding


def test_pissa_starts_exactly_and_loads_as_a_lora(case: Case):
    with case.refused("pissa"):
        before = case.outputs(case.load("one"))
        model = get_peft_model(case.load("one"), PissaConfig(r=4, target_modules="all-linear"))
        rounding = {"rtol": 0, "atol": 1e-5 * float(before.abs().max())}  # of float32, in some ten layers
        torch.testing.assert_close(case.outputs(model), before, **rounding)
        after = case.outputs(moved(model))
        assert (after - before).abs().max() > 100 * rounding["atol"]
        model.save_pretrained(case.folder / "pissa", save_embedding_layers=False)  # PEFT looks for them where there are none
        again = PeftModel.from_pretrained(case.load("one"), case.folder / "pissa")
        torch.testing.assert_close(case.outputs(again), after, **rounding)
        torch.testing.assert_close(case.outputs(again.merge_and_unload()), after, **rounding)
