"""Blood smears with boxes and biomedical questions as samples of Uni-Med's six tasks. Shared by the example and a benchmark."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from datasets import Dataset, Features, List, Value
from PIL import Image

from hf_ext.uni_med import format_box

CELLS = {"WBC": "white blood cell", "RBC": "red blood cell", "Platelets": "platelet"}
TASKS = ("refer", "identify", "vqa", "caption", "cls")  # those with images; "qa" is the sixth
NUMBERS = ("no", "one", "two")
SQUARE = (1.0, 1.0)
WHOLE = (0.0, 0.0, 1.0, 1.0)
CORNERS = [(x, y, x + 0.6, y + 0.6) for y in (0.0, 0.4) for x in (0.0, 0.4)]
FEATURES = Features(
    {"photo": Value("int64"), "window": List(Value("float64"))} | {name: Value("string") for name in ("text", "task", "answer")}
)

Box = tuple[float, float, float, float]  # left, top, right, bottom as shares of an image; right < left: seen in a mirror


@dataclass
class Photo:
    """An image and what is in it, as names and boxes."""

    image: Image.Image
    cells: list[tuple[str, Box]]
    size: tuple[int, int]  # width and height in pixels of its pictures

    def look(self, window: Box) -> list[tuple[str, Box]]:
        """Returns the cells of which at least half is in a window, cut to it, in shares of the window."""
        found = []
        for name, box in self.cells:
            across, down = (sorted((box[j] - window[i]) / (window[i + 2] - window[i]) for j in (i, i + 2)) for i in (0, 1))
            part = max(across[0], 0.0), max(down[0], 0.0), min(across[1], 1.0), min(down[1], 1.0)
            seen = max(part[2] - part[0], 0) * max(part[3] - part[1], 0)
            if seen >= 0.5 * (across[1] - across[0]) * (down[1] - down[0]):
                found.append((name, part))
        return found

    def picture(self, window: Box) -> Image.Image:
        (left, right), (top, bottom) = sorted(window[::2]), sorted(window[1::2])
        size = self.image.width, self.image.height
        part = [share * pixels for share, pixels in zip((left, top, right, bottom), size * 2)]
        image = self.image.resize(self.size, Image.Resampling.BILINEAR, part)
        if window[2] < window[0]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if window[3] < window[1] else image

    def around(self, box: Box, zoom: float) -> Box:
        """Returns the window with a cell in its middle."""
        size = zoom * max((box[2] - box[0]) * self.image.width, (box[3] - box[1]) * self.image.height)
        return centered(box, min(size / self.image.width, 1.0), min(size / self.image.height, 1.0))


def centered(box: Box, width: float, height: float) -> Box:
    """Returns a box of a given size around the middle of another, moved into the image."""
    left, top = min(max((box[0] + box[2] - width) / 2, 0), 1 - width), min(max((box[1] + box[3] - height) / 2, 0), 1 - height)
    return left, top, left + width, top + height


def load_photos(folder: str, split: str, size: tuple[int, int]) -> list[Photo]:
    """Returns the photos of a VOC folder's split, whose pictures have this width and height in pixels."""
    photos, width = [], 2 * size[0]
    for name in Path(folder, "ImageSets", "Main", f"{split}.txt").read_text().split():
        image, cells = Image.open(Path(folder, "JPEGImages", f"{name}.jpg")).convert("RGB"), []
        for found in ElementTree.parse(Path(folder, "Annotations", f"{name}.xml")).iter("object"):
            left, top, right, bottom = (int(found.find(f"bndbox/{side}").text) for side in ("xmin", "ymin", "xmax", "ymax"))
            if left < right and top < bottom:
                box = left / image.width, top / image.height, right / image.width, bottom / image.height
                cells.append((CELLS[found.find("name").text], box))
        photos.append(Photo(image.resize((width, width * image.height // image.width)), cells, size))
    return photos


def random_window(rng: random.Random) -> Box:
    """Returns a random window, mirrored or not. A third of the windows are whole images."""
    size = 1.0 if rng.random() < 1 / 3 else rng.uniform(0.55, 1.0)
    left, top = rng.uniform(0, 1 - size), rng.uniform(0, 1 - size)
    return mirrored((left, top, left + size, top + size), rng)


def mirrored(window: Box, rng: random.Random) -> Box:
    left, top, right, bottom = window
    left, right = rng.choice([(left, right), (right, left)])
    top, bottom = rng.choice([(top, bottom), (bottom, top)])
    return left, top, right, bottom


def place(box: Box) -> str:
    across, down = (min(int(3 * (box[i] + box[i + 2]) / 2), 2) for i in (0, 1))
    return f"{('upper', 'middle', 'lower')[down]} {('left', 'centre', 'right')[across]}"


def report(cells: list[tuple[str, Box]]) -> str:
    white = [box for name, box in cells if name == CELLS["WBC"]]
    where = f" at the {' and the '.join(map(place, white[:2]))}" if white else ""
    platelets = "platelets" if any(name == CELLS["Platelets"] for name, _ in cells) else "no platelets"
    return f"{NUMBERS[min(len(white), 2)]} white blood cell{where} and {platelets} ."


def ask(task: str, photo: Photo, window: Box, kind: str, rng: random.Random) -> dict | None:
    """Returns window, question and answer; None if there is nothing of the kind to ask about."""
    if task == "cls":
        boxes = [box for name, box in photo.cells if name == kind]
        window = mirrored(photo.around(rng.choice(boxes), rng.uniform(1.2, 1.5)), rng) if boxes else window
    cells = photo.look(window)
    boxes = [box for name, box in cells if name == kind]
    white = [box for name, box in cells if name == CELLS["WBC"]]
    if task == "refer" and len(white) == 1:
        text, answer = "where is the white blood cell", format_box(white[0], SQUARE)
    elif task == "identify" and boxes:  # the box has one size for all, as that of the cell would tell what it is
        text, answer = f"what is in {format_box(centered(rng.choice(boxes), 0.2, 0.25), SQUARE)}", kind
    elif task == "vqa":
        text, answer = "how many white blood cells are there", NUMBERS[min(len(white), 2)]
    elif task == "caption":
        text, answer = "describe the image", report(cells)
    elif task == "cls" and boxes:
        text, answer = "what kind of cell is this", kind
    else:
        return None
    return {"window": window, "text": text, "task": task, "answer": answer}


def training_samples(task: str, photos: list[Photo], views: int) -> list[dict]:
    rng, samples = random.Random(task), []
    for number, photo in enumerate(photos):
        kinds = sorted({name for name, _ in photo.cells})
        asked = (ask(task, photo, random_window(rng), rng.choice(kinds), rng) for _ in range(views if kinds else 0))
        samples += [{"photo": number, **sample} for sample in asked if sample]
    return samples


def test_samples(task: str, photos: list[Photo]) -> list[dict]:
    """Returns the test samples: all tasks but the count on whole images, and the count and the report on their corners."""
    rng, samples = random.Random(task), []
    windows = {"vqa": CORNERS, "caption": [WHOLE, *CORNERS]}.get(task, [WHOLE])
    kinds = list(CELLS.values()) if task in ("identify", "cls") else [CELLS["WBC"]]
    for number, photo in enumerate(photos):
        asked = (ask(task, photo, window, kind, rng) for window in windows for kind in kinds)
        samples += [{"photo": number, **sample} for sample in asked if sample]
    return samples


def load_questions(folder: str) -> tuple[list[dict], list[dict]]:
    """Returns the questions of PubMedQA to train on and to test on."""
    found = json.loads(Path(folder, "ori_pqal.json").read_text())
    tests = json.loads(Path(folder, "test_ground_truth.json").read_text())
    rows = {
        name: {"photo": None, "window": None, "text": row["QUESTION"].lower(), "task": "qa", "answer": row["final_decision"]}
        for name, row in found.items()
    }
    return [row for name, row in rows.items() if name not in tests], [rows[name] for name in tests]


def with_images(data: Dataset | list[dict], photos: list[Photo]) -> Dataset:
    """Returns the samples as UniMedCollator takes them. Their images are cut when a batch needs them."""
    data = Dataset.from_list(data, features=FEATURES) if isinstance(data, list) else data

    def cut(rows: dict[str, list]) -> dict[str, list]:
        pairs = zip(rows.pop("photo"), rows.pop("window"))
        return {**rows, "image": [None if number is None else photos[number].picture(window) for number, window in pairs]}

    return data.with_transform(cut)
