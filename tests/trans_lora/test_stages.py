"""A folder belongs to one run: files of another run are refused, and a half-written checkpoint is not resumed from."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from test_transfer import transfer
from tiny_adapters import moved
from tiny_transfers import SEEDS, answer, inputs, lora, pretrained, settings, teacher
from transformers import TrainerCallback

from hf_ext import HfExtError
from hf_ext.trans_lora import train_discriminator
from hf_ext.trans_lora.stages import last_checkpoint

SMALL = {"num_samples": 12, "save_strategy": "steps", "save_steps": 1}  # of 4 steps
LABELLED = SMALL | {"inputs": {text: answer(text) for text in inputs(17)}, "seeds": ()}  # only trains


@pytest.mark.parametrize(("first", "then", "message"), [
    ({}, {"num_samples": 10, "temperature": 0.5}, "holds a run with another num_samples, temperature"),
    ({"inputs": inputs(20)}, {"inputs": inputs(20, seed=9)}, "has labels of other inputs"),
])  # fmt: skip
def test_a_folder_of_another_transfer_is_refused(tmp_path, first, then, message):
    transfer(tmp_path, **first).label()
    with pytest.raises(HfExtError, match=message):
        transfer(tmp_path, **then).train()


def test_one_folder_cannot_be_a_discriminators_and_a_transfers(tmp_path):
    transfer(tmp_path, **SMALL).synthesize()
    args = settings(tmp_path)
    with pytest.raises(HfExtError, match="holds a run with another kind"):
        train_discriminator(*pretrained("gpt2"), inputs(16, 3), task="pick", args=args, peft_config=lora("gpt2"), seeds=SEEDS)


def test_files_without_a_record_are_not_resumed_from(tmp_path):
    (tmp_path / "synthesis.jsonl").write_text("")
    with pytest.raises(HfExtError, match="holds synthesis.jsonl of another run"):
        transfer(tmp_path).synthesize()


def test_another_adapter_of_the_same_base_is_another_teacher(tmp_path):
    model, tokenizer = teacher("gpt2")
    transfer(tmp_path, teaching=(model, tokenizer), **SMALL).label()
    other = moved(model, seed=5)
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        next(p for name, p in other.named_parameters() if "lora_B" in name).add_(0.1)
    with pytest.raises(HfExtError, match="another teacher's adapter"):
        transfer(tmp_path, teaching=(other, tokenizer), **SMALL).train()


def test_a_finished_training_refuses_other_settings_or_starts_again(tmp_path):
    transfer(tmp_path, **LABELLED, learning_rate=1e-9).train()
    advice = "Take another folder, or start again with resume_from_checkpoint=False"
    with pytest.raises(HfExtError, match=f"another learning_rate. {advice}"):
        transfer(tmp_path, **LABELLED, learning_rate=1e-2).train()
    for resume, learning_rate in ((False, 1e-2), ("False", 1e-3)):
        (tmp_path / "checkpoint-99").mkdir()  # later than all of the new training
        shutil.copy(f"{last_checkpoint(tmp_path)}/trainer_state.json", tmp_path / "checkpoint-99")
        again = transfer(tmp_path, **LABELLED, learning_rate=learning_rate)
        again.train(resume_from_checkpoint=resume)
        assert last_checkpoint(tmp_path) not in (None, str(tmp_path / "checkpoint-99"))
        factors = [parameter for name, parameter in again.model.named_parameters() if "lora_B" in name]
        assert max(factor.abs().max() for factor in factors) > 0.1 * learning_rate  # which steps of 1e-9 would not reach


def test_settings_may_change_while_nothing_was_written(tmp_path):
    with pytest.raises(ValueError, match="min_pp"):
        transfer(tmp_path, generation_kwargs={"min_pp": 0.1}, **SMALL).train()
    transfer(tmp_path, generation_kwargs={"min_p": 0.01}, **SMALL).synthesize()


class DieWhileSaving(TrainerCallback):
    """Leaves the last checkpoint as a kill in the midst of writing it does."""

    def __init__(self, left: str):
        self.left = left

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 2:
            folder = Path(args.output_dir, "checkpoint-2")
            if self.left == "a card":
                shutil.rmtree(folder)
                folder.mkdir()
                (folder / "README.md").touch()
            else:
                os.truncate(folder / "trainer_state.json", 40)
            raise KeyboardInterrupt


def test_a_half_written_checkpoint_is_skipped(tmp_path):
    whole = transfer(tmp_path / "whole", **LABELLED)
    whole.train()
    for left in ("a card", "half a state"):
        with pytest.raises(KeyboardInterrupt):
            transfer(tmp_path / left, **LABELLED, callbacks=[DieWhileSaving(left)]).train()
        assert last_checkpoint(tmp_path / left).endswith("checkpoint-1")
        again = transfer(tmp_path / left, **LABELLED)
        again.train(resume_from_checkpoint=True)
        ended, expected = (trainer.report.to_dict() | {"seconds": {}, "adapter": ""} for trainer in (again, whole))
        assert ended == expected


@pytest.mark.parametrize(
    ("checkpoint", "message"), [(True, "no complete checkpoint"), ("nowhere", "there is no folder nowhere")]
)
def test_resuming_without_a_checkpoint_is_an_early_error(tmp_path, checkpoint, message):
    with pytest.raises(ValueError, match=message):
        transfer(tmp_path, **SMALL).train(resume_from_checkpoint=checkpoint)
    assert not (tmp_path / "transfer.json").exists() and not (tmp_path / "synthesis.jsonl").exists()
    assert last_checkpoint(tmp_path / "nowhere") is None
