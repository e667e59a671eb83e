"""Tries decoding during loading on a tiny model, where Transformers is newer than the tested versions."""

from __future__ import annotations

import shutil
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging

from hf_ext.integration import versions
from hf_ext.storage.delta.writer import write_model
from hf_ext.storage.layout import SINGLE
from hf_ext.storage.safetensors_file import SafetensorsFile
from hf_ext.storage.source import NoBase

_runs: ContextVar[bool] = ContextVar("runs", default=False)  # the loading of the tiny model asks too

# Converters merge the experts of this model, and rename tensors; the others are loaded under their own names.
SIZES = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
}


def is_running() -> bool:
    """Checks whether this thread loads the tiny model, which is not to be loaded the plain way."""
    return _runs.get()


def require_success() -> None:
    """Tries it once in a process, which takes a second. Does nothing with tested versions. Raises AttributeError if decoding
    during loading does not work."""
    if _runs.get():
        return
    token = _runs.set(True)
    try:
        failure = _failure()
    finally:
        _runs.reset(token)
    if failure is not None:
        raise AttributeError(f"{type(failure).__name__}: {failure}")


@cache
def _failure() -> Exception | None:
    """Returns the error with which the tiny model fails to load; None if it loads or need not be tried."""
    if not versions.is_untested("transformers"):
        return None
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
            _load(Path(place))
    except Exception as error:
        return error
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    return None


def _load(place: Path) -> None:
    """Saves, compresses and loads the tiny model. Raises an error if the loaded one has other weights."""
    from transformers import MixtralConfig, MixtralForCausalLM

    original = MixtralForCausalLM(MixtralConfig(**SIZES)).to(torch.bfloat16)
    original.save_pretrained(place / "plain")
    shutil.copytree(place / "plain", place / "compressed", ignore=shutil.ignore_patterns(SINGLE))
    write_model([[SafetensorsFile(place / "plain" / SINGLE)]], NoBase(), place / "compressed", level=1)
    loaded = MixtralForCausalLM.from_pretrained(place / "compressed", dtype=torch.bfloat16)
    for name, weight in original.state_dict().items():
        if not torch.equal(weight, loaded.state_dict()[name]):
            raise ValueError(f"decoding during loading gives other values for '{name}'")
    loaded.save_pretrained(place / "again")
    if {path.name for path in place.joinpath("again").iterdir()} != {path.name for path in place.joinpath("plain").iterdir()}:
        raise ValueError("a loaded model is saved in another form")
