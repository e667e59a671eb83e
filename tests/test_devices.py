"""Each feature on one device and on two: on GPUs if the machine has some, else on simulated ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from accelerate.state import AcceleratorState
from hosts import pissa
from peft import PeftModel, get_peft_model
from simulated_devices import DEVICES, simulation
from tiny_adapters import NF4, load, moved, small_llama
from tiny_models import fine_tuned, inputs, llama, perturb, placed, same_bits
from tiny_transfers import SEEDS, is_input, judge, lora, pretrained, settings, teacher
from tiny_transfers import inputs as questions
from tiny_uni_med import batch, uni_med
from tiny_vision_language_models import llava
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_ext import CMoEConfig, PissaConfig, QPissaConfig, TransLoraTrainer, emr, fm_delta
from hf_ext.integration.in_place import LiveWeights
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import ModelGenerator
from hf_ext.weight_sync import Publisher, Subscriber

CUDA = torch.cuda.is_available()
# The parts of each model on the last device; all others are on the first.
LAST = {
    "llama": ("model.layers.1", "model.norm", "lm_head"),
    "gpt2": ("transformer.h.1", "transformer.ln_f", "lm_head"),
    "t5": ("decoder.block.1", "decoder.final_layer_norm", "lm_head"),
    "llava": ("model.multi_modal_projector.linear_2", "model.language_model", "lm_head"),
    "uni_med": ("language_model",),
}
PISSA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one", "two"])
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of one device or of two. A single GPU has the CPU before it."""
    if CUDA:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        yield gpus[: request.param] if len(gpus) >= request.param else ["cpu", *gpus]
        return
    monkeypatch.setattr(LiveWeights, "require_in_memory", lambda self: None)  # which knows a simulated tensor as packed
    with simulation():
        yield DEVICES[: request.param]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "autocast")]


@pytest.fixture(params=["float32", "bfloat16 autocast", *SLOW])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


def places(model: PreTrainedModel, kind: str, devices: list[str]) -> dict[str, str]:
    """A device map."""
    parts: dict[str, str] = {}
    for name, _ in model.named_modules():
        if name and not any(name.startswith(f"{part}.") for part in parts):
            last = any(name == part for part in LAST[kind])
            if last or not any(part.startswith(f"{name}.") for part in LAST[kind]):
                parts[name] = devices[-1 if last else 0]
    return parts


def spread(model: PreTrainedModel, kind: str, devices: list[str], precision: str = "float32") -> PreTrainedModel:
    model.to(torch.bfloat16 if precision.startswith("bfloat16") else torch.float32)
    model = dispatch_model(model, places(model, kind, devices), main_device=devices[0], force_hooks=True)
    if "cpu" in devices:
        del model.hf_device_map  # by which PEFT would offload what is on the CPU
    return model


def loaded(folder: Path, like: PreTrainedModel, devices: list[str]) -> PreTrainedModel:
    """A Llama of a folder. Accelerate would offload what a device map has on the CPU beside a GPU."""
    if "cpu" in devices:
        return spread(AutoModelForCausalLM.from_pretrained(folder), "llama", devices)
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places(like, "llama", devices))


@contextmanager
def context(precision: str, devices: list[str]) -> Iterator[None]:
    """Autocast, or nothing."""
    with ExitStack() as stack:
        for kind in {torch.device(name).type for name in devices if precision.endswith("autocast")}:
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        yield


def assert_same_bits(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """All weights are those of another model, wherever they are."""
    state, other = model.state_dict(), expected.state_dict()
    assert not [name for name, weight in other.items() if not same_bits(state[name], weight)]


def tolerance(precision: str) -> dict[str, float]:
    return {"rtol": 0, "atol": 1e-4 if precision == "float32" else 0.1}


def assert_same_step(model, twin, inputs, devices, precision) -> None:
    """A forward pass gives what it gives on the CPU in float32, up to rounding, and a backward pass has the same gradients."""
    inputs = {"labels": inputs["input_ids"]} | inputs
    with context(precision, devices):
        output = model(**placed(inputs, model))
    expected = twin(**inputs)
    torch.testing.assert_close(output.logits.float().cpu(), expected.logits, **tolerance(precision))
    output.loss.backward()
    expected.loss.backward()
    gradients, others = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, twin))
    assert gradients and gradients.keys() == others.keys()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pissa
@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4"])
def test_pissa_trains_and_saves(devices, precision, tmp_path, start):
    config = PissaConfig(**PISSA, init_lora_weights=start)
    model = get_peft_model(spread(llama(), "llama", devices, precision), config)
    assert {p.device for p in model.parameters()} == {torch.device(name) for name in devices}
    assert_same_step(model, get_peft_model(llama(), config), inputs(llama()), devices, precision)
    moved(model).save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(spread(llama(), "llama", devices, precision), tmp_path)
    tokens = inputs(model)
    with torch.no_grad(), context(precision, devices):
        expected = model(**tokens).logits
        torch.testing.assert_close(again(**tokens).logits, expected, **tolerance(precision))
        torch.testing.assert_close(again.merge_and_unload()(**tokens).logits, expected, **tolerance(precision))


@pytest.mark.skipif(not CUDA, reason="bitsandbytes has no kernels for simulated devices")
def test_qpissa_trains_and_saves(devices, tmp_path):
    if "cpu" in devices:
        pytest.skip("bitsandbytes does not mix a GPU and the CPU")
    small_llama().save_pretrained(tmp_path / "base")
    options = {"device_map": places(small_llama(), "llama", devices)}
    model = get_peft_model(load(tmp_path / "base", NF4, **options), QPissaConfig(**PISSA))
    tokens = inputs(model)
    model(**tokens, labels=tokens["input_ids"]).loss.backward()
    moved(model).save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(tmp_path / "base", NF4, **options), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(again(**tokens).logits, model(**tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("router", ["soft", "sparse"])
def test_cmoe_trains(devices, precision, router):
    model, inputs = llava()
    config = CMoEConfig(r=4, tasks=("vqa", "cls"), router=router)
    twin = get_peft_model(copy.deepcopy(model), config)
    model = get_peft_model(spread(model, "llava", devices, precision), config)
    assert_same_step(model, twin, inputs, devices, precision)


@pytest.mark.parametrize("router", ["soft", "sparse"])
def test_uni_med_trains_and_answers(devices, precision, router):
    model = spread(uni_med(router=router), "uni_med", devices, precision)
    assert_same_step(model, uni_med(router=router), batch(), devices, precision)
    question = placed(batch(answers=False), model)
    ids = model.generate(**question, max_new_tokens=3, do_sample=False)
    assert ids.shape[1] > question["input_ids"].shape[1]


def test_a_compressed_checkpoint_is_loaded_and_switched_to(devices, tmp_path):
    tuned = fine_tuned(llama(tied=True), tmp_path)
    other = perturb(tuned, 2)
    other.save_pretrained(tmp_path / "other")
    for name in ("tuned", "other"):
        fm_delta.compress_checkpoint(tmp_path / name, tmp_path / "base", tmp_path / f"{name}-small")
    model = loaded(tmp_path / "tuned-small", tuned, devices)
    assert model.lm_head.weight.device == torch.device(devices[-1])
    assert_same_bits(model, tuned)
    fm_delta.switch(model, tmp_path / "other-small")
    assert_same_bits(model, other)


@pytest.mark.parametrize("discard", [False, True])
def test_a_merge_switches_its_tasks(devices, tmp_path, discard):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("one", "two")):
        perturb(base, seed).save_pretrained(tmp_path / name)
    emr.merge(tmp_path / "base", {name: tmp_path / name for name in ("one", "two")}, tmp_path / "merged", method="emr")
    model = loaded(tmp_path / "merged", base, devices)
    for name in ("two", "one"):
        model.set_task(name, discard_changes=discard)
        emr.extract(tmp_path / "merged", name, tmp_path / f"plain-{name}")
        assert_same_bits(model, AutoModelForCausalLM.from_pretrained(tmp_path / f"plain-{name}"))


def test_weights_are_published_and_followed(devices, tmp_path):
    places, subscriber = [*devices, devices[-1], "cpu"], Subscriber(tmp_path)
    with Publisher(tmp_path, dtype=torch.bfloat16) as run:
        tensors = {str(i): torch.zeros(64, 64, dtype=torch.bfloat16, device=place) for i, place in enumerate(places)}
        for step in range(3):
            torch.manual_seed(step)
            weights = {name: torch.randn(64, 64) for name in tensors}
            run.publish({name: weights[name].to(tensor.device) for name, tensor in tensors.items()}, step)
            run.wait()
            assert subscriber.update(tensors) == step
            assert all(torch.equal(tensor.cpu(), weights[name].bfloat16()) for name, tensor in tensors.items())


@pytest.fixture
def first_device(devices, monkeypatch) -> Iterator[torch.device]:
    """The device of Trainer."""
    if "cpu" in devices:
        pytest.skip("Trainer moves a model that is partly on the CPU to the GPU")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", devices[0])
    AcceleratorState._reset_state(reset_partial_state=True)
    yield torch.device(devices[0])
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("source", "target"), [("gpt2", "llama"), pytest.param("llama", "t5", marks=pytest.mark.slow)])
def test_trans_lora_runs_all_stages(devices, first_device, tmp_path, source, target):
    """One device gets the models from the CPU, one after the other; two have both all the time."""
    model, tokenizer = pretrained(target)
    teaching, its_tokenizer = teacher(source)
    has_judge, apart = source == "gpt2", len(devices) == 2
    if apart:
        spread(model, target, devices)
        spread(teaching.get_base_model(), source, devices)
    args = {"use_cpu": False, "num_samples": 4, "num_train_epochs": 1, "dataloader_pin_memory": CUDA}
    trainer = TransLoraTrainer(
        model,
        settings(tmp_path, **args, filter="discriminator" if has_judge else "none"),
        processing_class=tokenizer,
        teacher=teaching,
        teacher_processing_class=its_tokenizer,
        discriminator=judge(teaching, its_tokenizer) if has_judge else None,
        seeds=SEEDS,
        inputs=None if has_judge else questions(12),
        well_formed=is_input,
        peft_config=lora(target),
    )
    trainer.train()
    assert trainer.args.device == first_device == trainer.model.device
    assert trainer.report.trained > 0 and teaching.device == (first_device if apart else torch.device("cpu"))
    assert any(weight.any() for name, weight in trainer.model.named_parameters() if "lora_B" in name), "it has trained"


def test_sampling_keeps_the_random_state_of_every_device(devices):
    model, tokenizer = pretrained("llama")
    write = ModelGenerator(model.to(devices[0]), Encoder(tokenizer, model), 4)
    before = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    first = write(["pick a b c", "sort"], 8, seed=1, temperature=1.0)
    after = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert write(["pick a b c", "sort"], 8, seed=1, temperature=1.0) == first
