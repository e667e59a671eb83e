"""The discriminator learns to tell inputs apart, goes with the teacher on one model, and is saved like an adapter."""

import json
import shutil
from collections import Counter

import pytest
import torch
from hosts import pissa
from lookup_models import write_judge
from peft import LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from tiny_adapters import moved
from tiny_transfers import SEEDS, inputs, judge, lora, pretrained, settings, teacher
from training_seeds import training_seed

from hf_ext import HfExtError, PissaConfig
from hf_ext.trans_lora import Discriminator, train_discriminator
from hf_ext.trans_lora.config import PAPERS_MEMBERSHIP
from hf_ext.trans_lora.discriminator import _split

OTHERS = [f"sort {text[5:]}" for text in inputs(10)] + [f"find {text[5:7]}" for text in inputs(10)]
REAL = [f"pick X {text[5:]}" for text in inputs(20, seed=3)]  # which no model writes
NO_STEPS = {"learning_rate": 1e-9, "num_train_epochs": 1}


def trained(model, tokenizer, folder, **options) -> Discriminator:
    args = settings(folder, **options)
    return train_discriminator(model, tokenizer, REAL, task="pick", args=args, peft_config=lora("gpt2"), seeds=SEEDS)


def logits(model, tokenizer) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([tokenizer(SEEDS[0])["input_ids"]])).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base model, the teacher's adapter and a trained discriminator, as folders."""
    folder = tmp_path_factory.mktemp("saved")
    model, tokenizer = teacher("gpt2")
    model.save_pretrained(folder / "adapter")
    base, _ = pretrained("gpt2")
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    base.config.name_or_path = base.name_or_path = str(folder / "base")
    discriminator = trained(base, tokenizer, folder / "runs")
    discriminator.save_pretrained(folder / "discriminator")
    return folder, discriminator, tokenizer


def test_metrics_are_the_kept_shares_of_held_out_inputs(tmp_path):
    """Its base model knows the answers, and steps of next to nothing do not change them."""
    model, tokenizer = pretrained("gpt2")
    model = write_judge(get_peft_model(model, lora("gpt2"))).merge_and_unload()
    args = settings(tmp_path, eval_strategy="epoch", **NO_STEPS)
    options = {"task": "pick", "args": args, "peft_config": lora("gpt2")}
    discriminator = train_discriminator(model, tokenizer, REAL, **options, synthetic_inputs=OTHERS)
    assert discriminator.metrics == {"real_kept": 1.0, "synthetic_kept": 0.0}
    scores = discriminator.score(inputs(20) + OTHERS)
    assert all(0.5 < score <= 1 for score in scores[:20]) and all(0 <= score < 0.5 for score in scores[20:])
    assert discriminator.score([]) == []


def test_the_smaller_kind_is_repeated_and_all_of_it_trained_on():
    held_out, rows = _split(REAL, OTHERS[:3], seed=training_seed())
    assert [answer for _, answer in held_out] == ["Yes"] * 2
    assert Counter(answer for _, answer in rows) == {"Yes": 18, "No": 18}
    assert {text for text, _ in held_out + rows} == {*REAL, *OTHERS[:3]}


def test_the_score_is_the_share_of_yes(saved):
    _, discriminator, tokenizer = saved
    prompt = tokenizer(SEEDS[0] + "\nIs the above question from pick dataset?")["input_ids"]
    discriminator.model.set_adapter("discriminator")
    yes, no = (
        sum(
            discriminator.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 + i].log_softmax(-1)[token].item()
            for i, token in enumerate(tokens)
        )
        for tokens in (tokenizer(" Yes")["input_ids"], tokenizer(" No")["input_ids"])
    )
    expected = 1 / (1 + torch.tensor(no - yes).exp().item())
    assert discriminator.score([SEEDS[0]])[0] == pytest.approx(expected, abs=1e-5)
    discriminator.model.base_model.set_adapter([])


@pissa
def test_a_teacher_in_pissas_training_form_takes_no_discriminator(saved):
    config = PissaConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"])
    model = moved(get_peft_model(pretrained("gpt2")[0], config))
    with pytest.raises(ValueError, match="Save them, and load them as LoRAs"):
        Discriminator.from_pretrained(saved[0] / "discriminator", model, pretrained("gpt2")[1])


def test_beside_any_teacher_both_compute_as_they_did_alone(saved):
    folder, discriminator, _ = saved
    expected = discriminator.score(OTHERS + SEEDS)
    base, tokenizer = pretrained("gpt2")
    configs = {
        "lora": lora("gpt2"),
        "dora": lora("gpt2", use_dora=True),
        "prompts": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "with a head of its own": lora("gpt2", modules_to_save=["ln_f"]),
    }
    for name, config in configs.items():
        model = moved(get_peft_model(pretrained("gpt2")[0], config))
        alone, grads = logits(model, tokenizer), {name for name, p in model.named_parameters() if p.requires_grad}
        with_teacher = Discriminator.from_pretrained(folder / "discriminator", model, tokenizer)
        assert torch.equal(logits(model, tokenizer), alone), name
        assert with_teacher.score(OTHERS + SEEDS) == pytest.approx(expected, abs=1e-4), name
        assert torch.equal(logits(model, tokenizer), alone), name
        assert {name for name, p in model.named_parameters() if p.requires_grad} == grads
        with model.disable_adapter():
            assert torch.allclose(logits(model, tokenizer)[:, -4:], logits(base, tokenizer)[:, -4:], atol=1e-5), name


def test_training_beside_a_teacher_leaves_it_as_it_was(tmp_path):
    model, tokenizer = teacher("gpt2")
    alone = logits(model, tokenizer)
    discriminator = trained(model, tokenizer, tmp_path / "run", discriminator_prompt=PAPERS_MEMBERSHIP)
    assert torch.equal(logits(model, tokenizer), alone)
    second = [weight for name, weight in discriminator.model.named_parameters() if "lora_B.discriminator" in name]
    assert second and all(weight.any() for weight in second), "B is 0 before the training"
    discriminator.score(OTHERS)
    assert torch.equal(logits(model, tokenizer), alone)

    # It asks as it was trained, wherever it is loaded.
    texts = [*OTHERS, *SEEDS, "{task} {input} {0}"]
    asked = f"{texts[-1]}\nIs the above question from the pick dataset? Answer in as few words as possible."
    assert discriminator.question(texts[-1]) == asked  # the tokenizer has no chat template
    discriminator.save_pretrained(tmp_path / "saved")
    again = Discriminator.from_pretrained(tmp_path / "saved", pretrained("gpt2")[0], tokenizer)
    assert again.prompt == discriminator.prompt and again.score(texts) == pytest.approx(discriminator.score(texts), abs=1e-5)


def test_a_teacher_that_comes_after_it_computes_as_alone(saved, tmp_path):
    folder, _, tokenizer = saved
    expected = logits(teacher("gpt2")[0], tokenizer)
    base, _ = pretrained("gpt2")
    plain = logits(base, tokenizer)
    discriminator = Discriminator.from_pretrained(folder / "discriminator", base, tokenizer)
    assert torch.equal(logits(base, tokenizer), plain)
    scores = discriminator.score(OTHERS)
    model = PeftModel.from_pretrained(base, folder / "adapter")
    assert torch.allclose(logits(model, tokenizer), expected, atol=1e-4)
    assert discriminator.score(OTHERS) == pytest.approx(scores, abs=1e-5)
    assert torch.allclose(logits(model, tokenizer), expected, atol=1e-4)


def test_a_saved_discriminator_loads_as_an_adapter(saved):
    folder, discriminator, tokenizer = saved
    assert {path.name for path in (folder / "discriminator").iterdir()} == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "discriminator.json")
    }
    again = Discriminator.from_pretrained(folder / "discriminator")
    assert again.score(OTHERS + SEEDS) == pytest.approx(discriminator.score(OTHERS + SEEDS), abs=1e-6)
    assert (again.task, again.metrics) == (discriminator.task, discriminator.metrics)
    plain = PeftModel.from_pretrained(pretrained("gpt2")[0], folder / "discriminator")
    discriminator.model.set_adapter("discriminator")
    assert torch.allclose(logits(plain, tokenizer), logits(discriminator.model, tokenizer), atol=1e-6)
    discriminator.model.base_model.set_adapter([])
    assert PeftConfig.from_pretrained(folder / "discriminator").base_model_name_or_path == str(folder / "base")
    (folder / "discriminator" / "README.md").write_text("My own words.")
    discriminator.save_pretrained(folder / "discriminator")
    assert (folder / "discriminator" / "README.md").read_text() == "My own words."


def test_nothing_real_is_written_but_the_seeds(saved):
    folder, _, _ = saved
    files = [path for name in ("runs", "discriminator") for path in (folder / name).rglob("*") if path.is_file()]
    texts = [path.read_text(errors="ignore") for path in files]
    assert len(texts) > 4 and not [text for text in REAL if any(text in file for file in texts)]


def test_a_repeated_run_resumes_from_its_files_and_another_is_refused(tmp_path):
    options = NO_STEPS | {"save_strategy": "steps", "save_steps": 5}
    first = trained(*pretrained("gpt2"), tmp_path, **options)
    before = (tmp_path / "synthesis.jsonl").read_bytes()
    (tmp_path / "checkpoint-99").mkdir()
    for changed in ({"discriminator_prompt": PAPERS_MEMBERSHIP}, {"learning_rate": 1e-4}):
        with pytest.raises(HfExtError, match=f"holds a run with another {next(iter(changed))}. Take another folder"):
            trained(*pretrained("gpt2"), tmp_path, **options | changed)
    given = {"args": settings(tmp_path, **options), "peft_config": lora("gpt2"), "seeds": SEEDS}
    with pytest.raises(HfExtError, match="holds a run with another task, real inputs"):
        train_discriminator(*pretrained("gpt2"), [text.replace("pick", "sort") for text in REAL], task="sort", **given)
    again = trained(*pretrained("gpt2"), tmp_path, **options)
    assert (tmp_path / "synthesis.jsonl").read_bytes() == before
    assert again.score(OTHERS) == pytest.approx(first.score(OTHERS), abs=1e-5)
    trained(*pretrained("gpt2"), tmp_path, **options | {"learning_rate": 1e-4}, resume_from_checkpoint="False")
    assert not (tmp_path / "checkpoint-99").exists()


def test_another_model_is_refused_and_named(saved):
    folder, _, tokenizer = saved
    model = moved(pretrained("gpt2")[0])
    with pytest.raises(HfExtError, match="tiny-gpt2 is another model. In a chain"):
        Discriminator.from_pretrained(folder / "discriminator", model, tokenizer)
    model = moved(get_peft_model(pretrained("gpt2")[0], lora("gpt2"))).merge_and_unload()
    model.config.name_or_path = model.name_or_path = ""
    with pytest.raises(HfExtError, match="the given model is another"):
        Discriminator.from_pretrained(folder / "discriminator", model, tokenizer)


def test_a_base_in_half_precision_is_the_same_base():
    base, tokenizer = pretrained("gpt2")
    scores = judge(base.bfloat16(), tokenizer).score(OTHERS + SEEDS)
    assert [score > 0.5 for score in scores] == [False] * len(OTHERS) + [True] * len(SEEDS)


def test_a_tokenizer_that_cannot_pad_pads_with_the_end(saved, tmp_path):
    folder, discriminator, _ = saved
    shutil.copytree(folder, tmp_path / "saved")
    settings_of_tokenizer = tmp_path / "saved/base/tokenizer_config.json"
    config = json.loads(settings_of_tokenizer.read_text())
    config.pop("pad_token")
    settings_of_tokenizer.write_text(json.dumps(config))
    adapter = tmp_path / "saved" / "discriminator" / "adapter_config.json"
    adapter.write_text(adapter.read_text().replace(str(folder), str(tmp_path / "saved")))
    again = Discriminator.from_pretrained(tmp_path / "saved" / "discriminator")
    assert again.score(OTHERS) == pytest.approx(discriminator.score(OTHERS), abs=1e-5)


@pytest.mark.parametrize("start", ["pissa_niter_4", "olora", "lora_ga"])
def test_an_adapter_that_has_changed_its_base_cannot_share_it(saved, start):
    folder, _, tokenizer = saved
    model = get_peft_model(pretrained("gpt2")[0], lora("gpt2"))
    model.peft_config["default"].init_lora_weights = start
    with pytest.raises(HfExtError, match=f"init_lora_weights='{start}' changes the base model's weights"):
        Discriminator.from_pretrained(folder / "discriminator", model, tokenizer)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"task": "pick"}', '{"task": 1, "base_sample": "x", "metrics": {}}'])
def test_a_folder_that_is_no_discriminator_is_refused(saved, tmp_path, content):
    if content is not None:
        (tmp_path / "discriminator.json").write_text(content)
    with pytest.raises(HfExtError, match="no discriminator|not a valid record"):
        Discriminator.from_pretrained(tmp_path)


def test_too_few_inputs_and_replaced_modules_are_refused(tmp_path):
    model, tokenizer = pretrained("gpt2")
    replacing = {"peft_config": LoraConfig(task_type="CAUSAL_LM", modules_to_save=["lm_head"]), "synthetic_inputs": OTHERS}
    for real, options, message in (
        (["a", "b", "c", "c "], {}, "There are 3 different real inputs; give at least 5"),
        ("real inputs.jsonl", {}, "real_inputs='real inputs.jsonl' is a single text"),
        ([*REAL, "pick " + "a b c " * 300], {}, "'pick a b c [a-c ]+…' is too long: the discriminator's model's context"),
        (REAL, {"synthetic_inputs": []}, "synthetic_inputs is empty"),
        (REAL, replacing, "leave out modules_to_save"),
    ):
        with pytest.raises(HfExtError, match=message):
            train_discriminator(model, tokenizer, real, task="t", args=settings(tmp_path), **options)
