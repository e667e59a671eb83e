"""Inputs are written and filtered, and a stopped run resumes."""

import json
from dataclasses import asdict

import pytest
from tiny_transfers import SEEDS, inputs, pretrained, settings
from transformers.utils import logging

from hf_ext import HfExtError
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import Completion, ModelGenerator
from hf_ext.trans_lora.stages import read_lines
from hf_ext.trans_lora.synthesis import Prompts, counts, write_inputs


class Script:
    """Writes given lists, one after the other and then anew."""

    def __init__(self, *texts: str, ended: bool = True):
        self.texts, self.ended, self.asked = list(texts), ended, []

    def __call__(self, prompts, max_new_tokens, seed=None, **sampling):
        candidates = [self.texts[(len(self.asked) + i) % len(self.texts)] for i in range(len(prompts))]
        self.asked += prompts
        return [Completion(text, self.ended) for text in candidates]


class Stop(Exception):
    pass


def encoder(kind="llama"):
    model, tokenizer = pretrained(kind)
    return Encoder(tokenizer, model, "{input}", "The target's")


def write(folder, generate, needed, judge=None, well_formed=None, seeds=SEEDS, of_which="", **options):
    args = settings(folder, **{"generation_batch_size": 1} | options)
    return write_inputs(generate, Prompts(seeds, args, encoder()), needed, {}, judge, well_formed, of_which)


def test_each_input_is_kept_or_dropped_for_its_reason(tmp_path):
    script = Script(
        " pick a b c\n7. pick c a b\n8. pick a b c \n9. pick a b c d e f g h i j\n10. pick f g h",
        " pick j a b\n7. \n8. sort a\n9. pick e\ufffd",
    )
    judged = []

    def judge(texts):
        judged.extend(texts)
        return [0.1 if text == "pick f g h" else 0.9 for text in texts]

    candidates = write(tmp_path, script, 2, judge, lambda text: text.startswith("pick"))
    assert [(candidate.input, candidate.reason) for candidate in candidates] == [
        ("pick a b c", None),
        ("pick c a b", "repeats a seed"),
        ("pick a b c", "duplicate"),
        ("pick a b c d e f g h i j", "malformed"),
        ("pick f g h", "filter"),
        ("pick j a b", None),
    ]
    assert judged == ["pick a b c", "pick f g h", "pick j a b"]  # what comes later in a round is judged too, but not needed
    assert counts(candidates) == {"kept": 2, "malformed": 1, "repeats a seed": 1, "duplicate": 1, "filter": 1}
    assert read_lines(tmp_path / "synthesis.jsonl") == [asdict(candidate) for candidate in candidates]


def test_what_is_cut_off_by_the_limit_of_tokens_is_dropped(tmp_path):
    candidates = write(tmp_path, Script(" pick a b c\n7. pick d e", ended=False), 1)
    assert [(candidate.input, candidate.reason) for candidate in candidates] == [("pick a b c", None)]
    script = Script(" pick d e\n7. pick a", " pick a b c\n7. pick", ended=False)
    assert counts(write(tmp_path / "other", script, 2))["malformed"] == 1


class Counting(ModelGenerator):
    """Counts its calls, and may stop before one."""

    rounds, stop_at = 0, None

    def __call__(self, *args, **options):
        if self.rounds == self.stop_at:
            raise Stop
        self.rounds += 1
        return super().__call__(*args, **options)


def counted(folder, stop_at=None) -> tuple[list, Counting]:
    model, tokenizer = pretrained("llama")
    ask = Encoder(tokenizer, model, "{input}")
    generate = Counting(model, ask, 2)
    generate.stop_at = stop_at
    return keeping_pick(folder, generate, ask), generate


def keeping_pick(folder, generate, ask) -> list:
    prompts = Prompts(SEEDS, settings(folder, generation_batch_size=2), ask)
    return write_inputs(generate, prompts, 16, {}, lambda texts: [0.9 if text < "q" else 0.1 for text in texts])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not killed: its inputs, its file and its rounds."""
    folder = tmp_path_factory.mktemp("whole")
    candidates, generate = counted(folder)
    return candidates, (folder / "synthesis.jsonl").read_bytes(), generate.rounds


@pytest.mark.parametrize(("after", "tail"), [(0, "whole"), (0.5, "half a line"), (0.5, "half a round"), (1, "half a line")])
def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path, whole, after, tail):
    expected, content, rounds = whole
    done = 1 + round(after * (rounds - 2))  # killed in the second round, half-way, or in the last
    assert 1 <= done < rounds
    with pytest.raises(Stop):
        counted(tmp_path, stop_at=done)
    path = tmp_path / "synthesis.jsonl"
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    path.write_bytes({"whole": data, "half a line": data[:-7], "half a round": b"".join(lines[:-2])}[tail])
    again, generate = counted(tmp_path)
    assert again == expected and path.read_bytes() == content
    assert generate.rounds == rounds - done + (tail != "whole")  # whole rounds are not written again
    assert keeping_pick(tmp_path, Script(), encoder()) == expected  # nothing is left to write


def test_each_round_shows_other_seeds_in_another_order():
    prompts = Prompts(inputs(8), settings("x", num_shots=3, num_items=6), encoder())
    script = Script(" pick a b c")
    for number, process in ((0, 0), (0, 1), (1, 0), (0, 0)):
        prompts.answers(script, number, process)
    rounds = [script.asked[i : i + 8] for i in range(0, 32, 8)]
    assert rounds[0] == rounds[3] and len({tuple(part) for part in rounds}) == 3
    assert all(prompt.count("\n") == 4 and prompt.endswith("\n4.") for prompt in script.asked)


def test_too_low_a_rate_of_kept_inputs_is_an_early_error(tmp_path):
    script = Script(*(f" sort {a} {b}" for a in "abcdefgh" for b in "abcdefgh"))
    said = r"40 inputs are not possible within max_attempts=800\. .* 0 were kept .*\(\d+ filter\)"
    with pytest.raises(HfExtError, match=said):
        write(tmp_path, script, 40, lambda texts: [0.1] * len(texts))
    attempts = len((tmp_path / "synthesis.jsonl").read_text().splitlines())
    assert attempts < 400
    with pytest.raises(HfExtError, match=r"within max_attempts=70\. .* would take about"):
        write(tmp_path / "some", script, 40, lambda texts: [float(text[-1] == "a") for text in texts], max_attempts=70)


def test_a_hopeless_run_ends_before_a_twentieth_of_the_attempts(tmp_path):
    script = Script(" pick a a a", *[" sort"] * 999)
    said = r"1,050 inputs \(1,000 and 50\) are not possible within max_attempts=21,000\. Of the first \d+, 1 were kept and "
    said += r"the others dropped \(\d+ malformed\); at this rate they would take about \d+,\d+\."
    with pytest.raises(HfExtError, match=said):
        write(tmp_path, script, 1050, None, lambda text: "pick" in text, of_which=" (1,000 and 50)", generation_batch_size=8)
    assert 300 < len((tmp_path / "synthesis.jsonl").read_text().splitlines()) < 600


def test_the_first_round_shows_inputs_and_the_time_that_remains(tmp_path, capsys):
    script = Script(" pick a b c\n7. pick d f e\n8. sort", *(f" pick {a} {b} {a}" for a in "abcdefgh" for b in "abcdefgh"))
    logging.enable_progress_bar()
    write(tmp_path, script, 8, lambda texts: [0.25 if t == "pick d f e" else 0.75 for t in texts], lambda text: text != "sort")
    logging.disable_progress_bar()
    shown = capsys.readouterr().err
    lines = [line.split(maxsplit=2) for line in shown.replace("\r", "\n").splitlines()]
    assert ["kept", "0.75", "pick a b c"] in lines and ["filter", "0.25", "pick d f e"] in lines
    assert ["malformed", "sort"] in lines
    assert "1 of the first 3 inputs pass, in 0 s; at this pace the 7 that are missing take about 0 s." in shown
    assert shown.count("of the first") == 1 and "80 % of 10 pass" in shown


@pytest.mark.parametrize(
    "line, message",
    [("nonsense", "Line 2 of .* is not a JSON object"), ("[1]", "Line 2"), ('{"text": 1}', "not written by this")],
)
def test_a_file_that_something_else_wrote_is_named(tmp_path, line, message):
    write(tmp_path, Script(" pick a b c"), 1)
    with open(tmp_path / "synthesis.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(HfExtError, match=message):
        write(tmp_path, Script(), 1)


def test_lines_are_read_as_they_were_written_whatever_is_in_them(tmp_path):
    strange = 'line\u2028\x85\r\nbreaks \u00e9 \U0001f600 " \\ {'
    (tmp_path / "f.jsonl").write_text(json.dumps({"input": strange}, ensure_ascii=False) + "\n", encoding="utf-8", newline="")
    assert read_lines(tmp_path / "f.jsonl") == [{"input": strange}]
    assert read_lines(tmp_path / "none.jsonl") == []
