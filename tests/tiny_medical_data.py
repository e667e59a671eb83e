"""Medical files of a few pixels: DICOM, and what docs/uni_med_data.md reads."""

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


def save_all() -> None:
    """Writes everything under the names that docs/uni_med_data.md has."""
    write(Path("ct.dcm"), np.arange(64, dtype=np.int16).reshape(8, 8) * 40, RescaleSlope=1, RescaleIntercept=-1024)
    write(Path("cine.dcm"), np.zeros((3, 8, 8), np.uint8), frames=3)
    question = {"question": "Are regions of the brain infarcted?", "answer": 2}
    report = {"image_path": ["CXR1/0.png", "CXR1/1.png"], "report": " the heart is normal . "}
    turns = [{"from": "human", "value": "<image>\nwhat is this?"}, {"from": "gpt", "value": "a scan"}]
    boxes = [{"image_id": 10, "category_id": 1, "bbox": [x, 10, 40, 40], "area": 1600} for x in (10, 60)]
    files = {
        "Slake1.0/train.json": [question | {"img_name": "x/a.jpg", "q_lang": language} for language in ("en", "zh")],
        "mimic_cxr/annotation.json": {"train": [report], "val": [], "test": []},
        "llava_med.json": [{"id": "1", "image": "a.jpg", "conversations": turns * 2}],
        "cells/instances.json": {
            "images": [{"id": 10, "file_name": "a.png", "width": 80, "height": 40}],
            "categories": [{"id": 1, "name": "red cell"}],
            "annotations": boxes,
        },
    }
    for name in ("Slake1.0/imgs/x/a.jpg", "images/a.jpg", "cells/a.png"):
        save(Path(name))
    for view in report["image_path"]:
        save(Path("mimic_cxr/images", view), mode="L")
    for name, content in files.items():
        Path(name).write_text(json.dumps(content), encoding="utf-8")
