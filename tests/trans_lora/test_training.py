"""Training computes logits where answers are, and learns the same from them."""

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from tiny_transfers import answer, inputs, lora, pretrained
from training_seeds import training_seed
from transformers import Trainer, TrainingArguments, set_seed

from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.scoring import AnswerTrainer


def losses(folder, kind, config, **options):
    """The loss and the gradients of both trainers for one batch, and how many places the output layer saw of each."""
    model, tokenizer = pretrained(kind)
    model = get_peft_model(model, config)
    encoder, seen = Encoder(tokenizer, model, "{input}"), []
    model.get_base_model().get_output_embeddings().register_forward_hook(
        lambda layer, inputs, output: seen.append(output.shape[:-1].numel())
    )
    texts = [*inputs(6), "pick a", "sort c a b d e"]
    samples = encoder.samples(texts, [f"{answer(text)} one" for text in texts[:3]] + [answer(text) for text in texts[3:]])
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", remove_unused_columns=False, **options)
    losses = []
    for trainer in (Trainer, AnswerTrainer):
        batch = encoder.batch(samples)
        loss = trainer(model.train(), args, encoder.batch, samples, processing_class=tokenizer).compute_loss(
            model, dict(batch), num_items_in_batch=(batch["labels"] != -100).sum()
        )
        model.zero_grad()
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    return losses, seen, int((batch["labels"] != -100).sum())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_logits_of_answers_alone_give_equal_loss_and_gradients(tmp_path, kind):
    (whole, sparing), seen, places = losses(tmp_path, kind, lora(kind))
    assert len(whole) == len(sparing) > 1 and all(torch.allclose(one, other, atol=1e-5) for one, other in zip(whole, sparing))
    assert seen[1] == places < seen[0] / 2


@pytest.mark.parametrize(("kind", "config", "options"), [
    ("llama", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), {}),
    ("llama", lora("llama"), {"label_smoothing_factor": 0.1}),
    ("llama", lora("llama"), {"torch_compile": True}),
    ("llama", lora("llama"), {"use_liger_kernel": True}),
    ("t5", lora("t5"), {}),
])  # fmt: skip
def test_where_the_loss_needs_all_logits_they_are_computed(tmp_path, kind, config, options):
    (whole, sparing), seen, _ = losses(tmp_path, kind, config, **options)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(whole, sparing)) and seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_accumulated_steps_equal_one_step_of_all_samples(tmp_path, kind):
    ends = []
    for steps in (1, 4):
        model, tokenizer = pretrained(kind)
        set_seed(training_seed())
        model = get_peft_model(model, lora(kind))
        encoder = Encoder(tokenizer, model, "{input}")
        samples = encoder.samples(inputs(8), ["early"] * 8)
        size = {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps, "max_steps": 1}
        plain = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0}
        plain |= {"save_strategy": "no"}
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", remove_unused_columns=False, **size, **plain)
        AnswerTrainer(model, args, encoder.batch, samples, processing_class=tokenizer).train()
        ends.append([p.detach().clone() for p in model.parameters() if p.requires_grad])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*ends))
    assert all(weight.any() for weight in ends[0]), "B is 0 before the step"
