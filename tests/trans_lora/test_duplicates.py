"""Duplicates and near duplicates are found exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ext.trans_lora.duplicates import SeenTexts, jaccard, shingles, words_of

texts = st.lists(st.lists(st.sampled_from("abcd"), max_size=8).map(" ".join), max_size=12)


@given(texts, st.sampled_from([0.2, 0.5, 0.7, 0.9, 1.0]))
def test_the_index_finds_what_comparing_all_pairs_finds(texts, threshold):
    seen = SeenTexts(threshold)
    for i, text in enumerate(texts):
        near = any(jaccard(shingles(text), shingles(other)) >= threshold for other in texts[:i])
        assert seen.has_near(text) == near
        assert seen.has(text) == any(words_of(text) == words_of(other) for other in texts[:i])
        seen.add(text)


@pytest.mark.parametrize("other", ["Not ( true )", "not (true)", "  not\n( True ) "])
def test_case_and_space_make_no_difference(other):
    seen = SeenTexts(0.9)
    seen.add("not ( True )")
    assert seen.has(other)


@pytest.mark.parametrize("other", ["not True", "not ( False )", "( not True )", "2 + 2 - 1"])
def test_signs_and_other_words_make_a_difference(other):
    seen = SeenTexts(1)
    seen.add("not ( True )")
    seen.add("2 + 2 + 1")
    assert not seen.has(other) and not seen.has_near(other)


def test_one_changed_word_of_many_is_near_and_of_few_is_not():
    seen = SeenTexts(0.8)
    long = " ".join(f"w{i}" for i in range(60))
    seen.add(long)
    seen.add("x1 x2 x3 x4 x5")
    assert seen.has_near(long.replace("w30", "other")) and not seen.has_near("x1 x2 other x4 x5")
