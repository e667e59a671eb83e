"""Annotations in the layouts in which data sets are published become training samples, and bad rows are named."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from tiny_medical_data import coco, gray, reports, save, slake, vqa_rad, write, write_json
from tiny_uni_med import processor
from transformers.utils import logging

from hf_ext.errors import CorruptFileError
from hf_ext.uni_med import (
    UniMedCollator,
    check_images,
    load_images,
    mix_datasets,
    parse_boxes,
    read_coco,
    read_reports,
    read_slake,
    read_vqa_rad,
)

RAMP = np.array([[0, 500, 1000, 1500], [2000, 2500, 3000, 4095]], np.uint16)


def test_images_are_opened_when_a_batch_needs_them(tmp_path):
    dicom = str(write(tmp_path / "scan", RAMP, WindowCenter=2000, WindowWidth=4001))  # recognized without a suffix
    video = str(write(tmp_path / "video.dcm", np.arange(24, dtype=np.uint8).reshape(3, 2, 4), frames=3))
    png = save(tmp_path / "gray.png", mode="L")
    rows = [[dicom], [png, dicom], None, [video]]
    data = Dataset.from_list([{"image": image, "text": "a", "frame": 2 if image == [video] else None} for image in rows])
    data = data.with_transform(load_images)
    assert data["text"][0] == "a"
    assert [image.mode for image in data[1]["image"]] == ["RGB", "RGB"]
    (first,), second, third, (fourth,) = data[:]["image"]
    assert gray(first)[1].tolist() == [128, 159, 191, 255] and gray(second[0]).max() == 77
    assert third is None and fourth.size == (4, 2) and gray(fourth)[0, 0] == 16
    (lung,) = data.with_transform(partial(load_images, window=(1000, 2000)))[0]["image"]
    assert gray(lung)[0].tolist() == [0, 64, 128, 191]
    already = Image.new("RGB", (3, 3))
    assert load_images({"image": [already, "https://example.org/a.png"]})["image"] == [already, "https://example.org/a.png"]


def test_files_that_are_no_images_are_named(tmp_path):
    (tmp_path / "text.png").write_text("text")
    whole = Path(save(tmp_path / "whole.png", (300, 300))).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    save(tmp_path / "deep.png", mode="I;16", value=40000)
    Image.new("L", (4, 4)).save(tmp_path / "stack.tif", save_all=True, append_images=[Image.new("L", (4, 4), 9)])
    wrong = {
        "text.png": "cannot be read: cannot identify",
        "cut.png": "cannot be read: .*truncated",
        "deep.png": "has mode I;16, not 8 bits",
        "stack.tif": "has 2 frames; choose one",
        "none.png": "cannot be read: .*No such file",
    }
    for name, reason in wrong.items():
        with pytest.raises(ValueError, match=rf"{re.escape(name)}' {reason}"):
            load_images({"image": [str(tmp_path / name)]})
    stack = load_images({"image": [str(tmp_path / "stack.tif")], "frame": [1]})["image"][0]
    assert gray(stack).max() == 9
    turned = Image.new("RGB", (4, 2))
    turned.getexif()[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=turned.getexif())
    assert load_images({"image": [str(tmp_path / "turned.jpg")]})["image"][0].size == (2, 4)


@pytest.fixture
def warnings(caplog):
    """The log of warnings."""
    logging.enable_propagation()
    with caplog.at_level("WARNING"):
        yield caplog
    logging.disable_propagation()


def test_checking_opens_each_image_once_and_names_the_rows(tmp_path, warnings):
    good = save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_text("bad")
    data = Dataset.from_list([{"image": [path]} for path in (good, str(tmp_path / "bad.png"), good)] + [{"image": None}])
    for checked in (data, data.with_transform(load_images)):
        with pytest.raises(ValueError, match=r"The data set, row 1: The image '.*bad\.png' cannot be read"):
            check_images(checked)
        assert len(check_images(checked, on_error="skip")) == 3
    assert check_images(data, on_error="skip")["image"] == [[good], [good], None]
    assert re.search(r"Skipped 1 of 4 rows of The data set: 1\. The first reasons:\n.*bad\.png", warnings.text)
    with pytest.raises(ValueError, match="on_error is 'ignore'; give 'raise' or 'skip'"):
        check_images(data, on_error="ignore")


def test_vqa_rad_questions_become_samples(tmp_path):
    file, images = vqa_rad(tmp_path)
    data = read_vqa_rad(file, images)
    assert data.column_names == ["image", "text", "task", "answer"] and len(data) == 4
    path = str(images / "synpic54610.jpg")
    assert data[1] == {"image": [path], "text": "how many cells are there ?", "task": "vqa", "answer": "2"}
    assert read_vqa_rad(file, images, split="train")["answer"] == ["Yes", "2"]
    assert read_vqa_rad(file, images, split="test")["answer"] == ["no", "No"]
    with pytest.raises(ValueError, match="no split 'val'"):
        read_vqa_rad(file, images, split="val")


def test_slake_questions_become_samples(tmp_path):
    file, images = slake(tmp_path)
    assert len(read_slake(file, images)) == 3
    data = read_slake(file, images, language="en")
    assert data["image"] == [[str(images / f"xmlab{i}/source.jpg")] for i in (1, 2)]
    assert data["answer"] == ["MRI", "no"] and set(data["task"]) == {"vqa"}
    assert read_slake(file, images, language="zh")["text"] == ["图中是什么模态？"]
    with pytest.raises(ValueError, match=r"train\.json' has no row that can be used; is the split or language right"):
        read_slake(file, images, language="fr")


def test_reports_become_caption_samples(tmp_path):
    file, images = reports(tmp_path)
    data = read_reports(file, images)
    assert data["image"][0] == [str(images / "CXR1/0.png"), str(images / "CXR1/1.png")] and len(data["image"][1]) == 1
    assert data[0]["answer"] == "the red cell is there . no w1"
    assert set(data["task"]) == {"caption"} and set(data["text"]) == {"describe the image"}
    assert read_reports(file, images, "test", question="what is there ?")["text"] == ["what is there ?"]
    with pytest.raises(ValueError, match="has no row that can be used"):
        read_reports(file, images, "val")
    with pytest.raises(ValueError, match=r"annotation\.json' has no list 'validation', only train, val, test"):
        read_reports(file, images, "validation")


def test_coco_boxes_are_hundredths_of_their_own_image(tmp_path):
    file, images = coco(tmp_path)
    a, b = str(tmp_path / "a.png"), str(tmp_path / "b.dcm")
    assert read_coco(file, images, "identify").to_list() == [
        {"image": [a], "text": "what is in {<2><2><5><6>}", "task": "identify", "answer": "red cell"},
        {"image": [a], "text": "what is in {<20><20><50><60>}", "task": "identify", "answer": "red cell"},
        {"image": [a], "text": "what is in {<94><83><100><100>}", "task": "identify", "answer": "platelet"},
        {"image": [b], "text": "what is in {<25><25><50><50>}", "task": "identify", "answer": "platelet"},
    ]
    refer = read_coco(file, images)
    assert refer.to_list() == [
        {"image": [a], "text": "where is the red cell", "task": "refer", "answer": "{<20><20><50><60>} {<2><2><5><6>}"},
        {"image": [a], "text": "where is the platelet", "task": "refer", "answer": "{<94><83><100><100>}"},
        {"image": [b], "text": "where is the platelet", "task": "refer", "answer": "{<25><25><50><50>}"},
    ]
    assert parse_boxes(refer[0]["answer"], (640, 480))[0] == (128, 96, 320, 288)
    assert read_coco(file, images, question="find {name}")["text"][0] == "find red cell"
    with pytest.raises(ValueError, match="tasks refer and identify, not of 'vqa'"):
        read_coco(file, images, "vqa")


def test_boxes_fit_resized_images_but_not_cropped_ones(tmp_path):
    file, images = coco(tmp_path)
    before = read_coco(file, images).to_list()
    save(images / "a.png", (107, 80))
    assert read_coco(file, images).to_list() == before
    content = json.loads(file.read_text())
    for row in content["images"]:
        del row["width"], row["height"]
    save(images / "a.png", (640, 480))
    assert read_coco(write_json(tmp_path / "without.json", content), images).to_list() == before
    for size in ((480, 640), (640, 400)):
        save(images / "a.png", size)
        with pytest.raises(
            ValueError, match=rf"row 0 \(id 1\): the image '.*a\.png' has {size[0]} x {size[1]} pixels, and its boxes"
        ):
            read_coco(file, images)


BAD_ROWS = {
    "not an object": (["a"], "it is \\['a'\\], not an object"),
    "no answer": ({"answer": ...}, "it has no answer, only qid"),
    "empty": ({"answer": " "}, "answer is ' ', not a text"),
    "null": ({"question": None}, "question is None, not a text"),
    "no file": ({"image_name": "x/y.jpg"}, "there is no image '.*x/y\\.jpg'; images= must be the folder in which image_name"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_or_skipped_with_a_log(tmp_path, name, warnings):
    change, reason = BAD_ROWS[name]
    file, images = vqa_rad(tmp_path)
    rows = json.loads(file.read_text())
    bad = change if isinstance(change, list) else {k: v for k, v in (rows[1] | change).items() if v is not ...}
    write_json(file, [rows[0], bad, *rows[2:]])
    row_id = "" if bad is change else r" \(qid 1\)"
    with pytest.raises(ValueError, match=rf"Public\.json, row 1{row_id}: {reason}.*on_error=\"skip\""):
        read_vqa_rad(file, images)
    assert read_vqa_rad(file, images, on_error="skip")["answer"] == ["Yes", "no", "No"]
    assert re.search(rf"Skipped 1 of 4 rows of .*Public\.json: 1\. The first reasons:\n.*{reason}", warnings.text)


def test_all_skipped_rows_are_listed_with_the_first_reasons(tmp_path, warnings):
    file, images = slake(tmp_path)
    (row, *_) = json.loads(file.read_text())
    write_json(file, [row, *[{"qid": i} for i in range(6)], row])
    assert len(read_slake(file, images, on_error="skip")) == 2
    (record,) = [record.getMessage() for record in warnings.records if "Skipped" in record.getMessage()]
    assert "Skipped 6 of 8 rows" in record and ": 1, 2, 3, 4, 5, 6. The first reasons:" in record
    assert record.count("\n") == 3 and "row 3 (qid 2): it has no img_name" in record


BAD_BOXES = {
    "outside": ({"bbox": [700, 0, 5, 5]}, "is outside the image of 640 x 480"),
    "empty": ({"bbox": [5, 5, 0, 5]}, "is empty or reversed"),
    "not finite": ({"bbox": [5, 5, float("nan"), 5]}, "is empty or reversed"),
    "short": ({"bbox": [5, 5, 5]}, r"bbox is \[5, 5, 5\], not \[left, top, width, height\]"),
    "words": ({"bbox": ["5", 5, 5, 5]}, "bbox is"),
    "image": ({"image_id": 99}, "the list 'images' has no id 99"),
    "category": ({"category_id": [2]}, r"category_id is \[2\], not a text"),
}


@pytest.mark.parametrize("name", BAD_BOXES)
def test_a_bad_box_is_named(tmp_path, name, warnings):
    change, reason = BAD_BOXES[name]
    file, images = coco(tmp_path)
    content = json.loads(file.read_text())
    content["annotations"][2] |= change
    write_json(file, content)
    with pytest.raises(ValueError, match=rf"instances\.json, list annotations, row 2 \(id 3\): .*{reason}"):
        read_coco(file, images)
    assert len(read_coco(file, images, "identify", on_error="skip")) == 3 and "list annotations: 2." in warnings.text


def test_bad_lists_of_coco_are_named(tmp_path):
    file, images = coco(tmp_path)
    content = json.loads(file.read_text())
    for name, change, reason in (
        ("images", lambda rows: rows.append(dict(rows[0])), "ids in the list 'images' that are not unique"),
        (
            "images",
            lambda rows: rows[0].update(width="640"),
            "has width '640' and height 480 in the list 'images', not numbers",
        ),
        ("images", lambda rows: rows.append({}), r"list images, row 2: it has no id"),
        ("categories", lambda rows: rows[0].pop("name"), r"list annotations, row 0 \(id 1\): it has no name, only id"),
    ):
        changed = json.loads(json.dumps(content))
        change(changed[name])
        with pytest.raises(ValueError, match=rf"instances\.json.*{reason}"):
            read_coco(write_json(file, changed), images)
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(ValueError, match=r"row 0 \(id 1\): The image '.*a\.png' cannot be read"):
        read_coco(write_json(file, content), images)


def test_files_of_another_layout_are_named(tmp_path):
    file = tmp_path / "file.json"
    readers = {
        read_vqa_rad: "list of rows",
        read_slake: "list of rows",
        read_reports: "no list 'train'",
        read_coco: "no list 'images'",
    }
    for read, reason in readers.items():
        with pytest.raises(FileNotFoundError, match=r"none\.json"):
            read(tmp_path / "none.json", tmp_path)
        file.write_text("[{")
        with pytest.raises(CorruptFileError, match=r"file\.json' is not valid JSON: "):
            read(file, tmp_path)
        file.write_text('{"questions": []}')
        with pytest.raises(ValueError, match=rf"file\.json' .*{reason}"):
            read(file, tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"has no list 'train', only a list"):
        read_reports(file, tmp_path)


def test_all_formats_mix_into_batches_of_the_collator(tmp_path):
    rad, slakes, cxr, boxes = vqa_rad(tmp_path / "a"), slake(tmp_path / "b"), reports(tmp_path / "c"), coco(tmp_path)
    data = {
        "vqa": read_vqa_rad(*rad),
        "slake": read_slake(*slakes, language="en"),
        "caption": read_reports(*cxr),
        "refer": read_coco(*boxes),
        "identify": read_coco(*boxes, "identify"),
        "qa": Dataset.from_list([{"image": None, "text": "is this a cell ?", "task": "qa", "answer": "yes"}]),
    }
    mixed = mix_datasets(data, dict.fromkeys(data, 1)).with_transform(load_images)
    check_images(mixed)
    rows = [mixed[i] for i in range(len(mixed))]
    assert {row["task"] for row in rows} == {"vqa", "caption", "refer", "identify", "qa"}
    batch = UniMedCollator(processor())(rows)
    views = sum(len(row["image"] or []) for row in rows)
    assert (
        max(len(row["image"] or []) for row in rows) == 2 and len(batch["pixel_values"]) == len(batch["image_tasks"]) == views
    )
    assert len(batch["input_ids"]) == len(rows) and torch.isfinite(batch["pixel_values"]).all()


def test_box_samples_keep_their_question_and_answer(tmp_path):
    for task, question, answer in (
        ("refer", "where is the red cell", "{<20><20><50><60>} {<2><2><5><6>}"),
        ("identify", "what is in {<2><2><5><6>}", "red cell"),
    ):
        row = read_coco(*coco(tmp_path), task).with_transform(load_images)[0]
        assert (row["text"], row["answer"]) == (question, answer)
        batch = UniMedCollator(processor())([row])
        assert batch["image_tasks"].tolist() == [processor().tasks.index(task)]
