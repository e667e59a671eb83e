"""What models are asked, and how their lists are read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ext.trans_lora.config import PAPERS_MEMBERSHIP
from hf_ext.trans_lora.discriminator import question
from hf_ext.trans_lora.prompts import Item, parse_items, synthesis_prompt, synthesis_request


def test_the_prompt_is_the_papers_list_with_its_next_number_open():
    assert synthesis_prompt(["a", "b"], 4) == "Here are 4 examples:\n1. a\n2. b\n3."


def test_a_chat_model_is_asked_for_the_rest_of_the_list():
    request = synthesis_request(["a", "b"], 4)
    assert "1. a\n2. b\n" in request and "2 more" in request and "numbered 3 to 4" in request


def test_the_discriminator_is_asked_the_papers_question():
    assert question("2 + 2 =", "arithmetic") == "2 + 2 =\nIs the above question from arithmetic dataset?"
    asked = "2 + 2 =\nIs the above question from the arithmetic dataset? Answer in as few words as possible."
    assert question("2 + 2 =", "arithmetic", PAPERS_MEMBERSHIP) == asked


def test_braces_in_an_input_or_a_task_stay():
    assert question("{task} {0} {input", "{input}", "{task}: {input}? {no}") == "{input}: {task} {0} {input? {no}"


@given(st.lists(st.text("ab 1.\n-", min_size=1).map(str.strip).filter(bool), min_size=1, max_size=5))
def test_what_was_written_as_a_list_is_read_as_that_list(texts):
    numbers = range(6, 6 + len(texts) + 1)
    if any(f"\n{number}." in "\n" + text for text in texts for number in numbers):
        return  # it looks like the next item, and nobody could tell
    written = " " + "\n".join([texts[0], *(f"{n}. {text}" for n, text in zip(numbers[1:], texts[1:]))])
    assert [item.text for item in parse_items(written, 6, 10, ended=True)] == texts


ONE_TWO = [Item("one", True), Item("two", True)]
UNFINISHED = [Item("one", True), Item("two", False)]
OPENINGS = ("6. one\n7. two", " one\n7. two", "\n6. one\n7. two", "Sure, here they are:\n\n6. one\n7. two")
LINES = " Which?\nOptions:\n1. a\n2. b\n7. Where?\n1. here"
READ = {  # by name: the text, the last number of the list, whether the text has ended, the items from number 6 on
    **{f"first number {i}": (text, 7, True, ONE_TWO) for i, text in enumerate(OPENINGS)},
    "followed by nothing": (" one\n7. two", 10, False, UNFINISHED),
    "followed by more": (" one\n7. two\n8. and", 7, False, ONE_TWO),
    "lines and numbers": (LINES, 10, True, [Item("Which?\nOptions:\n1. a\n2. b", True), Item("Where?\n1. here", True)]),
    "out of order": (" one\n9. nine", 10, True, [Item("one\n9. nine", True)]),
}
for opening in ("", "\n", "Sure, here are two more:\n\n"):  # a list that begins with one counts from there
    READ[f"{opening}1."] = (f"{opening}1. one\n2. two", 10, False, UNFINISHED)
    READ[f"{opening}1. to 3."] = (f"{opening}1. one\n2. two\n3. three", 7, True, ONE_TWO)


@pytest.mark.parametrize(("text", "last", "ended", "items"), READ.values(), ids=READ)
def test_a_list_is_read_item_by_item(text, last, ended, items):
    assert parse_items(text, 6, last, ended) == items


@pytest.mark.parametrize("text", [
    " one\n7. two\n\nI hope that these help! Let me know",
    " `one`\nAnswer: 1\n7. `two`\n```\n",
    "\n```python\none\n```\n7. two\nas ",
])  # fmt: skip
def test_comments_and_backticks_are_no_part_of_an_item(text):
    assert parse_items(text, 6, 10, False, ["a", "b"]) == ONE_TWO


def test_inputs_have_line_breaks_and_backticks_as_the_seeds():
    text = " Which?\n`a` or b\n\nI hope that this helps!"
    assert parse_items(text, 6, 10, True, ["What?\na or b"]) == [Item("Which?\na or b", True)]
    assert parse_items(text, 6, 10, True, ["What?\n\n`a` or b"]) == [Item(text.strip(), True)]
