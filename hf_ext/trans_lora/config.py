"""The configuration of a transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from peft import PeftConfig
from transformers import TrainingArguments

FILTERS = ("discriminator", "none")
MEMBERSHIP = "{input}\nIs the above question from {task} dataset?"
PAPERS_MEMBERSHIP = "{input}\nIs the above question from the {task} dataset? Answer in as few words as possible."  # figure 8


def _setting(default: Any, help: str) -> Any:
    kind = {"default_factory": default} if callable(default) else {"default": default}
    return field(metadata={"help": help}, **kind)


@dataclass
class TransLoraConfig(TrainingArguments):
    """The `TrainingArguments` of a transfer, for the distillation and the stages before it.

    The defaults are the paper's (Trans-LoRA, arXiv 2405.17258, section 4.1) where it gives a value: 20 epochs of batches of 8,
    AdamW at 2e-5 without weight decay and without warm-up.

    Raises:
        ValueError: an invalid value.
    """

    # Values that the command line takes as JSON.
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "generation_kwargs", "chat_template_kwargs"]

    num_samples: int = _setting(1000, "Number of synthetic inputs to keep; in the paper, the size of the real data.")
    filter: str = _setting(
        "discriminator", "Filter of the synthetic inputs: 'discriminator', or 'none' to keep all that are well-formed and new."
    )
    num_shots: int = _setting(5, "Number of seeds in each prompt, drawn at random if there are more.")
    num_items: int = _setting(10, "Length of the list that a prompt begins: the seeds and the inputs to write.")
    temperature: float = _setting(1.0, "Temperature at which inputs are sampled.")
    top_p: float = _setting(1.0, "Probability mass from which inputs are sampled (nucleus sampling).")
    generation_kwargs: dict | str | None = _setting(
        None, "Further arguments of `generate` when inputs are sampled, such as min_p."
    )
    generation_batch_size: int = _setting(32, "Number of prompts in a batch, for generation and scoring, on each process.")
    max_attempts: int | None = _setting(
        None, "Number of inputs after which the run gives up; by default 20 for each input to keep."
    )
    max_input_length: int | None = _setting(
        None, "Maximum length of an input in tokens; by default twice that of the longest seed."
    )
    max_label_length: int = _setting(256, "Maximum length of an answer of the teacher in tokens.")
    prompt_template: str | None = _setting(
        None,
        "Prompt of the student, with {input} in it; by default its chat template, or the input and a line break. A space "
        "separates the answer, unless the template ends with one.",
    )
    teacher_prompt_template: str | None = _setting(None, "Prompt of the teacher, the one that its adapter was trained with.")
    system_prompt: str | None = _setting(None, "System message of the student's chats, except for requests to write inputs.")
    teacher_system_prompt: str | None = _setting(None, "System message of the teacher's chats.")
    chat_template_kwargs: dict | str | None = _setting(
        None, 'Variables of the chat templates of student and teacher, such as {"enable_thinking": false} for Qwen3.'
    )
    discriminator_prompt: str = _setting(
        MEMBERSHIP,
        "Question of train_discriminator whether an input is real, with {input} and {task} in it. A transfer uses the question "
        "that the discriminator was trained with.",
    )
    held_out_share: float = _setting(
        0.05, "Further inputs, as a share of num_samples, on which student and teacher are compared."
    )

    num_train_epochs: float = _setting(20.0, "Epochs of the distillation.")
    learning_rate: float = _setting(2e-5, "Initial learning rate of the distillation.")
    remove_unused_columns: bool = _setting(False, "Not used: samples have no other columns.")
    label_names: list[str] | None = _setting(lambda: ["labels"], "Names of the label columns.")

    @classmethod
    def paper(cls, output_dir: str | Path, dataset_size: int, **options: Any) -> TransLoraConfig:
        """Returns the settings of the paper's runs: as many synthetic inputs as there was real data, and the paper's
        question to the discriminator. All other defaults are the paper's where it gives a value. For MMLU it takes
        num_train_epochs=10 and learning_rate=2e-4, for prompt tuning learning_rate=2e-3.

        The adapters are not part of a TransLoraConfig. The paper's are LoRAs on the query and value projections,
        `LoraConfig(target_modules=["q_proj", "v_proj"])`, and prompts that start at a text, `PromptTuningConfig(
        prompt_tuning_init="TEXT", prompt_tuning_init_text="Answer the following question correctly:",
        tokenizer_name_or_path=…)`.

        Args:
            dataset_size: number of real inputs that the source adapter was trained on.
            options: further fields, which replace those of the paper.
        """
        return cls(str(output_dir), **paper_settings(dataset_size) | options)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filter not in FILTERS:
            raise ValueError(f"filter='{self.filter}' is none of {', '.join(FILTERS)}.")
        lengths = ("max_label_length", "max_input_length")
        for name in ("num_samples", "num_shots", "generation_batch_size", "max_attempts", *lengths):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give 1 or more.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: give more than 0 and at most 1.")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: give more than 0.")
        if self.max_steps <= 0 and self.num_train_epochs < 0:
            raise ValueError(f"num_train_epochs={self.num_train_epochs}: give 0 or more, or max_steps.")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share={self.held_out_share}: give 0 or more, and less than 1.")
        for name in ("generation_kwargs", "chat_template_kwargs"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a JSON object.")
        fixed = {"num_return_sequences", "num_beams", "do_sample", "max_new_tokens", "stop_strings"} & self.sampling.keys()
        if fixed:
            raise ValueError(f"generation_kwargs has {', '.join(sorted(fixed))}, which a transfer sets itself.")
        if self.num_items <= self.num_shots:
            raise ValueError(f"num_items={self.num_items} leaves nothing to write after num_shots={self.num_shots} seeds.")
        for name in ("prompt_template", "teacher_prompt_template"):
            template = getattr(self, name)
            if template is not None and "{input}" not in template:
                raise ValueError(f"{name}={template!r} has no {{input}} in it.")
        for part in ("{input}", "{task}"):
            if part not in self.discriminator_prompt:
                raise ValueError(f"discriminator_prompt={self.discriminator_prompt!r} has no {part} in it.")

    @property
    def sampling(self) -> dict[str, Any]:
        """Returns the further arguments of `generate`."""
        return cast("dict[str, Any]", self.generation_kwargs or {})  # TrainingArguments has parsed JSON

    @property
    def chat_variables(self) -> dict[str, Any]:
        """Returns the variables of the chat templates."""
        return cast("dict[str, Any]", self.chat_template_kwargs or {})

    def training_settings(self, adapter: PeftConfig) -> dict[str, Any]:
        """Returns the settings that a checkpoint of the training of an adapter depends on."""
        names = ("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
        settings = self.named(*names, "lr_scheduler_type", "warmup_steps", "weight_decay", "seed")
        sizes = [name for name in ("peft_type", "r", "target_modules", "num_virtual_tokens") if hasattr(adapter, name)]
        return settings | {f"adapter's {name}": getattr(adapter, name) for name in sizes}

    def named(self, *names: str) -> dict[str, Any]:
        """Returns the settings of these names."""
        return {name: getattr(self, name) for name in names}


def paper_settings(dataset_size: int) -> dict[str, Any]:
    """Returns the paper's values of the fields that have other defaults."""
    return {"num_samples": dataset_size, "discriminator_prompt": PAPERS_MEMBERSHIP}
