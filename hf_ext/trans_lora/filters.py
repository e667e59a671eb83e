"""Checks the inputs that a target model writes: their length, the user's test, and the filter of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_ext.trans_lora.adapters import adapter_digest
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.discriminator import ANSWER_LENGTH, Discriminator
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.synthesis import Judge, Verdicts
from hf_ext.trans_lora.teacher import Teacher


@dataclass(frozen=True)
class InputFilter:
    """
    Attributes:
        encoder: of the target's prompts.
        discriminator: None with other filters.
        well_formed: the user's test, if there is one.
    """

    args: TransLoraConfig
    encoder: Encoder
    teacher: Teacher
    discriminator: Discriminator | None = None
    well_formed: Callable[[str], bool] | None = None

    @property
    def judge(self) -> Judge | None:
        """Returns the function of args.filter that scores inputs; None if all are kept."""
        return {"discriminator": self._by_discriminator, "token_excess": self._by_excess, "none": None}[self.args.filter]

    def _by_discriminator(self, inputs: Sequence[str]) -> Verdicts:
        assert self.discriminator is not None  # require_discriminator
        scores = self.discriminator.score(inputs, self.args.generation_batch_size, self.args.device)
        return [(score, score > 0.5, None) for score in scores]

    def _by_excess(self, inputs: Sequence[str]) -> Verdicts:
        """Passes all inputs with a label. `keep_best` selects among them at the end."""
        with self.teacher.on(self.args.device):
            return [(score, score is not None, label) for score, label in self.teacher.excess(inputs)]

    def accepts(self, text: str) -> bool:
        """Checks whether a text passes the user's test and fits into the context of all models."""
        readers = [(self.encoder, text, self.args.max_label_length)]
        if self.teacher.encoder is not None:
            readers.append((self.teacher.encoder, text, self.args.max_label_length))
        if self.args.filter == "discriminator":
            assert self.discriminator is not None  # require_discriminator
            readers.append((self.discriminator.encoder, self.discriminator.question(text), ANSWER_LENGTH))
        fits = all(encoder.fits(encoder.prompt(question), room) for encoder, question, room in readers)
        return fits and (self.well_formed is None or self.well_formed(text))

    def settings(self) -> dict[str, Any]:
        """Returns the settings and models that the verdicts depend on."""
        names = ("num_samples", "filter", "keep_share", "held_out_share", "seed")
        discriminator = self.discriminator and {
            "task": self.discriminator.task,
            "prompt": self.discriminator.prompt,
            "checksum": adapter_digest(self.discriminator.model),
        }
        settings = {"discriminator": discriminator} | {name: getattr(self.args, name) for name in names}
        return settings | (self.teacher.settings() if self.args.filter == "token_excess" else {})
