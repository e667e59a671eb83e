"""Medical files of a few pixels: DICOM, and annotations in the layouts in which data sets are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, RLELossless, SecondaryCaptureImageStorage, generate_uid


def write(path: Path, pixels: np.ndarray, syntax: str = ExplicitVRLittleEndian, frames: int = 0, **attributes: Any) -> Path:
    """Writes a DICOM file. Pixels are (frames,) rows, columns(, 3)."""
    shape = pixels.shape[1:] if frames else pixels.shape
    header = Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian if syntax == RLELossless else syntax
    header.file_meta.MediaStorageSOPClassUID = header.SOPClassUID = SecondaryCaptureImageStorage
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID = generate_uid()
    header.Rows, header.Columns = shape[:2]
    header.SamplesPerPixel = shape[2] if len(shape) == 3 else 1
    header.PhotometricInterpretation = "RGB" if len(shape) == 3 else "MONOCHROME2"
    if len(shape) == 3:
        header.PlanarConfiguration = 0
    if frames:
        header.NumberOfFrames = frames
    header.BitsAllocated = header.BitsStored = 8 * pixels.itemsize
    header.HighBit = header.BitsAllocated - 1
    header.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in attributes.items():
        setattr(header, name, value)
    data = pixels.astype(pixels.dtype.newbyteorder(">" if syntax == ExplicitVRBigEndian else "<")).tobytes()
    header.PixelData = data + b"\0" * (len(data) % 2)
    header["PixelData"].VR = "OW" if header.BitsAllocated > 8 else "OB"
    if syntax == RLELossless:
        header.compress(RLELossless, generate_instance_uid=False)
    header.save_as(path, enforce_file_format=True)
    return path


def gray(image: Image.Image) -> np.ndarray:
    """Returns the values of an RGB image without color."""
    pixels = np.asarray(image)
    assert image.mode == "RGB" and (pixels == pixels[..., :1]).all()
    return pixels[..., 0]


def save(path: Path, size: tuple[int, int] = (80, 40), mode: str = "RGB", value: Any = 77) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)
    return str(path)


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def vqa_rad(folder: Path) -> tuple[Path, Path]:
    def row(qid: int, kind: str, question: str, answer: Any) -> dict[str, Any]:
        return {
            **{"qid": qid, "phrase_type": kind, "qid_linked_id": "03f451ca", "image_name": "synpic54610.jpg"},
            **{"image_case_url": "https://example.org/54610", "image_organ": "HEAD", "evaluation": "evaluated"},
            **{"question": question, "question_rephrase": "NULL", "question_relation": "NULL", "question_frame": "NULL"},
            **{"question_type": "PRES", "answer": answer, "answer_type": "CLOSED "},
        }

    rows = [
        row(0, "freeform", "Are regions of the brain infarcted?", "Yes"),
        row(1, "para", "how many cells are there ? ", 2),
        row(2, "test_freeform", "Is this a cell ?", "no "),
        row(3, "test_para", "Is it red ?", "No"),
    ]
    save(folder / "VQA_RAD Image Folder/synpic54610.jpg", mode="L")
    return write_json(folder / "VQA_RAD Dataset Public.json", rows), folder / "VQA_RAD Image Folder"


def slake(folder: Path) -> tuple[Path, Path]:
    def row(qid: int, image: str, language: str, question: str, answer: str) -> dict[str, Any]:
        return {
            **{"img_id": 1, "img_name": image, "question": question, "answer": answer, "q_lang": language},
            **{"location": "Abdomen", "modality": "MRI", "answer_type": "OPEN", "base_type": "vqa"},
            **{"content_type": "Modality", "triple": ["vhead", "_", "_"], "qid": qid},
        }

    rows = [
        row(0, "xmlab1/source.jpg", "en", "What modality is used to take this image?", "MRI"),
        row(1, "xmlab2/source.jpg", "en", "is this a cell ?", "no"),
        row(9835, "xmlab1/source.jpg", "zh", "图中是什么模态？", "MRI"),
    ]
    for i in (1, 2):
        save(folder / f"imgs/xmlab{i}/source.jpg")
    return write_json(folder / "train.json", rows), folder / "imgs"


def reports(folder: Path) -> tuple[Path, Path]:
    def row(name: str, views: list[str], split: str) -> dict[str, Any]:
        fields = {"id": name, "study_id": 50414267, "subject_id": 10000032, "image_path": views, "split": split}
        return fields | {"report": " the red cell is there . no w1 "}

    first, second = ["CXR1/0.png", "CXR1/1.png"], ["p10/p10000032/s50414267/02aa804e.jpg"]
    splits = {
        "train": [row("CXR1", first, "train"), row("02aa804e", second, "train")],
        "val": [],
        "test": [row("t", second, "test")],
    }
    for name in (*first, *second):
        save(folder / "images" / name, mode="L")
    return write_json(folder / "annotation.json", splits), folder / "images"


def coco(folder: Path) -> tuple[Path, Path]:
    def box(i: int, image: int, category: int, *corner: float) -> dict[str, Any]:
        area = corner[2] * corner[3]
        return {
            "id": i,
            "image_id": image,
            "category_id": category,
            "bbox": corner,
            "area": area,
            "iscrowd": 0,
            "segmentation": [],
        }

    content = {
        "info": {"year": 2024},
        "licenses": [],
        "images": [
            {"id": 10, "file_name": "a.png", "width": 640, "height": 480},
            {"id": 11, "file_name": "b.dcm", "width": 8, "height": 4},
        ],
        "categories": [{"id": 1, "name": "red cell", "supercategory": "cell"}, {"id": 3, "name": "platelet"}],
        "annotations": [
            box(1, 10, 1, 10, 10, 20, 20),
            box(2, 10, 1, 128, 96, 192, 192),
            box(3, 10, 3, 600, 400, 80, 80),
            box(4, 11, 3, 2, 1, 2, 1),
        ],
    }
    save(folder / "a.png", (640, 480))
    write(folder / "b.dcm", np.zeros((4, 8), np.uint8))
    return write_json(folder / "instances.json", content), folder


def save_all() -> None:
    """Writes everything under the names that docs/uni_med_data.md has."""
    write(Path("ct.dcm"), np.arange(64, dtype=np.int16).reshape(8, 8) * 40, RescaleSlope=1, RescaleIntercept=-1024)
    write(Path("cine.dcm"), np.zeros((3, 8, 8), np.uint8), frames=3)
    vqa_rad(Path())
    slake(Path("Slake1.0"))
    reports(Path("mimic_cxr"))
    coco(Path("cells"))
