"""The report of a transfer: its inputs, their labels, the new adapter's agreement with the teacher, and the time."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_ext.display import percent, table
from hf_ext.storage.files import write_atomically, write_json


@dataclass(frozen=True)
class TransferReport:
    """The report of a transfer. `str()` gives a table.

    Attributes:
        source, target: the models.
        adapter: folder of the new adapter.
        prompt: the prompt that the student was trained with, with {input} in place of an input.
        filter: the filter of the inputs.
        seeds: number of seeds.
        counts: numbers of kept inputs, and of dropped ones by reason.
        trained, held_out, unlabelled: numbers of kept inputs that were trained on, held out, or left without a complete label.
        agreement: share of the held-out inputs that the student answers word for word as the teacher; None without such inputs.
        seconds: time that each stage took in this run, which may have resumed from the files of another one.
    """

    source: str
    target: str
    adapter: str
    prompt: str
    filter: str
    seeds: int
    counts: dict[str, int]
    trained: int
    held_out: int
    unlabelled: int
    agreement: float | None
    seconds: dict[str, float]

    @property
    def attempts(self) -> int:
        return sum(self.counts.values())

    def to_dict(self) -> dict:
        return asdict(self) | {"attempts": self.attempts}

    def rows(self) -> list[tuple[str, str]]:
        """Returns the figures with their names."""
        rows = [("inputs written", f"{self.attempts:,}")]
        rows += [(f"  {name}", f"{count:,} ({percent(count / self.attempts)})") for name, count in self.counts.items()]
        rows.append(
            ("trained on / held out / without a whole label", f"{self.trained:,} / {self.held_out:,} / {self.unlabelled:,}")
        )
        if self.agreement is not None:
            rows.append((f"student answers as the teacher ({self.held_out:,} held-out inputs)", percent(self.agreement)))
        return rows + [(f"seconds, {stage}", f"{seconds:.0f}") for stage, seconds in self.seconds.items()]

    def __str__(self) -> str:
        return f"{table(('transfer', ''), self.rows())}\n\n{self.summary()}"

    def summary(self) -> str:
        text = f"{self.source} → {self.target}: {self.counts.get('kept', 0):,} of {self.attempts:,} inputs kept ({self.filter})"
        text = text if self.agreement is None else f"{text}, the student answers as the teacher on {percent(self.agreement)}"
        return f"{text}. The adapter is in {self.adapter}."

    def save(self, folder: str | os.PathLike) -> None:
        """Writes report.json."""
        write_atomically(Path(folder, "report.json"), lambda beside: write_json(beside, self.to_dict()))
