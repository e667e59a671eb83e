"""Boxes go to text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ext.uni_med.boxes import box_iou, format_box, parse_boxes


def test_a_box_is_written_in_hundredths_of_the_image():
    assert format_box((64, 48, 320, 240), (640, 480)) == "{<10><10><50><50>}"
    assert parse_boxes("it is {<10><10><50><50>} there", (640, 480)) == [(64, 48, 320, 240)]


def test_boxes_are_cut_to_the_image():
    assert format_box((-20, -1, 700, 481), (640, 480)) == "{<0><0><100><100>}"
    assert parse_boxes("{<0><50><999><100>}", (200, 100)) == [(0, 50, 200, 100)]


@pytest.mark.parametrize(("boxes", "message"), [
    ([(5, 5, 5, 9), (9, 5, 5, 9), (5, 9, 9, 5), (float("nan"), 1, 2, 3)], "empty or reversed"),
    ([(11, 1, 12, 2), (-5, 1, 0, 2), (1, 10, 2, 12), (1, -9, 2, -1)], "outside the image of 10 x 10"),
])  # fmt: skip
def test_boxes_without_a_part_of_the_image_are_errors(boxes, message):
    for box in boxes:
        with pytest.raises(ValueError, match=message):
            format_box(box, (10, 10))


@given(
    st.tuples(st.integers(1, 4000), st.integers(1, 4000)),
    st.tuples(*[st.floats(0, 0.9)] * 2),
    st.tuples(*[st.floats(0.05, 0.5)] * 2),
)
def test_boxes_round_trip_to_half_a_hundredth(size, corner, extent):
    box = tuple(value * side for value, side in zip((*corner, *(a + b for a, b in zip(corner, extent))), (*size, *size)))
    (parsed,) = parse_boxes(format_box(box, size), size)
    for value, expected, side in zip(parsed, box, (*size, *size)):
        assert abs(value - min(expected, side)) <= 0.00501 * side


def test_a_small_box_stays_a_box():
    text = format_box((10, 10, 12, 12), (1000, 1000))
    assert text == "{<1><1><2><2>}" and box_iou(*parse_boxes(text, (1000, 1000)), (10, 10, 20, 20)) == pytest.approx(1)
    assert format_box((999.9, 0, 1000, 1), (1000, 1000)) == "{<99><0><100><1>}"


def test_many_boxes_are_read_and_spaces_do_not_matter():
    text = "cells { <1> <2> < 30 ><40>} and {<5><6><7><8>}, not {<9><9><3><99>} or {<1><2><3>}"
    assert [[round(value) for value in box] for box in parse_boxes(text, (100, 100))] == [[1, 2, 30, 40], [5, 6, 7, 8]]
    assert parse_boxes("none", (100, 100)) == []


def test_overlap_is_intersection_over_union():
    assert box_iou((0, 0, 2, 2), (0, 0, 2, 2)) == 1
    assert box_iou((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert box_iou((0, 0, 1, 1), (1, 1, 2, 2)) == 0 == box_iou((0, 0, 0, 0), (0, 0, 0, 0))
