"""The files of a run, from which it resumes, and the shares of its processes."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from hf_ext.errors import HfExtError
from hf_ext.storage.files import write_atomically

RECORD = "transfer.json"
SEEDS = "seed_answers.jsonl"
CHECKPOINTS = "checkpoint-*"


def is_run(folder: Path, *files: str) -> bool:
    """Checks whether a folder holds files of a run, or one of `files`."""
    return any((folder / name).exists() for name in (RECORD, SEEDS, *files))


def claim(folder: Path, part: str, settings: dict[str, Any], files: Sequence[str], anew: bool = False) -> None:
    """Records in a folder the settings that the files of one part of a run ("inputs", "labels" or "training") depend on. Raises
    HfExtError if there are files of these patterns that were made with other settings, unless the part begins `anew`."""

    def check() -> None:
        path = folder / RECORD
        folder.mkdir(parents=True, exist_ok=True)
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        plain = json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
        current = json.loads(plain)
        recorded = record.get(part)
        begun = [name for pattern in files for name in folder.glob(pattern)]
        if begun and not anew and recorded is None:
            raise HfExtError(f"{folder} holds {begun[0].name} of another run. Take another folder, or delete it.")
        if begun and not anew and recorded is not None and recorded != current:
            different = ", ".join(key for key in current | recorded if recorded.get(key) != current.get(key))
            hints = {
                "training": "start again with resume_from_checkpoint=False (--resume-from-checkpoint False)",
                "labels": f"delete {begun[0].name} for new labels",
            }
            hint = hints.get(part, "delete it")
            raise HfExtError(f"{folder} holds a run with another {different}. Take another folder, or {hint}.")
        if recorded != current:
            text = json.dumps(record | {part: current}, indent=1, ensure_ascii=False)
            write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))

    _on_main_process(check)


def _on_main_process(work: Callable[[], Any]) -> Any:
    """Runs `work` on the main process. All processes get its result, or its HfExtError."""
    result = None
    if PartialState().is_main_process:
        try:
            result = work()
        except HfExtError as error:
            result = error
    (result,) = broadcast_object_list([result])
    if isinstance(result, HfExtError):
        raise result
    return result


def begin_training(folder: Path, settings: dict[str, Any], resume_from_checkpoint: str | bool | None) -> str | None:
    """Claims a folder for a training, and returns the checkpoint that it resumes from (see `checkpoint_to_resume`). The
    settings may have changed if the user sets `resume_from_checkpoint`. False deletes the checkpoints, because a killed run
    would resume from one of them."""
    checkpoint = checkpoint_to_resume(folder, resume_from_checkpoint)
    if str(resume_from_checkpoint).lower() == "false" and PartialState().is_main_process:
        for path in folder.glob(CHECKPOINTS):
            shutil.rmtree(path)
    claim(folder, "training", settings, [CHECKPOINTS], anew=resume_from_checkpoint is not None)
    return checkpoint


def checkpoint_to_resume(folder: Path, resume_from_checkpoint: str | bool | None) -> str | None:
    """Returns the checkpoint that a training resumes from; None to begin. The choice is a folder, True for the last checkpoint,
    False to begin, or None for the last checkpoint if there is one. On the command line, TrainingArguments keeps "True" and
    "False" as texts."""
    choice = str(resume_from_checkpoint).lower()
    if choice == "false":
        return None
    if choice in ("none", "true"):
        last = last_checkpoint(folder)
        if last is None and choice == "true":
            raise ValueError(f"There is no complete checkpoint in {folder} to resume from.")
        return last
    if not os.path.isdir(str(resume_from_checkpoint)):
        raise ValueError(f"resume_from_checkpoint: there is no folder {resume_from_checkpoint}.")
    return str(resume_from_checkpoint)


def last_checkpoint(folder: Path) -> str | None:
    """Returns the last complete checkpoint: a Trainer writes trainer_state.json last."""
    for path in sorted(folder.glob(CHECKPOINTS), key=lambda path: (len(path.name), path.name), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_bytes())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def append_lines(path: Path, records: Iterable[dict]) -> None:
    """Adds JSON lines to a file in one write, on the main process."""
    if not PartialState().is_main_process:
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(map(_line, records)))
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """Writes a file of JSON lines, or overwrites it, on the main process."""
    if not PartialState().is_main_process:
        return
    text = "".join(map(_line, records))
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def read_lines(path: Path) -> list[dict]:
    """Returns the JSON lines of a file, as the main process reads them. Leaves out an unfinished last line."""

    def read() -> list[dict]:
        data = path.read_bytes() if path.exists() else b""
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
                raise HfExtError(f"Line {number} of {path} is not a JSON object; mend it, or delete the file to begin anew.")
        return records

    return _on_main_process(read)


def _line(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def in_shares(items: Sequence, work: Callable[[Sequence], list]) -> list:
    """Runs `work` on each process's share of the items. All processes get all results, in order."""
    state = PartialState()
    share = math.ceil(len(items) / state.num_processes)
    part = items[state.process_index * share :][:share]
    return gather_object(work(part) if len(part) else [])


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def first_line(text: str) -> str:
    """Returns the beginning of a text, in one line."""
    return text.replace("\n", " ⏎ ")[:80]
