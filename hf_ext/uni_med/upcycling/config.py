"""The configuration of an upcycled connector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from peft import LoraConfig, PeftType

from hf_ext.uni_med.connector import RouterInput, Routing, check_routing


@dataclass
class CMoEConfig(LoraConfig):
    """Turns the trained projector of a vision-language model into a mixture of experts (CMoE of Uni-Med, arXiv 2409.17508).

    Each expert is the projector plus a low-rank change of its own, s Bₑ Aₑ for each of the projector's weights. Bₑ starts at 0,
    so the model's output does not change at first, whatever the router's weights are. The Aₑ differ, so the experts diverge.

    It takes the options of `LoraConfig`. `r`, `lora_alpha`, `use_rslora`, `lora_dropout` and the two patterns hold for experts
    as for LoRA layers. The other options hold for the LoRA layers, if `target_modules` asks for any.

    Args:
        num_experts: experts of each projector.
        router: weights of the experts. "soft": sigmoid(logits) over their sum. "sparse": softmax over the
            `num_experts_per_tok` largest logits. "hard": expert i for task i. "constant": equal weights.
        router_input: "task_token" (task token and visual token), "token" or "task". Without `tasks` it becomes "token".
        router_hidden_size: size of the router's hidden layer and of a task token.
        num_experts_per_tok: experts of a visual token with the sparse router.
        tasks: names of tasks. A batch gives the task of each sample as `tasks=`, by name or index; -1 means that it is unknown,
            and stands for the mean of all tasks.
        connectors: names of the projectors' modules, for models whose projector this package does not find by its class.
        target_modules: modules that get a LoRA beside the experts, as in `LoraConfig`. None for no others.

    Raises:
        ValueError: the values do not fit together.
    """

    num_experts: int = field(default=5, metadata={"help": "Experts of each projector."})
    router: Routing = field(default="soft", metadata={"help": "Weights of the experts: soft, sparse, hard or constant."})
    router_input: RouterInput = field(
        default="task_token", metadata={"help": "Input of the router: task_token (task and visual token), token or task."}
    )
    router_hidden_size: int = field(default=64, metadata={"help": "Size of the router's hidden layer and of a task token."})
    num_experts_per_tok: int = field(default=2, metadata={"help": "Experts of a visual token with the sparse router."})
    tasks: list[str] | tuple[str, ...] = field(default=(), metadata={"help": "Names of tasks."})
    connectors: list[str] | None = field(
        default=None, metadata={"help": "Names of the projectors' modules. Default: found by their class."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("CMOE")
        self.projectors: list[str] = []  # of the model that gets the adapter; its tuner fills it in
        for name in ("tasks", "connectors"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: give a list of names.")
        self.tasks = list(self.tasks)
        if min(self.r, *self.rank_pattern.values(), self.num_experts, self.router_hidden_size) < 1:
            raise ValueError(
                f"r={self.r}, rank_pattern={self.rank_pattern}, num_experts={self.num_experts}, "
                f"router_hidden_size={self.router_hidden_size}: each must be 1 or more."
            )
        for name, kind in (("router", Routing), ("router_input", RouterInput)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported. Use {', '.join(map(repr, get_args(kind)))}."
                )
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={self.tasks}: give each name once.")
        if not self.tasks:
            if self.router == "hard" or (self.router != "constant" and self.router_input == "task"):
                raise ValueError(f"router={self.router!r} with router_input={self.router_input!r} requires tasks=(name, …).")
            self.router_input = "token"
        check_routing(self.router, self.num_experts, self.num_experts_per_tok, len(self.tasks))
