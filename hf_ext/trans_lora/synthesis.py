"""Synthetic inputs of a task: written from a few seeds, filtered, and saved in a file with the result for each."""

from __future__ import annotations

import bisect
import itertools
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.utils.logging import tqdm

from hf_ext.display import percent, table
from hf_ext.errors import HfExtError
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.duplicates import SeenTexts
from hf_ext.trans_lora.encoding import Encoder, without_bos
from hf_ext.trans_lora.generation import Generator, Server
from hf_ext.trans_lora.prompts import parse_items, synthesis_prompt, synthesis_request
from hf_ext.trans_lora.stages import append_lines, read_lines, write_lines

SYNTHESIS = "synthesis.jsonl"
MALFORMED, SEED, DUPLICATE, NEAR_DUPLICATE = "malformed", "repeats a seed", "duplicate", "near duplicate"
FILTER, RANK = "filter", "low score"  # reasons: the filter refused the input, or other inputs were better


@dataclass(frozen=True)
class Candidate:
    """One input that the target model wrote.

    Attributes:
        kept: whether it will be labeled and trained on.
        score: the filter's score; None if an earlier check dropped it, or without a filter.
        reason: why it was dropped; None if it was kept.
        label: the teacher's answer, if the filter required it.
        round: number of its round.
        round_size: number of inputs of this round in the file.
    """

    input: str
    kept: bool
    score: float | None = None
    reason: str | None = None
    label: str | None = None
    round: int = 0
    round_size: int = 0


#: Of each input: (score, whether to keep, the teacher's label if it was needed).
Verdicts = list[tuple[float | None, bool, str | None]]
Judge = Callable[[Sequence[str]], Verdicts]


def write_inputs(
    generate: Generator,
    encoder: Encoder,
    seeds: Sequence[str],
    args: TransLoraConfig,
    path: Path,
    needed: int,
    judge: Judge | None = None,
    well_formed: Callable[[str], bool] | None = None,
    of_which: str = "",
) -> list[Candidate]:
    """Writes and filters inputs until `needed` are kept. The JSON lines file `path` gets all of them (section 3.1).

    Resumes from the file's contents. Repeats an incomplete last round from its seed, with the same result.

    Args:
        judge: the filter; None keeps all inputs that are well-formed and new.
        well_formed: function that returns whether a text can be an input of the task.
        of_which: the parts of `needed`, for the error.

    Raises:
        HfExtError: too few inputs are kept to reach `needed`.
    """
    state = PartialState()
    path.parent.mkdir(parents=True, exist_ok=True)
    candidates = _read_candidates(path)
    seen = SeenTexts(args.near_duplicate_threshold)
    for candidate in candidates:
        if candidate.reason in (None, FILTER, RANK):
            seen.add(candidate.input)
    limit = args.max_attempts or 20 * needed
    prompts = Prompts(seeds, args, encoder)
    number = first = max((candidate.round for candidate in candidates), default=-1) + 1
    kept, start = passed(candidates), time.monotonic()
    mark, then = kept, 0.0
    with tqdm(total=needed, initial=min(kept, needed), desc="Synthetic inputs", disable=not state.is_main_process) as bar:
        while kept < needed:
            texts = gather_object(prompts.answers(generate, number, state.process_index))
            new = _until(_sift(texts, number, prompts, seen, judge, well_formed), needed - kept)
            new = [replace(candidate, round_size=len(new)) for candidate in new]
            candidates += new
            if state.is_main_process:
                append_lines(path, map(asdict, new))
            before, kept = kept, kept + passed(new)
            bar.update(kept - before)
            bar.set_postfix_str(f"{percent(kept / max(len(candidates), 1), 0)} of {len(candidates):,} pass")
            rounds, seconds = number - first + 1, time.monotonic() - start
            if rounds == 1:
                bar.write(f"{_outlook(new, seconds)}{_ahead(passed(new), needed - kept, seconds)}", file=sys.stderr)
            elif rounds.bit_count() == 1:  # later rounds repeat more inputs, so the estimate follows their pace
                bar.write(f"{kept:,} of {needed:,} inputs{_ahead(kept - mark, needed - kept, seconds - then)}", file=sys.stderr)
            if rounds.bit_count() == 1:
                mark, then = kept, seconds
            if kept < needed:
                _require_progress(candidates, kept, needed, of_which, limit, path)
            number += 1
    return candidates


def _outlook(new: Sequence[Candidate], seconds: float) -> str:
    """Returns ten inputs of a run's first round with their results, and the share that passes."""
    shown = [new[i * len(new) // min(10, len(new))] for i in range(min(10, len(new)))]
    rows = [(one.reason or "kept", "" if one.score is None else f"{one.score:.2f}", first_line(one.input)) for one in shown]
    text = f"{passed(new):,} of the first {len(new):,} inputs pass, in {duration(seconds)}"
    return f"{table(('fate', 'score', 'input'), rows)}\n{text}"


def _ahead(kept: int, missing: int, seconds: float) -> str:
    """Returns an estimate of the time for the inputs that are missing, at the pace of the last rounds."""
    if not kept or missing <= 0:
        return "."
    return f"; at this pace the {missing:,} that are missing take about {duration(seconds * missing / kept)}."


def first_line(text: str) -> str:
    """Returns the beginning of a text, in one line."""
    return text.replace("\n", " ⏎ ")[:80]


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def passed(candidates: Iterable[Candidate]) -> int:
    """Returns the number of candidates that passed the filter."""
    return sum(candidate.kept or candidate.reason == RANK for candidate in candidates)


def _until(candidates: list[Candidate], needed: int) -> list[Candidate]:
    """Returns the candidates up to the one that completes the required number."""
    kept = list(itertools.accumulate(candidate.kept for candidate in candidates))
    return candidates[: bisect.bisect_left(kept, needed) + 1]


class Prompts:
    """The prompts of a round, and the inputs in the completions."""

    def __init__(self, seeds: Sequence[str], args: TransLoraConfig, encoder: Encoder):
        self.seeds, self.args, self.encoder = list(dict.fromkeys(seeds)), args, encoder
        if len(self.seeds) < args.num_shots:
            raise HfExtError(
                f"There are {len(self.seeds)} different seeds, and each prompt shows num_shots={args.num_shots}. Give more "
                "examples of the task's inputs, or lower num_shots."
            )
        longest = max(encoder.lengths(self.seeds))
        self.max_input_length = args.max_input_length or 2 * longest
        self.longest = self.max_input_length + 4  # its number and a line break
        self.room = (args.num_items - args.num_shots) * self.longest

    def answers(self, generate: Generator, number: int, process: int) -> list[tuple[str, bool]]:
        """Returns the inputs that one process writes in a round, and whether each is finished."""
        args, first = self.args, self.args.num_shots + 1
        order = random.Random(f"{args.seed} {number} {process}")
        shown = [order.sample(self.seeds, args.num_shots) for _ in range(args.generation_batch_size)]
        prompts = [self._prompt(seeds) for seeds in shown]
        written = generate(
            without_bos(prompts, self.encoder.tokenizer) if isinstance(generate, Server) else prompts,
            max_new_tokens=self.room,
            seed=order.randrange(2**31),
            temperature=args.temperature,
            top_p=args.top_p,
            stop=f"\n{args.num_items + 1}.",
            longest=self.longest,
        )
        items = [item for one in written for item in parse_items(one.text, first, args.num_items, one.ended, self.seeds)]
        return [(item.text, item.finished) for item in items]

    def require_room(self) -> None:
        """Checks that the longest seeds and the text to write fit into the model's context.

        Raises:
            HfExtError: they do not fit.
        """
        longest = sorted(self.seeds, key=len)[-self.args.num_shots :]
        length = len(self.encoder.tokens([self._prompt(longest)])[0]) + (0 if self.encoder.encoder_decoder else self.room)
        self.encoder.require_room(length, f"A prompt of {self.args.num_shots} seeds, with room for what is to be written,")

    def _prompt(self, seeds: Sequence[str]) -> str:
        """Returns a prompt that ends with the number of the next item, in the assistant's turn if the model chats."""
        if self.encoder.chats:
            return f"{self.encoder.request(synthesis_request(seeds, self.args.num_items))}{len(seeds) + 1}."
        return synthesis_prompt(seeds, self.args.num_items)

    def too_long(self, text: str) -> bool:
        return self.encoder.lengths([text])[0] > self.max_input_length


def _sift(
    texts: list[tuple[str, bool]],
    number: int,
    prompts: Prompts,
    seen: SeenTexts,
    judge: Judge | None,
    well_formed: Callable[[str], bool] | None,
) -> list[Candidate]:
    seeds = SeenTexts(1)
    for seed in prompts.seeds:
        seeds.add(seed)

    def fault(text: str, finished: bool) -> str | None:
        broken = not text or not finished or "\ufffd" in text or prompts.too_long(text)
        if broken or well_formed is not None and not well_formed(text):
            return MALFORMED
        if seeds.has(text):
            return SEED
        if seen.has(text):
            return DUPLICATE
        if seen.threshold < 1 and seen.has_near(text):
            return NEAR_DUPLICATE
        seen.add(text)
        return None

    candidates = [Candidate(text, False, reason=reason, round=number) for text, reason in ((t, fault(t, f)) for t, f in texts)]
    fresh = [i for i, candidate in enumerate(candidates) if candidate.reason is None]
    if judge is None:
        verdicts = [(None, True, None)] * len(fresh)
    else:
        verdicts = in_shares([candidates[i].input for i in fresh], judge)
    for i, (score, keep, label) in zip(fresh, verdicts):
        candidates[i] = replace(candidates[i], kept=keep, score=score, label=label, reason=None if keep else FILTER)
    return candidates


def keep_best(candidates: list[Candidate], count: int, path: Path) -> list[Candidate]:
    """Keeps the candidates with the highest scores of the filter, in the file too."""
    scores = {i: candidate.score for i, candidate in enumerate(candidates) if candidate.score is not None}
    best = set(sorted(scores, key=lambda i: (-scores[i], i))[:count])
    for i in scores:
        candidates[i] = replace(candidates[i], kept=i in best, reason=None if i in best else RANK)
    _write_candidates(candidates, path)
    return candidates


def counts(candidates: Iterable[Candidate]) -> dict[str, int]:
    """Returns the number of kept inputs, and of dropped ones for each reason."""
    numbers = Counter("kept" if candidate.kept else candidate.reason for candidate in candidates)
    return {name: numbers[name] for name in ("kept", MALFORMED, SEED, DUPLICATE, NEAR_DUPLICATE, FILTER, RANK) if numbers[name]}


def _require_progress(candidates: list[Candidate], kept: int, needed: int, of_which: str, limit: int, path: Path) -> None:
    attempts = len(candidates)
    # The number kept at the most favorable rate that the results so far allow (three standard deviations up).
    hope = (kept + 3 * math.sqrt(kept + 1)) / max(attempts, 1) * limit
    # Waits for a twentieth of the attempts, as a filter's rate may vary, unless even a fifth cannot be reached.
    if attempts < limit and hope >= (needed / 5 if attempts < limit / 20 else needed):
        return
    dropped = ", ".join(f"{count:,} {name}" for name, count in counts(candidates).items() if name != "kept") or "none"
    rate = f"; at this rate they would take about {math.ceil(needed * attempts / kept):,}" if kept else ""
    raise HfExtError(
        f"{needed:,} inputs{of_which} are not possible within max_attempts={limit:,}. Of the first {attempts:,}, {kept:,} were "
        f"kept and the others dropped ({dropped}){rate}. {path} lists all of them with the reasons. Raise max_attempts, or, in "
        "another output_dir, lower num_samples, give seeds that are more alike, or use another filter."
    )


def in_shares(items: Sequence, work: Callable[[Sequence], list]) -> list:
    """Runs `work` on each process's share of the items. All processes get all results, in order."""
    state = PartialState()
    share = math.ceil(len(items) / state.num_processes)
    part = items[state.process_index * share :][:share]
    return gather_object(work(part) if len(part) else [])


def _read_candidates(path: Path) -> list[Candidate]:
    records = read_lines(path)
    try:
        candidates = [Candidate(**record) for record in records]
    except TypeError as error:
        raise HfExtError(f"{path} was not written by this version ({error}); delete it to begin anew.") from error
    last = [candidate for candidate in candidates if candidate.round == candidates[-1].round]
    if last and len(last) < last[0].round_size:
        candidates = candidates[: -len(last)]
        _write_candidates(candidates, path)
    return candidates


def _write_candidates(candidates: list[Candidate], path: Path) -> None:
    if PartialState().is_main_process:
        write_lines(path, map(asdict, candidates))
