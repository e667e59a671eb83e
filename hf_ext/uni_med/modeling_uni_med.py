"""Uni-Med: a vision tower, a connector and a language model, as one Transformers model (arXiv 2409.17508)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, torch_compilable_check

from hf_ext.integration import versions
from hf_ext.integration.cards import name_in_text, write_card
from hf_ext.uni_med.configuration_uni_med import IMAGE_TOKEN, UniMedConfig, pair
from hf_ext.uni_med.connector import Connector, Experts, Router

# The name of the keys and values of earlier tokens: `cache` from Transformers 5.24 on.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@dataclass
class UniMedImageFeatures(BaseModelOutputWithPooling):
    """Images as the language model gets them.

    Attributes:
        last_hidden_state: (images, height * width, vision size), the tower's tokens.
        pooler_output: (images, tokens, text size), the connector's output.
        router_weights: (images, tokens, experts), the weights of the experts; None without a mixture.
    """

    router_weights: torch.FloatTensor | None = None


@dataclass
class UniMedCausalLMOutputWithPast(CausalLMOutputWithPast):
    """The language model's output.

    Attributes:
        image_hidden_states: (images, tokens, text size), the connector's output.
        router_weights: (images, tokens, experts) with `output_router_weights=True`.
    """

    image_hidden_states: torch.FloatTensor | None = None
    router_weights: torch.FloatTensor | None = None


class UniMedPreTrainedModel(PreTrainedModel):
    config: UniMedConfig
    config_class = UniMedConfig
    base_model_prefix = "uni_med"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["Connector"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # or loading would skip the buffers of some language models; `_init_weights` uses torch.nn.init

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (Connector, Experts, Router)):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class UniMedForConditionalGeneration(UniMedPreTrainedModel, GenerationMixin):
    """A vision-language model that answers questions about images and text. `forward` takes the output of `UniMedProcessor`;
    its docstring lists the arguments.
    """

    def __init__(
        self, config: UniMedConfig, vision_tower: PreTrainedModel | None = None, language_model: PreTrainedModel | None = None
    ):
        versions.require("Uni-Med", "transformers>=5.16.1")
        super().__init__(config)
        self.vision_tower = AutoModel.from_config(config.vision_config) if vision_tower is None else vision_tower
        if language_model is None:
            language_model = AutoModelForCausalLM.from_config(config.text_config)
        self.connector = Connector(
            config.vision_size,
            language_model.get_input_embeddings().embedding_dim,
            config.connector,
            num_experts=config.num_experts,
            router=config.router,
            router_input=config.router_input,
            top_k=config.num_experts_per_tok,
            resampling=config.resampling,
            resampling_rate=config.resampling_rate,
            num_tasks=len(config.tasks),
        )
        self.language_model = language_model
        self.post_init()

    @classmethod
    def from_vision_text_pretrained(
        cls, vision: str | os.PathLike, text: str | os.PathLike, dtype: str | torch.dtype | None = None, **options: Any
    ) -> UniMedForConditionalGeneration:
        """Joins a pretrained vision tower and a pretrained language model by a connector that is yet to be trained.

        Args:
            vision: folder or Hub id of any vision model that `AutoModel` loads; of a model with several towers, such as
                CLIP or BLIP-2, it uses the vision tower.
            text: folder or Hub id of any model that `AutoModelForCausalLM` loads.
            dtype: as in `from_pretrained`.
            options: fields of `UniMedConfig`, such as connector="moe_mlp". `image_token_id` defaults to the id that
                `<image>` has in the tokenizer of `text`, or gets when it is added.

        Raises:
            ValueError: the options do not fit together, or `vision` has no weights for its vision tower.
            TypeError: the configuration does not have this option.
        """
        fields = UniMedConfig.__dataclass_fields__.keys() - {"vision_config", "text_config"}
        if unknown := options.keys() - fields:
            raise TypeError(f"UniMedConfig has no {', '.join(sorted(unknown))}.")
        if "image_token_id" not in options:
            tokenizer = AutoTokenizer.from_pretrained(text)
            options["image_token_id"] = tokenizer.get_vocab().get(IMAGE_TOKEN, len(tokenizer))
        loading = {} if dtype is None else {"dtype": dtype}
        tower = _vision_tower(vision, loading)
        language_model = AutoModelForCausalLM.from_pretrained(text, **loading)
        # UniMedConfig would reset the attention implementation of the two models.
        parts = {"vision_config": tower.config, "text_config": language_model.config}
        attention = {name: getattr(part, "_attn_implementation", None) for name, part in parts.items()}
        config = UniMedConfig(**parts, attn_implementation=attention, **options)
        config.dtype = language_model.dtype
        model = cls(config, tower, language_model).eval()
        model.connector.to(language_model.dtype)
        model.generation_config = language_model.generation_config
        return model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        *args: Any,
        save_original_format: bool = False,
        **kwargs: Any,
    ) -> None:
        """Saves the model as usual, and a model card if the folder has none. Tensors keep their names in memory, because
        Trainer resumes by them; Transformers saves some towers under older names."""
        kwargs |= {"save_original_format": save_original_format}
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if self.should_save_on_this_rank(is_main_process) and not getattr(self, "_hf_peft_config_loaded", False):
            parts: tuple[Any, Any] = (self.config.vision_config, self.config.text_config)
            bases = [part.name_or_path for part in parts if part.name_or_path]
            vision, text = (name_in_text(part.name_or_path or part.model_type) for part in parts)
            figures: dict[str, Any] = {"vision": vision, "text": text, "config": self.config}
            write_card(Path(save_directory), "uni_med", bases, "finetune", tags=["uni-med"], **figures)

    def train(self, mode: bool = True) -> UniMedForConditionalGeneration:
        """Sets the training mode. A frozen vision tower stays in evaluation mode."""
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.vision_tower.parameters()):
            self.vision_tower.eval()
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_output_embeddings(value)

    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        image_tasks: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Any,
    ) -> UniMedImageFeatures:
        """Returns images as embeddings for the language model.

        Args:
            pixel_values: (images, 3, height, width).
            image_tasks: (images,).
            interpolate_pos_encoding: for images of another size than the tower's, if the tower supports it.

        Raises:
            ValueError: a required task is missing, a task is unknown, or the tower's tokens cannot be resampled.
        """
        tasks = self.config.tasks
        if image_tasks is None and self.connector.needs_task:
            raise ValueError(
                f"This model routes images by task, and no task is given. Begin the text with a tag, such as '[{tasks[0]}] …', "
                f"or pass task= to the processor (image_tasks= to the model). The tasks are {', '.join(tasks)}."
            )
        if image_tasks is not None:
            torch_compilable_check(
                (len(image_tasks) == len(pixel_values)) and ((image_tasks >= 0) & (image_tasks < len(tasks))).all(),
                lambda: (
                    f"image_tasks {image_tasks.tolist()} for {len(pixel_values)} images: give one for each image, within 0…"
                    f"{len(tasks) - 1} ({', '.join(tasks)})."
                ),
            )
        options = {"interpolate_pos_encoding": True} if interpolate_pos_encoding else {}
        features = self.vision_tower(pixel_values.to(self.vision_tower.dtype), return_dict=True, **options)
        tokens, pooled = features.last_hidden_state, getattr(features, "pooler_output", None)
        if self.training and pooled is not None and pooled.requires_grad:
            tokens = tokens + 0 * pooled.sum()  # DDP requires gradients of all trained weights, those of a pooler too
        tokens, grid = self._grid(tokens, pixel_values.shape[-2:])
        embeddings, weights = self.connector(tokens.to(next(self.connector.parameters()).dtype), grid, image_tasks)
        return UniMedImageFeatures(last_hidden_state=tokens, pooler_output=embeddings, router_weights=weights)

    def _grid(self, tokens: torch.Tensor, size: torch.Size) -> tuple[torch.Tensor, tuple[int, int]]:
        """Returns the tower's tokens of patches, row by row, without earlier ones such as a class token, and their grid."""
        if tokens.dim() == 4:  # (images, size, height, width)
            return tokens.flatten(2).transpose(1, 2), (tokens.shape[2], tokens.shape[3])
        count = tokens.shape[1]
        if patch := getattr(self.config.vision_config, "patch_size", None):
            height, width = pair(patch)
            grid = size[0] // height, size[1] // width
            if (extra := count - grid[0] * grid[1]) >= 0:
                return tokens[:, extra:], grid
        height = round(math.sqrt(count * size[0] / size[1]))  # the tower merges patches
        if height == 0 or count % height:
            raise ValueError(
                f"The vision tower gives {count} tokens for {size[0]} x {size[1]} pixels, which do not form a grid."
            )
        return tokens, (height, count // height)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        image_tasks: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, UniMedImageFeatures] | None = None,
        output_router_weights: bool = False,
        interpolate_pos_encoding: bool = False,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> UniMedCausalLMOutputWithPast:
        """Returns the language model's output, with images in place of the image tokens.

        Args:
            input_ids: (batch, length), with `config.image_token_id` for each token of an image.
            pixel_values: (images, 3, height, width), in the order of the rows. Rows may have no image.
            image_tasks: (images,), the index of each image's task in `config.tasks`, if the connector routes by task.
            attention_mask: (batch, length).
            inputs_embeds: (batch, length, text size), in place of `input_ids`, without images.
            labels: (batch, length), -100 for positions without loss; adds `loss`.
            mm_encoder_outputs: {"image": output of `get_image_features`}, in place of `pixel_values`.
            output_router_weights: also return the experts' weights.
            interpolate_pos_encoding: for images of another size than the tower's, if the tower supports it.
            position_ids, logits_to_keep, kwargs: arguments of the language model.
            past_key_values, cache: names of one argument of the language model; Transformers 5.24 renamed it.

        Raises:
            ValueError: inputs exclude each other, or images and image tokens do not match.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds.")
        cache = past_key_values if cache is None else cache
        images = (mm_encoder_outputs or {}).get("image")
        if pixel_values is not None:
            if images is not None:
                raise ValueError("Give either pixel_values or mm_encoder_outputs.")
            images = self.get_image_features(pixel_values, image_tasks, interpolate_pos_encoding, return_dict=True)
        if input_ids is not None:
            inputs_embeds = self._embeddings(input_ids, images, cache is not None and _has_started(cache))
        elif images is not None:
            raise ValueError("Images replace the image tokens in input_ids: give input_ids, not inputs_embeds.")
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            logits_to_keep=logits_to_keep,
            **{CACHE: cache},
            **kwargs,
        )
        return UniMedCausalLMOutputWithPast(
            loss=outputs.loss,
            logits=outputs.logits,
            **{CACHE: getattr(outputs, CACHE, None)},
            hidden_states=outputs.hidden_states,
            attentions=getattr(outputs, "attentions", None),
            image_hidden_states=None if images is None else images.pooler_output,
            router_weights=images.router_weights if images is not None and output_router_weights else None,
        )

    def _embeddings(self, input_ids: torch.Tensor, images: UniMedImageFeatures | None, started: bool = False) -> torch.Tensor:
        """Returns embeddings (batch, length, text size), with images inserted. `started`: images came before."""
        here = input_ids == self.config.image_token_id
        embeddings = self.get_input_embeddings()(input_ids.masked_fill(here, 0))
        if images is None:
            torch_compilable_check(
                started or not here.any(), "There are image tokens in input_ids, but no images: give pixel_values."
            )
            return self._joined(embeddings)
        count, tokens, _ = images.pooler_output.shape
        # For a chunk of the prompts, `generate` passes all its image tokens as one image, without the tower's.
        is_chunk = images.last_hidden_state is None
        torch_compilable_check(
            here.sum() == count * tokens and (is_chunk or (here.sum(1) % tokens == 0).all()),
            lambda: (
                f"There are {here.sum(1).tolist()} image tokens in the rows of input_ids, but {count} images of {tokens} "
                f"tokens each. Make the inputs with UniMedProcessor(…, num_image_tokens={tokens})."
            ),
        )
        here = here[..., None].to(embeddings.device)  # the language model may be on another device
        return embeddings.masked_scatter(here, images.pooler_output.to(embeddings))

    def _joined(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings with a zero gradient for the vision tower and the connector, if they are trained: it sends a
        blank image through them. In distributed training every process needs one, even if its batch has no images."""
        parameters = (*self.vision_tower.parameters(), *self.connector.parameters())
        if not (self.training and torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)):
            return embeddings
        size = pair(getattr(self.config.vision_config, "image_size", 224))
        blank = torch.zeros(1, 3, *size, device=self.vision_tower.device)
        task = blank.new_zeros(1, dtype=torch.long) if self.connector.needs_task else None
        return embeddings + 0 * self.get_image_features(blank, task, return_dict=True).pooler_output.sum().to(embeddings)


def _has_started(cache: Cache) -> bool:
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # linear attention alone, as in Mamba, has no length
        return cache.has_previous_state()


def _vision_tower(source: str | os.PathLike, loading: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(source)
    if not hasattr(config, "vision_config"):
        return AutoModel.from_pretrained(source, **loading)
    # A checkpoint of several towers has a prefix for the tensors of each.
    tower, info = AutoModel.from_pretrained(
        source,
        config=config.vision_config,
        key_mapping={r"^(model\.)?(vision_tower|vision_model)\.(vision_model\.)?": ""},
        output_loading_info=True,
        **loading,
    )
    if missing := sorted(name for name in info["missing_keys"] if not name.startswith(("pooler", "head"))):
        raise ValueError(f"{source} has no weights for its vision tower's {missing[0]} and {len(missing) - 1} more.")
    return tower
