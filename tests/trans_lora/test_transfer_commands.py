"""The commands of Trans-LoRA take all options of a training, and refuse mistakes before they load a model."""

import json
import shutil

import pytest
import torch
from hosts import HAS_PISSA
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_transfers import SEEDS, inputs, pretrained, save_files
from training_seeds import training_seed
from transformers import AutoConfig, AutoModelForCausalLM, OlmoConfig
from typer.main import get_command

from hf_ext import HfExtError, TransLoraConfig
from hf_ext.cli.command import app
from hf_ext.cli.main import main
from hf_ext.cli.trans_lora import NewAdapter, TransferRequest, parsed
from hf_ext.trans_lora import read_inputs, transfer
from hf_ext.trans_lora.config import MEMBERSHIP, PAPERS_MEMBERSHIP

COMMON = (
    *("--use_cpu", "--generation_batch_size", 8, "--per_device_train_batch_size", 8, "--num_train_epochs", 2),
    *("--report_to", "none", "--save_strategy", "no", "--rank", 16, "--seed", training_seed()),
)
ASKED = ("--prompt_template", "{input}", "--teacher_prompt_template", "{input}", "--max_label_length", 4)
NOT_TRAINED = ("--learning_rate", 1e-9)  # the discriminator then says "Yes" to all inputs, as its base does


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_files(folder)
    return folder


def run(*words) -> int:
    return main([str(word) for word in words])


def of_discriminator(folders, out) -> tuple:
    return "train-discriminator", "--source-model", folders / "source", "--task", "pick", "--out", out, *COMMON, *NOT_TRAINED


def of_transfer(folders, out) -> tuple:
    models = ("--source-model", folders / "source", "--source-adapter", folders / "adapter")
    return "transfer", *models, "--target-model", folders / "target", "--seeds", folders / "seeds.jsonl", "--out", out


def test_the_command_line_trains_a_discriminator_and_transfers_with_it(folders, tmp_path, capsys):
    """With nine inputs, none is held out, so nothing shows that the discriminator is no better than chance."""
    discriminator, out = tmp_path / "d", tmp_path / "out"
    assert run(*of_discriminator(folders, discriminator), "--inputs", folders / "real.jsonl", "--paper", 20) == 0
    assert "holds the discriminator of pick." in capsys.readouterr().out
    line = (*of_transfer(folders, out), "--discriminator", discriminator, "--paper", 20, "--target-modules", "all-linear")
    assert run(*line, "--held_out_share", 0.2, *COMMON, *ASKED, "--learning-rate", 1e-2, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "report.json").read_text())
    assert report["counts"]["kept"] == 24 and 0 <= report["agreement"] <= 1
    assert json.loads((discriminator / "discriminator.json").read_text())["prompt"] == PAPERS_MEMBERSHIP
    PeftModel.from_pretrained(pretrained("llama")[0], out)


def test_a_discriminator_no_better_than_chance_is_refused(folders, tmp_path, capsys):
    out, real = tmp_path / "d", tmp_path / "real.jsonl"
    real.write_text("".join(json.dumps(text) + "\n" for text in inputs(20, 3)))
    assert run(*of_discriminator(folders, out), "--inputs", real) == 1
    assert "keeps 100 % of the real ones and 100 % of the synthetic ones" in capsys.readouterr().err
    assert not (out / "discriminator.json").exists()
    assert run(*of_discriminator(folders, tmp_path / "few"), "--inputs", folders / "real.jsonl") == 0
    record = json.loads((tmp_path / "few" / "discriminator.json").read_text())
    record["metrics"] = {"real_kept": 0.0, "synthetic_kept": 1.0}
    (tmp_path / "few" / "discriminator.json").write_text(json.dumps(record))
    assert run(*of_transfer(folders, tmp_path / "out"), "--discriminator", tmp_path / "few") == 1
    assert f"The discriminator {tmp_path / 'few'} is no better than chance" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "expected"), [
    ("", (1000, MEMBERSHIP, 2e-5)),
    ("--paper 250", (250, PAPERS_MEMBERSHIP, 2e-5)),
    ("--paper 250 --peft-type prompt_tuning", (250, PAPERS_MEMBERSHIP, 2e-3)),
    ("--paper 250 --peft-type prompt_tuning --num-samples 9 --learning_rate 1e-4", (9, PAPERS_MEMBERSHIP, 1e-4)),
])  # fmt: skip
def test_options_take_precedence_over_the_papers_settings(folders, tmp_path, options, expected):
    line = f"--source-model a --source-adapter b --target-model c --seeds {folders / 'seeds.jsonl'} --out e {options}"
    context = get_command(app).commands["transfer"].make_context("transfer", line.split())
    request, adapter, args = parsed(context, str(tmp_path), TransferRequest, "seeds")
    assert (args.num_samples, args.discriminator_prompt, args.learning_rate) == expected
    assert (request.source_adapter, args.output_dir, adapter.rank) == ("b", str(tmp_path), 16)


def test_the_papers_adapters_have_its_layers_or_its_start_text(folders, tmp_path):
    OlmoConfig().save_pretrained(tmp_path)  # a family that PEFT has no default layers for
    families = ((folders / "target", {"q_proj", "v_proj"}), (folders / "source", {"c_attn"}), (tmp_path, {"q_proj", "v_proj"}))
    for path, modules in families:
        for kind in ("lora", "dora", *(["pissa"] if HAS_PISSA else [])):
            assert NewAdapter(peft_type=kind, paper=80).config(str(path)).target_modules == modules
    target = str(folders / "target")
    assert NewAdapter(target_modules=["o_proj"], paper=80).config(target).target_modules == "o_proj"
    assert NewAdapter().config(target).target_modules == "all-linear"

    model, tokenizer = pretrained("llama")
    tokens = tokenizer("Answer the following question correctly:")["input_ids"]
    start = model.get_input_embeddings().weight[tokens].detach().clone()
    adapted = get_peft_model(model, NewAdapter(peft_type="prompt_tuning", rank=len(tokens), paper=80).config(target))
    assert torch.equal(adapted.prompt_encoder["default"].embedding.weight, start)


def test_a_target_with_the_sources_layers_is_named_as_one_to_copy_to(folders, tmp_path, caplog):
    options = ("--filter", "none", "--target-modules", "foo", *COMMON)  # an error before the training
    for target, is_alike in (("source", True), ("target", False)):
        caplog.clear()
        run(*of_transfer(folders, tmp_path / "out"), "--target-model", folders / target, *options)
        assert ("the adapter as it is may do better" in caplog.text) is is_alike


def test_inputs_are_read_with_byte_order_marks_and_empty_lines(tmp_path):
    path = tmp_path / "inputs.jsonl"
    path.write_bytes('\ufeff{"input": "a\u2028b"}\r\n\n"c"\n'.encode())
    assert read_inputs(path) == ["a\u2028b", "c"]


def test_mistakes_on_the_command_line_are_errors_of_one_line(folders, tmp_path, capsys):
    given = (*of_transfer(folders, tmp_path / "out"), "--filter", "none")
    AutoConfig.from_pretrained(folders / "target").save_pretrained(tmp_path / "bare")
    (tmp_path / "bad.jsonl").write_text('{"input": "a"}\n{"text": "b"}\n')
    failures = [
        (("--discriminator", tmp_path), "`hf-ext train-discriminator`, makes one"),
        (("--source-model", "nope"), "'nope' is neither a folder nor a model of the Hub that can be"),
        (("--target-model", "nope"), "'nope' is neither a folder nor a model of the Hub that can be"),
        (("--source-model", folders / "target"), "does not fit the source model"),
        (("--seeds", tmp_path / "bad.jsonl"), "Line 2 of"),
        (("--filter", "best"), "filter='best' is none of"),
        (("--target-modules", "foo"), "Target modules foo not found in the base model."),
        (("--target-model", tmp_path / "bare"), "has no tokenizer that can be loaded. Save one with it"),
        (("--source-adapter", tmp_path), "is no adapter"),
    ]
    mistakes = [
        (("--filter", "discriminator"), "for '--discriminator': give one, or choose --filter none"),
        (("--seeds", tmp_path / "no.jsonl"), "for '--seeds': there is no file"),
        (("--rank", "much"), "argument --rank: invalid int value: 'much'"),
        (("--peft-type", "ia3"), "argument --peft_type/--peft-type: invalid choice: 'ia3'"),
        (("--no_such_option", "1"), "unrecognized arguments: --no_such_option"),
        (("--lerning_rate", "1"), "Did you mean --learning-rate"),
        (("--learning_rat", "1"), "Did you mean --learning-rate"),
        (("--output_dir", "elsewhere"), "give the folder as --out"),
        (("--push_to_hub",), "upload the result: hf upload ORG/NAME OUT"),
        (("--learning_rate", "much"), "learning_rate"),
    ]
    for code, cases in ((1, failures), (2, mistakes)):
        for options, message in cases:
            assert run(*given, *options) == code
            last = capsys.readouterr().err.strip().splitlines()[-1]
            assert last.startswith("hf-ext") and message in last
    assert run("transfer", "--out", "d", "--filter", "none") == 2
    assert "the following arguments are required: --source_model/--source-model" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["transfer", "train-discriminator"])
def test_no_command_overwrites_what_it_reads(folders, tmp_path, capsys, command):
    copied = shutil.copytree(folders, tmp_path / "files")
    files = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    for name in ["source"] if command == "train-discriminator" else ["source", "adapter", "target"]:
        out = copied / "source" / ".." / name
        line = of_transfer(copied, out) if command == "transfer" else of_discriminator(copied, out)
        more = ("--filter", "none") if command == "transfer" else ("--inputs", copied / "real.jsonl")
        assert run(*line, *more) == 1
        assert f"{copied / name} cannot be overwritten, it is still needed" in capsys.readouterr().err
    assert files == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("layers", "lacking"), [(6, "the model"), (1, "the adapter")])
def test_an_adapter_of_another_base_is_refused(folders, tmp_path, layers, lacking):
    config = AutoConfig.from_pretrained(folders / "source", n_layer=layers)
    other = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=2, target_modules=["c_attn"]))
    other.save_pretrained(tmp_path / "adapter")
    names = [str(path) for path in (folders / "source", tmp_path / "adapter", folders / "target")]
    with pytest.raises(HfExtError) as error:
        transfer(*names, SEEDS, TransLoraConfig(output_dir=str(tmp_path / "out"), filter="none"), LoraConfig(r=2))
    start = f"The adapter {names[1]} does not fit the source model {names[0]}: "
    assert str(error.value).startswith(start) and f" weights which {lacking} lacks, such as 'base_model." in str(error.value)
    assert str(error.value).endswith("Give the model that its adapter_config.json names.")
