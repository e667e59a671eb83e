"""The processor: from images, questions and answers to a Uni-Med model's inputs."""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer, BatchFeature, ProcessorMixin

# Up to 5.17, transformers.AutoImageProcessor requires torchvision.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from hf_ext.uni_med.configuration_uni_med import IMAGE_TOKEN, QA, TASKS, pair
from hf_ext.uni_med.images import Image, check_rgb

if TYPE_CHECKING:
    from hf_ext.uni_med.modeling_uni_med import UniMedForConditionalGeneration

# Uni-Med's prompt, appendix B of its paper. The task of apply_chat_template(…, task="vqa") goes to the first images.
CHAT_TEMPLATE = """\
{%- macro words(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content if part['type'] == 'text' %}{{ part['text'] }}{% endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set now = namespace(task=task, system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set now.system = words(message['content']) + ' ' -%}
{%- elif message['role'] == 'assistant' -%}
{{ ' ' + words(message['content']) + eos_token }}
{%- else -%}
{{ '[INST] ' }}
{%- if message['content'] is not string -%}
{%- for part in message['content'] if part['type'] == 'image' %}{{ '<Img><image></Img> ' }}
{%- if loop.last and now.task and now.task != 'qa' %}{{ '[' + now.task + '] ' }}{% set now.task = none %}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{ now.system + words(message['content']) + ' [/INST]' }}
{%- set now.system = '' -%}
{%- endif -%}
{%- endfor -%}"""


class UniMedProcessor(ProcessorMixin):
    """Turns images, questions and answers into a Uni-Med model's inputs.

    Args:
        image_processor: any image processor of Transformers; torchvision is not required.
        tokenizer: of the language model. `<image>` is added if it is missing. A tokenizer without a padding token uses its end
            token.
        num_image_tokens: number of tokens that the connector outputs for an image.
        tasks: names of the tasks, as in the model's configuration.
        chat_template: Jinja template; defaults to the paper's prompt.

    Raises:
        ValueError: the tokenizer has no end token.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        num_image_tokens: int = 64,
        tasks: Sequence[str] = TASKS,
        chat_template: str | None = None,
    ):
        if tokenizer is None or tokenizer.eos_token is None:
            raise ValueError("UniMedProcessor requires a tokenizer with an end token (eos_token).")
        self.num_image_tokens = num_image_tokens
        self.tasks = list(tasks)
        self.image_token = IMAGE_TOKEN
        # If it is in the vocabulary, it becomes a special token with the same id, so that it is never split.
        tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)], special_tokens=True)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        super().__init__(image_processor, tokenizer, chat_template=chat_template or CHAT_TEMPLATE)

    @classmethod
    def from_vision_text_pretrained(
        cls,
        vision: str | os.PathLike,
        text: str | os.PathLike,
        model: "UniMedForConditionalGeneration | None" = None,
        **options: Any,
    ) -> "UniMedProcessor":
        """Builds the processor for `UniMedForConditionalGeneration.from_vision_text_pretrained` of the same two models.

        Args:
            vision: folder or Hub id with an image processor and a vision model.
            text: folder or Hub id with a tokenizer.
            model: gives the tasks and the number of image tokens; without it, an image token is assumed to be four
                patches.
            options: of this class.
        """
        image_processor, tokenizer = AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text)
        if model is not None:
            options = {"tasks": model.config.tasks, "num_image_tokens": _count_tokens(model, image_processor)} | options
        elif "num_image_tokens" not in options:
            config = AutoConfig.from_pretrained(vision)
            config = getattr(config, "vision_config", config)
            height, width = pair(config.image_size)
            down, across = pair(config.patch_size)
            options["num_image_tokens"] = (height // down) * (width // across) // 4
        return cls(image_processor, tokenizer, **options)

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        task: str | None | Sequence[str | None] = None,
        answers: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Returns inputs of `UniMedForConditionalGeneration`.

        Args:
            images: for each text an image (PIL in RGB, array of 3 channels, path or URL), a list of images, or None; for a
                single text, its image or images.
            text: questions, if `task` is given: the prompt is added around them. Otherwise whole prompts with `<image>` in
                place of the images, as chat templates make them.
            task: one of `tasks`, or "qa" for a question without an image; one for all texts or one for each. In a whole
                prompt, the task is the first one in brackets, such as [vqa].
            answers: target answers. They add `labels`, which are -100 except for the answer and its end token.
            kwargs: options of the tokenizer and the image processor, such as return_tensors="pt" or max_length. Batches are
                padded unless padding=False: on the left for generation, on the right with answers.

        Returns:
            input_ids and attention_mask (batch, length); with images pixel_values (images, 3, height, width) and, if there
            are tasks, image_tasks (images,); with answers labels (batch, length).

        Raises:
            ValueError: a sample is invalid; the message names it.
        """
        if text is None:
            raise ValueError("There is no text: give a question or a prompt.")
        rows = [text] if isinstance(text, str) else list(text)
        tasks = [task] * len(rows) if task is None or isinstance(task, str) else list(task)
        replies = [answers] if isinstance(answers, str) else None if answers is None else list(answers)
        if not rows:
            raise ValueError("There are no texts.")
        for what, values in (("tasks", tasks), ("answers", replies)):
            if values is not None and len(values) != len(rows):
                raise ValueError(f"There are {len(values)} {what} for {len(rows)} texts.")
        pictures = self._images_by_row(images, rows, isinstance(text, str), tasks)
        prompts, image_tasks = [], []
        for i, row in enumerate(rows):
            prompt, index = self._prompt(i, row, tasks[i], len(pictures[i]))
            if replies is not None and not (isinstance(replies[i], str) and self.image_token not in replies[i]):
                raise ValueError(f"Sample {i}: the answer is {replies[i]!r}, not a text without {self.image_token}.")
            prompts.append(prompt.replace(self.image_token, self.image_token * self.num_image_tokens))
            image_tasks += [index] * len(pictures[i])
        if None in image_tasks and set(image_tasks) != {None}:
            raise ValueError("Some samples with images have a task and others have none; give task= for all of them.")

        options = self._merge_kwargs(self.valid_processor_kwargs, tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        tensors = options["text_kwargs"].pop("return_tensors", None)
        data = self._tokens(prompts, replies, **options["text_kwargs"])
        flat = [check_rgb(image, f"Sample {i}") for i, row in enumerate(pictures) for image in row]  # after the cheaper checks
        if flat:
            data["pixel_values"] = self.image_processor(flat, **options["images_kwargs"])["pixel_values"]
            if image_tasks[0] is not None:
                data["image_tasks"] = image_tasks
        return BatchFeature(data, tensor_type=tensors)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "image_tasks"]

    def _images_by_row(self, images: Any, rows: list[str], single: bool, tasks: list[str | None]) -> list[list[Any]]:
        if images is None:
            return [[] for _ in rows]
        if single:
            return [_flat(images)]
        if not isinstance(images, (list, tuple)):
            images = [images]
        nested = any(image is None or isinstance(image, (list, tuple)) for image in images)
        if nested or any(tasks):
            if len(images) != len(rows):
                raise ValueError(
                    f"There are {len(images)} images for {len(rows)} texts; give a list with an image, a list of images or "
                    "None for each text."
                )
            return [_flat(image) for image in images]
        counts = [row.count(self.image_token) for row in rows]
        if sum(counts) != len(images):
            raise ValueError(
                f"There are {len(images)} images, but {self.image_token} occurs {sum(counts)} times in the texts ({counts}). "
                f"Give questions with task=, or prompts with one {self.image_token} for each image."
            )
        rest = iter(images)
        return [[next(rest) for _ in range(count)] for count in counts]

    def _prompt(self, i: int, text: str, task: str | None, images: int) -> tuple[str, int | None]:
        """Returns the prompt of a row, with one image token per image, and the index of its task."""
        if not isinstance(text, str):
            raise ValueError(f"Sample {i}: the text is a {type(text).__name__}, not a string.")
        places = text.count(self.image_token)
        if task is None:
            if places != images:
                raise ValueError(
                    f"Sample {i}: {images} images, but {self.image_token} occurs {places} times in the text. Give a question "
                    f"with task=, or a prompt with one {self.image_token} for each image."
                )
            match = re.search("|".join(rf"\[({re.escape(name)})\]" for name in self.tasks), text)
            return text, self.tasks.index(match[0][1:-1]) if match else None
        if task not in (*self.tasks, QA):
            raise ValueError(f"Sample {i}: there is no task '{task}'; they are {', '.join((*self.tasks, QA))}.")
        if places:
            raise ValueError(f"Sample {i}: with task=, images take their place by themselves; leave {self.image_token} out.")
        if written := next((name for name in (*self.tasks, QA) if f"[{name}]" in text), None):
            raise ValueError(f"Sample {i}: the text has the task token [{written}]. Leave it out; task='{task}' writes it.")
        if (task == QA) == (images > 0):
            what = "is without images" if task == QA else "needs an image"
            raise ValueError(f"Sample {i}: the task '{task}' {what}, and there are {images}.")
        index = None if task == QA else self.tasks.index(task)
        pictures = f"<Img>{self.image_token}</Img> " * images
        return f"[INST] {text} [/INST]" if task == QA else f"[INST] {pictures}[{task}] {text} [/INST]", index

    def _tokens(self, prompts: list[str], answers: list[str] | None, **options: Any) -> dict[str, Any]:
        padding = options.pop("padding", True)
        side = options.pop("padding_side", None) or ("left" if answers is None else "right")
        limit = options.pop("max_length", None) or self.tokenizer.model_max_length
        multiple = options.pop("pad_to_multiple_of", None)
        if options.pop("truncation", False):
            raise ValueError("truncation=True is not supported, because it would cut images; shorten the text.")
        ids, starts = self._ids(prompts, answers, **options)
        for i, row in enumerate(ids):
            if len(row) > limit:
                raise ValueError(f"Sample {i}: {len(row)} tokens, but the context has {limit}. Shorten the text.")
        length = limit if padding == "max_length" else None
        data = dict(
            self.tokenizer.pad(
                {"input_ids": ids}, padding=padding, max_length=length, padding_side=side, pad_to_multiple_of=multiple
            )
        )
        if answers is not None:
            data["labels"] = []
            for row, start, padded in zip(ids, starts, data["input_ids"]):
                ignored = [-100] * (len(padded) - len(row))
                labels = [-100] * start + row[start:]
                data["labels"].append(ignored + labels if side == "left" else labels + ignored)
        return data

    def _ids(self, prompts: list[str], answers: list[str] | None, **options: Any) -> tuple[list[list[int]], list[int]]:
        """Returns the tokens of each row, with its answer and an end token, and the length of each prompt."""
        end = self.tokenizer.eos_token_id
        # Some tokenizers append an end token to each text. Remove it, because the answer follows.
        ids = [
            row[:-1] if row[-1:] == [end] and (row[-2:-1] == [end] or not prompt.endswith(self.tokenizer.eos_token)) else row
            for row, prompt in zip(self.tokenizer(prompts, **options)["input_ids"], prompts)
        ]
        starts = [len(row) for row in ids]
        if answers is not None:
            whole = self.tokenizer([f"{prompt} {answer}" for prompt, answer in zip(prompts, answers)], **options)["input_ids"]
            alone = self.tokenizer(answers, **options | {"add_special_tokens": False})["input_ids"]
            # Tokenize the answer together with its prompt, unless that changes the tokens of the prompt.
            ids = [
                (full if full[: len(prompt)] == prompt else prompt + answer) for prompt, full, answer in zip(ids, whole, alone)
            ]
            ids = [row if row[-1] == end else [*row, end] for row in ids]
        return ids, starts


def _flat(images: Any) -> list[Any]:
    if images is None:
        return []
    if isinstance(images, (list, tuple)):
        return [image for part in images for image in _flat(part)]
    return [images]


@torch.no_grad()
def _count_tokens(model: "UniMedForConditionalGeneration", image_processor: Any) -> int:
    """Returns the number of tokens that the connector outputs for an image."""
    pixels = image_processor(Image.new("RGB", (64, 64)), return_tensors="pt")["pixel_values"]
    return model.get_image_features(pixels.to(model.device), torch.zeros(1, dtype=torch.long)).pooler_output.shape[1]
