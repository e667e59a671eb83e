"""Images: from files of any format of PIL, or DICOM files as a display shows them, to RGB."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.image_utils import load_image

from hf_ext.errors import CorruptFileError, HfExtError, MissingDependencyError

try:
    from PIL import Image, ImageOps
except ImportError as error:
    raise MissingDependencyError("Uni-Med's images require Pillow: pip install 'pillow>=10'.") from error

EIGHT_BITS = ("RGB", "L", "1", "P", "LA", "PA", "RGBA", "RGBX", "CMYK", "YCbCr")  # PIL's modes that become RGB without a choice


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


def _load(image: Any, frame: int | None, window: tuple[float, float] | None) -> Any:
    if isinstance(image, (list, tuple)):
        return [_load(part, frame, window) for part in image]
    if not isinstance(image, (str, os.PathLike)) or os.fspath(image).startswith(("http://", "https://")):
        return image
    try:
        with open(image, "rb") as file:
            is_dicom = os.fspath(image).lower().endswith((".dcm", ".dicom")) or file.read(132)[128:] == b"DICM"
        if is_dicom:
            return read_dicom(image, frame, window)
        with Image.open(image) as picture:
            index = _choose_frame(image, getattr(picture, "n_frames", 1), frame)
            if picture.mode not in EIGHT_BITS:
                raise ValueError(f"The image '{image}' has mode {picture.mode}, not 8 bits. Convert it with a suitable window.")
            picture.seek(index)
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:  # of PIL and the file system
        raise CorruptFileError(f"The image '{image}' cannot be read: {error}. Restore the file, or leave it out.") from error


def _choose_frame(path: str | os.PathLike, frames: int, frame: int | None) -> int:
    """Returns the frame to read. Raises a ValueError if there is none with this number, or several and no choice."""
    if frame is None and frames > 1:
        raise ValueError(f"'{path}' has {frames} frames; choose one with frame=0…{frames - 1} or a column 'frame'.")
    if frame is not None and not 0 <= frame < frames:
        raise ValueError(f"'{path}' has no frame {frame}; its frames are 0…{frames - 1}.")
    return frame or 0


def check_rgb(image: Any, where: str) -> Any:
    """Returns an image, opened if it is a path or a URL. Raises a ValueError, which names the sample `where`, if it cannot be
    read or does not have the three channels of RGB in 8 bits."""
    if isinstance(image, (str, os.PathLike)):
        try:
            image = ImageOps.exif_transpose(Image.open(image)) if os.path.exists(image) else load_image(os.fspath(image))
        except Exception as error:  # whatever PIL, the file system and the network raise
            raise ValueError(f"{where}: the image {image} cannot be read: {error}") from error
    if isinstance(image, Image.Image):
        try:
            image.load()
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"{where}: the image is broken: {error}") from error
        if image.mode != "RGB":
            raise ValueError(f"{where}: the image has mode {image.mode}, not RGB; convert it with image.convert('RGB').")
        return image
    if isinstance(image, (np.ndarray, torch.Tensor)):
        if image.ndim != 3 or 3 not in (image.shape[0], image.shape[-1]):
            raise ValueError(f"{where}: the image has shape {tuple(image.shape)}, not three channels of RGB.")
        if str(image.dtype).rpartition(".")[2] != "uint8":
            raise ValueError(f"{where}: the image is an array of {image.dtype}, not of uint8 from 0 to 255.")
        return image
    raise ValueError(f"{where}: the image is a {type(image).__name__}; give a PIL image, an array, a path or a URL.")


def read_dicom(path: str | os.PathLike, frame: int | None = None, window: tuple[float, float] | None = None) -> Image.Image:
    """Reads one frame of a DICOM file as a display shows it (PS3.3), in an RGB image of Columns x Rows pixels.

    Gray values go through the modality LUT or rescale, then through the VOI LUT or window, to 0…255. MONOCHROME1 is inverted.
    Without VOI LUT and window, values of up to 8 bits keep their brightness. Of more bits, the smallest value of the frame
    becomes 0 and the largest 255, padding aside. Presentation LUTs, overlays and ICC profiles are not applied.

    Args:
        frame: number of the frame, from 0. Required if the file has several.
        window: center and width in units after the rescale, such as Hounsfield units; defaults to the file's VOI LUT or first
            window.

    Raises:
        HfExtError: pydicom is not installed, or a package that decodes the file's compression.
        CorruptFileError: the file is damaged, is no DICOM file, has no image, or claims more than `PIL.Image.MAX_IMAGE_PIXELS`.
        ValueError: there is no such frame, or the choice of a frame is missing.
    """
    if window is not None and not window[1] > 0:
        raise ValueError(f"The window (center, width) is {window}; the width must be positive.")
    try:
        from pydicom import dcmread, pixels
    except ImportError as error:
        raise HfExtError("Reading DICOM files requires pydicom: pip install 'pydicom>=3'.") from error
    try:
        header = dcmread(path, stop_before_pixels=True)
        frames, size = int(header.get("NumberOfFrames") or 1), header.Rows * header.Columns
        syntax = header.file_meta.TransferSyntaxUID
        decoder = pixels.get_decoder(syntax)
        if size > (Image.MAX_IMAGE_PIXELS or size):  # before memory is allocated
            raise ValueError(f"it claims {header.Columns} x {header.Rows} pixels, more than PIL.Image.MAX_IMAGE_PIXELS")
    except Exception as error:  # whatever a damaged header leads to
        raise _damaged(path, error) from error
    if not decoder.is_available:
        missing = ", or ".join(decoder.missing_dependencies)
        raise HfExtError(f"'{path}' is compressed as {syntax.name}. Install a package that decodes it: {missing}.")
    index = _choose_frame(path, frames, frame)
    try:
        # Of a path, pydicom reads the one frame only; it cannot do so in a deflated file. Colors become RGB.
        stored = pixels.pixel_array(dcmread(path) if syntax.is_deflated else path, index=index)
        kind = header.PhotometricInterpretation
        if kind == "PALETTE COLOR":
            colors = pixels.apply_color_lut(stored, header)[..., :3]
            shares = colors / np.iinfo(colors.dtype).max
        elif header.SamplesPerPixel == 3:
            shares = stored / (2**header.BitsStored - 1)
        elif kind in ("MONOCHROME1", "MONOCHROME2"):
            shares = _brightness(stored, header, index, window)
            shares = 1 - shares if kind == "MONOCHROME1" else shares
        else:
            raise ValueError(f"the photometric interpretation {kind} is not supported")
        if not np.isfinite(shares).all():
            raise ValueError("its pixels are not finite numbers")
        return Image.fromarray(np.rint(255 * shares).astype(np.uint8)).convert("RGB")
    except Exception as error:  # whatever damaged data and invalid attributes lead to
        raise _damaged(path, error) from error


def _damaged(path: str | os.PathLike, error: Exception) -> CorruptFileError:
    reason = " ".join(str(error).split()).rstrip(".")
    return CorruptFileError(f"The DICOM file '{path}' cannot be read: {reason}. Restore or convert the file, or leave it out.")


def _brightness(stored: np.ndarray, header: Any, index: int, window: tuple[float, float] | None) -> np.ndarray:
    """Returns the brightness of a DICOM file's stored values in 0…1, before MONOCHROME1 is inverted."""
    from pydicom import Dataset
    from pydicom.pixels import apply_modality_lut, apply_voi, apply_windowing

    modality, voi = (_of_frame(header, index, f"{name}Sequence") for name in ("PixelValueTransformation", "FrameVOILUT"))
    stored = stored.astype(np.int64) if stored.dtype.kind in "iu" else stored  # or pydicom's indices of tables overflow
    values = shown = apply_modality_lut(stored, modality)
    if window is None and voi.get("VOILUTSequence"):
        item = voi.VOILUTSequence[0]
        count, first, bits = item.LUTDescriptor
        item.LUTDescriptor = [count, first, 16]  # or indices above 255 overflow at a table of 8 bits
        indices = np.clip(np.rint(values), first, first + (count or 2**16) - 1).astype(np.int64)
        return apply_voi(indices, voi) / (2**bits - 1)
    if window is not None or None not in (voi.get("WindowCenter"), voi.get("WindowWidth")):
        center, width = window or (np.atleast_1d(voi[name].value)[0] for name in ("WindowCenter", "WindowWidth"))
        view = Dataset()  # of one bit, so the result is in 0…1
        view.PhotometricInterpretation, view.PixelRepresentation, view.BitsStored = "MONOCHROME2", 0, 1
        view.VOILUTFunction = "LINEAR_EXACT" if window else voi.get("VOILUTFunction") or "LINEAR"
        for name, value in (("WindowCenter", center), ("WindowWidth", width)):
            view.add_new(name, "FD", float(value))  # the VR DS would limit a number to 16 characters
        return apply_windowing(values, view)
    if (bits := header.get("BitsStored") or 16) <= 8:
        lowest = -(2 ** (bits - 1)) if header.PixelRepresentation else 0
        shown = apply_modality_lut(np.array([lowest, lowest + 2**bits - 1]), modality)
    elif (stored != header.get("PixelPaddingValue")).any():
        shown = values[stored != header.get("PixelPaddingValue")]
    low, high = float(shown.min()), float(shown.max())
    return np.clip((values - low) / (high - low or 1), 0, 1)


def _of_frame(header: Any, index: int, group: str) -> Any:
    """Returns the attributes of a frame in an enhanced multi-frame file (PS3.3 C.7.6.16), or else the header."""
    of_frame, shared = (header.get(f"{name}FunctionalGroupsSequence") or [] for name in ("PerFrame", "Shared"))
    return next((item[group].value[0] for item in (*of_frame[index : index + 1], *shared) if item.get(group)), header)
