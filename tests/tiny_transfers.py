"""Small language models of three kinds that write lists, with tokenizers of their own, and an adapter that knows a task.

The task: is the last letter of "pick c a b" an early one (up to e) or a late one? The models write lists of such inputs, but do
not answer them. Their weights are written by hand (`lookup_models`).
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from lookup_models import WIDTH, write_judge, write_lists, write_teacher
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from training_seeds import training_seed
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_ext import TransLoraConfig
from hf_ext.trans_lora import Discriminator
from hf_ext.trans_lora.discriminator import NAME

LETTERS = "abcdefghij"
WORDS = ["pick", "pick", "sort", "find"]
SEEDS = ["pick c a b", "pick d e f", "pick a c j", "pick h b g", "pick i f a"]


def letters(draw: random.Random, count: int = 3) -> str:
    return " ".join(draw.sample(LETTERS, count))


def inputs(count: int, seed: int = 0) -> list[str]:
    """Inputs of the task, other than the seeds."""
    draw, texts = random.Random(seed), {}
    while len(texts) < count:
        text = f"pick {letters(draw)}"
        if text not in SEEDS:
            texts[text] = None
    return list(texts)


def answer(text: str) -> str:
    return "early" if text[-1] < "f" else "late"


def is_input(text: str) -> bool:
    return bool(re.fullmatch(r"pick( [a-j]){3}", text))


def documents(count: int) -> list[str]:
    """What the tokenizers are made from: lists of lines that begin with one of three words, and single letters, answered."""
    draw, texts = random.Random(0), []
    for _ in range(count):
        lines = [f"{i}. {draw.choice(WORDS)} {letters(draw, draw.choice([3, 3, 3, 4]))}" for i in range(1, 11)]
        texts.append("\n".join(["Here are 10 examples:", *lines]))
        letter = draw.choice(LETTERS)
        texts += [f"the letter {letter} {answer(letter)}"] * 2
        texts.append(f"is {letter} early? {'Yes' if answer(letter) == 'early' else 'No'}")
    return texts


def build_tokenizer(vocabulary: int, ends: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, which may end all that it reads, as T5's does."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<pad>", "<end>"] if vocabulary % 2 else ["<end>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    questions = [f"Is the above question from pick dataset? {said}" for said in ("Yes", "No")]
    inner.train_from_iterator([*documents(300), *questions], trainer)
    if ends:
        end = ("<end>", inner.token_to_id("<end>"))
        inner.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[end])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", model_max_length=256)


def gpt2(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    sizes = {"n_embd": 2 * WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 256, "tie_word_embeddings": False}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes, **ends))


def llama(tokenizer: PreTrainedTokenizerFast, intermediate_size: int = 160) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": intermediate_size, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"max_position_embeddings": 256, "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **more))


def t5(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ends = {"eos_token_id": end, "pad_token_id": pad, "decoder_start_token_id": pad, "tie_word_embeddings": False}
    return T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes, **ends))


MODELS = {"gpt2": (gpt2, 340), "llama": (llama, 311), "t5": (t5, 340)}


@cache
def _pretrained(kind: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    make, vocabulary = MODELS[kind]
    torch.manual_seed(0)
    tokenizer = build_tokenizer(vocabulary, ends=kind == "t5")
    return write_lists(make(tokenizer), tokenizer).eval(), tokenizer


def pretrained(kind: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A copy of a base model, named after its kind, with its tokenizer."""
    model, tokenizer = _pretrained(kind)
    model = copy.deepcopy(model)
    model.config.name_or_path = model.name_or_path = f"tiny-{kind}"
    return model, tokenizer


def teacher(kind: str = "gpt2") -> tuple[PeftModel, PreTrainedTokenizerFast]:
    """A base model with an adapter that knows the task; it is asked by the input alone (prompt template "{input}")."""
    model, tokenizer = pretrained(kind)
    return write_teacher(get_peft_model(model, lora(kind))).eval(), tokenizer


def judge(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerFast) -> Discriminator:
    """A discriminator on a GPT-2, beside its adapters, if any. It keeps what begins with "pick"."""
    with TemporaryDirectory() as folder:
        alone = get_peft_model(pretrained("gpt2")[0], lora("gpt2"), NAME)
        Discriminator(write_judge(alone), tokenizer, "pick").save_pretrained(folder)
        return Discriminator.from_pretrained(folder, model, tokenizer)


def save_files(folder: Path) -> None:
    """Writes the folders of an old model, of its adapter and of a new model, and files of inputs: source, adapter, target,
    seeds.jsonl and real.jsonl. Both models write inputs of the task and take them for its own."""
    for kind, role in (("gpt2", "source"), ("llama", "target")):
        for part in pretrained(kind):
            part.save_pretrained(folder / role)
    teacher("gpt2")[0].save_pretrained(folder / "adapter")
    for name, texts in (("seeds", SEEDS), ("real", inputs(9, 3))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))


def lora(kind: str, **options) -> LoraConfig:
    task = "SEQ_2_SEQ_LM" if kind == "t5" else "CAUSAL_LM"
    modules = ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else "all-linear"
    return LoraConfig(task_type=task, r=16, lora_alpha=32, target_modules=modules, fan_in_fan_out=kind == "gpt2", **options)


def settings(folder: str | os.PathLike, **options) -> TransLoraConfig:
    """What a transfer of the task takes here."""
    small = {"num_samples": 20, "held_out_share": 0.25, "max_label_length": 4, "num_train_epochs": 2, "learning_rate": 1e-2}
    batches = {"per_device_train_batch_size": 8, "generation_batch_size": 8}
    asked = {"prompt_template": "{input}", "teacher_prompt_template": "{input}", "seed": training_seed()}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    return TransLoraConfig(output_dir=str(folder), **small | batches | asked | quiet | options)
