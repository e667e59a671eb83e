"""The files of a run, from which it resumes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from hf_ext.errors import HfExtError
from hf_ext.storage.files import write_atomically

RECORD = "transfer.json"
CHECKPOINTS = "checkpoint-*"


def claim(folder: Path, part: str, settings: dict[str, Any], files: Sequence[str], anew: bool = False) -> None:
    """Records in a folder the settings that the files of one part of a run depend on.

    Args:
        part: "inputs", "labels" or "training".
        files: patterns of their names. Without such files, the settings may change.
        anew: change the settings anyway.

    Raises:
        HfExtError: there are such files, and they were made with other settings.
    """

    def check() -> str | None:
        path = folder / RECORD
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        current = json.loads(json.dumps(settings, default=_plain))
        recorded = record.get(part)
        begun = [name for pattern in files for name in folder.glob(pattern)]
        if begun and not anew:
            if recorded is None:
                return f"{folder} holds {begun[0].name} of another run. Take another folder, or delete it."
            if recorded != current:
                different = ", ".join(key for key in current | recorded if recorded.get(key) != current.get(key))
                hints = {
                    "training": "start again with resume_from_checkpoint=False (--resume-from-checkpoint False)",
                    "labels": f"delete {begun[0].name} for new labels",
                }
                hint = hints.get(part, "delete it")
                return f"{folder} holds a run with another {different}. Take another folder, or {hint}."
        if recorded != current:
            text = json.dumps(record | {part: current}, indent=1, ensure_ascii=False)
            write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))
        return None

    refusal: list[str | None] = [None]
    if PartialState().is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        refusal = [check()]
    if message := broadcast_object_list(refusal)[0]:
        raise HfExtError(message)


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def starts_again(resume_from_checkpoint: str | bool | None) -> bool:
    """Returns true if a training must not resume. On the command line, TrainingArguments keeps "False" as a text."""
    return str(resume_from_checkpoint).lower() == "false"


def delete_checkpoints(folder: str | os.PathLike) -> None:
    """Deletes all checkpoints of a training that starts again: a killed run would resume from one of them."""
    if PartialState().is_main_process:
        for checkpoint in Path(folder).glob(CHECKPOINTS):
            shutil.rmtree(checkpoint)


def last_checkpoint(folder: str | os.PathLike) -> str | None:
    """Returns the last complete checkpoint: a Trainer writes trainer_state.json last."""

    def number(path: Path) -> int:
        return int(path.name.rpartition("-")[2]) if path.name.rpartition("-")[2].isdigit() else -1

    for path in sorted(Path(folder).glob(CHECKPOINTS), key=number, reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_bytes())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def checkpoint_to_resume(folder: str | os.PathLike, resume_from_checkpoint: str | bool | None) -> str | None:
    """Returns the checkpoint that a training resumes from; None to begin.

    Args:
        resume_from_checkpoint: a folder, True for the last checkpoint, or None for the last one if there is one.

    Raises:
        ValueError: there is no such checkpoint.
    """
    last = last_checkpoint(folder)
    if resume_from_checkpoint is None:
        return last
    if str(resume_from_checkpoint).lower() == "true":
        if last is None:
            raise ValueError(f"There is no complete checkpoint in {folder} to resume from.")
        return last
    if not os.path.isdir(str(resume_from_checkpoint)):
        raise ValueError(f"resume_from_checkpoint: there is no folder {resume_from_checkpoint}.")
    return str(resume_from_checkpoint)


def append_lines(path: Path, records: Iterable[dict]) -> None:
    """Adds JSON lines to a file in one write."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(map(_line, records)))
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """Writes a file of JSON lines, or overwrites it."""
    text = "".join(map(_line, records))
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def read_lines(path: Path) -> list[dict]:
    """Returns the JSON lines of a file, as the main process reads them. Leaves out an unfinished last line.

    Raises:
        HfExtError: a line is not a JSON object.
    """
    parsed: list = [None]
    if PartialState().is_main_process:
        parsed = [_parse_lines(path)]
    lines = broadcast_object_list(parsed)[0]
    if isinstance(lines, HfExtError):
        raise lines
    return lines


def _parse_lines(path: Path) -> list[dict] | HfExtError:
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        write_atomically(path, lambda beside: beside.write_bytes(whole))
    records = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            records.append(None)
        if not isinstance(records[-1], dict):
            return HfExtError(f"Line {number} of {path} is not a JSON object; mend it, or delete the file to begin anew.")
    return records


def _line(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
