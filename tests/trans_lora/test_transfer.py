"""An adapter moves to another model: of any kind to any kind, in stages that go on where they were, and with a report."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from hosts import pissa
from peft import LoraConfig, PeftModel, PromptTuningConfig, PromptTuningInit, get_peft_model
from processes import free_port, launched, on_ranks
from stop_after import StopAfter
from tiny_adapters import NF4, load, moved
from tiny_models import same_bits
from tiny_transfers import SEEDS, answer, inputs, is_input, judge, lora, pretrained, settings, teacher
from tokenizers import processors
from transformers import AutoTokenizer, TrainerCallback
from valid_cards import valid_card

from hf_ext import HfExtError, PissaConfig, QPissaConfig, TransLoraConfig, TransLoraTrainer
from hf_ext.trans_lora.config import MEMBERSHIP, PAPERS_MEMBERSHIP
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import ModelGenerator
from hf_ext.trans_lora.synthesis import Prompts


def transfer(folder, source="gpt2", target="llama", peft_config=None, teaching=None, **options) -> TransLoraTrainer:
    """A trainer that is ready to train. Options of the trainer and of its settings are distinguished by name; `target` is a
    kind of model, or a model and its tokenizer."""
    of_trainer = {name: options.pop(name) for name in (*TRAINER, "callbacks") if name in options}
    model, tokenizer = pretrained(target) if isinstance(target, str) else target
    teacher_model, teacher_tokenizer = teaching or teacher(source)
    return TransLoraTrainer(
        model,
        settings(folder, **{"filter": "none"} | options),
        processing_class=tokenizer,
        teacher=teacher_model,
        teacher_processing_class=teacher_tokenizer,
        peft_config=peft_config or lora(target if isinstance(target, str) else "llama"),
        **{"seeds": SEEDS, "well_formed": is_input} | of_trainer,
    )


TRAINER = ("seeds", "well_formed", "discriminator", "inputs", "synthesizer", "eval_dataset", "train_dataset")


@pytest.fixture(scope="module")
def moved_over(tmp_path_factory):
    """A whole transfer with the discriminator, and nothing else to tell inputs apart."""
    model, tokenizer = teacher("gpt2")
    folder = tmp_path_factory.mktemp("transfer")
    given = {"discriminator": judge(model, tokenizer), "teaching": (model, tokenizer)}
    trainer = transfer(folder, filter="discriminator", well_formed=None, num_samples=40, **given)
    trainer.train()
    trainer.save_model()
    return trainer, folder


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_stage_leaves_a_file_a_person_can_read(moved_over):
    trainer, folder = moved_over
    written, labels = lines(folder / "synthesis.jsonl"), lines(folder / "labels.jsonl")
    judged = [line for line in written if line["score"] is not None]
    assert all(line["kept"] == (line["score"] > 0.5) == is_input(line["input"]) for line in judged)
    assert {line["kept"] for line in judged} == {True, False}
    kept = [line["input"] for line in written if line["kept"]]
    assert [line["input"] for line in labels] == kept and len(kept) == len({*kept} - {*SEEDS}) == 50
    assert all(line["label"] == answer(line["input"]) for line in labels)
    assert json.loads((folder / "transfer.json").read_text())["inputs"]["seeds"] == SEEDS


def test_the_report_says_what_the_files_say(moved_over):
    trainer, folder = moved_over
    report, saved = trainer.report, json.loads((folder / "report.json").read_text())
    written = lines(folder / "synthesis.jsonl")
    assert report.attempts == saved["attempts"] == len(written) == sum(report.counts.values())
    assert report.counts["kept"] == sum(line["kept"] for line in written)
    assert report.held_out == 10 and report.trained == 40 and report.unlabelled == 0
    assert f"{report.attempts:,}" in str(report) and f"{100 * report.agreement:.1f} %" in report.summary()
    held_out = [text for text, _ in trainer.label(trainer.synthesize())[1]]
    said = ModelGenerator(trainer.model, trainer.encoder, 8)([trainer.encoder.prompt(text) for text in held_out], 4)
    assert report.agreement == sum(one.text.strip() == answer(text) for one, text in zip(said, held_out)) / 10
    assert saved["adapter"] == str(folder) and str(folder) in report.summary()
    assert saved["seconds"] == report.seconds and {"inputs", "labels", "training"} < report.seconds.keys()


def test_the_card_has_the_report_unless_the_user_wrote_one(moved_over, tmp_path):
    trainer, folder = moved_over
    data, text = valid_card(folder)
    assert (data.base_model, data["base_model_relation"]) == ("tiny-llama", "adapter")
    assert "trans-lora" in data.tags and data.library_name == "peft"
    assert all(f"| {name.strip()} | {value} |" in text for name, value in trainer.report.rows())
    assert f"| inputs written | {trainer.report.attempts:,} |" in text
    assert "````text\n{input}\n````" in text and json.loads((folder / "report.json").read_text())["prompt"] == "{input}"
    (tmp_path / "README.md").write_text("My own words.\n")
    trainer.save_model(tmp_path)
    text = (tmp_path / "README.md").read_text()  # to which PEFT adds metadata
    assert "My own words." in text and "inputs written" not in text


CONFIGS = {
    "lora": lambda task: LoraConfig(task_type=task, r=16, lora_alpha=32, target_modules="all-linear"),
    "dora": lambda task: LoraConfig(task_type=task, r=16, lora_alpha=32, target_modules="all-linear", use_dora=True),
    "pissa": lambda task: PissaConfig(task_type=task, r=16, lora_alpha=16, target_modules="all-linear"),
    "prompt_tuning": lambda task: PromptTuningConfig(
        task_type=task, num_virtual_tokens=8, prompt_tuning_init=PromptTuningInit.RANDOM
    ),
}


def logits(model) -> torch.Tensor:
    tokenizer = pretrained("llama")[1]
    with torch.no_grad():
        return model.eval()(torch.tensor([tokenizer(SEEDS[0])["input_ids"]])).logits


PISSA = pytest.param("pissa", marks=pissa)


@pytest.mark.parametrize("kind", ["lora", "dora", PISSA, "prompt_tuning"])
def test_any_kind_of_adapter_may_be_the_new_one(tmp_path, kind):
    labels = {text: answer(text) for text in inputs(16)}
    trainer = transfer(tmp_path, peft_config=CONFIGS[kind]("CAUSAL_LM"), inputs=labels, seeds=())
    before = logits(trainer.model)
    trainer.train()
    trainer.save_model()
    after = logits(trainer.model)
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.allclose(logits(PeftModel.from_pretrained(pretrained("llama")[0], tmp_path)), after, atol=1e-3)


@pytest.mark.parametrize("kind", ["dora", PISSA, "prompt_tuning"])
def test_any_kind_of_adapter_may_be_the_teachers(tmp_path, kind):
    """What it has learned is of no account here: only that its answers, rather than its base's, are what is learned."""
    model, tokenizer = pretrained("gpt2")
    model = moved(get_peft_model(model, CONFIGS[kind]("CAUSAL_LM")), seed=4).eval()
    trainer = transfer(tmp_path, teaching=(model, tokenizer), max_label_length=2)
    texts = inputs(12)
    said = trainer.teacher.answers(texts)
    expected = ModelGenerator(model, Encoder(tokenizer, model, "{input}"), 1)(texts, 2)
    assert said == [one.text.strip() or None if one.ended else None for one in expected]


@pytest.mark.parametrize("source, target", [("t5", "gpt2"), ("gpt2", "t5")])
def test_encoder_decoders_teach_and_learn(tmp_path, source, target):
    trainer = transfer(tmp_path, source, target)
    before = weights(trainer)
    trainer.train()
    labels = lines(tmp_path / "labels.jsonl")
    assert len(labels) == 25 and all(line["label"] == answer(line["input"]) for line in labels)
    (sample,) = trainer.encoder.samples([trainer.encoder.prompt(labels[0]["input"])], [labels[0]["label"]])
    assert sample in [*trainer.train_dataset, *trainer.eval_dataset]
    moved = {name.split(".lora_")[0] for name, weight in weights(trainer).items() if not same_bits(weight, before[name])}
    assert any("decoder" in name for name in moved) == any("encoder" in name for name in moved) == (target == "t5")
    assert len(moved) == len(before) / 2  # A and B of each layer


def test_a_chain_of_transfers_needs_one_discriminator(tmp_path):
    """The second teacher has another base than the discriminator."""
    source, teacher_tokenizer = pretrained("gpt2")
    given = {"discriminator": judge(source, teacher_tokenizer), "teaching": teacher("llama"), "filter": "discriminator"}
    trainer = transfer(tmp_path, target="gpt2", well_formed=None, **given)
    trainer.train()
    labels = lines(tmp_path / "labels.jsonl")
    meant = [line for line in labels if is_input(line["input"])]  # sampling may leave the grammar of the inputs
    assert len(labels) == 25 and meant and all(line["label"] == answer(line["input"]) for line in meant)


@pissa
def test_a_four_bit_model_learns_too(tmp_path):
    base, tokenizer = pretrained("llama")
    base.save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base", NF4)
    config = QPissaConfig(task_type="CAUSAL_LM", r=8, target_modules=["o_proj", "down_proj"])
    on_cpu = model.device.type == "cpu"  # bitsandbytes has chosen
    trainer = transfer(tmp_path / "out", target=(model, tokenizer), peft_config=config, use_cpu=on_cpu)
    before = weights(trainer)
    trainer.train()
    assert len(lines(tmp_path / "out" / "labels.jsonl")) == 25
    assert all(weight.isfinite().all() and not same_bits(weight, before[name]) for name, weight in weights(trainer).items())


# ---------------------------------------------------------------------------------------------------------- going on


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


class Die(TrainerCallback):
    """Ends the process's work as a kill would, after a step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


STEPS = {"save_strategy": "steps", "save_steps": 3, "num_samples": 12}  # of 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not killed: its files and its weights."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = transfer(folder, **STEPS)
    trainer.train()
    names = ("synthesis.jsonl", "labels.jsonl", "transfer.json")
    return {name: (folder / name).read_bytes() for name in names}, weights(trainer), trainer.report


@pytest.mark.parametrize("stage", ["synthesis", "labels", "distillation"])
def test_a_killed_run_ends_as_one_that_ran_through(tmp_path, whole, stage):
    def interrupt():
        raise KeyboardInterrupt

    tested = []
    broken = transfer(tmp_path, **STEPS, callbacks=[Die()] if stage == "distillation" else [])
    if stage == "synthesis":
        broken.well_formed = lambda text: interrupt() if len(tested) == 14 else tested.append(text) or is_input(text)
    elif stage == "labels":
        ask = broken.teacher.completions
        broken.teacher.completions = lambda texts: ask(texts) if texts == SEEDS else interrupt()
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = transfer(tmp_path, **STEPS)
    again.train()
    files, expected, report = whole
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    assert all(same_bits(parameter, expected[name]) for name, parameter in weights(again).items())
    assert (again.report.counts, again.report.agreement) == (report.counts, report.agreement)


def test_options_and_callbacks_of_trainer_are_used(tmp_path):
    by_steps = {"eval_strategy": "steps", "eval_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
    options = {"num_train_epochs": 6, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "inputs": inputs(25)}
    trainer = transfer(tmp_path, **by_steps, **options, callbacks=[StopAfter(6)])
    trainer.train()
    assert trainer.state.global_step == 6
    logged = [sorted(entry) for entry in trainer.state.log_history]
    assert sum("loss" in entry for entry in logged) == 6 and sum("eval_loss" in entry for entry in logged) == 2
    assert any("agreement" in entry for entry in logged)


# ----------------------------------------------------------------------------------------------------- other ways to go


def test_given_inputs_replace_synthetic_ones(tmp_path):
    trainer = transfer(tmp_path, inputs=inputs(40), seeds=())
    trainer.train()
    trainer.save_model()
    assert not (tmp_path / "synthesis.jsonl").exists()
    assert lines(tmp_path / "labels.jsonl") == [{"input": text, "label": answer(text)} for text in inputs(40)]
    assert (trainer.report.trained, trainer.report.held_out) == (30, 10) and "inputs given" in trainer.report.summary()
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_server_may_write_and_another_may_teach(tmp_path):
    """What stands for a server here is anything that writes; that real ones do is tested with the generators."""
    asked = []

    def there(model, encoder):
        write = ModelGenerator(model, encoder, 8)
        return lambda prompts, *args, **options: asked.extend(prompts) or write(prompts, *args, **options)

    (model, tokenizer), (taught, words) = pretrained("llama"), teacher("gpt2")
    teaching = there(taught, Encoder(words, taught, "{input}")), words
    transfer(tmp_path, teaching=teaching, synthesizer=there(model, Encoder(tokenizer, model))).train()
    assert all(line["label"] == answer(line["input"]) for line in lines(tmp_path / "labels.jsonl"))
    assert {prompt.split()[0] for prompt in asked} >= {"Here", "pick"}


def test_an_input_that_does_not_fit_the_teacher_is_dropped(tmp_path):
    teacher_model, tokenizer = teacher("gpt2")
    # Room for four tokens of a label after four:
    teacher_model.config.max_position_embeddings = teacher_model.config.n_positions = 8
    trainer = transfer(tmp_path, teaching=(teacher_model, tokenizer), well_formed=None)
    candidates = trainer.synthesize()
    assert {len(tokenizer(one.input)["input_ids"]) for one in candidates if one.kept} <= {1, 2, 3, 4}
    assert any(one.reason == "malformed" and len(tokenizer(one.input)["input_ids"]) == 5 for one in candidates)


THINKING = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{% if not enable_thinking | default(true) %}<nothing>{% endif %}"
)


def test_chats_have_the_system_prompt_and_template_variables(tmp_path):
    (model, tokenizer), (target, _) = teacher("gpt2"), pretrained("gpt2")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    tokenizer.chat_template = THINKING
    asked = {"prompt_template": None, "teacher_prompt_template": None, "chat_template_kwargs": '{"enable_thinking": false}'}
    args = settings(tmp_path, filter="none", system_prompt="Be brief.", teacher_system_prompt="Say when.", **asked)
    options = {"processing_class": tokenizer, "teacher": model, "seeds": SEEDS, "peft_config": lora("gpt2")}
    trainer = TransLoraTrainer(target, args, **options)
    assert trainer.encoder.prompt("a") == "<begin><system>Be brief.<user>a<assistant><nothing>"
    assert trainer.teacher.encoder.prompt("a") == "<begin><system>Say when.<user>a<assistant><nothing>"
    request = Prompts(SEEDS, args, trainer.encoder).prompt(SEEDS)
    assert request.startswith("<begin><user>Here are 5 examples of a task's inputs:\n1. ")
    assert request.endswith("<assistant><nothing>6.")
    [sample] = trainer.encoder.samples([trainer.encoder.prompt("a")], ["early"])
    assert sample["input_ids"][-1] == tokenizer.eos_token_id
    asked = []
    trainer.teacher.generator = lambda prompts, length: asked.extend(prompts) or []
    trainer.teacher.completions(["a"])
    assert asked == [trainer.teacher.encoder.prompt("a")]
    assert trainer.teacher.encoder.without_bos(asked) == asked  # the tokenizer adds none
    begin = ("<begin>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[begin])
    assert trainer.teacher.encoder.without_bos(asked) == ["<system>Say when.<user>a<assistant><nothing>"]
    with pytest.raises(HfExtError, match="has a system prompt and no chat template"):
        TransLoraTrainer(target, settings(tmp_path, filter="none", system_prompt="Be brief."), **options)


def test_given_labels_stay_and_the_teacher_adds_the_others(tmp_path):
    texts = inputs(6)
    trainer = transfer(tmp_path, inputs={text: "mine" if i % 2 else None for i, text in enumerate(texts)}, seeds=())
    trainer.label()
    labels = [line["label"] for line in lines(tmp_path / "labels.jsonl")]
    assert labels == ["mine" if i % 2 else answer(text) for i, text in enumerate(texts)]


def test_an_answer_too_long_for_the_target_is_no_label(tmp_path):
    texts = inputs(4)
    trainer = transfer(tmp_path, inputs={text: "late " * (400 if text == texts[1] else 1) for text in texts}, seeds=())
    trainer.train()
    assert (trainer.report.trained, trainer.report.held_out, trainer.report.unlabelled) == (2, 1, 1)
    with pytest.raises(HfExtError, match="None of the answers fits .* context of 256 tokens"):
        transfer(tmp_path / "long", inputs={text: "late " * 400 for text in texts}, seeds=()).train()


# ----------------------------------------------------------------------------------------------------------- bad input


def test_arguments_that_contradict_each_other_are_one_clear_error(tmp_path):
    model, tokenizer = teacher("llama")
    cases = [
        ({"target": (model.get_base_model(), tokenizer), "teaching": (model, tokenizer)}, "one model; load the target"),
        ({"filter": "discriminator"}, "filter='discriminator' needs a discriminator"),
        ({"seeds": SEEDS[:4] + SEEDS[:1]}, "There are 4 different seeds, and each prompt shows num_shots=5"),
        ({"train_dataset": [1]}, "give inputs="),
        ({"max_input_length": 200}, "takes [0-9]+ tokens, and the target's model's context holds 256"),
        ({"filter": "discriminator", "discriminator": str(tmp_path)}, "no discriminator"),
        ({"seeds": [*SEEDS, " "]}, "is empty"),
        ({"inputs": ["a", ""]}, "is empty"),
        ({"inputs": []}, "inputs is empty"),
        ({"inputs": {"a": "early", "b": " "}}, "inputs has the label ' ', which is no text"),
        ({"inputs": {"a": None, "b": 5}}, "inputs has the label 5, which is no text"),
        ({"seeds": "seeds.jsonl"}, "seeds='seeds.jsonl' is a single text"),
        ({"seeds": [1, 2, 3, 4, 5]}, "seeds contains something other than texts"),
        ({"inputs": ["pick a", "pick " + "a b c " * 300]}, "'pick a b c [a-c ]+…' is too long: the target's model's context"),
        ({"held_out_share": 0, "eval_strategy": "epoch"}, "nothing to evaluate on"),
        ({"peft_config": lora("llama", init_lora_weights="pissa")}, "changes the base model's weights"),
    ]
    for options, message in cases:
        with pytest.raises(HfExtError, match=message):
            transfer(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("token", ["pad_token", "eos_token"])
@pytest.mark.parametrize("whose", ["teacher", "target"])
def test_a_tokenizer_without_padding_or_end_is_named(tmp_path, token, whose):
    pairs = {"teaching": teacher("gpt2"), "target": pretrained("llama")}
    part = "teaching" if whose == "teacher" else "target"
    pairs[part][1].save_pretrained(tmp_path / "tokenizer")
    pairs[part] = pairs[part][0], AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    setattr(pairs[part][1], token, None)
    with pytest.raises(HfExtError, match=f"(?i)the {whose}'s tokenizer has no .*{token}"):
        transfer(tmp_path, **pairs)


def test_a_target_without_an_adapter_to_train_is_refused(tmp_path):
    (model, tokenizer), (teacher_model, teacher_tokenizer) = pretrained("llama"), teacher("gpt2")
    options = {"processing_class": tokenizer, "teacher": teacher_model, "teacher_processing_class": teacher_tokenizer}
    for target, config, message in (
        (model, None, "Give a target model and the peft_config"),
        (get_peft_model(model, lora("llama")), lora("llama"), "or a PeftModel and no peft_config"),
    ):
        with pytest.raises(HfExtError, match=message):
            TransLoraTrainer(target, settings(tmp_path, filter="none"), **options, seeds=SEEDS, peft_config=config)


def test_a_teacher_whose_answers_never_end_is_an_early_error(tmp_path):
    trainer = transfer(tmp_path, max_label_length=1)
    with pytest.raises(HfExtError, match="gave none of the 5 seeds a whole answer within max_label_length=1 tokens"):
        trainer.train()
    assert not (tmp_path / "synthesis.jsonl").exists()
    answers = lines(tmp_path / "seed_answers.jsonl")
    assert [(line["input"], line["ended"]) for line in answers] == [(seed, False) for seed in SEEDS]


def test_other_label_options_take_the_same_inputs(tmp_path):
    trainer = transfer(tmp_path, num_samples=20, max_label_length=1, save_strategy="epoch", num_train_epochs=1)
    before = trainer.synthesize()
    with pytest.raises(HfExtError, match="gave none of the 25 inputs a whole answer"):
        trainer.label()
    options = {"num_samples": 20, "save_strategy": "epoch", "num_train_epochs": 1}
    again = transfer(tmp_path, **options)
    with pytest.raises(HfExtError, match="another max_label_length. .* or delete labels.jsonl for new labels"):
        again.train()
    assert again.synthesize() == before
    (tmp_path / "labels.jsonl").unlink()
    again.train()
    labels = tmp_path / "labels.jsonl"
    labels.write_text(labels.read_text().replace("early", "late"))
    with pytest.raises(HfExtError, match="another labels .a checksum.. .* or start again with resume_from_checkpoint=False"):
        transfer(tmp_path, **options).train()
    with pytest.raises(HfExtError, match="another prompt_template"):
        transfer(tmp_path, **options, prompt_template="{input}:").train()


@pytest.mark.parametrize("options, message", [
    ({"filter": "best"}, "filter='best' is none of"),
    ({"generation_kwargs": {"num_beams": 2}}, "num_beams, which a transfer sets itself"),
    ({"generation_kwargs": "min_p"}, "generation_kwargs='min_p' is not a JSON object"),
    ({"num_samples": 0}, "num_samples=0"),
    ({"num_items": 5}, "leaves nothing to write"),
    ({"prompt_template": "Q:"}, "has no {input} in it"),
    ({"discriminator_prompt": "{task}?"}, "discriminator_prompt='{task}\\?' has no {input} in it"),
    ({"discriminator_prompt": "{input}?"}, "has no {task} in it"),
    ({"temperature": 0}, "temperature=0"),
    ({"held_out_share": 1}, "held_out_share=1"),
])  # fmt: skip
def test_invalid_settings_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **options)


def test_the_papers_settings_are_its_size_and_its_question(tmp_path):
    args = TransLoraConfig.paper(tmp_path, dataset_size=250, num_train_epochs=10, use_cpu=True, report_to=[])
    assert (args.num_samples, args.filter, args.num_train_epochs) == (250, "discriminator", 10)
    assert (args.discriminator_prompt, settings(tmp_path).discriminator_prompt) == (PAPERS_MEMBERSHIP, MEMBERSHIP)
    assert (args.learning_rate, args.per_device_train_batch_size) == (2e-5, 8)
    assert (args.weight_decay, args.warmup_steps, args.lr_scheduler_type) == (0, 0, "linear")
    assert TransLoraConfig.paper(tmp_path, 250, use_cpu=True, report_to=[]).num_train_epochs == 20


def _share(rank: int, folder: str, port: int) -> None:
    launched(rank, port)
    trainer = transfer(Path(folder), num_samples=40, num_train_epochs=1)
    assert trainer.accelerator.num_processes == 2
    trainer.train()
    trainer.save_model()
    total = torch.stack([p.detach().double().sum() for p in trainer.model.parameters()]).sum()
    both = trainer.accelerator.gather(total[None])
    assert both[0] == both[1], both
    os._exit(0)  # without waiting for the other process


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path):
    assert on_ranks(_share, str(tmp_path), free_port()) == [0, 0]
    written, rounds = lines(tmp_path / "synthesis.jsonl"), {}
    for line in written:
        rounds.setdefault(line["round"], []).append(line["input"])
    assert max(map(len, rounds.values())) > 8 * 5  # one process writes at most five for each of its eight prompts
    assert sum(line["kept"] for line in written) == 50 and len({line["input"] for line in written if line["kept"]}) == 50
    PeftModel.from_pretrained(pretrained("llama")[0], tmp_path)


def test_equal_inputs_are_in_one_part_only(tmp_path):
    texts = [text + space for text in inputs(8) for space in ("", " ", "")]
    trained, held_out = transfer(tmp_path, inputs=texts, seeds=()).label()
    assert held_out and sorted(text for text, _ in trained + held_out) == sorted(inputs(8))
