"""A folder without a model card gets one; a card that is there stays; decompression restores the original files alone."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from hosts import pissa
from huggingface_hub import ModelCardData, metadata_load
from PIL import Image
from tiny_adapters import load, small_llama, trained
from tiny_checkpoints import contents, pair
from tiny_merges import plain, write_tasks
from tiny_models import bert, perturb
from tiny_uni_med import processor, save_parts
from valid_cards import valid_card

from hf_ext import PissaConfig, UniMedForConditionalGeneration, emr, fm_delta
from hf_ext.integration import cards

MINE = "---\nlicense: cc-by-4.0\ntags:\n- mine\n---\n\n# My model\n"


def licensed(folder: Path, license: str = "mit", **more: str) -> Path:
    (folder / "README.md").write_text(f"---\n{ModelCardData(license=license, **more).to_yaml()}\n---\n\n# A base\n")
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A base with a card, its fine-tune, and the compressed fine-tune."""
    folder = tmp_path_factory.mktemp("fm_delta")
    bert().save_pretrained(folder / "base")
    licensed(folder / "base", "other", license_name="tiny", license_link="LICENSE")
    perturb(bert(), 1).save_pretrained(folder / "tuned")
    fm_delta.compress_checkpoint(folder / "tuned", folder / "base", folder / "small")
    return folder


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emr")
    base, tasks = write_tasks(folder)
    for name in ("base", "trec", "cr"):
        licensed(folder / name)
    emr.merge(base, {task: tasks[task] for task in ("trec", "cr")}, folder / "merged", method="emr")
    return folder


# ---- each method's card ------------------------------------------------------------------------------------------------


def test_the_card_of_a_compressed_checkpoint_names_base_license_and_class(tuned, tmp_path):
    data, text = valid_card(tuned / "small")
    assert "# A fine-tune of `base`" in text and "import BertForSequenceClassification" in text
    assert (data.library_name, data.tags, data.base_model) == ("transformers", ["fm-delta"], None)
    assert (data.license, data["license_name"], data["license_link"]) == ("other", "tiny", "LICENSE")
    base = tmp_path / "hub/models--user--tiny/snapshots/0123456789"  # as in the cache of downloads
    shutil.copytree(tuned / "base", base)
    fm_delta.compress_checkpoint(tuned / "tuned", base, tmp_path / "small")
    data, _ = valid_card(tmp_path / "small")
    assert (data.base_model, data["base_model_relation"]) == ("user/tiny", "finetune")
    fm_delta.compress_checkpoint(tuned / "tuned", None, tmp_path / "alone")
    data, text = valid_card(tmp_path / "alone")
    assert "without a base model" in text and "fine-tune" not in text and data.base_model is None and data.license is None


def test_the_card_of_a_merge_says_of_each_task_how_close_it_is(merged, tmp_path):
    data, text = valid_card(merged / "merged")
    for task in emr.report(merged / "merged").tasks:
        assert f"| {task.task} | λ {task.scale:.4f} |" in text and f'model.set_task("{task.task}")' in text
    assert (data.license, data.tags) == ("mit", ["emr-merging", "merge"])
    plain(merged / "merged").save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/README.md").read_bytes() == (merged / "merged/README.md").read_bytes()
    licensed(shutil.copytree(merged / "cr", tmp_path / "cr"), "cc-by-nc-4.0")
    emr.merge(merged / "base", {"cr": tmp_path / "cr", "trec": merged / "trec"}, tmp_path / "out", method="emr")
    assert valid_card(tmp_path / "out")[0].license is None  # the models do not agree


def test_the_code_in_the_card_of_a_uni_med_model_runs(tmp_path):
    vision, text_model = save_parts(tmp_path)
    options = {"router": "sparse", "num_experts": 3, "tasks": ["vqa", "cls"]}
    model = UniMedForConditionalGeneration.from_vision_text_pretrained(vision, text_model, **options)
    model.save_pretrained(tmp_path / "model")
    _, text = valid_card(tmp_path / "model")
    assert "# Uni-Med: `vision` and `text`" in text and "`vqa`, `cls`, `qa`" in text and "| experts | 3 |" in text
    processor(tasks=model.config.tasks).save_pretrained(tmp_path / "model")
    Image.new("L", (40, 30)).save(tmp_path / "image.png")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = {'text="…"': 'text="how many cells"', "_tokens=20": "_tokens=3"}
    shown |= {f'{call}("…")': f'{call}("{tmp_path / name}")' for call, name in (("pretrained", "model"), ("open", "image.png"))}
    for old, new in shown.items():
        code = code.replace(old, new)
    exec(code, scope := {})
    assert scope["answer"].shape == (1, 3)  # without the prompt


@pissa
def test_a_pissa_adapter_has_the_card_of_peft(tmp_path):
    small_llama().save_pretrained(tmp_path / "base")
    trained(load(tmp_path / "base"), PissaConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    data = metadata_load(tmp_path / "adapter/README.md")
    assert data["library_name"] == "peft" and data["base_model"] == str(tmp_path / "base")


# ---- a card that is there ----------------------------------------------------------------------------------------------


def test_a_card_that_is_there_stays(tuned, merged, tmp_path):
    saves = {
        "compress": lambda out: fm_delta.compress_checkpoint(tuned / "tuned", tuned / "base", out),
        "decompress": lambda out: fm_delta.decompress_checkpoint(tuned / "small", out),
        "enable": fm_delta.enable(perturb(bert(), 3), tuned / "base").save_pretrained,
        "merge": lambda out: emr.merge(merged / "base", {"cr": merged / "cr"}, out, method="emr"),
        "merged": plain(merged / "merged").save_pretrained,
        "extract": lambda out: emr.extract(plain(merged / "merged"), "trec", out),
        "extract_lora": lambda out: fm_delta.extract_lora(tuned / "tuned", tuned / "base", out, rank=1),
    }
    for name, save in saves.items():
        (tmp_path / name).mkdir()
        for card in (MINE, "", "---\n: [\n---\n"):
            (tmp_path / name / "README.md").write_text(card)
            save(tmp_path / name)
            assert len(list((tmp_path / name).iterdir())) > 1
            assert (tmp_path / name / "README.md").read_text() == card, name


def test_decompression_leaves_out_an_added_card(tuned, tmp_path):
    back = iter(range(9))

    def restored(folder: Path) -> dict:
        fm_delta.decompress_checkpoint(folder, out := tmp_path / f"back-{next(back)}")
        return contents(out)

    assert restored(tuned / "small") == contents(tuned / "tuned")
    small = shutil.copytree(tuned / "small", tmp_path / "small")
    (small / "README.md").write_text(MINE)
    fm_delta.compress_checkpoint(tuned / "tuned", tuned / "base", small)
    assert (small / "README.md").read_text() == MINE and restored(small) == contents(tuned / "tuned")
    model = fm_delta.enable(perturb(bert(), 2), tuned / "base")
    for _ in range(2):
        model.save_pretrained(tmp_path / "saved")
    valid_card(tmp_path / "saved")
    assert "README.md" not in restored(tmp_path / "saved")


@pytest.mark.parametrize("text", [MINE, "", "---\n: [\n---\n", "the added one"])
def test_a_card_of_the_source_is_kept_to_the_last_byte_both_ways(tuned, tmp_path, text):
    source = shutil.copytree(tuned / "tuned", tmp_path / "tuned")
    text = (tuned / "small/README.md").read_text() if text == "the added one" else text
    (source / "README.md").write_text(text)
    fm_delta.compress_checkpoint(source, tuned / "base", tmp_path / "small", verify=True)
    assert (tmp_path / "small/README.md").read_text() == text
    fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_a_folder_without_a_configuration_gets_no_card(tmp_path):
    src, base = pair(tmp_path)
    (src / "config.json").unlink()
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    assert contents(tmp_path / "small").keys() == {"model.safetensors"}


# ---- hostile contents --------------------------------------------------------------------------------------------------


def test_metadata_that_cannot_be_read_are_empty(tmp_path):
    path = tmp_path / "README.md"
    huge = f"---\nlicense: mit\nnotes: {'x' * cards.MAX_BYTES}\n---\n".encode()
    for content in (b"\xff\xfe\x00", b"---\na: " + b"[" * 1200 + b"\n---\n", b"---\n: [\n---\n", b"---\n- a\n---\n", huge):
        path.write_bytes(content)
        assert cards.metadata_of(tmp_path) == {}
    path.unlink()
    os.mkfifo(path)
    assert cards.metadata_of(tmp_path) == {}


def test_names_do_not_become_markup_code_or_metadata(tmp_path):
    name = cards.name_in_text('folder/x`\n\n# Click [here](bad)\n")\nimport os #')
    assert name.startswith("`x") and not {"\n", '"', "[", "/"} & set(name) and name.count("`") == 2
    assert cards.name_in_text("org/model") == "`org/model`" and cards.name_in_text("/a/my model-v1.2") == "`my model-v1.2`"
    figures = {"base_class": "AutoModel", "description": "{{ 7 * 7 }}: [x"}
    assert cards.write_card(tmp_path, "lora", [f"/nowhere/{name}"], "adapter", tags=["a"], library="peft", **figures)
    assert metadata_load(tmp_path / "README.md") == {"library_name": "peft", "tags": ["a"]}
    assert "{{ 7 * 7 }}: [x" in (tmp_path / "README.md").read_text()
    (tmp_path / "config.json").write_text('{"architectures": ["x; import os"]}')
    assert cards.class_of(tmp_path) == "AutoModel"
