"""Images of training data: opened when a batch needs them, from DICOM files or any format of PIL."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hf_ext.errors import CorruptFileError
from hf_ext.uni_med.data.dicom import choose_frame, dicom_size, read_dicom
from hf_ext.uni_med.pillow import Image, ImageOps

EIGHT_BITS = ("RGB", "L", "1", "P", "LA", "PA", "RGBA", "RGBX", "CMYK", "YCbCr")  # PIL's modes that become RGB without a choice
ORIENTATION = 0x0112  # in EXIF


def load_images(rows: Mapping[str, Sequence[Any]], window: tuple[float, float] | None = None) -> dict[str, Sequence[Any]]:
    """Opens the images of a batch of rows: `data.with_transform(load_images)`.

    Args:
        rows: columns. Each value of `image` is None, a path, an image, or a list of paths and images. Files may be DICOM or any
            format of PIL; URLs stay. The column `frame` is optional: the frame to read of files with several, from 0.
        window: center and width for DICOM files, as in `read_dicom`.

    Returns:
        the columns, with RGB images in place of paths.

    Raises:
        HfExtError: a DICOM file needs a package that is not installed.
        ValueError: a file is missing or damaged, has several frames and no choice, or gray values of more than 8 bits in a
            format without a window. The message names the file.
    """
    if "image" not in rows:
        return dict(rows)
    frames = rows.get("frame") or [None] * len(rows["image"])
    return {**rows, "image": [_load(image, frame, window) for image, frame in zip(rows["image"], frames, strict=True)]}


def image_size(path: str | os.PathLike) -> tuple[int, int]:
    """Returns width and height in pixels of the image as it is loaded, from the file's header.

    Raises:
        CorruptFileError: the header cannot be read.
        HfExtError: a DICOM file requires pydicom, which is not installed.
    """
    if _is_dicom(path):
        return dicom_size(path)
    try:
        with Image.open(path) as picture:
            return picture.size if picture.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(picture).size
    except Exception as error:  # whatever PIL and the file system raise
        raise _unreadable(path, error) from error


def _load(image: Any, frame: int | None, window: tuple[float, float] | None) -> Any:
    if isinstance(image, (list, tuple)):
        return [_load(part, frame, window) for part in image]
    if not isinstance(image, (str, os.PathLike)) or os.fspath(image).startswith(("http://", "https://")):
        return image
    if _is_dicom(image):
        return read_dicom(image, frame, window)
    try:
        picture = Image.open(image)
        frames = getattr(picture, "n_frames", 1)
    except Exception as error:  # whatever PIL and the file system raise
        raise _unreadable(image, error) from error
    with picture:
        index = choose_frame(image, frames, frame)
        if picture.mode not in EIGHT_BITS:
            raise ValueError(f"The image '{image}' has mode {picture.mode}, not 8 bits. Convert it with a suitable window.")
        try:
            picture.seek(index)
            return ImageOps.exif_transpose(picture).convert("RGB")
        except Exception as error:  # as above
            raise _unreadable(image, error) from error


def _is_dicom(path: str | os.PathLike) -> bool:
    if os.fspath(path).lower().endswith((".dcm", ".dicom")):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | os.PathLike, error: Exception) -> CorruptFileError:
    return CorruptFileError(f"The image '{path}' cannot be read: {error}. Restore the file, or leave it out.")
