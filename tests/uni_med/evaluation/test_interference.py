"""GD and GM are what their formulas say of the gradients, and measuring them changes nothing."""

import math

import pytest
import torch
from PIL import Image
from tiny_uni_med import batch, image, rows, uni_med
from transformers import Trainer, TrainingArguments

from hf_ext.uni_med import InterferenceCallback, feature_map, interference


def batches() -> dict:
    return {row["task"]: batch(samples=[row]) for row in rows() if row["task"] != "qa"}


def test_the_matrices_are_those_of_the_gradients():
    model = uni_med()
    result = interference(model, batches())
    assert result.tasks == ["vqa", "cls", "caption"]
    gradients = []
    for inputs in batches().values():
        model.zero_grad()
        model(**inputs).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.connector.parameters()]).double())
    for i, a in enumerate(gradients):
        assert result.norms[i].item() == pytest.approx(a.norm().item(), rel=1e-4)
        for j, b in enumerate(gradients):
            cosine = (a @ b / (a.norm() * b.norm())).item()
            magnitude = (2 * a.norm() * b.norm() / (a.norm() ** 2 + b.norm() ** 2)).item()
            assert result.direction[i, j].item() == pytest.approx(cosine, abs=1e-5)
            assert result.magnitude[i, j].item() == pytest.approx(magnitude, abs=1e-5)
    off = [(0, 1), (0, 2), (1, 2)]
    assert result.mean_direction == pytest.approx(sum(result.direction[i, j].item() for i, j in off) / 3)
    assert f"mean GD {result.mean_direction:.3f}, mean GM {result.mean_magnitude:.3f} of 3 tasks" in str(result)


def test_interference_averages_batches_of_a_task():
    model = uni_med()
    one, other = batches()["vqa"], batches()["cls"]
    result = interference(model, {"both": [one, other], "one": one}, [model.connector.experts.down])
    total = torch.zeros_like(model.connector.experts.down)
    for inputs in (one, other):
        total += torch.autograd.grad(model(**inputs).loss, model.connector.experts.down)[0] / 2
    assert result.norms[0].item() == pytest.approx(total.norm().item(), rel=1e-4)


def test_a_task_without_a_gradient_has_no_angle():
    result = interference(uni_med(), batches() | {"qa": batch(samples=rows()[1:2])})
    assert result.norms[3] == 0 and math.isnan(result.direction[0, 3]) and math.isnan(result.magnitude[3, 3])
    assert math.isfinite(result.mean_direction) and math.isfinite(result.mean_magnitude) and "–" in str(result)


def test_a_loss_of_frozen_weights_has_a_zero_gradient():
    model = uni_med()
    model.requires_grad_(False).connector.requires_grad_(True)
    result = interference(model, batches() | {"qa": batch(samples=rows()[1:2])})
    assert result.norms[3] == 0 and (result.norms[:3] > 0).all()


def test_measuring_leaves_the_model_as_it_is():
    model = uni_med().train()
    model.vision_tower.requires_grad_(False)
    model(**batch()).loss.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    interference(model, batches())
    assert model.training
    assert all(torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in before.items())


def test_interference_without_gradients_is_an_error():
    model = uni_med()
    with pytest.raises(ValueError, match="at least two"):
        interference(model, {"vqa": batches()["vqa"]})
    with pytest.raises(ValueError, match="'cls' have no labels"):
        interference(model, batches() | {"cls": batch(answers=False)})
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="parameters with requires_grad"):
        interference(model, batches())


def test_interference_is_drawn(tmp_path):
    model = uni_med()
    interference(model, batches()).plot(tmp_path / "interference.png")
    points = feature_map(model, batches() | {"qa": batch(samples=rows()[1:2])})
    points.plot(tmp_path / "features.png")
    for name in ("interference.png", "features.png"):
        assert min(Image.open(tmp_path / name).size) > 300


def test_the_map_has_the_principal_components_of_the_means():
    model = uni_med()
    samples = [{"image": image(i), "text": "what ?", "task": "cls", "answer": "red"} for i in range(6)]
    inputs = batch(samples=samples)
    points = feature_map(model, {"cls": inputs})
    with torch.no_grad():
        means = model.get_image_features(inputs["pixel_values"], inputs["image_tasks"]).pooler_output.mean(1)
    singular = torch.linalg.svdvals(means - means.mean(0))
    torch.testing.assert_close(points.after.norm(dim=0), singular[:2], rtol=1e-4, atol=1e-5)
    assert points.tasks == ["cls"] * 6 and points.before.shape == (6, 2)
    model.connector.register_forward_pre_hook(lambda module, _: pytest.fail("dropout") if module.training else None)
    feature_map(model.train(), {"cls": inputs})
    assert model.training
    with pytest.raises(ValueError, match="1 images"):
        feature_map(model, {"cls": batches()["cls"]})


def test_the_callback_logs_with_the_loss(tmp_path):
    callback = InterferenceCallback(batches(), every=2)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, logging_steps=1, per_device_train_batch_size=1, report_to="none", save_strategy="no",
        use_cpu=True,
    )  # fmt: skip
    data = [{name: value[0] for name, value in batches()["vqa"].items()}] * 4
    trainer = Trainer(uni_med(), arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert [step for step, _ in callback.history] == [1, 3]
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    assert logged[3]["interference_direction"] == callback.history[1][1].mean_direction
    assert "interference_direction" not in logged[2]
