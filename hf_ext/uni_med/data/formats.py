"""Data sets in common medical formats, as the columns image, text, task and answer of `UniMedCollator`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from hf_ext.errors import CorruptFileError, HfExtError
from hf_ext.uni_med.boxes import format_box
from hf_ext.uni_med.data.images import image_size, load_images

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)

QUESTIONS = {"refer": "where is the {name}", "identify": "what is in {box}"}
REASONS = 3  # of skipped rows, in the log


def check_images(data: Dataset, on_error: str = "raise") -> Dataset:
    """Opens the images of each row of a data set once, as `load_images` does.

    Args:
        data: rows with the columns image and, optionally, frame. It may have a transform.
        on_error: "raise" stops at the first row that cannot be read. "skip" leaves such rows out and logs a warning with their
            count, their row numbers and the first reasons.

    Returns:
        the rows that can be read.

    Raises:
        ValueError: a row cannot be read; the message names the row and the file.
        HfExtError: a package is not installed. This is not skipped.
    """

    def load(i: int) -> int:
        row = data[i]
        load_images({"image": [row.get("image")], "frame": [row.get("frame")]})  # no work if a transform has done it
        return i

    usable = _each("The data set", range(len(data)), load, on_error)
    return data if len(usable) == len(data) else data.select(usable)


def read_vqa_rad(
    file: str | os.PathLike, images: str | os.PathLike, split: str | None = None, on_error: str = "raise"
) -> Dataset:
    """Reads the public JSON file of VQA-RAD as samples of the task vqa.

    Args:
        file: JSON list of rows with image_name, question, answer and phrase_type.
        images: folder with the images.
        split: "train" or "test"; test rows have a phrase_type that begins with "test". Defaults to all rows.
        on_error: "raise" or "skip", as in `check_images`.

    Returns:
        a data set with the columns image (list of one path), text, task and answer. Images are not opened.

    Raises:
        ValueError: a row is incomplete, its image is missing, or no row is left; the message names the file and the row.
        HfExtError: datasets is not installed.
    """
    if split not in (None, "train", "test"):
        raise ValueError(f"VQA-RAD has no split '{split}'; give 'train', 'test' or None.")

    def is_of_split(row: Any) -> bool:
        return split is None or _text(row, "phrase_type").startswith("test") == (split == "test")

    return _read_vqa(file, images, "image_name", is_of_split, on_error)


def read_slake(
    file: str | os.PathLike, images: str | os.PathLike, language: str | None = None, on_error: str = "raise"
) -> Dataset:
    """Reads a JSON file of SLAKE, such as train.json, as samples of the task vqa.

    Args:
        file: JSON list of rows with img_name, question, answer and q_lang.
        images: folder in which the names of the images start, such as "xmlab1/source.jpg".
        language: "en" or "zh". Defaults to all rows.
        on_error: "raise" or "skip", as in `check_images`.

    Returns:
        a data set as `read_vqa_rad` returns it, and with its errors.
    """

    return _read_vqa(file, images, "img_name", lambda row: not language or _text(row, "q_lang") == language, on_error)


def _read_vqa(
    file: str | os.PathLike, images: str | os.PathLike, image_key: str, is_wanted: Callable[[Any], bool], on_error: str
) -> Dataset:
    def convert(row: Any) -> dict[str, Any] | None:
        if not is_wanted(row):
            return None
        return _sample([_path(images, row, image_key)], _text(row, "question"), "vqa", _text(row, "answer"))

    return _dataset(file, _each(file, _list(file, _read_json(file)), convert, on_error))


def read_reports(
    file: str | os.PathLike,
    images: str | os.PathLike,
    split: str = "train",
    question: str = "describe the image",
    on_error: str = "raise",
) -> Dataset:
    """Reads reports on MIMIC-CXR or IU X-Ray, in the layout of R2Gen's annotation.json, as samples of the task caption.

    Args:
        file: JSON object with a list of rows for each split; a row has image_path (list of paths) and report.
        images: folder in which the paths of the images start.
        split: name of the list.
        question: the text of all samples.
        on_error: "raise" or "skip", as in `check_images`.

    Returns:
        a data set with the columns image (list of the paths of all views), text, task and answer. Images are not opened.

    Raises:
        ValueError: a row is incomplete, an image is missing, or no row is left; the message names the file and the row.
        HfExtError: datasets is not installed.
    """

    def convert(row: Any) -> dict[str, Any]:
        paths = _value(row, "image_path")
        if not (isinstance(paths, list) and paths):
            raise ValueError(f"image_path is {paths!r}, not a list of paths.")
        views = [_path(images, {"image_path": path}, "image_path") for path in paths]
        return _sample(views, question, "caption", _text(row, "report"))

    return _dataset(file, _each(f"{file}, split {split}", _list(file, _read_json(file), split), convert, on_error))


def read_coco(
    file: str | os.PathLike,
    images: str | os.PathLike,
    task: str = "refer",
    question: str | None = None,
    on_error: str = "raise",
) -> Dataset:
    """Reads boxes in the layout of COCO's instances JSON as samples of the task refer or identify.

    Args:
        file: JSON object with images (id, file_name, width, height), categories (id, name) and annotations (image_id,
            category_id, bbox: left, top, width and height in pixels).
        images: folder in which the file names start.
        task: "refer" makes one sample of each image and category, whose answer is all its boxes, the largest first.
            "identify" makes one sample of each box.
        question: text with {name} for "refer" or {box} for "identify"; defaults to "where is the {name}" and "what is in
            {box}".
        on_error: "raise" or "skip", as in `check_images`. Rows are annotations.

    Returns:
        a data set with the columns image (list of one path), text, task and answer. Reads the headers of the images only.

    Raises:
        ValueError: an annotation is incomplete, its box is empty or outside the image, its image is missing or of other
            proportions than width and height, or no row is left; the message names the file and the annotation.
        HfExtError: datasets is not installed, or pydicom for DICOM files.
    """
    if task not in QUESTIONS:
        raise ValueError(f"Boxes make samples of the tasks {' and '.join(QUESTIONS)}, not of '{task}'.")
    question = question or QUESTIONS[task]
    boxes = _read_boxes(file, images, on_error)
    if task == "identify":
        return _dataset(file, [_sample([path], question.format(box=box), task, name) for _, path, name, box in boxes])
    answers: dict[tuple[str, str], list[str]] = {(path, name): [] for _, path, name, _ in boxes}  # in the order of the file
    for _, path, name, box in sorted(boxes, key=lambda row: -row[0]):
        answers[path, name].append(box)
    return _dataset(
        file,
        [_sample([path], question.format(name=name), task, " ".join(texts)) for (path, name), texts in answers.items()],
    )


def _read_boxes(file: str | os.PathLike, images: str | os.PathLike, on_error: str) -> list[tuple[float, str, str, str]]:
    """Returns the annotations of COCO: area of the box, path of the image, name of the category, and the box as text."""
    content = _read_json(file)

    def by_id(name: str) -> dict[str, Any]:
        rows = _each(f"{file}, list {name}", _list(file, content, name), lambda row: (_text(row, "id"), row), on_error)
        if len(entries := dict(rows)) < len(rows):
            raise ValueError(f"'{file}' has ids in the list '{name}' that are not unique. Correct them.")
        return entries

    pictures, categories = by_id("images"), by_id("categories")

    @cache
    def find(picture: str) -> tuple[str, tuple[float, float]]:
        path = _path(images, pictures[picture], "file_name")
        return path, _box_space(path, pictures[picture])

    def convert(row: Any) -> tuple[float, str, str, str]:
        picture, category = _text(row, "image_id"), _text(row, "category_id")
        for key, rows, name in ((picture, pictures, "images"), (category, categories, "categories")):
            if key not in rows:
                raise ValueError(f"the list '{name}' has no id {key}.")
        path, size = find(picture)
        box = _value(row, "bbox")
        if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
            raise ValueError(f"bbox is {box!r}, not [left, top, width, height].")
        left, top, width, height = box
        text = format_box((left, top, left + width, top + height), size)
        return width * height, path, _text(categories[category], "name"), text

    return _each(f"{file}, list annotations", _list(file, content, "annotations"), convert, on_error)


def _box_space(path: str, row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the width and height that boxes refer to: a row's, if the image in the file has the same proportions."""
    columns, rows = image_size(path)
    width, height = row.get("width") or columns, row.get("height") or rows
    if not (_is_number(width) and _is_number(height)):
        raise ValueError(f"the image '{path}' has width {width!r} and height {height!r} in the list 'images', not numbers.")
    # Boxes are shares of the image, so that resizing it changes nothing. Sizes may be rounded to whole pixels.
    if abs(width * rows - height * columns) > max(width + height, columns + rows):
        raise ValueError(
            f"the image '{path}' has {columns} x {rows} pixels, and its boxes are for {width} x {height}. Use the image "
            "that was annotated, neither cropped nor turned."
        )
    return width, height


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_json(file: str | os.PathLike) -> Any:
    try:
        with open(file, encoding="utf-8-sig") as stream:
            return json.load(stream)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"'{file}' is not valid JSON: {error}. Download the file again.") from error


def _list(file: str | os.PathLike, content: Any, name: str | None = None) -> list[Any]:
    """Returns the content of a JSON file, or its list of this name, if it is a list."""
    if name is not None:
        if not (isinstance(content, dict) and name in content):
            keys = ", ".join(content) if isinstance(content, dict) else f"a {type(content).__name__}"
            raise ValueError(f"'{file}' has no list '{name}', only {keys}; is it in another layout?")
        content = content[name]
    if not isinstance(content, list):
        raise ValueError(f"'{file}' holds a {type(content).__name__} instead of a list of rows; is it in another layout?")
    return content


def _each(source: str | os.PathLike, rows: Sequence[Any], convert: Callable[[Any], Any], on_error: str) -> list[Any]:
    """Returns what each row becomes, without None. Rows count from 0; those that raise a ValueError raise it or are logged."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}; give 'raise' or 'skip'.")
    results: list[Any] = []
    skipped: list[str] = []
    reasons: list[str] = []
    for i, row in enumerate(rows):
        try:
            if (result := convert(row)) is not None:
                results.append(result)
        except ValueError as error:
            row_id = next((f" ({key} {row[key]})" for key in ("id", "qid") if isinstance(row, dict) and key in row), "")
            message = f"{source}, row {i}{row_id}: {error}"
            if on_error == "raise":
                raise ValueError(f'{message} Correct the row, or leave such rows out with on_error="skip".') from error
            skipped.append(str(i))
            if len(reasons) < REASONS:
                reasons.append(message)
    if skipped:
        listed = ", ".join(skipped)
        summary = f"Skipped {len(skipped)} of {len(rows)} rows of {source}: {listed}. The first reasons:"
        logger.warning("\n".join([summary, *reasons]))
    return results


def _value(row: Any, key: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"it is {row!r:.80}, not an object.")
    if key not in row:
        raise ValueError(f"it has no {key}, only {', '.join(row)}.")
    return row[key]


def _text(row: Any, key: str) -> str:
    value = _value(row, key)
    if _is_number(value):
        value = str(value)
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{key} is {value!r}, not a text.")
    return value.strip()


def _path(folder: str | os.PathLike, row: Any, key: str) -> str:
    path = os.path.join(folder, _text(row, key))
    if not os.path.isfile(path):
        raise ValueError(f"there is no image '{path}'; images= must be the folder in which {key} starts.")
    return path


def _sample(image: list[str], text: str, task: str, answer: str) -> dict[str, Any]:
    return {"image": image, "text": text, "task": task, "answer": answer}


def _dataset(file: str | os.PathLike, samples: list[dict[str, Any]]) -> Dataset:
    if not samples:
        raise ValueError(f"'{file}' has no row that can be used; is the split or language right?")
    try:
        from datasets import Dataset
    except ImportError as error:
        raise HfExtError("Reading annotations requires datasets: pip install datasets.") from error
    return Dataset.from_list(samples)
