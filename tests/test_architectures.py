"""Every operation on the architectures of Transformers: exact, right to a bound, or refused by name.

ARCHITECTURES=all runs all of them (`make architectures` prints a table), ARCHITECTURES=name,… these classes, or folders of
models. Where Transformers or PEFT cannot do with a model what an operation needs, the test shows that and skips.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_adapters import moved
from tiny_architectures import build, classes, fine_tune, inputs
from tiny_checkpoints import contents
from tiny_merges import METHODS, same_tensors, tensors_of
from tiny_models import assert_same_weights, same_bits
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from hf_ext import HfExtError, PissaConfig, emr, fm_delta
from hf_ext.weight_sync import Publisher, Subscriber

#: Classes with odd names, ties, shapes or buffers. The first eight needed changes of the package.
ODD = [
    "T5Gemma2ForConditionalGeneration",  # an embedding with another parameter
    "CTRLLMHeadModel",  # a tied head with a bias
    "FalconForCausalLM",  # a class of its own for linear layers
    "Gemma4UnifiedForCausalLM",  # settings of single layers
    "GraniteMoeHybridForCausalLM",  # a setting that is infinite
    "LevitForImageClassification",  # batch norms
    "Wav2Vec2ForCTC",  # a weight norm
    "BertForSequenceClassification of a bare base",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",  # one embedding under three names
    "MarianMTModel",  # positions that are not saved
    "GPT2LMHeadModel",  # transposed weights
    "MixtralForCausalLM",  # fused experts
    "Glm4MoeForCausalLM",  # a dense layer and shared experts
    "Qwen2VLForConditionalGeneration",  # the order of the layers
    "CLIPModel",
    "ConvNextForImageClassification",
]
#: What is refused: by operation, the error's text, and the classes.
REFUSED: dict[str, dict[str, str]] = {
    "switch": {  # the class appends to a list of its configuration, each time that it builds a model
        "has down_ops .* in its config.json": "LevitForImageClassification, LevitForImageClassificationWithTeacher, LevitModel"
    },
    "pissa convolutions": {  # they pad by themselves, or transpose what they return
        "whose forward is not that of Conv1d": "ParakeetForCTC, VoxtralRealtimeForConditionalGeneration"
    },
    "extract": {  # its linear layers, but for the head, are of a class that PEFT does not know
        "No linear layer of .* that PEFT can adapt": "IBertForSequenceClassification"
    },
}


def cases() -> list:
    names = os.environ.get("ARCHITECTURES", "")
    if names:
        names = classes() if names == "all" else names.split(",")
        return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]
    drawn = sorted(name for name in classes() if zlib.crc32(name.encode()) % 48 == 0 and name not in ODD)
    return [*ODD[:8], *(pytest.param(name, marks=pytest.mark.slow) for name in (*ODD[8:], *drawn))]


class Case:
    """The folders of an architecture: a base, two fine-tunes of it, "one" and "two", and both compressed."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self._plain = name, folder, {}
        name, _, is_bare = name.partition(" of a bare base")
        try:
            if Path(name).is_dir():
                self.kind = getattr(transformers, AutoConfig.from_pretrained(name).architectures[0])
                model = self.kind.from_pretrained(name)
            else:
                self.kind = getattr(transformers, name)
                model = build(name).to(torch.bfloat16 if "CausalLM" in name else torch.float32)
            (model.base_model if is_bare else model).save_pretrained(folder / "base")
            for seed, task in enumerate(("one", "two"), 1):
                fine_tune(self.plain("base"), seed).save_pretrained(folder / task)
            loaded, saved = self.plain("one").state_dict(), fine_tune(self.plain("base"), 1).state_dict()
            changed = [name for name in saved if name not in loaded or not same_bits(loaded[name], saved[name])]
        except Exception as error:  # of any type
            pytest.skip(f"Transformers does not build or save it: {error}")
        if unsaved := {*changed} - {*(self.kind._keys_to_ignore_on_save or ())}:
            pytest.skip(f"Transformers does not load what it saves: {sorted(unsaved)[0]}")
        for task in ("one", "two"):
            fm_delta.compress_checkpoint(folder / task, folder / "base", folder / f"small-{task}")

    def load(self, name: str, **options) -> PreTrainedModel:
        torch.manual_seed(0)  # of a head that the base lacks
        return self.kind.from_pretrained(self.folder / name, **options).eval()

    def plain(self, name: str) -> PreTrainedModel:
        """Returns the model of a folder, which no test changes."""
        if name not in self._plain:
            self._plain[name] = self.load(name)
        return self._plain[name]

    def outputs(self, model: nn.Module) -> torch.Tensor:
        """Returns what a model computes; nothing if these inputs are none for it."""
        return _first_output(model, self.inputs) if self.inputs else torch.zeros(1)

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        model = self.load("one", dtype=torch.float32)
        for batch in inputs(model):
            try:
                if _first_output(model, batch).isfinite().all():
                    return batch
            except Exception:  # models check their inputs in ways of their own
                continue
        return {}


@torch.no_grad()
def _first_output(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    outputs = model(**batch)
    outputs = outputs.values() if isinstance(outputs, dict) else outputs
    return next(value for value in outputs if isinstance(value, torch.Tensor) and value.is_floating_point())


@pytest.fixture(scope="module", params=cases())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("architecture")
    yield Case(request.param, folder)
    shutil.rmtree(folder)


@pytest.fixture
def refused(case: Case, record_property: Callable[[str, str], None]) -> Callable[[str], AbstractContextManager]:
    """Returns a context for an operation that expects the error of the table."""

    def context(operation: str) -> AbstractContextManager:
        for text, names in REFUSED.get(operation, {}).items():
            if case.name in names.split(", "):
                record_property("refused", text)
                return pytest.raises((ValueError, HfExtError), match=text)
        return nullcontext()

    return context


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
        same(case.load(f"small-{task}"), case.plain(task))


def test_compressed_checkpoints_are_restored_byte_for_byte(case: Case):
    fm_delta.decompress_checkpoint(case.folder / "small-one", case.folder / "restored")
    assert contents(case.folder / "restored") == contents(case.folder / "one")


def test_the_base_is_found(case: Case):
    report = fm_delta.find_base(case.folder / "one", [case.folder / "base"])
    assert [candidate.verdict for candidate in report.candidates] == ["sure"]


def test_models_switch(case: Case, refused):
    model = case.load("small-one")
    with refused("switch"):
        fm_delta.switch(model, case.folder / "small-two")
        same(model, case.plain("two"))


def test_loaded_models_are_saved_as_plain_ones(case: Case):
    for name in ("small-two", "two"):
        case.load(name).save_pretrained(case.folder / f"saved-{name}")
    same_tensors(*(tensors_of(case.folder / f"saved-{name}") for name in ("small-two", "two")))


def test_a_step_of_training_is_published_and_followed(case: Case):
    live = dict(case.load("base").named_parameters())
    with Publisher(case.folder / "steps") as run:
        for step, name in enumerate(("base", "one")):
            run.publish(case.plain(name).named_parameters(), step)
    Subscriber(case.folder / "steps").update(live)
    assert all(same_bits(weight, live[name]) for name, weight in case.plain("one").named_parameters())


@pytest.mark.parametrize("method", METHODS)
def test_merged_tasks_switch_as_they_are_extracted(case: Case, refused, method: str):
    folder = case.folder / method
    with refused("merge"):
        emr.merge(case.folder / "base", {task: case.folder / task for task in ("one", "two")}, folder, **METHODS[method])
        merged, base = case.load(method), case.plain("base")
        for task in ("two", "one"):
            merged.set_task(task)
            emr.extract(folder, task, case.folder / f"{method}-{task}")
            model, own = case.load(f"{method}-{task}"), case.plain(task)
            same(merged, model)
            assert sum(energies(model, own).values()) < sum(energies(base, own).values())  # nearer than the base
            size = {name: tensor.numel() for name, tensor in own.state_dict().items()}
            left = {name for name, energy in energies(model, base).items() if energy == 0 and size[name] > 100}
            assert not left - {name for name, energy in energies(own, base).items() if energy == 0}
            statistics = [name for name, _ in own.named_buffers() if name in size]
            assert all(torch.equal(model.get_buffer(name), own.get_buffer(name)) for name in statistics)


@pytest.mark.parametrize("modules_to_save", [False, True])
def test_peft_loads_what_an_extracted_lora_reports(case: Case, refused, modules_to_save: bool):
    def check() -> None:
        out = case.folder / f"lora-{modules_to_save}"
        report = fm_delta.extract_lora(case.folder / "one", case.folder / "base", out, rank=2, modules_to_save=modules_to_save)
        base, tuned = (case.load(name, dtype=torch.float32) for name in ("base", "one"))
        change, model = sum(energies(tuned, base).values()), PeftModel.from_pretrained(base, out)
        assert case.outputs(model).isfinite().all()
        rest = sum(energies(tuned, model.merge_and_unload()).values())
        reported = report.change - report.kept + sum(energy for energy in report.omitted.values() if energy)
        assert rest < reported + 1e-3 * change  # the factors' rounding

    with refused("extract"):
        try:
            check()
        except Exception:
            try:
                get_peft_model(case.load("base"), LoraConfig(r=1, target_modules="all-linear"))
            except Exception as error:  # of any type
                pytest.skip(f"PEFT has no LoRA for it: {error}")
            raise


def convolutions(model: nn.Module) -> list[str]:
    """The names of the convolutions that PiSSA supports."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        and (module.groups, {*module.dilation}, module.padding_mode) == (1, {1}, "zeros")
    ]


@pytest.mark.parametrize("targets", ["all-linear", "all-linear, DoRA", "convolutions"])
def test_pissa_starts_exactly_and_loads_as_a_lora(case: Case, refused, targets: str):
    modules = "all-linear" if "linear" in targets else convolutions(case.load("base"))
    if not modules:
        pytest.skip("PEFT has no LoRA for it: no such layer")

    def check(config: Callable[..., LoraConfig]) -> None:
        model = case.load("one", dtype=torch.float32)
        before = case.outputs(model)
        model = get_peft_model(model, config(r=4, target_modules=modules, use_dora="DoRA" in targets)).eval()
        rounding = {"rtol": 0, "atol": 1e-5 * float(before.abs().max())}  # of float32, in some ten layers
        torch.testing.assert_close(case.outputs(model), before, **rounding)
        after = case.outputs(moved(model))
        folder = case.folder / f"{targets}-{config.__name__}"
        model.save_pretrained(folder, save_embedding_layers=False)  # PEFT looks for them where there are none
        again = PeftModel.from_pretrained(case.load("one", dtype=torch.float32), folder)
        torch.testing.assert_close(case.outputs(again), after, **rounding)
        merged, expected = again.merge_and_unload(), model.merge_and_unload()
        torch.testing.assert_close(case.outputs(merged), after, **rounding)
        for name, weight in expected.state_dict().items():
            torch.testing.assert_close(merged.state_dict()[name], weight, rtol=0, atol=1e-5)

    with refused("pissa convolutions" if targets == "convolutions" else "pissa"):
        try:
            check(PissaConfig)
        except Exception:
            try:
                check(LoraConfig)
            except Exception as error:
                pytest.skip(f"PEFT's LoRA fails: {re.sub(' +', ' ', str(error))}")
            raise
