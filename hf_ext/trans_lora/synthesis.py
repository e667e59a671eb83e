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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from hf_ext.display import percent, table
from hf_ext.errors import HfExtError
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import Generator, ModelGenerator, Server
from hf_ext.trans_lora.models import base_of, on_device
from hf_ext.trans_lora.prompts import Item, parse_items, synthesis_prompt, synthesis_request
from hf_ext.trans_lora.stages import append_lines, claim, duration, first_line, in_shares, read_lines, write_lines

SYNTHESIS = "synthesis.jsonl"
MALFORMED, SEED, DUPLICATE, FILTER = "malformed", "repeats a seed", "duplicate", "filter"  # reasons


@dataclass(frozen=True)
class Candidate:
    """One input that the target model wrote."""

    input: str
    kept: bool  # it will be labeled and trained on
    score: float | None = None  # the filter's; None if an earlier check dropped it, or without a filter
    reason: str | None = None  # it was dropped; None if it was kept
    round: int = 0  # number of its round
    round_size: int = 0  # number of inputs of this round in the file


#: The filter: returns a score for each input. It keeps those with more than 0.5.
Judge = Callable[[Sequence[str]], list[float]]


class Prompts:
    """The prompts of a round, and the inputs in the completions."""

    def __init__(self, seeds: Sequence[str], args: TransLoraConfig, encoder: Encoder):
        self.seeds, self.args, self.encoder = list(dict.fromkeys(seed.strip() for seed in seeds)), args, encoder
        if len(self.seeds) < args.num_shots:
            raise HfExtError(
                f"There are {len(self.seeds)} different seeds, and each prompt shows num_shots={args.num_shots}. Give more "
                "examples of the task's inputs, or lower num_shots."
            )
        longest = max(encoder.lengths(self.seeds))
        self.max_input_length = args.max_input_length or 2 * longest
        self.longest = self.max_input_length + 4  # its number and a line break
        self.room = (args.num_items - args.num_shots) * self.longest

    def answers(self, generate: Generator, number: int, process: int) -> list[Item]:
        """Returns the inputs that one process writes in a round."""
        args, first = self.args, self.args.num_shots + 1
        order = random.Random(f"{args.seed} {number} {process}")
        shown = [order.sample(self.seeds, args.num_shots) for _ in range(args.generation_batch_size)]
        prompts = [self.prompt(seeds) for seeds in shown]
        written = generate(
            self.encoder.without_bos(prompts) if isinstance(generate, Server) else prompts,
            max_new_tokens=self.room,
            seed=order.randrange(2**31),
            temperature=args.temperature,
            top_p=args.top_p,
            stop=f"\n{args.num_items + 1}.",
            longest=self.longest,
        )
        return [item for one in written for item in parse_items(one.text, first, args.num_items, one.ended, self.seeds)]

    def require_room(self) -> None:
        """Raises HfExtError unless the longest seeds and the text to write fit into the model's context."""
        longest = sorted(self.seeds, key=len)[-self.args.num_shots :]
        length = self.encoder.length(self.prompt(longest), self.room)
        self.encoder.require_room(length, f"A prompt of {self.args.num_shots} seeds, with room for what is to be written,")

    def prompt(self, seeds: Sequence[str]) -> str:
        """Returns a prompt that ends with the number of the next item, in the assistant's turn if the model chats."""
        if self.encoder.chats:
            return f"{self.encoder.request(synthesis_request(seeds, self.args.num_items))}{len(seeds) + 1}."
        return synthesis_prompt(seeds, self.args.num_items)


@dataclass
class Sieve:
    """The checks of written inputs, in their order: well-formed, no seed, no duplicate, and the filter `judge`."""

    prompts: Prompts
    judge: Judge | None = None
    well_formed: Callable[[str], bool] | None = None  # checks whether a text can be an input of the task
    seen: set[str] = field(default_factory=set)

    def sift(self, texts: list[Item], number: int) -> list[Candidate]:
        """Returns the candidates of a round."""
        reasons = [self._fault(text, finished) for text, finished in texts]
        fresh = [text for (text, _), reason in zip(texts, reasons) if reason is None]
        scores = dict(zip(fresh, in_shares(fresh, self.judge))) if self.judge is not None else {}
        candidates = []
        for (text, _), reason in zip(texts, reasons):
            score = scores.get(text) if reason is None else None
            reason = FILTER if score is not None and score <= 0.5 else reason
            candidates.append(Candidate(text, reason is None, score, reason, number))
        return candidates

    def _fault(self, text: str, finished: bool) -> str | None:
        prompts, test = self.prompts, self.well_formed
        too_long = prompts.encoder.lengths([text])[0] > prompts.max_input_length
        if not text or not finished or "\ufffd" in text or too_long or test is not None and not test(text):
            return MALFORMED
        if text in prompts.seeds:
            return SEED
        if text in self.seen:
            return DUPLICATE
        self.seen.add(text)
        return None


def write_inputs(
    writer: PreTrainedModel | PeftModel | Generator,
    prompts: Prompts,
    needed: int,
    settings: dict[str, Any],
    judge: Judge | None = None,
    well_formed: Callable[[str], bool] | None = None,
    of_which: str = "",
) -> list[Candidate]:
    """Writes and filters inputs until `needed` are kept. synthesis.jsonl in args.output_dir gets all of them (section 3.1).
    Resumes from the file's contents. Repeats an incomplete last round from its seed, with the same result. The writer is the
    model, without its adapters if it has some, or a `Server`. `settings` are what the inputs depend on beside the seeds and the
    settings of the writing; `of_which` names the parts of `needed` for the error."""
    args, sieve = prompts.args, Sieve(prompts, judge, well_formed)
    names = ("num_shots", "num_items", "temperature", "top_p", "generation_kwargs", "max_input_length", "chat_template_kwargs")
    settings = settings | {"seeds": prompts.seeds} | args.named(*names)
    claim(Path(args.output_dir), "inputs", settings, [SYNTHESIS])
    if not isinstance(writer, nn.Module):
        return _write_inputs(writer, sieve, needed, of_which)
    with base_of(writer) as base, on_device(base, args.device):
        model = ModelGenerator(base, prompts.encoder, args.generation_batch_size, args.sampling)
        return _write_inputs(model, sieve, needed, of_which)


def _write_inputs(generate: Generator, sieve: Sieve, needed: int, of_which: str) -> list[Candidate]:
    state, prompts = PartialState(), sieve.prompts
    path = Path(prompts.args.output_dir, SYNTHESIS)
    candidates = _read_candidates(path)
    sieve.seen |= {one.input for one in candidates if one.reason in (None, FILTER)}
    limit = prompts.args.max_attempts or 20 * needed
    number = first = max((candidate.round for candidate in candidates), default=-1) + 1
    kept, start = _kept(candidates), time.monotonic()
    with tqdm(total=needed, initial=min(kept, needed), desc="Synthetic inputs", disable=not state.is_main_process) as bar:
        while kept < needed:
            texts = gather_object(prompts.answers(generate, number, state.process_index))
            new = sieve.sift(texts, number)
            running = list(itertools.accumulate(candidate.kept for candidate in new))
            new = new[: bisect.bisect_left(running, needed - kept) + 1]  # up to the one that completes the number
            new = [replace(candidate, round_size=len(new)) for candidate in new]
            candidates += new
            append_lines(path, map(asdict, new))
            kept += _kept(new)
            bar.update(_kept(new))
            bar.set_postfix_str(f"{percent(kept / max(len(candidates), 1), 0)} of {len(candidates):,} pass")
            if number == first:
                bar.write(_outlook(new, needed - kept, time.monotonic() - start), file=sys.stderr)
            if kept < needed:
                _require_progress(candidates, kept, needed, of_which, limit, path)
            number += 1
    return candidates


def _outlook(new: Sequence[Candidate], missing: int, seconds: float) -> str:
    """Returns ten inputs of a run's first round with their results, the share that passes, and an estimate of the remaining
    time."""
    shown = [new[i * len(new) // min(10, len(new))] for i in range(min(10, len(new)))]
    rows = [(one.reason or "kept", "" if one.score is None else f"{one.score:.2f}", first_line(one.input)) for one in shown]
    kept, ahead = _kept(new), ""
    if kept and missing > 0:
        ahead = f"; at this pace the {missing:,} that are missing take about {duration(seconds * missing / kept)}"
    text = f"{kept:,} of the first {len(new):,} inputs pass, in {duration(seconds)}{ahead}."
    return f"{table(('fate', 'score', 'input'), rows)}\n{text}"


def _kept(candidates: Iterable[Candidate]) -> int:
    return sum(candidate.kept for candidate in candidates)


def counts(candidates: Iterable[Candidate]) -> dict[str, int]:
    """Returns the number of kept inputs, and of dropped ones for each reason."""
    numbers = Counter(candidate.reason or "kept" for candidate in candidates)
    return {name: numbers[name] for name in ("kept", MALFORMED, SEED, DUPLICATE, FILTER) if numbers[name]}


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


def _read_candidates(path: Path) -> list[Candidate]:
    records = read_lines(path)
    try:
        candidates = [Candidate(**record) for record in records]
    except TypeError as error:
        raise HfExtError(f"{path} was not written by this version ({error}); delete it to begin anew.") from error
    last = [candidate for candidate in candidates if candidate.round == candidates[-1].round]
    if last and len(last) < last[0].round_size:
        candidates = candidates[: -len(last)]
        write_lines(path, map(asdict, candidates))
    return candidates
