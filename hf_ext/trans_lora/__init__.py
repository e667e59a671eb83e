"""Trans-LoRA: an adapter moved to another base model, without the task's data (arXiv 2405.17258)."""

from hf_ext.trans_lora.discriminator import Discriminator, train_discriminator
from hf_ext.trans_lora.generation import Completion, Server
from hf_ext.trans_lora.report import TransferReport
from hf_ext.trans_lora.statistics import distinct, mmd
from hf_ext.trans_lora.synthesis import Candidate
from hf_ext.trans_lora.transfer import load_model, read_inputs, transfer

__all__ = [
    "Candidate",
    "Completion",
    "Discriminator",
    "Server",
    "TransferReport",
    "distinct",
    "load_model",
    "mmd",
    "read_inputs",
    "train_discriminator",
    "transfer",
]
