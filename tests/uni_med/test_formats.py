"""Medical files become training samples: DICOM as a display shows it, annotations in their layouts, and bad files by name."""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from pydicom import Dataset as Attributes
from pydicom import dcmread
from pydicom.encaps import encapsulate
from pydicom.pixels import apply_modality_lut, apply_voi_lut, convert_color_space
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    RLELossless,
)
from tiny_medical_data import coco, reports, save, slake, vqa_rad, write, write_json
from tiny_uni_med import processor
from transformers.utils import logging

from hf_ext.errors import CorruptFileError, HfExtError
from hf_ext.uni_med import (
    UniMedCollator,
    check_images,
    load_images,
    mix_datasets,
    parse_boxes,
    read_coco,
    read_dicom,
    read_reports,
    read_slake,
    read_vqa_rad,
)

RAMP = np.array([[0, 500, 1000, 1500], [2000, 2500, 3000, 4095]], np.uint16)


def grey(image: Image.Image) -> np.ndarray:
    """The values of an RGB image without color."""
    assert image.mode == "RGB"
    pixels = np.asarray(image)
    assert (pixels == pixels[..., :1]).all()
    return pixels[..., 0]


def table(first: int, bits: int, data: list[int], vr: str = "US") -> Attributes:
    item = Attributes()
    item.add_new("LUTDescriptor", "SS" if first < 0 else "US", [len(data), first, bits])
    item.add_new("LUTData", vr, data if vr == "US" else np.array(data, "<u2").tobytes())
    return item


def edited(path: Path, **attributes: Any) -> Path:
    """The file with other attributes; None removes one."""
    found = dcmread(path)
    for name, value in attributes.items():
        if value is None:
            delattr(found, name)
        else:
            setattr(found, name, value)
    found.save_as(path)
    return path


@pytest.mark.parametrize(
    "syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, DeflatedExplicitVRLittleEndian, RLELossless]
)
def test_the_values_do_not_depend_on_how_they_are_stored(tmp_path, syntax):
    path = write(tmp_path / "a.dcm", RAMP, syntax, BitsStored=12, HighBit=11, WindowCenter=2000, WindowWidth=4001)
    assert dcmread(path).file_meta.TransferSyntaxUID == syntax
    # linear: ((x - 1999.5) / 4000 + 0.5) * 255
    assert grey(read_dicom(path)).tolist() == [[0, 32, 64, 96], [128, 159, 191, 255]]


def test_big_endian_files_are_read_with_their_tables(tmp_path):
    item = table(0, 8, list(range(0, 256)), "OW")
    item.LUTData = np.arange(256, dtype=">u2").tobytes()
    path = tmp_path / "a.dcm"
    write(path, np.array([[1, 2], [3, 300]], np.uint16), ExplicitVRBigEndian, VOILUTSequence=[item])
    assert grey(read_dicom(path)).tolist() == [[1, 2], [3, 255]]


WINDOWS = {
    "linear": ({"WindowCenter": 40, "WindowWidth": 401}, [0, 0, 77, 128, 153, 255]),
    "linear_exact": ({"WindowCenter": 40, "WindowWidth": 400, "VOILUTFunction": "LINEAR_EXACT"}, [0, 0, 76, 128, 153, 255]),
    "sigmoid": ({"WindowCenter": 40, "WindowWidth": 400, "VOILUTFunction": "SIGMOID"}, [0, 30, 79, 128, 153, 252]),
    "narrow": ({"WindowCenter": 40, "WindowWidth": 1}, [0, 0, 0, 255, 255, 255]),
    "several": ({"WindowCenter": [40, 500], "WindowWidth": [401, 10]}, [0, 0, 77, 128, 153, 255]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_signed_values_are_rescaled_and_windowed(tmp_path, name):
    attributes, expected = WINDOWS[name]
    units = np.array([[-1000, -160, -40], [40, 80, 500]])  # Hounsfield units
    stored = ((units + 1024) // 4 * 4 // 2 - 700).astype(np.int16)  # slope 2, intercept 376
    path = write(tmp_path / "ct.dcm", stored, RescaleSlope=2, RescaleIntercept=376, **attributes)
    assert (stored < 0).any() and (stored * 2 + 376 == units).all()
    found = grey(read_dicom(path))
    assert found.ravel().tolist() == expected

    header = dcmread(path)
    opinion = apply_voi_lut(apply_modality_lut(header.pixel_array, header), header)
    low, high = (value * 2 + 376 for value in (-(2**15), 2**15 - 1))
    assert np.abs(255 * (opinion - low) / (high - low) - found).max() <= 0.5


def test_a_window_of_ones_own_replaces_the_one_in_the_file(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP, WindowCenter=5, WindowWidth=2, RescaleSlope=1, RescaleIntercept=-1000)
    assert grey(read_dicom(path, window=(500, 1000))).tolist() == [[0, 0, 0, 128], [255] * 4]
    assert grey(read_dicom(path, window=(500.0, 0.5)))[0].tolist() == [0, 0, 0, 128]
    for width in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="the width must be positive"):
            read_dicom(path, window=(500, width))


@pytest.mark.parametrize("vr", ["US", "OW"])
def test_voi_tables_come_before_windows(tmp_path, vr):
    item = table(500, 10, [0, *[200] * 998, 400, *[800] * 999, 1023], vr)  # for 500…2499
    path = write(tmp_path / "a.dcm", RAMP, VOILUTSequence=[item], WindowCenter=1, WindowWidth=2)
    expected = np.array([[0, 0, 200, 800], [800, 1023, 1023, 1023]])
    assert grey(read_dicom(path)).tolist() == np.rint(255 * expected / 1023).tolist()
    header = dcmread(path)
    assert apply_voi_lut(header.pixel_array, header).tolist() == expected.tolist()
    assert grey(read_dicom(path, window=(1000, 2000))).tolist() == [[0, 64, 128, 191], [255] * 4]


def test_a_table_of_8_bits_with_many_entries_does_not_wrap_around(tmp_path):
    item = table(0, 8, [min(i // 10, 255) for i in range(4096)])
    path = write(tmp_path / "a.dcm", RAMP, VOILUTSequence=[item])
    assert grey(read_dicom(path)).tolist() == [[0, 50, 100, 150], [200, 250, 255, 255]]


def test_modality_tables_come_before_windows_and_start_below_zero(tmp_path):
    stored = np.array([[-32768, -2], [-1, 32767]], np.int16)
    modality = table(-2, 16, [10, 20, 30])
    path = write(tmp_path / "a.dcm", stored, ModalityLUTSequence=[modality], WindowCenter=20, WindowWidth=20)
    found = grey(read_dicom(path))
    assert found.tolist() == [[0, 0], [134, 255]]  # ((10, 20, 30) - 19.5) / 19 + 0.5


def test_monochrome1_is_inverted_after_the_window(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP, PhotometricInterpretation="MONOCHROME1", WindowCenter=2000, WindowWidth=4001)
    assert grey(read_dicom(path)).tolist() == [[255, 223, 191, 159], [127, 96, 64, 0]]


def test_without_a_window_8_bits_stay_and_more_bits_are_stretched(tmp_path):
    eight = np.array([[10, 20], [30, 200]], np.uint8)
    assert grey(read_dicom(write(tmp_path / "a.dcm", eight))).tolist() == eight.tolist()
    assert grey(read_dicom(edited(tmp_path / "a.dcm", RescaleSlope=-3, RescaleIntercept=7))).tolist() == (255 - eight).tolist()
    sixteen = np.array([[1000, 2000], [3000, 1400]], np.uint16)
    assert grey(read_dicom(write(tmp_path / "b.dcm", sixteen))).tolist() == [[0, 128], [255, 51]]
    padded = np.append(sixteen, np.array([[0, 60000]], np.uint16), 0)
    below = write(tmp_path / "c.dcm", padded, PixelPaddingValue=0)
    assert grey(read_dicom(below)).tolist() == [[0, 4], [9, 2], [0, 255]]
    above = write(tmp_path / "c.dcm", padded, ImplicitVRLittleEndian, PixelPaddingValue=60000, PixelPaddingRangeLimit=50000)
    assert grey(read_dicom(above)).tolist() == [[85, 170], [255, 119], [0, 255]]
    assert not grey(read_dicom(write(tmp_path / "d.dcm", np.full((2, 2), 700, np.uint16)))).any()


def test_a_frame_must_be_chosen_where_there_are_several(tmp_path):
    frames = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    for syntax in (ExplicitVRLittleEndian, RLELossless, DeflatedExplicitVRLittleEndian):
        path = write(tmp_path / "a.dcm", frames, syntax, frames=3)
        assert [grey(read_dicom(path, frame=i)).tolist() for i in range(3)] == frames.tolist()
        with pytest.raises(ValueError, match=r"a\.dcm' has 3 frames; choose one with frame=0…2 or a column 'frame'"):
            read_dicom(path)
        for i in (3, -1):
            with pytest.raises(ValueError, match=rf"a\.dcm' has no frame {i}; its frames are 0…2"):
                read_dicom(path, frame=i)


def test_enhanced_files_have_a_rescale_for_all_frames_and_a_window_for_each(tmp_path):
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
    assert [(grey(read_dicom(path, frame=i)) > 0).sum() for i in (0, 1)] == [6, 3]


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
    found = dcmread(path)
    found.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    found.PixelData = encapsulate([stream.getvalue()])
    found["PixelData"].is_undefined_length = True
    found.save_as(path)
    assert np.abs(grey(read_dicom(path)).astype(int) - 99).max() <= 2

    found.PixelData = encapsulate([stream.getvalue()[:100]])
    found["PixelData"].is_undefined_length = True
    found.save_as(path)
    with pytest.raises(CorruptFileError, match=r"a\.dcm' cannot be decoded: .*another decoder may read it: pip install"):
        read_dicom(path)


def test_a_missing_decoder_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    path = write(tmp_path / "a.dcm", np.zeros((4, 4), np.uint8))
    found = dcmread(path)
    found.file_meta.TransferSyntaxUID = JPEGLosslessSV1
    found.PixelData = encapsulate([b"\xff\xd8 lossless"])
    found["PixelData"].is_undefined_length = True
    found.save_as(path)
    with pytest.raises(HfExtError) as error:
        read_dicom(path)
    assert not isinstance(error.value, CorruptFileError)
    assert re.search(r"a\.dcm' is compressed as JPEG Lossless.* requires more packages for it: pip install ", str(error.value))
    assert "'pylibjpeg>=2.0' 'pylibjpeg-libjpeg>=2.1'" in str(error.value)
    data = Dataset.from_list([{"image": [str(path)]}])
    with pytest.raises(HfExtError, match="requires more packages"):
        check_images(data, on_error="skip")
    found.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.103"  # video
    found.save_as(path)
    with pytest.raises(CorruptFileError, match=r"a\.dcm' cannot be decoded"):
        read_dicom(path)
    for module in ("pydicom", "pydicom.pixels"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HfExtError, match="Reading DICOM files requires pydicom: pip install 'pydicom>=3'"):
        read_dicom(path)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "bad.dcm"

    def error(**attributes: Any) -> str:
        if attributes:
            edited(write(path, RAMP), **attributes)
        with pytest.raises(CorruptFileError, match=r"bad\.dcm") as found:
            read_dicom(path)
        return str(found.value)

    assert "No such file" in error()
    path.write_bytes(b"no DICOM" * 40)
    assert "is not a DICOM file" in error()
    path.write_bytes(b"")
    assert "cannot be read" in error() or "is not a DICOM file" in error()
    whole = write(path, RAMP).read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        error()
    path.write_bytes(write(path, np.tile(RAMP, (50, 50))).read_bytes()[:-30000])
    assert "is cut off: its pixels need 40000 bytes or more, and the file has " in error()
    assert "no pixel data" in error(PixelData=None)
    assert "has no image: Rows is None" in error(Rows=None)
    assert "has no image: Rows is 0" in error(Rows=0)
    assert "NumberOfFrames is 0" in error(NumberOfFrames=0)
    assert "BitsAllocated" in error(BitsAllocated=None)
    assert "it must be 1 or a multiple of 8" in error(BitsAllocated=13)
    assert "Photometric Interpretation' value 'XYZ'" in error(PhotometricInterpretation="XYZ")
    assert "photometric interpretation HSV with 1 samples is not supported" in error(PhotometricInterpretation="HSV")
    assert "center 40 and width 0; give window=" in error(WindowCenter=40, WindowWidth=0)
    assert "VOI LUT Function value 'CURVE'" in error(WindowCenter=40, WindowWidth=9, VOILUTFunction="CURVE")
    short = table(0, 8, [1, 2, 3])
    short.LUTDescriptor = [300, 0, 8]
    assert "has 3 entries instead of 300" in error(VOILUTSequence=[short])
    assert "cannot be displayed" in error(VOILUTSequence=[Attributes()])


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, RLELossless, DeflatedExplicitVRLittleEndian])
def test_sizes_in_headers_are_not_believed(tmp_path, syntax):
    huge = edited(write(tmp_path / "a.dcm", RAMP, syntax), Rows=65535, Columns=65535)
    many = edited(write(tmp_path / "b.dcm", RAMP, syntax), NumberOfFrames=2**31 - 1)
    large = edited(write(tmp_path / "c.dcm", RAMP, syntax), Rows=9000, Columns=9000)
    assert max(path.stat().st_size for path in (huge, many, large)) < 3000
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=r"a\.dcm' claims 65535 x 65535 pixels, more than the limit of 89478485"):
            read_dicom(huge)
        with pytest.raises(CorruptFileError, match=r"b\.dcm"):
            read_dicom(many, frame=2**31 - 2)
        with pytest.raises(CorruptFileError, match=r"c\.dcm"):
            read_dicom(large)
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()


def test_images_are_opened_when_a_batch_needs_them(tmp_path):
    dicom = str(write(tmp_path / "scan", RAMP, WindowCenter=2000, WindowWidth=4001))  # recognized without a suffix
    video = str(write(tmp_path / "video.dcm", np.arange(24, dtype=np.uint8).reshape(3, 2, 4), frames=3))
    png = save(tmp_path / "grey.png", mode="L")
    rows = [[dicom], [png, dicom], None, [video]]
    data = Dataset.from_list([{"image": image, "text": "a", "frame": 2 if image == [video] else None} for image in rows])
    data = data.with_transform(load_images)
    assert data["text"][0] == "a"
    assert [image.mode for image in data[1]["image"]] == ["RGB", "RGB"]
    (first,), second, third, (fourth,) = data[:]["image"]
    assert grey(first)[1].tolist() == [128, 159, 191, 255] and grey(second[0]).max() == 77
    assert third is None and fourth.size == (4, 2) and grey(fourth)[0, 0] == 16
    (lung,) = data.with_transform(partial(load_images, window=(1000, 2000)))[0]["image"]
    assert grey(lung)[0].tolist() == [0, 64, 128, 191]
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
    assert grey(stack).max() == 9
    turned = Image.new("RGB", (4, 2))
    turned.getexif()[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=turned.getexif())
    assert load_images({"image": [str(tmp_path / "turned.jpg")]})["image"][0].size == (2, 4)


@pytest.fixture
def warnings(caplog):
    """What is logged."""
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


def test_vqa_rad(tmp_path):
    file, images = vqa_rad(tmp_path)
    data = read_vqa_rad(file, images)
    assert data.column_names == ["image", "text", "task", "answer"] and len(data) == 4
    path = str(images / "synpic54610.jpg")
    assert data[1] == {"image": [path], "text": "how many cells are there ?", "task": "vqa", "answer": "2"}
    assert read_vqa_rad(file, images, split="train")["answer"] == ["Yes", "2"]
    assert read_vqa_rad(file, images, split="test")["answer"] == ["no", "No"]
    with pytest.raises(ValueError, match="no split 'val'"):
        read_vqa_rad(file, images, split="val")


def test_slake(tmp_path):
    file, images = slake(tmp_path)
    assert len(read_slake(file, images)) == 3
    data = read_slake(file, images, language="en")
    assert data["image"] == [[str(images / f"xmlab{i}/source.jpg")] for i in (1, 2)]
    assert data["answer"] == ["MRI", "no"] and set(data["task"]) == {"vqa"}
    assert read_slake(file, images, language="zh")["text"] == ["图中是什么模态？"]
    with pytest.raises(ValueError, match=r"train\.json' has no row that can be used; is the split or language right"):
        read_slake(file, images, language="fr")


def test_reports(tmp_path):
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


def test_boxes_stay_right_in_a_resized_image_and_a_cropped_one_is_an_error(tmp_path):
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
def test_a_bad_row_is_an_error_that_names_the_file_and_the_row_or_is_skipped_with_a_log(tmp_path, name, warnings):
    change, reason = BAD_ROWS[name]
    file, images = vqa_rad(tmp_path)
    rows = json.loads(file.read_text())
    bad = change if isinstance(change, list) else {k: v for k, v in (rows[1] | change).items() if v is not ...}
    write_json(file, [rows[0], bad, *rows[2:]])
    known = "" if bad is change else r" \(qid 1\)"
    with pytest.raises(ValueError, match=rf"Public\.json, row 1{known}: {reason}.*on_error=\"skip\""):
        read_vqa_rad(file, images)
    assert read_vqa_rad(file, images, on_error="skip")["answer"] == ["Yes", "no", "No"]
    assert re.search(rf"Skipped 1 of 4 rows of .*Public\.json: 1\. The first reasons:\n.*{reason}", warnings.text)


def test_all_skipped_rows_are_listed_and_the_first_reasons_told(tmp_path, warnings):
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


def test_box_samples_have_the_prompt_of_their_task_and_keep_their_answer(tmp_path):
    made = processor()
    for task, question, answer in (
        ("refer", "where is the red cell", "{<20><20><50><60>} {<2><2><5><6>}"),
        ("identify", "what is in {<2><2><5><6>}", "red cell"),
    ):
        row = read_coco(*coco(tmp_path), task).with_transform(load_images)[0]
        assert (row["text"], row["answer"]) == (question, answer)
        batch = UniMedCollator(made)([row])
        prompt, _ = made._prompt(0, row["text"], task, 1, False)
        assert prompt == f"[INST] <Img><image></Img> [{task}] {question} [/INST]"
        assert batch["image_tasks"].tolist() == [made.tasks.index(task)]
