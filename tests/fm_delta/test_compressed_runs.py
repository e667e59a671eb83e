"""A Trainer with CompressCheckpoints or an enabled model trains, resumes, rotates and picks its best model as usual."""

from __future__ import annotations

import copy
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from repeats import repeats
from stop_after import StopAfter
from tiny_models import assert_same_weights, bert, in_own_memory, llama, perturb
from tiny_training import train
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    trainer,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_ext import BaseModelError, CheckpointError, fm_delta
from hf_ext.fm_delta import CompressCheckpoints
from hf_ext.storage.files import locked
from hf_ext.storage.layout import all_weights
from hf_ext.storage.safetensors_file import SafetensorsFile
from hf_ext.storage.weights import KEY

load = AutoModelForSequenceClassification.from_pretrained


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "base"
    bert().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(base) -> Trainer:
    """The training without the callback."""
    return train(model_of(base), base.parent / "plain")


@pytest.fixture(scope="module")
def compressed(base) -> Trainer:
    """The training with the callback."""
    return train_compressed(base, base.parent / "compressed")


@pytest.fixture
def run(compressed, tmp_path) -> Path:
    return shutil.copytree(compressed.args.output_dir, tmp_path / "run")


def model_of(base: Path):
    return in_own_memory(load(base))


def train_compressed(base: Path, out: Path, *callbacks: TrainerCallback, **options) -> Trainer:
    return train(model_of(base), out, callbacks=[CompressCheckpoints(), *callbacks], **options)


def checkpoints(run: Path) -> list[Path]:
    return sorted(run.glob("checkpoint-*"))


def steps(run: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in checkpoints(run)]


def is_compressed(folder: Path) -> bool:
    return all(KEY in SafetensorsFile(path).metadata for path in all_weights(folder))


def assert_compressed_run(run: Path, plain: Trainer, *expected: int) -> None:
    assert steps(run) == list(expected)
    for checkpoint in checkpoints(run):
        assert is_compressed(checkpoint)
        assert_same_weights(load(checkpoint), load(Path(plain.args.output_dir, checkpoint.name)))


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_a_run_saves_compressed_checkpoints_and_everything_else_plain(tmp_path, compressed, plain):
    run = Path(compressed.args.output_dir)
    assert_compressed_run(run, plain, 2, 4, 6)
    assert_same_weights(compressed.model, plain.model)
    for checkpoint in checkpoints(run):
        expected = Path(plain.args.output_dir, checkpoint.name)
        assert {path.name for path in checkpoint.iterdir()} == {path.name for path in expected.iterdir()} | {"README.md"}
        assert (checkpoint / "optimizer.pt").stat().st_size == (expected / "optimizer.pt").stat().st_size
    compressed.save_model(tmp_path / "final")
    compressed.model.save_pretrained(tmp_path / "checkpoint-6")  # outside the run
    assert not is_compressed(tmp_path / "final") and not is_compressed(tmp_path / "checkpoint-6")
    compressed.model.save_pretrained(
        run / "checkpoint-8", is_main_process=False
    )  # in another process of a distributed training
    assert not (run / "checkpoint-8").exists()
    assert_same_weights(load(tmp_path / "final"), plain.model)


def test_a_callback_that_is_added_later_compresses_too(tmp_path, base, plain):
    args = TrainingArguments(tmp_path, max_steps=2, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
    late = Trainer(model_of(base), args, train_dataset=plain.train_dataset)
    late.add_callback(CompressCheckpoints())
    late.train()
    assert is_compressed(tmp_path / "checkpoint-2")


def test_a_training_goes_on_where_compression_fails(tmp_path, base, plain, caplog):
    class Lock(TrainerCallback):
        """Holds the lock of a checkpoint from another thread, as another process would."""

        def on_train_begin(self, args, state, control, **kwargs):
            pool.submit(holds.enter_context, locked(tmp_path / "checkpoint-4")).result()

    with ThreadPoolExecutor(1) as pool, ExitStack() as holds:
        trained = train_compressed(base, tmp_path, Lock())
        pool.submit(holds.close).result()
    assert_same_weights(trained.model, plain.model)
    assert "checkpoint-4 is not compressed: Another process is writing" in caplog.text
    assert [is_compressed(checkpoint) for checkpoint in checkpoints(tmp_path)] == [True, False, True]
    assert_same_weights(load(tmp_path / "checkpoint-4"), load(Path(plain.args.output_dir, "checkpoint-4")))


def test_a_model_with_the_callback_can_be_copied_and_pickled(compressed):
    for model in (copy.deepcopy(compressed.model), pickle.loads(pickle.dumps(compressed.model))):
        assert_same_weights(model, compressed.model)


@repeats("based", False, True)
def test_adapters_are_left_alone(tmp_path, base, based):
    def adapted():
        torch.manual_seed(0)
        return get_peft_model(model_of(base), LoraConfig(r=2, target_modules=["query", "value"]))

    plain = train(adapted(), tmp_path / "plain")
    callback = CompressCheckpoints(base if based else None)
    train(adapted(), tmp_path / "out", callbacks=[StopAfter(4), callback])
    resumed = train(adapted(), tmp_path / "out", resume=True, callbacks=[callback])
    assert_same_weights(resumed.model, plain.model)


# ---- resuming, rotating, choosing --------------------------------------------------------------------------------------


@repeats("step", 2, 4)
def test_a_stopped_training_resumes_from_any_checkpoint_bit_by_bit(tmp_path, base, plain, step):
    class Crash(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_compressed(base, tmp_path, Crash())
    assert steps(tmp_path) == [2, 4]
    resumed = train_compressed(base, tmp_path, resume=str(tmp_path / f"checkpoint-{step}"))
    assert_same_weights(resumed.model, plain.model)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))  # the same Trainer, again
    assert_same_weights(resumed.model, plain.model)
    assert_compressed_run(tmp_path, plain, 2, 4, 6)


@repeats("causal", True, False, ids=["llama_tied", "bert"])
def test_an_enabled_model_trains_as_before_and_resumes_from_shards(tmp_path, causal):
    auto = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    (llama(tied=True) if causal else bert()).save_pretrained(tmp_path / "base")

    def tuned(enabled=True):
        model = in_own_memory(auto.from_pretrained(tmp_path / "base"))
        return fm_delta.enable(model, tmp_path / "base") if enabled else model

    plain, last = train(tuned(False), tmp_path / "plain", causal=causal), tmp_path / "out/checkpoint-4"
    train(tuned(), tmp_path / "out", callbacks=[StopAfter(4)], causal=causal)
    assert is_compressed(last) and get_last_checkpoint(str(tmp_path / "out")) == str(last)
    assert_same_weights(auto.from_pretrained(last), auto.from_pretrained(tmp_path / "plain/checkpoint-4"))
    fm_delta.enable(auto.from_pretrained(last), tmp_path / "base").save_pretrained(last, max_shard_size="60KB")
    for resume in (True, str(tmp_path / "out/checkpoint-2")):
        resumed = train(tuned(), tmp_path / "out", resume=resume, causal=causal)
        assert resumed.state.global_step == 6
        assert_same_weights(resumed.model, plain.model)


def test_adapters_train_and_resume_on_an_enabled_model(tmp_path, base):
    fm_delta.enable(perturb(bert()), base).save_pretrained(tmp_path / "small")
    perturb(bert()).save_pretrained(tmp_path / "tuned")

    def adapted(model):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["query", "value"]))

    def small():
        return adapted(fm_delta.enable(model_of(tmp_path / "small"), base))

    plain, out = train(adapted(model_of(tmp_path / "tuned")), tmp_path / "plain").model, tmp_path / "out"
    train(small(), out, callbacks=[StopAfter(4)])
    assert (out / "checkpoint-4/adapter_model.safetensors").exists() and not list((out / "checkpoint-4").glob("model*"))
    resumed = train(small(), out, resume=True).model
    assert_same_weights(resumed, plain)
    merged = resumed.merge_and_unload()
    assert_same_weights(PeftModel.from_pretrained(load(tmp_path / "small"), out / "checkpoint-6").merge_and_unload(), merged)
    merged.save_pretrained(tmp_path / "merged")
    assert is_compressed(tmp_path / "merged")
    assert_same_weights(load(tmp_path / "merged"), fm_delta.disable(merged))


SLOW = [(None, 2, [4, 6]), (0, 1, [2]), (1, 2, [4, 6]), (2, 3, [2, 4, 6])]


@pytest.mark.parametrize(
    ("best", "limit", "kept"),
    [(None, 1, [6]), (0, 2, [2, 6]), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_old_checkpoints_are_deleted_and_the_best_is_loaded(tmp_path, base, best, limit, kept):
    """`best` is which of the three evaluations finds the best model, if that is loaded at the end."""

    class Losses(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_loss"] = float(state.global_step // 2 - 1 != best)

    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "greater_is_better": False,
        "load_best_model_at_end": best is not None,
    }
    trained = train_compressed(base, tmp_path, Losses(), save_total_limit=limit, **options)
    assert steps(tmp_path) == kept
    assert all(is_compressed(checkpoint) and fm_delta.verify(checkpoint) for checkpoint in checkpoints(tmp_path))
    if best is not None:
        assert trained.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{2 * best + 2}")
    assert_same_weights(trained.model, load(tmp_path / f"checkpoint-{6 if best is None else 2 * best + 2}"))


def test_without_the_callback_resuming_is_an_error_and_loading_works(base, run, plain):
    assert not any("hf_ext" in callback.__module__ for callback in trainer.DEFAULT_CALLBACKS)
    with pytest.raises(RuntimeError, match="size mismatch"):
        train(model_of(base), run, resume=True)
    assert_same_weights(load(run / "checkpoint-6"), plain.model)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_unusable_base_is_refused_by_the_constructor(tmp_path, base, run):
    def construct(model, *arguments, out=run):
        Trainer(model, TrainingArguments(out, use_cpu=True, report_to=[]), callbacks=[CompressCheckpoints(*arguments)])

    with pytest.raises(CheckpointError, match="Give CompressCheckpoints its base="):
        construct(bert())
    with pytest.raises(BaseModelError, match="no/such"):
        construct(bert(), "no/such")
    with pytest.raises(CheckpointError, match="takes a Transformers PreTrainedModel, not a Linear"):
        construct(torch.nn.Linear(2, 2), base)
    with pytest.raises(CheckpointError, match="compresses this model's saves already"):
        construct(fm_delta.enable(model_of(base), base))
    with pytest.raises(CheckpointError, match="checkpoint-4, which is a checkpoint of the run itself"):
        construct(model_of(run / "checkpoint-4"))
    construct(model_of(run / "checkpoint-4"), out=tmp_path / "next")  # a compressed base of another run


def test_weights_against_another_base_are_not_loaded(tmp_path, run):
    perturb(bert()).save_pretrained(tmp_path / "other")
    with pytest.raises(BaseModelError, match="another base model"):
        train_compressed(tmp_path / "other", run, resume=str(run / "checkpoint-4"))
