"""Boxes as text: {<x1><y1><x2><y2>} in integers from 0 to 100, hundredths of the image's width and height."""

from __future__ import annotations

import math
import re

Box = tuple[float, float, float, float]
PATTERN = re.compile(r"\{\s*" + r"\s*".join([r"<\s*(\d{1,3})\s*>"] * 4) + r"\s*\}")


def format_box(box: Box, size: tuple[float, float]) -> str:
    """Returns a box as text, clipped to the image. Edges are rounded to the nearest hundredth.

    Args:
        box: left, top, right, bottom in pixels.
        size: width and height of the image in pixels.

    Raises:
        ValueError: the box is empty, reversed or outside the image.
    """
    left, top, right, bottom = box
    width, height = size
    if not (left < right and top < bottom):
        raise ValueError(f"The box {tuple(box)} is empty or reversed; it is left, top, right, bottom in pixels.")
    if not (left < width and right > 0 and top < height and bottom > 0):
        raise ValueError(f"The box {tuple(box)} is outside the image of {width} x {height} pixels.")
    x1, x2 = _hundredths(left / width, right / width)
    y1, y2 = _hundredths(top / height, bottom / height)
    return f"{{<{x1}><{y1}><{x2}><{y2}>}}"


def _hundredths(start: float, end: float) -> tuple[int, int]:
    """Rounds both to integers within 0…100, which are at least one apart."""
    start, end = 100 * max(start, 0.0), 100 * min(end, 1.0)
    first, last = round(start), round(end)
    return (first, last) if first < last else (math.floor(start), math.ceil(end))


def parse_boxes(text: str, size: tuple[float, float]) -> list[Box]:
    """Returns the boxes in a text, in pixels of an image of `size` (width, height). Skips empty and reversed boxes."""
    width, height = size
    boxes = []
    for match in PATTERN.finditer(text):
        x1, y1, x2, y2 = (min(int(value), 100) / 100 for value in match.groups())
        if x1 < x2 and y1 < y2:
            boxes.append((x1 * width, y1 * height, x2 * width, y2 * height))
    return boxes


def box_iou(box: Box, other: Box) -> float:
    """Returns the intersection over union of two boxes, in 0…1."""
    across = max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
    down = max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (box, other)]
    union = sum(areas) - across * down
    return across * down / union if union > 0 else 0.0
