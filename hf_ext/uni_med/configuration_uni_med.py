"""The configuration of a Uni-Med model."""

import importlib
import math
from collections.abc import Sequence
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from hf_ext.uni_med.connector import Kind, Resampling, RouterInput, Routing, check_routing

TASKS = ("vqa", "refer", "identify", "caption", "cls")
IMAGE_TOKEN = "<image>"
QA = "qa"  # questions without an image
#: Modules that the first configuration imports. `hf_ext.registration` adds the model's, with which the model is registered.
IMPORTS: list[str] = []


@strict
class UniMedConfig(PreTrainedConfig):
    """Configuration of `UniMedForConditionalGeneration`. The defaults are the paper's model (Uni-Med, arXiv 2409.17508,
    section 3): BLIP-2's ViT-g, Llama-2-7B, and a connector of five MLP experts with a soft router.

    Args:
        vision_config: configuration of the vision tower, any of `AutoModel`'s.
        text_config: configuration of the language model, any of `AutoModelForCausalLM`'s.
        connector: "linear", "mlp" (two layers), "moe_linear" or "moe_mlp".
        num_experts: experts of a mixture.
        router: "soft" weighs all experts by sigmoid(logits) over their sum; "sparse" takes the softmax over the
            `num_experts_per_tok` largest logits, and needs sizes that are multiples of 8; "hard" gives task i to expert i;
            "constant" weighs all equally.
        router_input: input of the router: "task_token" (task token and visual token), "token" or "task".
        num_experts_per_tok: experts of a visual token with the sparse router.
        resampling: "projection" concatenates neighboring visual tokens, "avg_pool" and "max_pool" pool squares of them.
        resampling_rate: number of visual tokens that become one.
        tasks: names of the tasks of images; each has a task token to learn.
        image_token_id: placeholder in `input_ids` for an embedding of an image; may lie outside the vocabulary.

    Raises:
        ValueError: the values do not fit together.
    """

    model_type = "uni_med"
    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}
    keys_to_ignore_at_inference = ["past_key_values", "cache", "image_hidden_states", "router_weights"]

    vision_config: dict | PreTrainedConfig | None = None
    text_config: dict | PreTrainedConfig | None = None
    connector: Kind = "moe_mlp"
    num_experts: int = 5
    router: Routing = "soft"
    router_input: RouterInput = "task_token"
    num_experts_per_tok: int = 2
    resampling: Resampling = "projection"
    resampling_rate: int = 4
    tasks: list[str] | tuple[str, ...] = TASKS
    image_token_id: int = 32000
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any):
        for module in IMPORTS:
            importlib.import_module(module)
        self.vision_config = _part(self.vision_config, "blip_2_vision_model")
        self.text_config = text_config = _part(self.text_config, "llama")
        super().__post_init__(**kwargs)
        self.tasks = list(self.tasks)
        if self.resampling_rate < 1 or self.num_experts < 1:
            raise ValueError(f"resampling_rate={self.resampling_rate}, num_experts={self.num_experts}: each must be 1 or more.")
        if self.resampling != "projection" and math.isqrt(self.resampling_rate) ** 2 != self.resampling_rate:
            raise ValueError(f"Pooling requires a square number of tokens: resampling_rate={self.resampling_rate} is none.")
        if not self.tasks or len({*self.tasks, QA}) <= len(self.tasks):
            raise ValueError(f"tasks={self.tasks}: give at least one name, each only once, and not '{QA}', which has no image.")
        if self.connector.startswith("moe"):
            check_routing(self.router, self.num_experts, self.num_experts_per_tok, len(self.tasks))
            if self.router == "sparse" and any(size % 8 for size in (self.connector_input_size, text_config.hidden_size)):
                raise ValueError(
                    "The sparse router's grouped matrix products require sizes that are multiples of 8; the connector's "
                    f"input has {self.connector_input_size} and the language model {text_config.hidden_size}. Use another "
                    "router."
                )

    @property
    def vision_size(self) -> int:
        """Size of the vision tower's tokens."""
        assert isinstance(self.vision_config, PreTrainedConfig)  # __post_init__ builds it
        sizes = getattr(self.vision_config, "hidden_sizes", None)  # towers with stages have one size per stage
        size = sizes[-1] if sizes else getattr(self.vision_config, "hidden_size", None)
        if size is None:
            raise ValueError(f"The configuration of the vision tower ({self.vision_config.model_type}) has no hidden_size.")
        return size

    @property
    def connector_input_size(self) -> int:
        return self.vision_size * (self.resampling_rate if self.resampling == "projection" else 1)


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Returns height and width from a size that may be one number for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _part(config: dict | PreTrainedConfig | None, model_type: str) -> PreTrainedConfig:
    """Builds the configuration of a part. The type is the default if the configuration has none."""
    if isinstance(config, PreTrainedConfig):
        return config
    return AutoConfig.for_model(**{"model_type": model_type} | (config or {}))
