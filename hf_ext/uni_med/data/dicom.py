"""DICOM files as RGB images: the pixel pipeline of PS3.3 (C.11.1 modality LUT, C.11.2 VOI LUT) and PS3.4 N.2."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_ext.errors import CorruptFileError, HfExtError
from hf_ext.uni_med.pillow import Image

if TYPE_CHECKING:
    from pydicom import Dataset

COLOR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")  # decoded to RGB


def read_dicom(path: str | os.PathLike, frame: int | None = None, window: tuple[float, float] | None = None) -> Image.Image:
    """Reads one frame of a DICOM file as a display shows it.

    Gray values go through the modality LUT or rescale, then through the VOI LUT or window, to 0…255. MONOCHROME1 is inverted.
    Without VOI LUT and window, values of up to 8 bits keep their brightness. Of more bits, the smallest value of the frame
    becomes 0 and the largest 255, padding aside. Presentation LUTs, overlays and ICC profiles are not applied.

    Args:
        frame: number of the frame, from 0. Required if the file has several.
        window: center and width in units after the rescale, such as Hounsfield units: center - width / 2 becomes 0, and
            center + width / 2 becomes 255. Defaults to the file's VOI LUT, or else to the first of its windows. Colors stay.

    Returns:
        an RGB image of Columns x Rows pixels.

    Raises:
        HfExtError: pydicom is not installed, or a package that decodes the file's compression.
        CorruptFileError: the file is damaged, is no DICOM file, has no image, or claims more than `PIL.Image.MAX_IMAGE_PIXELS`.
        ValueError: there is no such frame, or the choice of a frame is missing.
    """
    if window is not None and not window[1] > 0:
        raise ValueError(f"The window (center, width) is {window}; the width must be positive.")
    header = _read_header(path)
    index = choose_frame(path, int(header.get("NumberOfFrames") or 1), frame)
    stored = _decode(path, header, index)
    kind = header.get("PhotometricInterpretation")
    try:
        if kind in ("MONOCHROME1", "MONOCHROME2") and stored.ndim == 2:
            shares = _grey(stored, header, index, window)
            shares = 1 - shares if kind == "MONOCHROME1" else shares
        elif kind == "PALETTE COLOR" and stored.ndim == 2:
            from pydicom.pixels import apply_color_lut

            colors = apply_color_lut(stored, header)[..., :3]
            shares = colors / np.iinfo(colors.dtype).max
        elif kind in COLOR and stored.ndim == 3:
            shares = stored / (2**header.BitsStored - 1)
        else:
            raise ValueError(f"photometric interpretation {kind} with {header.get('SamplesPerPixel')} samples is not supported")
    except Exception as error:  # whatever invalid attributes lead to
        raise CorruptFileError(
            f"The image in '{path}' cannot be displayed: {_line(error)}. Convert the file, or leave it out."
        ) from error
    pixels = np.rint(255 * shares).astype(np.uint8)
    return Image.fromarray(pixels).convert("RGB")


def dicom_size(path: str | os.PathLike) -> tuple[int, int]:
    """Returns width and height in pixels from a DICOM file's header. Raises what `read_dicom` raises."""
    header = _read_header(path)
    return header.Columns, header.Rows


def choose_frame(path: str | os.PathLike, frames: int, frame: int | None) -> int:
    """Returns the frame to read. Raises a ValueError if there is none with this number, or several and no choice."""
    if frame is None and frames > 1:
        raise ValueError(f"'{path}' has {frames} frames; choose one with frame=0…{frames - 1} or a column 'frame'.")
    if frame is not None and not 0 <= frame < frames:
        raise ValueError(f"'{path}' has no frame {frame}; its frames are 0…{frames - 1}.")
    return frame or 0


def _read_header(path: str | os.PathLike) -> Dataset:
    """Returns what stands before the pixels, with sizes that are safe to allocate."""
    try:
        from pydicom import dcmread
        from pydicom.errors import InvalidDicomError
    except ImportError as error:
        raise HfExtError("Reading DICOM files requires pydicom: pip install 'pydicom>=3'.") from error
    try:
        header = dcmread(path, stop_before_pixels=True)
        rows, columns = header.get("Rows"), header.get("Columns")
        frames = header.get("NumberOfFrames")
    except InvalidDicomError as error:
        raise CorruptFileError(f"'{path}' is not a DICOM file: it lacks the mark 'DICM' at byte 128.") from error
    except Exception as error:  # whatever a damaged header leads to
        raise CorruptFileError(f"'{path}' cannot be read: {_line(error)}. Restore the file, or leave it out.") from error
    if not (isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0):
        raise CorruptFileError(
            f"'{path}' has no image: Rows is {_line(rows)}, Columns is {_line(columns)}. Leave the file out."
        )
    limit = Image.MAX_IMAGE_PIXELS
    if limit and rows * columns > limit:
        raise CorruptFileError(
            f"'{path}' claims {columns} x {rows} pixels, more than the limit of {limit}. If the file is right, raise "
            "PIL.Image.MAX_IMAGE_PIXELS."
        )
    if frames is not None and not (isinstance(frames, int) and frames > 0):
        raise CorruptFileError(f"'{path}' is damaged: NumberOfFrames is {_line(frames)}.")
    return header


def _decode(path: str | os.PathLike, header: Dataset, index: int) -> np.ndarray:
    """Returns the stored values of a frame, (rows, columns) or (rows, columns, 3), as RGB if they are colors."""
    from pydicom import dcmread
    from pydicom.pixels import get_decoder, pixel_array
    from pydicom.pixels.utils import get_expected_length
    from pydicom.uid import DeflatedExplicitVRLittleEndian, RLELossless

    advice = "Restore the file, or leave it out."
    try:
        syntax = header.file_meta.TransferSyntaxUID
        decoder = get_decoder(syntax)
        available, missing = decoder.is_available, " ".join(decoder.missing_dependencies)
        deflated = syntax == DeflatedExplicitVRLittleEndian
        # Two bytes of RLE become 128 at most. Other compressions have no such limit.
        factor = 64 if syntax == RLELossless else 0 if syntax.is_encapsulated or deflated else 1
        needed = get_expected_length(header) // factor if factor else 0
    except Exception as error:  # whatever missing or invalid attributes lead to, and formats such as video
        raise CorruptFileError(f"The image in '{path}' cannot be decoded: {_line(error)}. {advice}") from error
    if packages := re.findall(r"pylibjpeg[\w-]*>=[\d.]+", missing):
        install = f"pip install {shlex.join(packages)}"
        if not available:
            raise HfExtError(f"'{path}' is compressed as {syntax.name}; pydicom requires more packages for it: {install}.")
        advice = f"{advice} If the file is intact, another decoder may read it: {install}."
    if needed > (size := os.path.getsize(path)):
        raise CorruptFileError(
            f"'{path}' is cut off: its pixels need {needed} bytes or more, and the file has {size}. {advice}"
        )
    try:
        # Of a path, pydicom reads the one frame only; it cannot do so in a deflated file.
        return pixel_array(dcmread(path) if deflated else path, index=index)
    except Exception as error:  # whatever damaged data lead to
        raise CorruptFileError(f"The image in '{path}' cannot be decoded: {_line(error)}. {advice}") from error


def _grey(stored: np.ndarray, header: Dataset, index: int, window: tuple[float, float] | None) -> np.ndarray:
    """Returns the brightness of stored values in 0…1, before MONOCHROME1 is inverted."""
    modality = _macro(header, "PixelValueTransformationSequence", index)
    voi = _macro(header, "FrameVOILUTSequence", index)
    little = header.original_encoding[1] is not False
    values = _apply_modality(stored, modality, little)
    if window is not None:
        return _apply_window(values, *window, "LINEAR_EXACT")
    if tables := voi.get("VOILUTSequence"):
        values, highest = _look_up(values, tables[0], little)
        return values / highest
    if voi.get("WindowCenter") is not None and voi.get("WindowWidth") is not None:
        center, width = (np.atleast_1d(voi[name].value).astype(float)[0] for name in ("WindowCenter", "WindowWidth"))
        return _apply_window(values, center, width, voi.get("VOILUTFunction") or "LINEAR")
    bits = header.get("BitsStored")  # missing if the pixels are floats
    shown = values
    if bits and bits <= 8:
        lowest = -(2 ** (bits - 1)) if header.PixelRepresentation else 0
        shown = _apply_modality(np.array([lowest, lowest + 2**bits - 1]), modality, little)
    elif (padding := header.get("PixelPaddingValue")) is not None:
        first, last = sorted((padding, header.get("PixelPaddingRangeLimit", padding)))
        is_padding = (stored >= first) & (stored <= last)
        shown = values if is_padding.all() else values[~is_padding]
    low, high = float(shown.min()), float(shown.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("the pixels are not finite numbers")
    return np.clip((values - low) / (high - low or 1), 0, 1)


def _macro(header: Dataset, name: str, index: int) -> Dataset:
    """Returns the functional group of a frame in an enhanced multi-frame file (PS3.3 C.7.6.16), or else the header."""
    of_frame = (header.get("PerFrameFunctionalGroupsSequence") or [])[index : index + 1]
    shared = header.get("SharedFunctionalGroupsSequence") or []
    return next((group[name].value[0] for group in (*of_frame, *shared) if group.get(name)), header)


def _apply_modality(stored: np.ndarray, modality: Dataset, little: bool) -> np.ndarray:
    """Applies the modality LUT or the rescale (PS3.3 C.11.1)."""
    from pydicom.pixels import apply_rescale

    if tables := modality.get("ModalityLUTSequence"):
        return _look_up(stored, tables[0], little)[0]
    return apply_rescale(stored.astype(float), modality)


def _look_up(values: np.ndarray, item: Any, little: bool) -> tuple[np.ndarray, int]:
    """Returns values after a lookup table (PS3.3 C.11.1.1), and the largest value that the table may have.

    pydicom's `apply_modality_lut` and `apply_voi` require two bytes an entry, and wrap around where an index does not fit the
    type of the table or of the pixels.
    """
    count, first, bits = item.LUTDescriptor
    count = count or 2**16
    data = item.LUTData
    if isinstance(data, bytes):
        data = np.frombuffer(data, np.uint8 if len(data) < 2 * count else "<u2" if little else ">u2")
    table = np.atleast_1d(data).astype(np.int64)[:count]
    if len(table) < count:
        raise ValueError(f"the lookup table has {len(table)} entries instead of {count}")
    return table[np.clip(np.rint(values).astype(np.int64) - first, 0, count - 1)], 2**bits - 1


def _apply_window(values: np.ndarray, center: float, width: float, function: str) -> np.ndarray:
    """Returns values after a window, in 0…1 (PS3.3 C.11.2.1.2 and C.11.2.1.3)."""
    from pydicom import Dataset
    from pydicom.pixels import apply_windowing

    view = Dataset()
    view.PhotometricInterpretation, view.PixelRepresentation, view.BitsStored = "MONOCHROME2", 0, 1  # from 0 to 1
    view.VOILUTFunction = function
    view.add_new("WindowCenter", "FD", center)  # the VR DS would limit a number to 16 characters
    view.add_new("WindowWidth", "FD", width)
    try:
        if not np.isfinite([center, width]).all():
            raise ValueError("the window is not finite")
        with np.errstate(over="ignore"):  # far below a sigmoid window; the result is 0
            return apply_windowing(values, view)
    except ValueError as error:
        hint = f"the window has center {center:g} and width {width:g}; give window=(center, width)"
        raise ValueError(f"{error}: {hint}") from error


def _line(value: Any) -> str:
    return " ".join(str(value).split())
