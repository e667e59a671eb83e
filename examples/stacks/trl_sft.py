"""Fine-tune with TRL: a PiSSA adapter, or with --full all weights, whose checkpoints are compressed during the training.

python examples/stacks/trl_sft.py --model my-model-small --data chats.jsonl --output_dir my-pissa
python examples/stacks/trl_sft.py --model my-model-small --data chats.jsonl --output_dir my-sft --full

The model is plain, or compressed by hf_ext. Each line of the data is {"messages": […]}. All options of SFTConfig work too.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

from hf_ext import PissaConfig, fm_delta


@dataclass
class Arguments:
    model: str = field(metadata={"help": "folder or Hub id of the model, plain or compressed"})
    data: str = field(metadata={"help": "file of chats, as JSON lines"})
    full: bool = field(default=False, metadata={"help": "train all weights"})


arguments, settings = HfArgumentParser((Arguments, SFTConfig)).parse_args_into_dataclasses()
trainer = SFTTrainer(
    arguments.model,
    settings,
    train_dataset=load_dataset("json", data_files=arguments.data, split="train"),
    peft_config=None if arguments.full else PissaConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    callbacks=[fm_delta.CompressCheckpoints()] if arguments.full else None,
)
trainer.train()
if not arguments.full:
    trainer.save_model()  # a LoRA, which every program that supports LoRA loads
