"""Fine-tune all weights with Unsloth, with compressed checkpoints: python examples/stacks/unsloth_sft.py MODEL chats.jsonl

Requires a GPU.
"""

import sys

from unsloth import FastLanguageModel  # isort: skip  # before transformers and trl, which it changes
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from hf_ext import fm_delta

name, data = sys.argv[1:]
model, tokenizer = FastLanguageModel.from_pretrained(name, max_seq_length=2048, load_in_4bit=False, full_finetuning=True)
chats = load_dataset("json", data_files=data, split="train")
texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats["messages"]]
trainer = SFTTrainer(
    model,
    SFTConfig("my-run", learning_rate=2e-5, save_steps=500),
    train_dataset=chats.add_column("text", texts).select_columns("text"),
    processing_class=tokenizer,
    callbacks=[fm_delta.CompressCheckpoints(base=name)],
)
trainer.train()
