"""Every artifact has a model card with its own figures, and nobody's own card is ever written over."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from tiny_adapters import NF4, load, logits, small_llama, trained
from tiny_checkpoints import contents, pair
from tiny_merges import plain, write_tasks
from tiny_models import bert, perturb
from tiny_training import train
from tiny_uni_med import processor, save_parts, uni_med
from transformers.models.auto import modeling_auto
from valid_cards import KINDS, valid_card

import hf_ext
from hf_ext import PissaConfig, QPissaConfig, UniMedForConditionalGeneration, emr, fm_delta, pissa
from hf_ext.integration import card_marks, model_cards, origins

MINE = "---\nlicense: cc-by-4.0\ntags:\n- mine\n---\n\n# My model\n\nMy own words.\n"


def licensed(folder: Path, licence: str = "mit", **more: str) -> Path:
    """Gives a base a card of its own."""
    data = ModelCardData(license=licence, **more)
    (folder / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n# A base\n")
    return folder


# ---- each method's card ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Folders of a fine-tune, its base, and the compressed fine-tune."""
    folder = tmp_path_factory.mktemp("fm_delta")
    bert().save_pretrained(folder / "base")
    licensed(folder / "base", "other", license_name="tiny", license_link="LICENSE")
    perturb(bert(), 1).save_pretrained(folder / "tuned")
    fm_delta.compress_checkpoint(folder / "tuned", folder / "base", folder / "small")
    return folder


def test_the_card_of_a_compressed_checkpoint_shows_size_and_use(tuned):
    data, text = valid_card(tuned / "small", "fm_delta")
    report = fm_delta.inspect(tuned / "small")
    parameters = sum(tensor.parameters for tensor in report.tensors)
    assert f"{report.original_bytes / 1e6:.2f} MB" in text and f"{report.compressed_bytes / 1e6:.2f} MB" in text
    assert f"{100 * report.ratio:.1f} %" in text and f"| parameters | {parameters:,} |" in text
    assert "hf-ext decompress" in text and "BertForSequenceClassification.from_pretrained" in text
    assert (data.pipeline_tag, data.library_name, data.tags) == ("text-classification", "transformers", ["fm-delta"])
    assert (data.license, data["license_name"], data["license_link"]) == ("other", "tiny", "LICENSE")
    assert data.base_model is None  # which is a folder


def test_a_model_that_is_compressed_without_a_base_names_none(tuned, tmp_path):
    fm_delta.compress_checkpoint(tuned / "tuned", None, tmp_path / "small")
    data, text = valid_card(tmp_path / "small", "fm_delta")
    assert "without a base model" in text and "fine-tune" not in text and "difference" not in text
    assert data.base_model is None and data.license is None and "hf-ext decompress" in text


def test_models_and_trainer_checkpoints_have_cards_of_their_own(tuned, tmp_path):
    model = fm_delta.enable(perturb(bert(), 2), tuned / "base")
    train(model, tmp_path / "run", max_steps=2)
    model.save_pretrained(tmp_path / "final")
    for folder in (tmp_path / "run/checkpoint-2", tmp_path / "final"):
        _, text = valid_card(folder, "fm_delta")
        assert f"{fm_delta.inspect(folder).compressed_bytes / 1e6:.2f} MB" in text


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emr")
    base, tasks = write_tasks(folder)
    licensed(base)
    emr.merge(base, {task: tasks[task] for task in ("trec", "cr")}, folder / "merged")
    return folder


def test_a_merge_says_of_each_task_how_close_it_is(merged, tmp_path):
    emr.add_task(merged / "merged", "cr-again", merged / "cr", tmp_path / "more")
    for folder in (merged / "merged", tmp_path / "more"):
        data, text = valid_card(folder, "emr")
        report = emr.report(folder)
        for task in report.tasks:
            assert f"| {task.task} | {task.scale:.4f} | {task.least_scale:.3f} to {task.largest_scale:.3f} |" in text
            assert f"| {task.cosine:.4f} |" in text and f'model.set_task("{task.task}")' in text
        assert (data.license, data.tags) == ("mit", ["emr-merging", "merge"])


def test_a_merge_that_is_saved_again_keeps_its_card(merged, tmp_path):
    model = plain(merged / "merged")
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/README.md").read_bytes() == (merged / "merged/README.md").read_bytes()


def test_a_merge_of_models_with_another_licence_claims_none(merged, tmp_path):
    shutil.copytree(merged / "cr", tmp_path / "cr")
    licensed(tmp_path / "cr", "cc-by-nc-4.0")
    emr.merge(merged / "base", {"cr": tmp_path / "cr", "trec": merged / "trec"}, tmp_path / "out")
    assert valid_card(tmp_path / "out", "emr")[0].license is None


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "base"
    small_llama().save_pretrained(folder)
    return licensed(folder)


def adapter_config(kind: type[LoraConfig]) -> LoraConfig:
    return kind(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("kind, quantization", [(PissaConfig, None), (QPissaConfig, NF4)], ids=["pissa", "qpissa"])
def test_an_adapter_says_what_it_started_from(llama, tmp_path, kind, quantization):
    if quantization:
        pytest.importorskip("bitsandbytes")
    name = kind.__name__.removesuffix("Config").lower()
    model = trained(load(llama, quantization), adapter_config(kind))
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "one")  # PEFT writes into the card before it is written anew
    data, text = valid_card(tmp_path / "one", name)
    report = pissa.report(model)
    assert f"At the start of training:\n{report.summary()}." in text and "the 4 largest" in text
    for layer in report.layers:
        assert f"| {layer.layer} | 4 | {100 * layer.energy:.1f} % |" in text
    assert (data.pipeline_tag, data.library_name, data.license) == ("text-generation", "peft", "mit") and name in data.tags


def snippets(text: str, names: dict[str, str]) -> list[str]:
    """The code of a card, with what it leaves open, or does not know of a folder, filled in."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for old, new in names.items():
        blocks = [block.replace(old, new) for block in blocks]
    return blocks


@pytest.mark.parametrize("kind", [PissaConfig, QPissaConfig, "lora"])
def test_without_a_task_type_the_bases_class_is_shown(llama, tmp_path, kind):
    config = (PissaConfig if kind == "lora" else kind)(r=4, target_modules=["q_proj"])
    model = trained(load(llama), config)
    saved = pissa.convert_to_lora(model) if kind == "lora" else model
    saved.save_pretrained(tmp_path / "one")
    saved.save_pretrained(tmp_path / "one")
    name = kind if kind == "lora" else kind.__name__.removesuffix("Config").lower()
    data, text = valid_card(tmp_path / "one", name)
    assert "LlamaForCausalLM.from_pretrained" in text and data.pipeline_tag == "text-generation"
    scope: dict = {}
    for block in snippets(text, {'"base"': f'"{llama}"', '"…"': f'"{tmp_path / "one"}"'}):
        exec(block, scope)
    assert torch.allclose(logits(scope["model"]), logits(model), atol=1e-4)


def test_tables_of_transformers_are_read_without_import():
    for table in {table for tables in origins.TASKS.values() for table in tables}:
        imported = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values()
        classes = {name for entry in imported for name in ([entry] if isinstance(entry, str) else entry)}
        assert classes and classes <= origins.auto_classes()[f"MODEL_FOR_{table}_MAPPING_NAMES"]


def test_a_users_class_is_not_shown_as_one_of_transformers():
    card = model_cards.adapter_card("pissa", "user/base", None, [], "MyModel", config=PissaConfig(r=2))
    assert "import AutoModel\n" in card.text and card.data.pipeline_tag is None


def test_an_adapter_trained_further_keeps_its_start(llama, tmp_path):
    trained(load(llama), adapter_config(PissaConfig)).save_pretrained(tmp_path / "one")
    config = PissaConfig.from_pretrained(tmp_path / "one")
    again = PeftModel.from_pretrained(load(llama), tmp_path / "one", config=config, is_trainable=True)
    again.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two/README.md").read_bytes() == (tmp_path / "one/README.md").read_bytes()


def test_each_of_two_adapters_has_its_own_card(llama, tmp_path):
    model = trained(load(llama), adapter_config(PissaConfig))
    model.add_adapter("other", PissaConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "both")
    _, text = valid_card(tmp_path / "both/other", "pissa")
    assert pissa.report(model, "other").summary() in text and "v_proj" in text and "down_proj" not in text
    assert "v_proj" not in valid_card(tmp_path / "both", "pissa")[1]


def test_an_adapter_names_the_base_by_its_id(llama, tmp_path):
    base = load(llama)
    base.name_or_path = base.config._name_or_path = "user/tiny-llama"
    get_peft_model(base, adapter_config(PissaConfig)).save_pretrained(tmp_path / "one")
    data, text = valid_card(tmp_path / "one", "pissa")
    assert (data.base_model, data["base_model_relation"]) == ("user/tiny-llama", "adapter")
    assert "base_model:adapter:user/tiny-llama" in data.tags and 'from_pretrained("user/tiny-llama")' in text


@pytest.mark.parametrize("place", ["config.json", "card", "cache"])
def test_the_hub_id_of_a_local_base_comes_from_its_own_files(tuned, tmp_path, monkeypatch, place):
    base = tmp_path / ("hub/models--user--tiny/snapshots/0123456789" if place == "cache" else "base")
    shutil.copytree(tuned / "base", base)
    if place == "config.json":
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"_name_or_path": "user/tiny"}))
    elif place == "card":
        licensed(base, base_model="user/tiny")
    monkeypatch.chdir(base.parent)
    fm_delta.compress_checkpoint(tuned / "tuned", base.name, tmp_path / "small")
    fm_delta.compress_checkpoint(tuned / "tuned", base, tmp_path / "again")
    for folder in ("small", "again"):
        data = valid_card(tmp_path / folder, "fm_delta")[0]
        assert (data.base_model, data["base_model_relation"]) == ("user/tiny", "finetune")


@pytest.mark.parametrize("text", ['{"_name_or_path": "base"}', '{"_name_or_path": "./a/b"}', '{"_name_or_path": 3}', "[", "{}"])
def test_metadata_names_no_local_base(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert origins.origin_of(tmp_path) is None and origins.origin_of("user/tiny") == "user/tiny"


def test_a_converted_lora_says_what_it_misses(llama, tmp_path):
    model = trained(load(llama), adapter_config(PissaConfig))
    lora = pissa.convert_to_lora(model, rank=3)
    lora.save_pretrained(tmp_path / "lora")
    data, text = valid_card(tmp_path / "lora", "lora")
    assert lora.summary() in text and "a PiSSA adapter" in text and data.tags == ["lora", "pissa"]


def test_a_uni_med_model_says_its_tasks_and_its_connector(tmp_path):
    vision, text_model = save_parts(tmp_path)
    licensed(vision)
    UniMedForConditionalGeneration.from_vision_text_pretrained(vision, text_model).save_pretrained(tmp_path / "made")
    assert valid_card(tmp_path / "made", "uni_med")[0].license is None  # the language model's is not known
    licensed(text_model)
    options = {"router": "sparse", "num_experts": 3, "tasks": ["vqa", "cls"]}
    model = UniMedForConditionalGeneration.from_vision_text_pretrained(vision, text_model, **options)
    model.save_pretrained(tmp_path / "made")
    data, text = valid_card(tmp_path / "made", "uni_med")
    assert "| tasks | `vqa`, `cls`, `qa` |" in text and "| experts | 3 |" in text
    assert "sparse, of task_token, 2 of 3 experts" in text and "# Uni-Med: `vision` and `text`" in text
    assert f"| {sum(p.numel() for p in model.connector.parameters()):,} |" in text
    assert (data.license, data.pipeline_tag) == ("mit", "image-text-to-text")
    processor(tasks=model.config.tasks).save_pretrained(tmp_path / "made")
    Image.new("L", (40, 30)).save(tmp_path / "image.png")
    folder = {'from_pretrained("…")': f'from_pretrained("{tmp_path / "made"}")', 'text="…"': 'text="how many cells"'}
    scope: dict = {}
    for block in snippets(text, folder | {'open("…")': f'open("{tmp_path / "image.png"}")', "_tokens=20": "_tokens=3"}):
        exec(block, scope)
    assert scope["answer"].shape == (1, 3)  # without the prompt
    uni_med(connector="mlp").save_pretrained(tmp_path / "plain")
    assert "experts" not in valid_card(tmp_path / "plain", "uni_med")[1]


# ---- compressing and back ----------------------------------------------------------------------------------------------


def test_a_card_that_came_with_the_compression_goes_with_it(tuned, tmp_path):
    fm_delta.decompress_checkpoint(tuned / "small", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tuned / "tuned") and not (tmp_path / "back/README.md").exists()


@pytest.mark.parametrize("text", [MINE, "", "no metadata", "---\n: [\n---\n", "stale"])
def test_a_card_of_the_source_is_kept_to_the_last_byte_both_ways(tuned, tmp_path, text):
    shutil.copytree(tuned / "tuned", tmp_path / "tuned")
    if text == "stale":  # the very one that would have been written
        shutil.copy(tuned / "small/README.md", tmp_path / "tuned/README.md")
    else:
        (tmp_path / "tuned/README.md").write_text(text)
    fm_delta.compress_checkpoint(tmp_path / "tuned", tuned / "base", tmp_path / "small", verify=True)
    assert (tmp_path / "small/README.md").read_bytes() == (tmp_path / "tuned/README.md").read_bytes()
    fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "tuned")


def test_a_card_that_a_user_changed_is_kept(tuned, tmp_path):
    shutil.copytree(tuned / "small", tmp_path / "small")
    with open(tmp_path / "small/README.md", "a") as card:
        card.write("\nTrained on my own mails.\n")
    fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")
    assert (tmp_path / "back/README.md").read_bytes() == (tmp_path / "small/README.md").read_bytes()


def test_a_folder_without_a_configuration_gets_no_card(tmp_path):
    src, base = pair(tmp_path)
    (src / "config.json").unlink()
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    assert contents(tmp_path / "small").keys() == {"model.safetensors"}


def test_plain_weights_drop_the_card_of_older_contents(tuned, merged, tmp_path):
    fm_delta.compress_checkpoint(tuned / "tuned", tuned / "base", tmp_path / "out")
    fm_delta.decompress_checkpoint(tuned / "small", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tuned / "tuned")
    model = plain(merged / "merged")
    model.save_pretrained(tmp_path / "model")
    model.classifier.bias.data += 1
    model.save_pretrained(tmp_path / "model")
    shutil.copy(merged / "merged/README.md", tmp_path / "out")
    emr.extract(merged / "merged", "cr", tmp_path / "out")
    assert not (tmp_path / "model/README.md").exists() and not (tmp_path / "out/README.md").exists()


@pytest.mark.parametrize("way", ["compress", "decompress"])
def test_a_users_card_wins_over_a_generated_one_of_the_source(tuned, llama, tmp_path, way):
    source, copy = {
        "compress": ("tuned", lambda src, out: fm_delta.compress_checkpoint(src, tuned / "base", out, verify=True)),
        "decompress": ("small", fm_delta.decompress_checkpoint),
    }[way]
    bare, written = bare_cards(llama, tmp_path)["transformers"], "# By another hand\n"
    for name, card in {"bare": bare.read_text(), "written": written}.items():
        src, out = tmp_path / name, tmp_path / f"{name}-out"
        shutil.copytree(tuned / source, src)
        (src / "README.md").write_text(card)
        out.mkdir()
        (out / "README.md").write_text(MINE)
        copy(src, out)
        assert (out / "README.md").read_text() == (MINE if name == "bare" else written)


# ---- whose card it is --------------------------------------------------------------------------------------------------


def saves(tuned: Path, merged: Path, llama: Path) -> dict:
    """By method, what saves an artifact to a folder."""
    model = trained(load(llama), adapter_config(PissaConfig))
    return {
        "compress": lambda out: fm_delta.compress_checkpoint(tuned / "tuned", tuned / "base", out),
        "enable": fm_delta.enable(perturb(bert(), 3), tuned / "base").save_pretrained,
        "merge": lambda out: emr.merge(merged / "base", {"cr": merged / "cr"}, out),
        "add_task": lambda out: emr.add_task(merged / "merged", "cr-again", merged / "cr", out),
        "merged": plain(merged / "merged").save_pretrained,
        "convert_to_lora": pissa.convert_to_lora(model).save_pretrained,
        "uni_med": uni_med().save_pretrained,
    }


def test_a_card_of_the_users_is_never_written_over(tuned, merged, llama, tmp_path):
    for name, save in saves(tuned, merged, llama).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(MINE)
        save(tmp_path / name)
        assert len(list((tmp_path / name).iterdir())) > 1
        assert (tmp_path / name / "README.md").read_text() == MINE, name


def test_into_a_card_of_the_users_only_peft_writes(llama, tmp_path):
    (tmp_path / "README.md").write_text(MINE)
    trained(load(llama), adapter_config(PissaConfig)).save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "My own words." in text and "PiSSA adapter" not in text and "license: cc-by-4.0" in text


def test_a_card_that_nobody_changed_is_written_anew(tuned, merged, tmp_path):
    fm_delta.compress_checkpoint(tuned / "tuned", tuned / "base", tmp_path)
    first = (tmp_path / "README.md").read_text()
    fm_delta.compress_checkpoint(tuned / "tuned", merged / "base", tmp_path)
    second = (tmp_path / "README.md").read_text()
    assert valid_card(tmp_path, "fm_delta")[0].license == "mit" and first != second
    with open(tmp_path / "README.md", "w", newline="") as file:
        file.write(second.replace("\n", "\r\n"))  # as git may do
    assert card_marks.is_ours(tmp_path / "README.md")


@pytest.mark.parametrize("change", ["words", "figures", "licence", "tags", "mark", "behind the mark", "remark", "PEFT"])
def test_a_card_that_somebody_changed_is_theirs(tuned, tmp_path, change):
    path = Path(shutil.copy(tuned / "small/README.md", tmp_path))
    if change == "licence":
        metadata_update_here(path, {"license": "mit"})
    elif change == "tags":
        metadata_update_here(path, {"tags": ["fm-delta", "mine"]})
    else:
        old, new = {
            "words": ("bit for bit", "exactly"),
            "figures": (".", ","),
            "mark": ("<!-- hf_ext", "<!-- hf"),
            "behind the mark": ("card -->", "card --> My own words."),
            "remark": ("card -->", "card --> <!-- mine -->"),
            "PEFT": ("## How", "- PEFT adapters of this model: https://example.org\n## How"),
        }[change]
        path.write_text(path.read_text().replace(old, new))
    before = path.read_bytes()
    fm_delta.compress_checkpoint(tuned / "tuned", tuned / "base", tmp_path)
    assert path.read_bytes() == before


def test_a_changed_task_stays_in_the_card_of_an_adapter(llama, tmp_path):
    model = trained(load(llama), adapter_config(PissaConfig))
    model.save_pretrained(tmp_path)
    metadata_update_here(tmp_path / "README.md", {"pipeline_tag": "text-ranking"})
    model.save_pretrained(tmp_path)
    assert metadata_load(tmp_path / "README.md")["pipeline_tag"] == "text-ranking"


def metadata_update_here(path: Path, change: dict) -> None:
    card = ModelCard.load(path)
    for key, value in change.items():
        card.data[key] = value
    card.save(path)


def bare_cards(llama: Path, folder: Path) -> dict[str, Path]:
    """Cards of PEFT's and Transformers' in which nobody has written."""
    model = get_peft_model(load(llama), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(folder / "peft")
    said = "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been"
    card = ModelCard.from_template(
        ModelCardData(tags=["tiny"], library_name="transformers"), model_description=f"{said} automatically generated."
    )
    card.save(folder / "transformers/README.md")
    return {name: folder / name / "README.md" for name in ("peft", "transformers")}


def test_a_bare_card_of_peft_or_transformers_is_replaced(llama, tmp_path):
    for name, path in bare_cards(llama, tmp_path).items():
        assert card_marks.is_free(path), name
        text = path.read_text()
        for old, new in [
            ("[More Information Needed]", "Me"),
            ("---\n\n#", "---\n\nHello\n\n#"),
            ("---\n", "---\nlicense: mit\n"),
            ("---\n", "---\npipeline_tag: text-ranking\n"),
            ("---\n", "---\nbase_model_relation: merge\n"),
            (f"library_name: {name}", "library_name: mine"),
            ("## Uses", "- PEFT adapters of this model: https://example.org\n## Uses"),
        ]:
            assert old in text
            path.write_text(text.replace(old, new, 1))
            assert not card_marks.is_free(path), (name, new)
        path.write_text(text)
        metadata_update_here(path, {"base_model": "me/my-base"})
        assert not card_marks.is_free(path), name


@pytest.mark.parametrize("metadata", ["tags:\n- legal", "base_model: me/my-base", "pipeline_tag: text-generation"])
def test_a_card_of_metadata_alone_is_the_users(tuned, tmp_path, metadata):
    path = tmp_path / "README.md"
    for nothing in ("library_name: transformers\n", "tags: []\n"):
        path.write_text(f"---\n{nothing}---\n")
        assert card_marks.is_free(path), nothing
    path.write_text(f"---\nlibrary_name: peft\n{metadata}\n---\n")
    before = path.read_bytes()
    fm_delta.compress_checkpoint(tuned / "tuned", tuned / "base", tmp_path)
    assert path.read_bytes() == before


def test_tags_of_a_bare_card_go_into_its_replacement(tuned, llama, tmp_path):
    bare = bare_cards(llama, tmp_path)
    for name, save in {
        "transformers": fm_delta.enable(perturb(bert(), 3), tuned / "base").save_pretrained,
        "peft": lambda out: fm_delta.compress_checkpoint(tuned / "tuned", tuned / "base", out),
    }.items():
        metadata_update_here(bare[name], {"tags": [1, *metadata_load(bare[name])["tags"], "legal"]})
        save(bare[name].parent)
        tags = valid_card(bare[name].parent, "fm_delta")[0].tags
        assert {"1", "fm-delta", "legal"} < {*tags} and ("tiny" in tags) == (name == "transformers")


def test_what_cannot_be_read_is_somebodys(tmp_path):
    path = tmp_path / "README.md"
    assert card_marks.is_free(path)
    path.write_bytes(b"")
    assert card_marks.is_free(path)
    for content in (b"\xff\xfe\x00", b"---\na: " + b"[" * 1200 + b"\n---\n", b"---\n: [\n---\n", b"---\n- a\n---\n"):
        path.write_bytes(content)
        assert not card_marks.is_free(path) and card_marks.metadata_of(tmp_path) in (None, {})


def test_tags_of_numbers_or_of_a_single_word_are_words(tmp_path):
    for number, tags in enumerate(("[1, mine]", "mine", "2026", "[~]")):
        (tmp_path / "README.md").write_text(f"---\nlibrary_name: peft\ntags: {tags}\n---\n")
        assert card_marks.tags_of(card_marks.metadata_of(tmp_path)) == [["1", "mine"], ["mine"], ["2026"], []][number]


def test_figures_and_names_do_not_become_markup_or_metadata(tmp_path):
    name = "{{ 7 * 7 }}: [x"
    card = model_cards.adapter_card("trans_lora_discriminator", f"/nowhere/{name}", None, ["a"], task_name=name, metrics="")
    assert model_cards.write_card(tmp_path, card)
    assert metadata_load(tmp_path / "README.md") == {"library_name": "peft", "tags": ["a"]}
    assert f"# Discriminator of {name}" in (tmp_path / "README.md").read_text() and card_marks.is_ours(tmp_path / "README.md")


def test_a_name_that_is_markdown_or_code_does_not_reach_the_card():
    name = origins.name_in_text('folder/x`\n\n# Click [here](bad)\n")\nimport os #')
    assert name.startswith("`x") and not {"\n", '"', "[", "/"} & set(name) and name.count("`") == 2
    assert origins.name_in_text("org/model") == "`org/model`" and origins.name_in_text("/a/my model-v1.2") == "`my model-v1.2`"


def test_metadata_that_stand_for_gigabytes_are_not_read(tmp_path):
    """By aliases of aliases, which safe loaders resolve."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    text = "---\n" + "\n".join(lines) + "\nlicense: mit\n---\n# Mine\n"
    (tmp_path / "README.md").write_text(text)
    assert card_marks.metadata_of(tmp_path) is None and not card_marks.is_free(tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\nnotes: {'x' * card_marks.MAX_METADATA}\n---\n# Mine\n")
    assert card_marks.metadata_of(tmp_path) is None


# ---- templates ---------------------------------------------------------------------------------------------------------


def test_templates_are_found_in_an_installed_package(tmp_path):
    """Built as `pip install .` builds it, but for the extension, which takes long."""
    root = Path(__file__).parents[1]
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(build, cwd=root, check=True, capture_output=True, timeout=100)
    installed = tmp_path / "lib/hf_ext"
    for extension in Path(hf_ext.__file__).parent.glob("_native*"):
        shutil.copy(extension, installed)
    assert {path.stem for path in (installed / "model_cards").iterdir()} == KINDS
    show = f"print(c.__file__, *(len(c._template(kind)) > 99 for kind in {sorted(KINDS)!r}))"
    code = f"import hf_ext.integration.model_cards as c; {show}"
    env = {"PYTHONPATH": str(tmp_path / "lib"), "HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == [str(installed / "integration/model_cards.py"), *["True"] * len(KINDS)], done.stderr
