"""Trainer saves an enabled model compressed, and resumes and picks its best model as it does with plain checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from stop_after import StopAfter
from tiny_models import assert_same_weights, bert, in_own_memory, llama, perturb
from tiny_training import train
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_ext import fm_delta


def is_compressed(folder: Path) -> bool:
    files = list(folder.glob("model*.safetensors"))
    assert files
    kinds = {"fm_delta" in safe_open(file, "pt").metadata() for file in files}
    assert kinds == {"quantization_config" in json.loads((folder / "config.json").read_text())}
    return kinds.pop()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trainer") / "base"
    bert().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def through(base) -> Trainer:
    """The training of a model that is not enabled, which has saved to `plain` beside the base."""
    return train(model_of(base, enabled=False), base.parent / "plain")


def model_of(base: Path, enabled: bool = True, auto=AutoModelForSequenceClassification):
    model = in_own_memory(auto.from_pretrained(base))
    return fm_delta.enable(model, base) if enabled else model


def test_trainer_saves_compressed_and_trains_as_before(tmp_path, base, through):
    trainer, plain = train(model_of(base), tmp_path / "out"), through
    assert trainer.state.log_history[0]["loss"] == plain.state.log_history[0]["loss"]
    for step in (2, 4, 6):
        folder, expected = (Path(run.args.output_dir, f"checkpoint-{step}") for run in (trainer, plain))
        assert is_compressed(folder) and not is_compressed(expected)
        assert {path.name for path in folder.iterdir()} == {path.name for path in expected.iterdir()} | {"README.md"}
        assert_same_weights(*(AutoModelForSequenceClassification.from_pretrained(path) for path in (folder, expected)))
    trainer.save_model(tmp_path / "final")
    assert is_compressed(tmp_path / "final")
    assert_same_weights(AutoModelForSequenceClassification.from_pretrained(tmp_path / "final"), plain.model)


@pytest.mark.parametrize(
    "auto, causal", [(AutoModelForSequenceClassification, False), (AutoModelForCausalLM, True)], ids=["bert", "llama_tied"]
)
def test_a_resumed_training_ends_with_equal_bits(tmp_path, auto, causal):
    (llama(tied=True) if causal else bert()).save_pretrained(tmp_path / "base")
    through = train(model_of(tmp_path / "base", False, auto), tmp_path / "plain", causal=causal)
    train(model_of(tmp_path / "base", True, auto), tmp_path / "out", callbacks=[StopAfter(4)], causal=causal)
    assert get_last_checkpoint(str(tmp_path / "out")).endswith("checkpoint-4") and is_compressed(tmp_path / "out/checkpoint-4")
    for resume in (True, str(tmp_path / "out/checkpoint-2")):
        resumed = train(model_of(tmp_path / "base", True, auto), tmp_path / "out", resume=resume, causal=causal)
        assert resumed.state.global_step == 6
        assert_same_weights(resumed.model, through.model)


def test_training_resumes_from_shards(tmp_path, base, through):
    train(model_of(base), tmp_path / "out", callbacks=[StopAfter(4)])
    folder = tmp_path / "out/checkpoint-4"
    model = fm_delta.enable(AutoModelForSequenceClassification.from_pretrained(folder), base)
    model.save_pretrained(folder, max_shard_size="60KB")
    assert is_compressed(folder) and len(list(folder.glob("model-*.safetensors"))) > 2
    assert_same_weights(train(model_of(base), tmp_path / "out", resume=True).model, through.model)


def test_a_loaded_compressed_model_trains_and_resumes(tmp_path, base):
    tuned = fm_delta.enable(perturb(bert()), base)
    tuned.save_pretrained(tmp_path / "small")
    fm_delta.disable(tuned).save_pretrained(tmp_path / "tuned")
    through = train(model_of(tmp_path / "tuned", enabled=False), tmp_path / "plain")
    train(fm_delta.enable(model_of(tmp_path / "small", enabled=False), base), tmp_path / "out", callbacks=[StopAfter(2)])
    resumed = train(fm_delta.enable(model_of(tmp_path / "small", enabled=False), base), tmp_path / "out", resume=True)
    assert_same_weights(resumed.model, through.model)


def test_the_newest_and_the_best_are_kept_and_the_best_loaded(tmp_path, base):
    class BestAtFour(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_loss"] = abs(state.global_step - 4)

    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2}
    trained = train(model_of(base), tmp_path / "out", callbacks=[BestAtFour()], **options)
    best = Path(trained.state.best_model_checkpoint)
    assert best.name == "checkpoint-4"
    kept = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert [path.name for path in kept] == ["checkpoint-4", "checkpoint-6"] and all(map(is_compressed, kept))
    plain = train(model_of(base, enabled=False), tmp_path / "plain", callbacks=[BestAtFour()], **options)
    assert_same_weights(trained.model, plain.model)
    assert_same_weights(trained.model, AutoModelForSequenceClassification.from_pretrained(best))


def test_adapters_train_and_resume_on_a_compressed_model(tmp_path, base):
    fm_delta.enable(perturb(bert()), base).save_pretrained(tmp_path / "small")
    perturb(bert()).save_pretrained(tmp_path / "tuned")

    def adapted(folder: Path, enabled: bool) -> PeftModel:
        model = model_of(folder, enabled=False)
        model = fm_delta.enable(model, base) if enabled else model
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["query", "value"]))

    through = train(adapted(tmp_path / "tuned", False), tmp_path / "plain").model
    for enabled in (False, True):
        out = tmp_path / f"out_{enabled}"
        train(adapted(tmp_path / "small", enabled), out, callbacks=[StopAfter(4)])
        assert (out / "checkpoint-4/adapter_model.safetensors").exists() and not list((out / "checkpoint-4").glob("model*"))
        resumed = train(adapted(tmp_path / "small", enabled), out, resume=True).model
        assert_same_weights(resumed, through)
        fresh = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
        merged = PeftModel.from_pretrained(fresh, out / "checkpoint-6").merge_and_unload()
        assert_same_weights(merged, resumed.merge_and_unload())
        if enabled:
            merged = fm_delta.enable(merged, base)
            merged.save_pretrained(tmp_path / "merged")
            assert is_compressed(tmp_path / "merged")
            loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
            assert_same_weights(loaded, fm_delta.disable(merged))
