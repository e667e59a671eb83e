"""Images are opened when a batch needs them: DICOM files as a display shows them. Bad files are named."""

from __future__ import annotations

import re
import sys
import tracemalloc
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image
from pydicom import Dataset as Attributes
from pydicom import dcmread
from pydicom.encaps import encapsulate
from pydicom.pixels import convert_color_space
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    RLELossless,
)
from tiny_medical_data import gray, save, write

from hf_ext.errors import CorruptFileError, HfExtError
from hf_ext.uni_med import load_images, read_dicom

RAMP = np.array([[0, 500, 1000, 1500], [2000, 2500, 3000, 4095]], np.uint16)


def table(first: int, bits: int, data: list[int], vr: str = "US") -> Attributes:
    item = Attributes()
    item.add_new("LUTDescriptor", "SS" if first < 0 else "US", [len(data), first, bits])
    item.add_new("LUTData", vr, data if vr == "US" else np.array(data, "<u2").tobytes())
    return item


def edited(path: Path, **attributes: Any) -> Path:
    """The file with other attributes; None removes one."""
    header = dcmread(path)
    for name, value in attributes.items():
        if value is None:
            delattr(header, name)
        else:
            setattr(header, name, value)
    header.save_as(path)
    return path


def compressed(path: Path, syntax: str, data: bytes) -> Path:
    """Gives the file compressed pixels."""
    header = dcmread(path)
    header.file_meta.TransferSyntaxUID = syntax
    header.PixelData = encapsulate([data])
    header["PixelData"].is_undefined_length = True
    header.save_as(path)
    return path


WIDE = {"WindowCenter": 2000, "WindowWidth": 4001}  # linear: ((x - 1999.5) / 4000 + 0.5) * 255
SHOWN = [0, 32, 64, 96, 128, 159, 191, 255]


@pytest.mark.parametrize(
    "syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, DeflatedExplicitVRLittleEndian, RLELossless]
)
def test_the_values_do_not_depend_on_how_they_are_stored(tmp_path, syntax):
    path = write(tmp_path / "a.dcm", RAMP, syntax, BitsStored=12, HighBit=11, **WIDE)
    assert dcmread(path).file_meta.TransferSyntaxUID == syntax
    assert gray(read_dicom(path)).ravel().tolist() == SHOWN


def test_big_endian_files_are_read_with_their_tables(tmp_path):
    item = table(0, 8, list(range(0, 256)), "OW")
    item.LUTData = np.arange(256, dtype=">u2").tobytes()
    path = write(tmp_path / "a.dcm", np.array([[1, 2, 3, 300]], np.uint16), ExplicitVRBigEndian, VOILUTSequence=[item])
    assert gray(read_dicom(path)).tolist() == [[1, 2, 3, 255]]


UNITS = np.array([[-1000, -160, -40, 40, 80, 500]])  # Hounsfield units
STORED = ((UNITS + 1024) // 4 * 4 // 2 - 700).astype(np.int16)
CT = {"RescaleSlope": 2, "RescaleIntercept": 376}
WINDOW = {"WindowCenter": 40, "WindowWidth": 400}
EIGHT = np.array([[10, 20, 30, 200]], np.uint8)
SIXTEEN = np.array([[1000, 2000, 3000, 1400]], np.uint16)
PADDED = np.append(SIXTEEN, np.array([[0, 60000, 60000, 0]], np.uint16), 0)
VOI = [0, *[200] * 998, 400, *[800] * 999, 1023]  # for 500…2499
VOI_SHOWN = np.rint(255 * np.array([0, 0, 200, 800, 800, 1023, 1023, 1023]) / 1023).tolist()
DISPLAYS = {  # by name: stored values, attributes, brightness
    "linear": (STORED, CT | {"WindowCenter": 40, "WindowWidth": 401}, [0, 0, 77, 128, 153, 255]),
    "exact": (STORED, CT | WINDOW | {"VOILUTFunction": "LINEAR_EXACT"}, [0, 0, 76, 128, 153, 255]),
    "sigmoid": (STORED, CT | WINDOW | {"VOILUTFunction": "SIGMOID"}, [0, 30, 79, 128, 153, 252]),
    "narrow": (STORED, CT | {"WindowCenter": 40, "WindowWidth": 1}, [0, 0, 0, 255, 255, 255]),
    "several windows": (STORED, CT | {"WindowCenter": [40, 500], "WindowWidth": [401, 10]}, [0, 0, 77, 128, 153, 255]),
    "inverted": (RAMP, WIDE | {"PhotometricInterpretation": "MONOCHROME1"}, [255, 223, 191, 159, 127, 96, 64, 0]),
    "VOI table before windows": (RAMP, WINDOW | {"VOILUTSequence": [table(500, 10, VOI)]}, VOI_SHOWN),
    "VOI table of words": (RAMP, {"VOILUTSequence": [table(500, 10, VOI, "OW")]}, VOI_SHOWN),
    "long table of 8 bits": (  # an index does not wrap around
        RAMP,
        {"VOILUTSequence": [table(0, 8, [min(i // 10, 255) for i in range(4096)])]},
        [0, 50, 100, 150, 200, 250, 255, 255],
    ),
    "modality table before windows": (  # ((10, 20, 30) - 19.5) / 19 + 0.5
        np.array([[-32768, -2, -1, 32767]], np.int16),
        {"ModalityLUTSequence": [table(-2, 16, [10, 20, 30])], "WindowCenter": 20, "WindowWidth": 20},
        [0, 0, 134, 255],
    ),
    "8 bits stay": (EIGHT, {}, EIGHT.ravel().tolist()),
    "8 bits, turned by the slope": (EIGHT, {"RescaleSlope": -3, "RescaleIntercept": 7}, (255 - EIGHT).ravel().tolist()),
    "16 bits are stretched": (SIXTEEN, {}, [0, 128, 255, 51]),
    "one value": (np.full((2, 2), 700, np.uint16), {}, [0] * 4),
    "padding below": (PADDED, {"PixelPaddingValue": 0}, [0, 4, 9, 2, 0, 255, 255, 0]),
}


@pytest.mark.parametrize("name", DISPLAYS)
def test_gray_values_are_shown_as_the_standard_says(tmp_path, name):
    stored, attributes, expected = DISPLAYS[name]
    assert (
        gray(read_dicom(write(tmp_path / "a.dcm", stored, ImplicitVRLittleEndian, **attributes))).ravel().tolist() == expected
    )


def test_a_callers_window_replaces_those_of_the_file(tmp_path):
    for attributes in ({"WindowCenter": 5, "WindowWidth": 2}, {"VOILUTSequence": [table(500, 10, VOI)]}):
        path = write(tmp_path / "a.dcm", RAMP, RescaleSlope=1, RescaleIntercept=-1000, **attributes)
        assert gray(read_dicom(path, window=(500, 1000))).tolist() == [[0, 0, 0, 128], [255] * 4]
        assert gray(read_dicom(path, window=(500.0, 0.5)))[0].tolist() == [0, 0, 0, 128]
    for width in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="the width must be positive"):
            read_dicom(path, window=(500, width))


def test_a_frame_must_be_chosen_where_there_are_several(tmp_path):
    frames = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    for syntax in (ExplicitVRLittleEndian, RLELossless, DeflatedExplicitVRLittleEndian):
        path = write(tmp_path / "a.dcm", frames, syntax, frames=3)
        assert [gray(read_dicom(path, frame=i)).tolist() for i in range(3)] == frames.tolist()
        with pytest.raises(ValueError, match=r"a\.dcm' has 3 frames; choose one with frame=0…2 or a column 'frame'"):
            read_dicom(path)
        for i in (3, -1):
            with pytest.raises(ValueError, match=rf"a\.dcm' has no frame {i}; its frames are 0…2"):
                read_dicom(path, frame=i)


def test_enhanced_files_have_settings_for_each_frame(tmp_path):
    def group(name: str, **attributes: Any) -> Attributes:
        inner, outer = Attributes(), Attributes()
        for key, value in attributes.items():
            setattr(inner, key, value)
        setattr(outer, name, [inner])
        return outer

    path = write(
        tmp_path / "a.dcm",
        np.stack([RAMP, RAMP]),
        frames=2,
        SharedFunctionalGroupsSequence=[group("PixelValueTransformationSequence", RescaleSlope=2, RescaleIntercept=-1000)],
        PerFrameFunctionalGroupsSequence=[
            group("FrameVOILUTSequence", WindowCenter=center, WindowWidth=1) for center in (1000, 4000)
        ],
    )
    assert [(gray(read_dicom(path, frame=i)) > 0).sum() for i in (0, 1)] == [6, 3]


def test_colors_become_rgb(tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    for syntax in (ExplicitVRLittleEndian, RLELossless):
        assert (np.asarray(read_dicom(write(tmp_path / "a.dcm", rgb, syntax))) == rgb).all()
    planes = write(tmp_path / "b.dcm", rgb, PlanarConfiguration=1)
    edited(planes, PixelData=rgb.transpose(2, 0, 1).tobytes())
    assert (np.asarray(read_dicom(planes)) == rgb).all()
    ybr = convert_color_space(rgb, "RGB", "YBR_FULL")
    path = write(tmp_path / "c.dcm", ybr, PhotometricInterpretation="YBR_FULL")
    assert np.abs(np.asarray(read_dicom(path)).astype(int) - rgb).max() <= 2
    twelve = write(tmp_path / "d.dcm", rgb.astype(np.uint16) * 16, BitsStored=12, HighBit=11)
    assert (np.asarray(read_dicom(twelve)) == np.rint(rgb * 16.0 / 4095 * 255)).all()


def test_a_palette_is_applied(tmp_path):
    colors = {}
    for name, values in (("Red", [0, 255, 9]), ("Green", [1, 2, 9]), ("Blue", [3, 4, 9])):
        colors[f"{name}PaletteColorLookupTableDescriptor"] = [3, 0, 16]
        colors[f"{name}PaletteColorLookupTableData"] = (np.array(values, "<u2") * 257).tobytes()
    path = write(tmp_path / "a.dcm", np.array([[0, 1]], np.uint8), PhotometricInterpretation="PALETTE COLOR", **colors)
    assert np.asarray(read_dicom(path)).tolist() == [[[0, 1, 3], [255, 2, 4]]]


def test_jpeg_in_dicom_is_decoded_by_pillow(tmp_path):
    stream = BytesIO()
    Image.fromarray(np.full((16, 16), 99, np.uint8)).save(stream, "JPEG", quality=95)
    path = write(tmp_path / "a.dcm", np.zeros((16, 16), np.uint8))
    assert np.abs(gray(read_dicom(compressed(path, JPEGBaseline8Bit, stream.getvalue()))).astype(int) - 99).max() <= 2
    with pytest.raises(CorruptFileError, match=r"a\.dcm' cannot be read: "):
        read_dicom(compressed(path, JPEGBaseline8Bit, stream.getvalue()[:100]))


def test_a_missing_decoder_is_named_with_the_packages(tmp_path, monkeypatch):
    path = compressed(write(tmp_path / "a.dcm", np.zeros((4, 4), np.uint8)), JPEGLosslessSV1, b"\xff\xd8 lossless")
    named = r"a\.dcm' is compressed as JPEG Lossless.* Install a package that decodes it: .*pylibjpeg"
    with pytest.raises(HfExtError, match=named) as error:
        read_dicom(path)
    assert not isinstance(error.value, CorruptFileError)
    with pytest.raises(CorruptFileError, match=r"a\.dcm' cannot be read"):
        read_dicom(compressed(path, "1.2.840.10008.1.2.4.103", b"video"))
    for module in ("pydicom", "pydicom.pixels"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HfExtError, match="Reading DICOM files requires pydicom: pip install 'pydicom>=3'"):
        read_dicom(path)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "bad.dcm"

    def error(**attributes: Any) -> str:
        if attributes:
            edited(write(path, RAMP), **attributes)
        with pytest.raises(CorruptFileError, match=r"bad\.dcm") as failure:
            read_dicom(path)
        return str(failure.value)

    assert "No such file" in error()
    path.write_bytes(b"no DICOM" * 40)
    assert "prefix is missing" in error()
    whole = write(path, RAMP).read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        error()
    path.write_bytes(write(path, np.tile(RAMP, (50, 50))).read_bytes()[:-30000])
    error()
    for attributes, reason in (
        ({"PixelData": None}, "no pixel data"),
        ({"Rows": None}, "Rows"),
        ({"Rows": 0}, "Rows"),
        ({"BitsAllocated": None}, "Bits Allocated"),
        ({"BitsAllocated": 13}, "it must be 1 or a multiple of 8"),
        ({"PhotometricInterpretation": "XYZ"}, "Photometric Interpretation' value 'XYZ'"),
        ({"PhotometricInterpretation": "HSV"}, "photometric interpretation HSV is not supported"),
        ({"WindowCenter": 40, "WindowWidth": 0}, "Window Width must be greater than or equal to 1"),
        ({"WindowCenter": 40, "WindowWidth": 9, "VOILUTFunction": "CURVE"}, "VOI LUT Function value 'CURVE'"),
        ({"VOILUTSequence": [Attributes()]}, "LUTDescriptor"),
    ):
        assert reason in error(**attributes)


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, RLELossless, DeflatedExplicitVRLittleEndian])
def test_forged_sizes_in_headers_take_no_memory(tmp_path, syntax):
    huge = edited(write(tmp_path / "a.dcm", RAMP, syntax), Rows=65535, Columns=65535)
    many = edited(write(tmp_path / "b.dcm", RAMP, syntax), NumberOfFrames=2**31 - 1)
    assert max(path.stat().st_size for path in (huge, many)) < 3000
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=r"a\.dcm'.* claims 65535 x 65535 pixels, more than PIL"):
            read_dicom(huge)
        with pytest.raises(CorruptFileError, match=r"b\.dcm"):
            read_dicom(many, frame=2**31 - 2)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


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
