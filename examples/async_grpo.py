"""Train with TRL's AsyncGRPOTrainer while a vLLM server generates; after each step, the server receives a delta.

    python examples/async_grpo.py --model HuggingFaceTB/SmolLM2-135M-Instruct    # needs vLLM and TRL, in the same environment

The reward is the share of the letter "e" in an answer. TRL streams weights with NCCL, from GPU to GPU. Here they go through a
place (hf_ext.weight_sync), which needs no GPU and no connection between trainer and server: a folder, or a Hub repository or
bucket. The script prints the bytes of each step, and at the end checks that the server holds the weights of the training.
"""

import inspect
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
import torch
from datasets import Dataset
from parts.trl_on_cpu import train_on_cpu
from parts.vllm_server import RunningServer
from transformers import AutoTokenizer, HfArgumentParser
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from hf_ext.weight_sync import PlaceTransfer, Publisher, Subscriber, VLLMServer


@dataclass
class Arguments:
    model: str = field(metadata={"help": "Causal language model with a chat template: a folder or a Hub id."})
    steps: int = field(default=3, metadata={"help": "Optimizer steps."})
    place: str | None = field(default=None, metadata={"help": "Empty folder for the steps; a temporary one by default."})


def share_of_e(completions: list[list[dict]], **_: object) -> list[float]:
    """Returns the reward of each answer."""
    texts = [messages[-1]["content"] for messages in completions]
    return [text.count("e") / max(len(text), 1) for text in texts]


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    train_on_cpu()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = qwen2_5_chat_template  # TRL parses the answers of some templates only
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = sorted({inspect.getdoc(method).split("\n")[0] for method in vars(str).values() if inspect.getdoc(method)})
    prompts = [[{"role": "user", "content": f"Explain: {text}"}] for text in texts]
    with ExitStack() as stack:
        place = args.place or stack.enter_context(tempfile.TemporaryDirectory())
        server = RunningServer(args.model, args.model)
        stack.callback(server.close)
        config = AsyncGRPOConfig(
            output_dir=stack.enter_context(tempfile.TemporaryDirectory()),
            vllm_server_base_url=server.url,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=16,
            max_inflight_tasks=8,
            learning_rate=1e-5,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to=[],
        )
        transfer = PlaceTransfer(Publisher(place, dtype=torch.bfloat16), VLLMServer(server.url, place))
        trainer = AsyncGRPOTrainer(
            args.model,
            share_of_e,
            config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            weight_transfer=transfer,
        )
        trainer.train()
        for step in Subscriber(place).steps():
            size = sum(path.stat().st_size for path in Path(place).glob(f"{'step' if step else 'anchor'}-{step:08d}-*"))
            print(f"step {step}: {size / 1e6:.3f} MB")
        trained = {name: tensor.bfloat16() for name, tensor in trainer.model.state_dict().items()}
        checkpoint = stack.enter_context(tempfile.TemporaryDirectory())
        trainer.model.save_pretrained(checkpoint, state_dict=trained)
        digests = server.call("/weight_checker", {"action": "checksum"})
        server.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": checkpoint}})
        if digests != server.call("/weight_checker", {"action": "checksum"}):
            raise SystemExit("The server does not hold the weights of the training.")
        print(f"The server holds the weights after {args.steps} steps, bit for bit.")


if __name__ == "__main__":
    main()
