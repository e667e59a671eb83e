"""An adapter moves by the cheapest way that does: what was tried, how well it did, and the best one in the folder."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_transfers import SEEDS, accuracy, answer, inputs, judge, lora, pretrained, settings, teacher
from training_seeds import training_seed
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ext import HfExtError, fm_delta
from hf_ext.cli.main import main
from hf_ext.trans_lora import TransferRequest, migrate, read_pairs

TEST = [(text, answer(text)) for text in inputs(60, 7)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A source model with an adapter and a discriminator, a relative of it, and a model of another family."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("gpt2", "llama"):
        model, tokenizer = pretrained(kind)
        model.save_pretrained(root / kind)
        tokenizer.save_pretrained(root / kind)
    model, tokenizer = pretrained("gpt2")
    torch.manual_seed(training_seed())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * torch.randn_like(parameter)
    model.save_pretrained(root / "relative")
    tokenizer.save_pretrained(root / "relative")
    model, tokenizer = teacher("gpt2")
    model.save_pretrained(root / "adapter")
    judge(model, tokenizer).save_pretrained(root / "discriminator")
    (root / "seeds.jsonl").write_text("".join(json.dumps(text) + "\n" for text in SEEDS))
    (root / "test.jsonl").write_text("".join(json.dumps({"input": text, "output": said}) + "\n" for text, said in TEST))
    return root


def names(folders, target):
    return str(folders / "gpt2"), str(folders / "adapter"), str(folders / target), SEEDS


def loaded(folders, target, out):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / target), out)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_good_enough_copy_ends_the_migration(folders, tmp_path):
    report = migrate(
        TransferRequest(*names(folders, "relative"), settings(tmp_path), lora("gpt2")), test=TEST, target_score=0.9
    )
    assert [one.method for one in report.attempts] == ["copy"] and report.best.score == report.teacher == 1
    assert report.evidence == "accuracy on 60 test inputs" and report.shared_seconds == 0
    assert not list(tmp_path.rglob("synthesis.jsonl"))
    old = (folders / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == old
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folders / "relative")
    assert accuracy(loaded(folders, "relative", tmp_path), AutoTokenizer.from_pretrained(tmp_path)) == 1


def test_methods_share_inputs_and_the_best_adapter_is_kept(folders, tmp_path, capsys):
    source, adapter, target, _ = names(folders, "llama")
    line = ["migrate", "--source-model", source, "--source-adapter", adapter, "--target-model", target, "--json"]
    line += ["--seeds", folders / "seeds.jsonl", "--discriminator", folders / "discriminator", "--out", tmp_path]
    options = settings(tmp_path)
    for name in ("num_samples", "held_out_share", "max_label_length", "num_train_epochs", "learning_rate", "report_to"):
        line += [f"--{name}", getattr(options, name) or "none"]
    line += ["--per_device_train_batch_size", 8, "--generation_batch_size", 8, "--use_cpu", "--seed", options.seed]
    line += ["--prompt_template", "{input}", "--teacher_prompt_template", "{input}"]
    assert main([str(word) for word in line]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    copied, titok, trans_lora = report["attempts"]
    assert (copied["score"], copied["reason"]) == (None, "the tokenizers differ") and not (tmp_path / "copy").exists()
    assert report["evidence"] == "agreement on 5 held-out inputs" and report["shared_seconds"] > 0
    assert report["best"] == ("titok" if titok["score"] >= trans_lora["score"] else "trans_lora")
    best = tmp_path / report["best"] / "adapter_model.safetensors"
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == best.read_bytes()
    loaded(folders, "llama", tmp_path)

    written = lines(tmp_path / "trans_lora" / "synthesis.jsonl")
    learned = {line["input"] for line in lines(tmp_path / "titok" / "labels.jsonl")}
    assert learned < {line["input"] for line in written if line["score"] is not None}
    assert not (tmp_path / "titok" / "synthesis.jsonl").exists()

    assert main([str(word) for word in line]) == 0  # resumes: no stage is done again
    again = json.loads(capsys.readouterr().out)
    assert [one["score"] for one in again["attempts"]] == [one["score"] for one in report["attempts"]]
    assert lines(tmp_path / "trans_lora" / "synthesis.jsonl") == written


def test_without_a_discriminator_titok_writes_its_own_inputs(folders, tmp_path):
    args = settings(tmp_path, num_samples=12, num_train_epochs=1)
    report = migrate(TransferRequest(*names(folders, "llama"), args, lora("llama")))
    assert [one.method for one in report.attempts] == ["copy", "titok"] and report.best.method == "titok"
    assert len(lines(tmp_path / "titok" / "labels.jsonl")) == 15  # 12 and a quarter of them held out


@pytest.mark.parametrize("target", ["relative", "llama"])
def test_a_lora_out_of_a_fine_tune_migrates(folders, tmp_path, target):
    source, adapter, *_ = names(folders, target)
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), adapter).merge_and_unload()
    tuned.save_pretrained(tmp_path / "tuned")
    fm_delta.extract_lora(tmp_path / "tuned", source, tmp_path / "lora", energy=0.9999)
    args = settings(tmp_path / "out", num_samples=12, num_train_epochs=1)
    request = TransferRequest(source, str(tmp_path / "lora"), str(folders / target), SEEDS, args, lora(target))
    report = migrate(request, test=TEST, target_score=0.9)
    assert report.teacher == 1
    assert report.best.method == {"relative": "copy", "llama": "titok"}[target]
    loaded(folders, target, tmp_path / "out")


def test_what_cannot_be_compared_is_refused(folders, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"input": "a", "output": "b"}\n{"input": "a"}\n')
    with pytest.raises(HfExtError, match=r'Line 2 of .*bad.jsonl is not of the form {"input": "…", "output": "…"}'):
        read_pairs(tmp_path / "bad.jsonl")
    assert read_pairs(folders / "test.jsonl") == TEST
    with pytest.raises(HfExtError, match="nothing to compare on with held_out_share=0"):
        settled = settings(tmp_path / "out", held_out_share=0)
        migrate(TransferRequest(*names(folders, "llama"), settled, lora("llama")))
