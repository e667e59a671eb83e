"""A Trainer publishes its weights under the names and in the bits that save_pretrained would write."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import tiny_models
import torch
from accelerate.utils import compile_regions
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_runs import bits, same
from tiny_training import train
from torch.nn import DataParallel
from transformers import LlamaForCausalLM, PreTrainedModel, TrainerCallback

from hf_ext import CheckpointError
from hf_ext.weight_sync import LocalCheckpoint, Publisher, PublishWeights, Subscriber
from hf_ext.weight_sync.places import Folder
from hf_ext.weight_sync.training import checkpoint_weights


class SaveEveryStep(TrainerCallback):
    """Saves the model in bf16 as it is after each step."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.save_pretrained(self.folder / str(state.global_step))


def saved(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


class WithoutNorm(LlamaForCausalLM):
    _keys_to_ignore_on_save = ["model.norm.weight"]


MAKERS = {
    "llama": tiny_models.llama,
    "tied": lambda: tiny_models.llama(tied=True),
    "mixtral": tiny_models.mixtral,
    "unsaved": lambda: WithoutNorm(tiny_models.llama().config),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_step_is_what_save_pretrained_writes(tmp_path: Path, kind: str):
    model = MAKERS[kind]()
    callbacks = [PublishWeights(tmp_path / "place", anchor_every=4), SaveEveryStep(tmp_path / "saved")]
    model.save_pretrained(tmp_path / "saved/0")
    train(model, tmp_path / "run", callbacks=callbacks, causal=True, save_strategy="no", remove_unused_columns=False)
    subscriber = Subscriber(tmp_path / "place")
    assert subscriber.steps() == list(range(7))
    for step in subscriber.steps():
        subscriber.update(step=step)
        assert same(subscriber.tensors, saved(tmp_path / f"saved/{step}"))


def test_the_training_waits_for_on_step(tmp_path: Path):
    subscriber, calls = Subscriber(tmp_path / "place"), []

    def tell(step: int) -> None:
        calls.append((step, subscriber.update()))

    callback = PublishWeights(tmp_path / "place", every=4, dtype=None, on_step=tell)
    model = tiny_models.llama()
    train(model, tmp_path / "run", callbacks=[callback], causal=True, save_strategy="no")
    assert calls == [(0, 0), (4, 4), (6, 6)]  # the end, too
    assert all(bits(tensor) == bits(model.state_dict()[name]) for name, tensor in subscriber.tensors.items())


def test_a_resumed_training_goes_on_at_its_place(tmp_path: Path):
    subscriber = Subscriber(tmp_path / "place")
    train(tiny_models.llama(), tmp_path / "run", callbacks=[PublishWeights(tmp_path / "place")], causal=True)
    subscriber.update()
    with pytest.raises(CheckpointError, match="holds the steps of another training"):
        train(tiny_models.llama(), tmp_path / "other", callbacks=[PublishWeights(tmp_path / "place")], causal=True)
    resumed = str(tmp_path / "run/checkpoint-4")
    model = tiny_models.llama()
    train(model, tmp_path / "run", resume=resumed, callbacks=[PublishWeights(tmp_path / "place")], causal=True)
    assert subscriber.update() == 6
    assert same(subscriber.tensors, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})


def compiled_layers(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers = torch.nn.ModuleList(map(torch.compile, model.model.layers))
    return model


@pytest.mark.parametrize("wrap", [compiled_layers, compile_regions, lambda model: DataParallel(torch.compile(model))])
def test_names_are_those_of_the_model_that_is_not_compiled(tmp_path: Path, wrap):
    model = tiny_models.mixtral()
    model.save_pretrained(tmp_path / "saved")
    assert same(checkpoint_weights(wrap(model)), load_file(tmp_path / "saved/model.safetensors"))


def test_publisher_and_subscriber_may_be_compiled(tmp_path: Path):
    tiny_models.llama().save_pretrained(tmp_path / "copy")
    trained, served = torch.compile(tiny_models.perturb(tiny_models.llama())), compiled_layers(tiny_models.llama())
    with Publisher(tmp_path / "place") as publisher:
        publisher.publish(trained.named_parameters(), 0)
    LocalCheckpoint(tmp_path / "copy", tmp_path / "place").update(0)
    Subscriber(tmp_path / "place").update(dict(served.named_parameters()))
    for weights in (load_file(tmp_path / "copy/model.safetensors"), checkpoint_weights(served)):
        assert same(weights, trained._orig_mod.state_dict())


class Outage(TrainerCallback):
    """A file is where the place was, from the second step to the fourth."""

    def __init__(self, place: Path):
        self.place, self.away = place, place.with_name("away")

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.replace(self.place, self.away)
            self.place.write_text("a file")
        if state.global_step == 4:
            self.place.unlink()
            os.replace(self.away, self.place)


def test_the_training_goes_on_while_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    place = tmp_path / "place"
    callbacks = [PublishWeights(place, on_step=lambda step: None), Outage(place)]
    model = tiny_models.llama()
    with caplog.at_level(logging.WARNING):
        train(model, tmp_path / "run", callbacks=callbacks, causal=True)
    assert "could not be published" in caplog.text
    subscriber = Subscriber(place)
    assert subscriber.steps() == [0, 1, 5, 6] and subscriber.update() == 6
    assert same(subscriber.tensors, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})


class FailingOnce(Folder):
    """A store whose client raises an error of its own when the last step comes."""

    def put(self, files, remove=()):
        if any(name.startswith("step-00000006") for name in files) and not hasattr(self, "failed"):
            self.failed = True
            raise RuntimeError("the connection was reset")
        super().put(files, remove)


@pytest.mark.parametrize("on_step", [None, print])
def test_the_last_step_is_published_again_if_its_write_failed(tmp_path: Path, caplog, on_step):
    place = FailingOnce(tmp_path / "place")
    model = tiny_models.llama()
    train(model, tmp_path / "run", callbacks=[PublishWeights(place, on_step=on_step)], causal=True, save_strategy="no")
    assert place.failed and "the connection was reset" in caplog.text
    subscriber = Subscriber(place)
    assert subscriber.update() == 6
    assert same(subscriber.tensors, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})


def test_adapters_are_refused(tmp_path: Path):
    model = get_peft_model(tiny_models.llama(), LoraConfig(target_modules="all-linear"))
    with pytest.raises(CheckpointError, match="without adapters, not a PeftModel with adapters"):
        train(model, tmp_path / "run", callbacks=[PublishWeights(tmp_path / "place")], causal=True)
