"""A LoRA of a fine-tune: close to the best one for its rank, energy or size. PEFT loads and applies it."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_adapters import difference, loaded, logits, moved, products
from tiny_checkpoints import contents, edit_config
from tiny_models import MODELS, bert, fine_tuned, gpt_oss, llama, mixtral, perturb, qwen_moe, tokenizer
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedModel,
)
from valid_cards import valid_card

from hf_ext import BaseModelError, CheckpointError, HfExtError, fm_delta
from hf_ext.cli.main import main
from hf_ext.lora_extraction.extract import read_texts
from hf_ext.lora_extraction.factors import Aim, Spectrum
from hf_ext.lora_extraction.report import LayerLora, LoraReport

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Setting `save_embedding_layers`", ".*fan_in_fan_out", "Model with", "The following .* keys did not match")
]


def changes(tuned: nn.Module, base: nn.Module) -> dict[str, torch.Tensor]:
    before = base.state_dict()
    return {name: (weight.double() - before[name].double()) for name, weight in tuned.state_dict().items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, PreTrainedModel, PreTrainedModel]:
    """The folders of a fine-tune and its base, and both models."""
    folder = tmp_path_factory.mktemp("lora")
    tuned = fine_tuned(llama(), folder)
    return folder / "tuned", folder / "base", tuned, llama()


@pytest.mark.parametrize("name", MODELS)
def test_peft_loads_the_change_of_every_layer(tmp_path, name):
    model = MODELS[name].build()
    tuned = fine_tuned(model, tmp_path)
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=4)
    found, expected = products(loaded(model, tmp_path / "lora")), changes(tuned, model)
    assert found.keys() == {layer.layer for layer in report.layers}
    for layer in report.layers:
        change = expected[f"{layer.layer}.weight"]
        singular = torch.linalg.svdvals(change)
        error = (singular[4:].square().sum() / singular.square().sum()).sqrt().item()
        assert layer.rank == 4 and layer.error == pytest.approx(error, abs=0.02)
        assert (torch.linalg.norm(found[layer.layer] - change) / torch.linalg.norm(change)).item() <= 1.02 * error + 0.01


def test_all_changes_but_biases_fit_into_an_adapter(tmp_path, pair):
    tuned, base, model, before = pair
    report = fm_delta.extract_lora(tuned, base, tmp_path, rank=64, modules_to_save=True)
    assert report.error < 1e-3 and not report.omitted
    assert set(report.whole) >= {"model.embed_tokens", "model.norm", "model.layers.1.input_layernorm"}
    assert difference(logits(loaded(before, tmp_path)), logits(model)) < 1e-4 < difference(logits(before), logits(model))


@pytest.mark.parametrize("build", [mixtral, qwen_moe, gpt_oss])
def test_changed_experts_are_named_in_the_report(tmp_path, build):
    base = build()
    fine_tuned(base, tmp_path)
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora")
    tuned, before = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "base"))
    changed = {name for name, tensor in tuned.items() if not torch.equal(tensor, before[name])}
    assert {name for name in report.omitted if ".experts." in name} == {name for name in changed if ".experts." in name}
    assert len(changed) == len(report.layers) + len(report.omitted)
    assert all(energy > 0 for energy in report.omitted.values())
    few = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", energy=0.01)
    assert len(changed) == len(few.layers) + len(few.omitted) and len(few.layers) < len(report.layers)
    with_norms = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", modules_to_save=True)
    assert {name for name in with_norms.omitted if ".experts." in name} < report.omitted.keys() and with_norms.whole
    assert not any("experts" in name for name in products(loaded(base, tmp_path / "lora")))
    assert "Not in the adapter: " in report.summary()


def test_a_summary_lists_the_largest_changes_that_are_left_out():
    omitted = {f"block.{name}.bias": float(i) for i, name in enumerate("abcdefghij")} | {"block.new.bias": None}
    text = LoraReport([LayerLora("block.q", 1, 4.0, 4.0, 8)], 8, 16, omitted=omitted).summary()
    assert re.findall(r"\d+ × (\w+)\.bias", text) == ["new", *"jihgfed"] and text.endswith(", 3 other tensors")


@pytest.mark.parametrize("few", [True, False], ids=["few", "most"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_changed_rows_of_an_embedding_are_carried(tmp_path, tied, few):
    base = llama(tied)
    model = perturb(copy.deepcopy(base), 1)
    before, after = (part.get_input_embeddings().weight for part in (base, model))
    if few:
        after.data[5:] = before[5:]
    model.save_pretrained(tmp_path / "tuned")
    base.save_pretrained(tmp_path / "base")
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=64, modules_to_save=True)
    rows = (before != after).any(1).nonzero().flatten().tolist()
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert config["trainable_token_indices"] == ({"model.embed_tokens": rows} if tied or few else None)
    assert (f"model.embed_tokens ({len(rows)} rows)" if tied or few else "model.embed_tokens") in report.whole
    assert not report.omitted
    assert difference(logits(loaded(base, tmp_path / "lora")), logits(model)) < 1e-4 < difference(logits(base), logits(model))


def test_a_merged_lora_comes_out_again(tmp_path):
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = moved(get_peft_model(llama(), config))
    expected, changed = logits(model), len(products(model))
    model.merge_and_unload().save_pretrained(tmp_path / "tuned")
    llama().save_pretrained(tmp_path / "base")
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", energy=0.9999)
    assert len(report.layers) == changed and all(layer.rank <= 3 for layer in report.layers)
    assert difference(logits(loaded(llama(), tmp_path / "lora")), expected) < 1e-2


def test_a_head_that_the_base_lacks_is_carried_whole(tmp_path):
    model = bert(labels=5)
    perturb(model).save_pretrained(tmp_path / "tuned")
    model.bert.save_pretrained(tmp_path / "base")  # other names, and no head
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=8)
    assert report.whole == ["classifier"]
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5)
    loaded_model = PeftModel.from_pretrained(base, tmp_path / "lora")
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned").classifier
    assert torch.equal(loaded_model.base_model.model.classifier.modules_to_save["default"].weight, head.weight)
    assert {name.partition(".")[0] for name in products(loaded_model)} == {"bert"}


@pytest.mark.parametrize("aim", [{"energy": 0.6}, {"max_size": 40_000}, {"energy": 0.3, "rank": 8}])
def test_ranks_follow_the_energy(tmp_path, pair, aim):
    tuned, base, model, before = pair
    report = fm_delta.extract_lora(tuned, base, tmp_path, **aim)
    ranks = {layer.layer: layer.rank for layer in report.layers}
    assert len(set(ranks.values())) > 1 and report.size == (tmp_path / "adapter_model.safetensors").stat().st_size
    if "energy" in aim:
        assert aim["energy"] <= report.energy < aim["energy"] + 0.05 and max(ranks.values()) <= aim.get("rank", 64)
    else:
        assert 0.8 * aim["max_size"] < report.size <= aim["max_size"]
    product = products(loaded(before, tmp_path))
    assert {name: torch.linalg.matrix_rank(change, rtol=1e-5).item() for name, change in product.items()} == ranks


def test_a_choice_of_ranks_takes_the_best_components():
    spectra = {"a": Spectrum([4.0, 1.0], 17.0, 10), "b": Spectrum([3.0, 2.0, 0.5], 14.0, 20), "c": Spectrum([], 0.0, 5)}
    assert Aim(energy=0.5).ranks(spectra) == {"a": 1, "b": 0, "c": 0}
    assert Aim(energy=0.9).ranks(spectra) == {"a": 1, "b": 2, "c": 0}
    assert Aim(max_size=45).ranks(spectra) == {"a": 1, "b": 1, "c": 0}
    assert Aim().ranks(spectra) == {"a": 2, "b": 3, "c": 0}


def test_compressed_models_give_the_same_lora(tmp_path, pair):
    tuned, base, *_ = pair
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "small")
    fm_delta.compress_checkpoint(base, None, tmp_path / "small-base")
    fm_delta.extract_lora(tuned, base, tmp_path / "a", rank=4)
    fm_delta.extract_lora(tmp_path / "small", base, tmp_path / "b", rank=4)
    fm_delta.extract_lora(tmp_path / "small", None, tmp_path / "c", rank=4)
    fm_delta.extract_lora(tuned, tmp_path / "small-base", tmp_path / "d", rank=4)
    weights = [contents(tmp_path / name)["adapter_model.safetensors"] for name in "abcd"]
    assert len(set(weights)) == 1


def test_the_base_may_be_in_another_type(tmp_path):
    model = fine_tuned(llama(), tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "tuned")
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=64)
    assert report.error < 0.01
    assert {tensor.dtype for tensor in load_file(tmp_path / "lora/adapter_model.safetensors").values()} == {torch.bfloat16}


def test_a_user_folder_keeps_its_files_and_a_card_is_written(tmp_path, pair):
    tuned, base, *_ = pair
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/notes.txt").write_text("mine")
    report = fm_delta.extract_lora(tuned, base, tmp_path / "lora", rank=4, overwrite=True)
    assert (tmp_path / "lora/notes.txt").read_text() == "mine"
    data, text = valid_card(tmp_path / "lora")
    assert data.library_name == "peft" and "import LlamaForCausalLM" in text
    assert f"{100 * report.energy:.1f} %" in text
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM" and sorted(config["target_modules"]) == [
        "down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"
    ]  # fmt: skip


def test_texts_show_the_loss(tmp_path, pair):
    tuned, base, model, before = pair
    shutil.copytree(tuned, tmp_path / "tuned")
    tokenizer().save_pretrained(tmp_path / "tuned")
    (tmp_path / "texts.jsonl").write_text('{"text": "w1 w2 w3 w4"}\n{"text": "w5 w6"}\n')
    texts = read_texts(tmp_path / "texts.jsonl")
    report = fm_delta.extract_lora(tmp_path / "tuned", base, tmp_path / "lora", rank=4, texts=texts)
    tokens = [tokenizer()(text, return_tensors="pt").input_ids for text in texts]
    loaded_model = loaded(before, tmp_path / "lora")
    for name, part in {"base": before, "fine-tune": model, "base + LoRA": loaded_model}.items():
        with torch.no_grad():
            sums = [part(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1) for ids in tokens]
        assert report.losses[name] == pytest.approx(sum(sums) / sum(ids.shape[1] - 1 for ids in tokens), rel=1e-4)
    assert "base + LoRA" in report.summary()


SCALES = [(torch.float32, 1e-20), (torch.float64, 1e-40), (torch.bfloat16, 1.0), (torch.float32, 1e18)]


@pytest.mark.parametrize("dtype, scale", SCALES)
def test_the_share_is_that_of_the_lora_as_written(tmp_path, dtype, scale):
    base, tuned = llama().double(), perturb(llama()).double()
    for model, name in ((base, "base"), (tuned, "tuned")):
        for weight in model.parameters():
            weight.data *= scale
        model.to(dtype).save_pretrained(tmp_path / name)
    report = fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=8)
    state, change = load_file(tmp_path / "lora/adapter_model.safetensors"), changes(tuned, base)
    for layer in report.layers:
        A, B = (state[f"base_model.model.{layer.layer}.lora_{side}.weight"].double() / scale**0.5 for side in "AB")
        difference_of_layer = change[f"{layer.layer}.weight"] / scale
        squares = torch.linalg.svdvals(difference_of_layer).square()
        kept = 1 - ((difference_of_layer - B @ A).square().sum() / squares.sum()).item()
        assert layer.energy == pytest.approx(kept, abs=1e-3) and kept > 0.97 * (squares[:8].sum() / squares.sum()).item()


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("folder", ["tuned", "base"])
def test_values_that_are_not_finite_are_errors(tmp_path, name, value, folder):
    fine_tuned(llama(), tmp_path)
    path = tmp_path / folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][-1:] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"'{name}' of .*{folder}.* NaN or infinite"):
        fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora")
    assert not (tmp_path / "lora").exists()


def test_changes_beyond_single_precision_are_errors(tmp_path):
    base = llama(dtype=torch.float64)
    tuned = fine_tuned(base, tmp_path)
    tuned.lm_head.weight.data[3] = 1e200
    tuned.save_pretrained(tmp_path / "tuned")
    with pytest.raises(CheckpointError, match="'lm_head.weight' .* too large for a LoRA"):
        fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora")


def test_texts_may_hold_line_separators(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "one\u2028two\u0085three"}\r\n', encoding="utf-8")
    assert read_texts(tmp_path / "texts.jsonl") == ["one\u2028two\u0085three"]


@pytest.mark.parametrize("content", ["", "words", '{"text": 1}', '{"words": "a"}', '{"text": ""}'])
def test_files_without_texts_are_errors(tmp_path, content):
    (tmp_path / "texts.jsonl").write_text(content)
    with pytest.raises(HfExtError, match="must hold an object"):
        read_texts(tmp_path / "texts.jsonl")
    with pytest.raises(HfExtError, match="nowhere.jsonl cannot be read"):
        read_texts(tmp_path / "nowhere.jsonl")


def test_only_language_models_are_evaluated(tmp_path, pair):
    fine_tuned(bert(), tmp_path)
    with pytest.raises(HfExtError, match="is not a causal language model"):
        fm_delta.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", texts=["words"])
    with pytest.raises(HfExtError, match="has no tokenizer"):
        fm_delta.extract_lora(*pair[:2], tmp_path / "lora", texts=["words"])


def test_the_command_prints_the_report(tmp_path, pair, capsys):
    tuned, base, *_ = map(str, pair[:2])
    report = fm_delta.extract_lora(tuned, base, tmp_path / "a", max_size=40_000)
    capsys.readouterr()
    arguments = ["extract-lora", tuned, "--base", base, "--max-size", "40kB", "--out", str(tmp_path / "b")]
    assert main(arguments) == 0 and capsys.readouterr().out == f"{report.summary()}\n"
    assert main([*arguments, "--verbose"]) == 0 and capsys.readouterr().out == f"{report}\n"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert main([*arguments, "--json"]) == 0 and json.loads(capsys.readouterr().out) == report.to_dict()
    assert main(["extract-lora", tuned, "--base", base, "--max-size", "large", "--out", str(tmp_path / "c")]) == 2
    assert "'large' is not a size" in capsys.readouterr().err
    assert main(["extract-lora", tuned, "--base", base, "--max-size", "9" * 400 + "G", "--out", str(tmp_path / "c")]) == 2
    assert "999999999… is more than any file holds" in capsys.readouterr().err
    assert main(["extract-lora", tuned, "--base", base, "--rank", "99", "--out", str(tmp_path / "c")]) == 1
    assert capsys.readouterr().err.startswith("hf-ext: rank=99 is larger") and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 0}, "at least rank 1"),
        ({"rank": 65}, "rank=65 is larger than the smaller side of any linear layer"),
        ({"energy": 1.5}, "energy=1.5 is not a share"),
        ({"max_size": 0}, "max_size=0 is not a size"),
        ({"max_size": 100}, "max_size=100 is too small"),
        ({"max_size": 7_900}, r"max_size=7900 is too small: with one component, the adapter takes 8\d\d\d bytes"),
        ({"energy": 0.5, "max_size": 100}, "cannot be combined"),
    ],
)
def test_impossible_aims_are_errors(tmp_path, pair, options, message):
    with pytest.raises(HfExtError, match=message):
        fm_delta.extract_lora(*pair[:2], tmp_path / "lora", **options)
    assert not (tmp_path / "lora").exists()


def test_wrong_models_are_errors(tmp_path, pair):
    tuned, base, model, _ = pair
    out = tmp_path / "lora"
    with pytest.raises(BaseModelError, match="records no base"):
        fm_delta.extract_lora(tuned, None, out)
    with pytest.raises(CheckpointError, match="nothing to extract"):
        fm_delta.extract_lora(base, base, out)
    torch.manual_seed(5)
    LlamaForCausalLM(model.config).save_pretrained(tmp_path / "other")
    with pytest.raises(BaseModelError, match="is not the base of"):
        fm_delta.extract_lora(tuned, tmp_path / "other", out)
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in load_file(tuned / "model.safetensors").items()}
    shutil.copytree(tuned, tmp_path / "wrapped")
    save_file(wrapped, tmp_path / "wrapped" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="under a name that loading knows"):
        fm_delta.extract_lora(tmp_path / "wrapped", base, out, rank=4)
    model.save_pretrained(tmp_path / "unknown")
    edit_config(tmp_path / "unknown", architectures=["NoSuchModel"])
    with pytest.raises(CheckpointError, match="NoSuchModel, which is no model class"):
        fm_delta.extract_lora(tmp_path / "unknown", base, out)
    assert not out.exists()
