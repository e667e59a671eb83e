"""Uni-Med trains with Trainer, with PEFT's adapters on its language model, and on several processes."""

import math
import os
from pathlib import Path

import pytest
import torch
from hosts import pissa
from peft import LoraConfig, PeftModel, get_peft_model
from processes import free_port, launched, on_ranks
from stop_after import StopAfter
from tiny_models import same_bits
from tiny_uni_med import assert_likeliest, batch, processor, rows, uni_med
from training_seeds import training_seed
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_ext import PissaConfig, UniMedForConditionalGeneration
from hf_ext.uni_med import UniMedCollator, evaluate

ON_THE_LANGUAGE_MODEL = r".*language_model\.model\..*_proj"
KINDS = [{}, {"router": "sparse"}, {"connector": "mlp"}]


def train(model, out: Path, resume=None, callbacks=(), metrics=None, **options) -> Trainer:
    settings = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    settings |= {"seed": training_seed(), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(out), remove_unused_columns=False, **settings | options)
    data = {"train_dataset": rows() * 4, "eval_dataset": rows(), "data_collator": UniMedCollator(processor())}
    trainer = Trainer(model, arguments, **data, callbacks=[*callbacks], compute_metrics=metrics)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch()).logits


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_mixed_tasks_are_trained(tmp_path, options):
    model = uni_med(**options)
    model.vision_tower.requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.vision_tower.named_parameters()}
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    in_bf16 = {"bf16": not options, "gradient_checkpointing": not options}
    trainer = train(model, tmp_path, max_steps=2, save_strategy="no", **in_bf16)
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert not [name for name, p in before.items() if same_bits(p, model.get_parameter(name))]
    assert all(same_bits(p, frozen[name]) for name, p in model.vision_tower.named_parameters())
    assert not model.train().vision_tower.training and model.connector.training
    data = {row["task"]: [row] for row in rows()}
    assert evaluate(model, processor(), data, max_new_tokens=8).metrics.keys() == data.keys()


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, resumed = uni_med(), uni_med()
    train(whole, tmp_path / "whole")
    train(uni_med(), tmp_path / "parts", callbacks=[StopAfter(4)])
    train(resumed, tmp_path / "parts", resume=get_last_checkpoint(tmp_path / "parts"))
    assert all(same_bits(p, whole.get_parameter(name)) for name, p in resumed.named_parameters())
    last = UniMedForConditionalGeneration.from_pretrained(get_last_checkpoint(tmp_path / "whole"))
    torch.testing.assert_close(logits(last), logits(whole))


def test_trainer_evaluates_and_loads_the_best_checkpoint(tmp_path):
    hits = iter([0.2, 0.9, 0.4])

    def metrics(outputs):
        assert outputs.predictions.shape == (4, *outputs.label_ids.shape[1:], 96)
        assert (outputs.label_ids >= 0).any(1).all()
        return {"hits": next(hits)}

    model = uni_med()
    trainer = train(
        model, tmp_path, metrics=metrics, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_hits", greater_is_better=True, per_device_eval_batch_size=3,
    )  # fmt: skip
    best = UniMedForConditionalGeneration.from_pretrained(trainer.state.best_model_checkpoint)
    assert trainer.state.best_model_checkpoint.endswith("-4")
    torch.testing.assert_close(logits(best), logits(model))


@pytest.mark.parametrize("kind", [LoraConfig, pytest.param(PissaConfig, marks=pissa)], ids=["lora", "pissa"])
def test_adapters_on_the_language_model_with_a_trained_connector(tmp_path, kind):
    parts = {"target_modules": ON_THE_LANGUAGE_MODEL, "modules_to_save": ["connector"]}
    model = get_peft_model(uni_med(), kind(r=8, lora_alpha=16, task_type="CAUSAL_LM", **parts))
    expected = logits(uni_med())
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("language_model" in name or "connector.modules_to_save" in name for name in trained)
    assert len([name for name in trained if "lora_A" in name]) == 14
    train(model, tmp_path / "run", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    after = logits(model)
    assert not torch.allclose(after, expected, atol=1e-2)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(uni_med(), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), after, rtol=1e-4, atol=1e-5)
    inputs = batch(answers=False)
    assert_likeliest(loaded, inputs, model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None))
    merged = loaded.merge_and_unload()
    assert isinstance(merged, UniMedForConditionalGeneration)
    torch.testing.assert_close(logits(merged), after, rtol=1e-3, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(UniMedForConditionalGeneration.from_pretrained(tmp_path / "merged")), logits(merged))


def _half_without_images(rank: int, folder: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for options in KINDS:
        config = LoraConfig(r=2, target_modules="all-linear", modules_to_save=["connector"])
        adapted = get_peft_model(uni_med(**options), config)
        model = DistributedDataParallel(adapted.train())
        for _ in range(2):
            loss = model(**batch(samples=rows()[rank : rank + 1])).loss
            loss.backward()
        gradients = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
        assert any("vision_tower" in name for name in gradients) and all(g.isfinite().all() for g in gradients.values())
        assert gradients["base_model.model.connector.modules_to_save.default.experts.down"].abs().sum() > 0
        del model  # or its process group may wait in vain for the other rank
    torch.distributed.destroy_process_group()


def test_a_process_without_images_trains_along(tmp_path):
    assert on_ranks(_half_without_images, str(tmp_path)) == [0, 0]


def test_a_half_model_trains_a_connector_in_full_precision(tmp_path):
    model = uni_med().to(torch.bfloat16)
    model.requires_grad_(False).connector.float().requires_grad_(True)
    before = {name: p.clone() for name, p in model.connector.named_parameters()}
    train(model, tmp_path, learning_rate=1e-5, save_strategy="no")
    assert all(torch.mean(p != before[name], dtype=torch.float32) > 0.5 for name, p in model.connector.named_parameters())


def _train_together(rank: int, folder: str, port: int) -> None:
    launched(rank, port)
    model = uni_med()
    trainer = train(model, Path(folder), per_device_train_batch_size=2, save_strategy="no", max_steps=4)
    assert trainer.accelerator.num_processes == 2
    trainer.save_model()
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    both = trainer.accelerator.gather(total[None])
    assert both[0] == both[1], both
    os._exit(0)  # without waiting for the other process


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path):
    """A batch of a process may be without images."""
    assert on_ranks(_train_together, str(tmp_path), free_port()) == [0, 0]
    model = UniMedForConditionalGeneration.from_pretrained(tmp_path)
    assert not torch.allclose(logits(model), logits(uni_med()), atol=1e-3)
