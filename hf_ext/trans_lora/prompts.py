"""Prompts for a model, and the parsing of its answers (Trans-LoRA, arXiv 2405.17258, section 3)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """One numbered item of a list that a model continued."""

    text: str
    finished: bool  # something came after it: the next number, the end of text, or the end of the list


def synthesis_prompt(seeds: Sequence[str], count: int) -> str:
    """Returns a list of `count` inputs that begins with the seeds; the next one is open. The prompt ends with the open number,
    without a space, because most tokenizers join the space to the next word."""
    lines = [f"{number}. {seed}" for number, seed in enumerate(seeds, 1)]
    return "\n".join([f"Here are {count} examples:", *lines, f"{len(seeds) + 1}."])


def synthesis_request(seeds: Sequence[str], count: int) -> str:
    """Returns the request to a chat model for the rest of the list. Its answer begins with `len(seeds) + 1` and a dot."""
    lines = [f"{number}. {seed}" for number, seed in enumerate(seeds, 1)]
    first = len(seeds) + 1
    order = (
        f"Write {count - len(seeds)} more of the same kind, numbered {first} to {count}, without answers and without comment."
    )
    return "\n".join([f"Here are {len(seeds)} examples of a task's inputs:", *lines, "", order])


def parse_items(text: str, first: int, last: int, ended: bool, seeds: Sequence[str] = ()) -> list[Item]:
    """Splits the text that a model wrote after the prompt into items `first` to `last`.

    An item reaches to the line that begins with the next number, so items of several lines, and items that contain numbers,
    stay whole. The first number may be missing, as the prompt ends with it. A list that begins with 1 counts from there. Text
    before a list is no item.

    Args:
        ended: the model itself ended the text, rather than the limit of tokens.
        seeds: real inputs. If each has one line (one paragraph), an item ends with its first line (paragraph): comments and
            answers follow. If none has a backtick, items lose theirs.
    """
    if seeds and not any("`" in seed for seed in seeds):
        text = re.sub(r"```\w*|`", "", text)
    text = "\n" + text
    opening, mark, rest = text.partition(f"\n{first}.")
    if not mark:
        opening, mark, rest = text.partition("\n1.")
        if mark and (not opening.strip() or opening.rstrip().endswith(":")) and f"\n{first + 1}." not in text:
            first, last = 1, last - first + 1
        else:
            rest = text
    breaks = next((mark for mark in ("\n", "\n\n") if seeds and not any(mark in seed for seed in seeds)), None)
    items = []
    for number in range(first, last + 1):
        item, mark, rest = rest.partition(f"\n{number + 1}.")
        item, comment, _ = item.lstrip().partition(breaks) if breaks else (item, "", "")
        items.append(Item(item.strip(), finished=bool(mark or comment) or ended))
        if not mark:
            break
    return items
