"""A Trainer with CompressCheckpoints trains, resumes, rotates and picks its best model as it does without."""

from __future__ import annotations

import copy
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import python
from repeats import repeats
from safetensors.torch import load_file
from stop_after import StopAfter
from tiny_models import assert_same_weights, bert, in_own_memory
from tiny_training import examples, train
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_ext import BaseModelError, CheckpointError, fm_delta
from hf_ext.fm_delta.series import is_compressed, needed_by
from hf_ext.storage.files import locked

OPTIONS = {"max_steps": 12, "learning_rate": 1e-4}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "base"
    bert().save_pretrained(folder)
    return folder


def model_of(base: Path):
    return in_own_memory(AutoModelForSequenceClassification.from_pretrained(base))


def train_compressed(base: Path, out: Path, *callbacks: TrainerCallback, **options) -> Trainer:
    return train(model_of(base), out, callbacks=[fm_delta.CompressCheckpoints(), *callbacks], **(OPTIONS | options))


@pytest.fixture(scope="module")
def uncompressed(base) -> Trainer:
    return train(model_of(base), base.parent / "plain", **OPTIONS)


@pytest.fixture
def through(uncompressed, tmp_path) -> Trainer:
    """The training without compression. All its checkpoints are in `plain`."""
    (tmp_path / "plain").symlink_to(uncompressed.args.output_dir)
    return uncompressed


@pytest.fixture(scope="module")
def compressed(base) -> Path:
    train_compressed(base, base.parent / "compressed")
    return base.parent / "compressed"


@pytest.fixture
def run(compressed, tmp_path) -> Path:
    """A run of which all checkpoints were compressed during the training, in `out`."""
    return shutil.copytree(compressed, tmp_path / "out")


@pytest.fixture(scope="module")
def compressed_series(base) -> Path:
    out = base.parent / "series"
    train(model_of(base), out, callbacks=[StopAfter(8)], **OPTIONS)
    fm_delta.compress_series(out, base)
    return out


@pytest.fixture
def series(compressed_series, tmp_path) -> Path:
    """A run of which all checkpoints were compressed after the training had stopped at step 8, in `out`."""
    return shutil.copytree(compressed_series, tmp_path / "out")


def checkpoints(run: Path) -> dict[int, Path]:
    return {int(path.name.split("-")[1]): path for path in run.glob("checkpoint-*")}


def assert_same_as_plain(run: Path, plain: Path, *steps: int) -> None:
    assert set(checkpoints(run)) == set(steps)
    for checkpoint in checkpoints(run).values():
        models = [AutoModelForSequenceClassification.from_pretrained(path) for path in (checkpoint, plain / checkpoint.name)]
        assert_same_weights(*models)


class Watch(TrainerCallback):
    """After each save and its rotation, before (`first`) or after CompressCheckpoints acts, reads whatever is there."""

    def __init__(self):
        self.seen: list[dict[int, bool]] = []

    def on_save(self, args, state, control, **kwargs):
        there = checkpoints(Path(args.output_dir))
        for checkpoint in there.values():
            if is_compressed(checkpoint):
                fm_delta.verify(checkpoint)
            AutoModelForSequenceClassification.from_pretrained(checkpoint)
        self.seen.append({step: is_compressed(checkpoint) for step, checkpoint in sorted(there.items())})


def test_all_checkpoints_are_compressed_at_the_end(tmp_path, base, through):
    watch = Watch()
    trainer = train_compressed(base, tmp_path / "out", watch)
    assert watch.seen[-1] == {2: True, 4: True, 6: True, 8: True, 10: True, 12: False}
    assert trainer.state.log_history[0]["loss"] == through.state.log_history[0]["loss"]
    assert_same_as_plain(tmp_path / "out", tmp_path / "plain", 2, 4, 6, 8, 10, 12)
    assert all(map(is_compressed, checkpoints(tmp_path / "out").values()))
    assert any(map(needed_by, checkpoints(tmp_path / "out").values()))
    report = fm_delta.inspect_series(tmp_path / "out")
    assert report.compressed_bytes < 0.7 * report.original_bytes
    for checkpoint in checkpoints(tmp_path / "out").values():
        plain = tmp_path / "plain" / checkpoint.name
        assert {path.name for path in checkpoint.iterdir()} == {path.name for path in plain.iterdir()} | {"README.md"}
        assert (checkpoint / "optimizer.pt").stat().st_size == (plain / "optimizer.pt").stat().st_size


@pytest.mark.parametrize("step", [2, *(pytest.param(step, marks=pytest.mark.slow) for step in (4, 8)), 12])
def test_training_resumes_from_any_checkpoint_bit_by_bit(tmp_path, base, through, run, step):
    resumed = train_compressed(base, run, resume=str(run / f"checkpoint-{step}"))
    assert resumed.state.global_step == 12
    assert_same_weights(resumed.model, through.model)
    assert_same_as_plain(run, tmp_path / "plain", 2, 4, 6, 8, 10, 12)
    assert all(map(is_compressed, checkpoints(run).values()))


def test_a_stopped_training_resumes_without_the_callback(tmp_path, base, through):
    class Crash(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_compressed(base, tmp_path / "out", Crash())
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    assert get_last_checkpoint(str(tmp_path / "out")).endswith("checkpoint-6")
    for resumed in (
        train_compressed(base, tmp_path / "out", resume=True),
        train(model_of(base), tmp_path / "other", resume=True, **OPTIONS),
    ):
        assert_same_weights(resumed.model, through.model)
        assert_same_as_plain(Path(resumed.args.output_dir), tmp_path / "plain", 2, 4, 6, 8, 10, 12)


def test_an_overwritten_checkpoint_is_needed_by_none(tmp_path, base, through, run):
    assert needed_by(run / "checkpoint-4")
    train_compressed(base, run, StopAfter(9), resume=str(run / "checkpoint-4"), label_smoothing_factor=0.5)
    # 6 and 8 are of the second training, the others of the first.
    for step, checkpoint in checkpoints(run).items():
        models = [model_of(path) for path in (checkpoint, tmp_path / "plain" / checkpoint.name)]
        same = all(map(torch.equal, *(model.state_dict().values() for model in models)))
        assert same == (step not in (6, 8))


def test_a_run_compressed_afterwards_resumes_with_plain_import(tmp_path, base, through, series):
    """`compress-series` has compressed it; nothing but `import hf_ext` is in the script that goes on."""
    assert all(map(is_compressed, checkpoints(series).values()))
    script = f"""
import hf_ext
from pathlib import Path
from tiny_models import in_own_memory
from tiny_training import train
from transformers import AutoModelForSequenceClassification

model = in_own_memory(AutoModelForSequenceClassification.from_pretrained({str(base)!r}))
train(model, Path({str(series)!r}), resume=True, **{OPTIONS!r}).save_model({str(tmp_path / "end")!r})
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_weights(model_of(tmp_path / "end"), through.model)


def test_an_enabled_model_resumes_from_a_run_of_deltas(tmp_path, base, through, series, compressed_series):
    """`checkpoint-4` is stored against another checkpoint, not against the base that the model was enabled with."""
    assert needed_by(series / "checkpoint-4") == series / "checkpoint-6"
    enabled = fm_delta.enable(model_of(base), base)
    trainer = train(enabled, series, resume=str(series / "checkpoint-4"), **OPTIONS)
    assert_same_as_plain(series, tmp_path / "plain", 2, 4, 6, 8, 10, 12)
    assert_same_weights(trainer.model, through.model)
    with pytest.raises(BaseModelError, match="another base model"):  # outside the run, only the base is known
        enabled.load_state_dict(load_file(compressed_series / "checkpoint-4/model.safetensors"))


@pytest.mark.parametrize("limit", [None, 2])
def test_another_training_without_the_callback_loses_nothing(tmp_path, base, through, series, limit):
    """It saves over checkpoints with other weights, and deletes some, which older ones were stored against."""
    run, plain = series, tmp_path / "plain"
    assert needed_by(run / "checkpoint-2") == run / "checkpoint-4"
    other = OPTIONS | {"per_device_train_batch_size": 2, "save_total_limit": limit}
    train(model_of(base), run, resume=str(run / "checkpoint-4"), **other)
    older = [step for step in sorted(checkpoints(run)) if step <= 4]
    assert older == [2, 4] if limit is None else len(checkpoints(run)) == limit
    for step in older:
        folders = (run / f"checkpoint-{step}", plain / f"checkpoint-{step}")
        assert_same_weights(*map(AutoModelForSequenceClassification.from_pretrained, folders))
    if limit is None:
        again = AutoModelForSequenceClassification.from_pretrained(run / "checkpoint-6").state_dict()
        was = AutoModelForSequenceClassification.from_pretrained(plain / "checkpoint-6").state_dict()
        assert any(not torch.equal(again[name], was[name]) for name in was)


def test_a_new_training_leaves_older_checkpoints_readable(tmp_path, base, through, run):
    train_compressed(base, run, save_steps=3, label_smoothing_factor=0.5)
    assert set(checkpoints(run)) == {2, 3, 4, 6, 8, 9, 10, 12}
    for checkpoint in checkpoints(run).values():
        fm_delta.verify(checkpoint)
    for step in (2, 4, 8, 10):
        assert_same_weights(*(model_of(tmp_path / run / f"checkpoint-{step}") for run in ("out", "plain")))


SLOW_ROTATIONS = [(None, 2), (None, 3), (3, 1), (3, 3), (0, 1), (0, 2), (5, 2), (5, 3)]


@pytest.mark.parametrize(
    ("best_loss", "limit"),
    [(None, 1), (3, 2), (0, 3), (5, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_ROTATIONS)],
)
def test_rotation_never_takes_what_another_checkpoint_needs(tmp_path, base, through, limit, best_loss):
    """`best_loss` is which of the six evaluations finds the best model, if that is loaded at the end."""

    class Losses(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": float(self.state.global_step // 2 - 1 != best_loss)}
            self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    watch_first, watch_last = Watch(), Watch()
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
    options = OPTIONS | {"save_steps": 2, "per_device_train_batch_size": 4, "save_total_limit": limit, "report_to": []}
    args = TrainingArguments(
        str(tmp_path / "out"), use_cpu=True, disable_tqdm=True, greater_is_better=False,
        **(options | (best if best_loss is not None else {})),
    )  # fmt: skip
    callbacks = [watch_first, fm_delta.CompressCheckpoints(), watch_last]
    trainer = Losses(model_of(base), args, train_dataset=examples(16), eval_dataset=examples(8), callbacks=callbacks)
    trainer.train()
    assert len(watch_last.seen) == 6 and all(len(there) <= max(limit, 2) for there in watch_first.seen)
    # But for the newest and the best one, all are compressed.
    best_step = None if best_loss is None else 2 * best_loss + 2
    for i, there in enumerate(watch_last.seen):
        first_is_best = best_loss is not None and i < best_loss and 2
        plain = {2 * i + 2, first_is_best or best_step}
        assert all(compressed == (step not in plain) for step, compressed in there.items())
    kept = sorted(checkpoints(tmp_path / "out"))
    if best_loss is not None:
        assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best_step}")
        assert best_step in kept
        assert_same_weights(trainer.model, model_of(tmp_path / "plain" / f"checkpoint-{best_step}"))
    assert len(kept) == limit
    assert_same_as_plain(tmp_path / "out", tmp_path / "plain", *kept)
    assert all(map(is_compressed, checkpoints(tmp_path / "out").values()))


def test_a_later_save_total_limit_breaks_no_checkpoint(tmp_path, base):
    train_compressed(base, tmp_path / "out", StopAfter(8))
    assert any(map(needed_by, checkpoints(tmp_path / "out").values()))
    watch = Watch()
    train_compressed(base, tmp_path / "out", watch, resume=True, save_total_limit=3)
    assert [set(there) for there in watch.seen] == [{6, 8, 10}, {8, 10, 12}]


def test_shards_are_compressed_and_resumed_from(tmp_path, base, through, monkeypatch):
    class Shards(fm_delta.CompressCheckpoints):
        """Splits what was saved, as a model of several files is, before it is compressed."""

        def on_save(self, args, state, control, **kwargs):
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            model_of(folder).save_pretrained(folder, max_shard_size="60KB")
            super().on_save(args, state, control, **kwargs)

    train(model_of(base), tmp_path / "out", callbacks=[Shards()], **OPTIONS)
    assert len(list((tmp_path / "out/checkpoint-4").glob("model-*.safetensors"))) > 2
    assert all(map(is_compressed, checkpoints(tmp_path / "out").values()))
    assert_same_as_plain(tmp_path / "out", tmp_path / "plain", 2, 4, 6, 8, 10, 12)
    resumed = train_compressed(base, tmp_path / "out", resume=str(tmp_path / "out/checkpoint-4"))
    assert_same_weights(resumed.model, through.model)


@repeats("based", False, True)
def test_adapters_are_left_alone(tmp_path, base, based):
    def adapted():
        torch.manual_seed(0)
        return get_peft_model(model_of(base), LoraConfig(r=2, target_modules=["query", "value"]))

    through = train(adapted(), tmp_path / "plain", **OPTIONS)
    out, given = tmp_path / "out", base if based else None
    train(adapted(), out, callbacks=[StopAfter(6), fm_delta.CompressCheckpoints(given)], **OPTIONS)
    resumed = train(adapted(), out, resume=True, callbacks=[fm_delta.CompressCheckpoints(given)], **OPTIONS)
    assert_same_weights(resumed.model, through.model)
    assert set(checkpoints(out)) == {2, 4, 6, 8, 10, 12}


def test_a_model_with_the_callback_can_be_copied_and_pickled(tmp_path, base):
    trainer = train_compressed(base, tmp_path / "out", max_steps=2)
    for model in (copy.deepcopy(trainer.model), pickle.loads(pickle.dumps(trainer.model))):
        assert_same_weights(model, trainer.model)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_unusable_base_is_refused_before_the_first_step(tmp_path, base):
    def begin(model, *arguments, out="out"):
        train(model, tmp_path / out, callbacks=[fm_delta.CompressCheckpoints(*arguments)], **OPTIONS | {"max_steps": 4})

    with pytest.raises(CheckpointError, match="Give CompressCheckpoints its base="):
        begin(bert())
    with pytest.raises(BaseModelError, match="no/such"):
        begin(bert(), "no/such")
    with pytest.raises(CheckpointError, match="compresses this model's saves already"):
        begin(fm_delta.enable(model_of(base), base))
    assert not checkpoints(tmp_path / "out")
    begin(bert(), base)
    with pytest.raises(CheckpointError, match="is a checkpoint of the run itself"):
        begin(model_of(tmp_path / "out/checkpoint-4"))
    begin(model_of(tmp_path / "out/checkpoint-4"), out="next")  # a compressed base of another run
    assert needed_by(tmp_path / "next/checkpoint-2") and fm_delta.verify(tmp_path / "next/checkpoint-4")


def test_weights_of_another_run_are_not_taken_for_this_ones(tmp_path, base, run):
    with pytest.raises(CheckpointError, match="not those of a checkpoint in .*elsewhere.*hf-ext decompress"):
        train_compressed(base, tmp_path / "elsewhere", resume=str(run / "checkpoint-4"))


def test_a_training_goes_on_where_compression_fails(tmp_path, base, through, caplog):
    class Lock(TrainerCallback):
        """Holds the run's lock from another thread, as another process would."""

        def on_train_begin(self, args, state, control, **kwargs):
            pool.submit(holds.enter_context, locked(args.output_dir)).result()

    with ThreadPoolExecutor(1) as pool, ExitStack() as holds:
        trainer = train_compressed(base, tmp_path / "out", Lock())
        pool.submit(holds.close).result()
    assert_same_weights(trainer.model, through.model)
    assert "are not all compressed" in caplog.text
    assert not any(map(is_compressed, checkpoints(tmp_path / "out").values()))
    assert_same_as_plain(tmp_path / "out", tmp_path / "plain", 2, 4, 6, 8, 10, 12)
