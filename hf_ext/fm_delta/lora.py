"""The extraction of a LoRA, which takes compressed fine-tunes too, under the name that users know."""

from hf_ext.lora_extraction.extract import extract_lora as extract_lora
from hf_ext.lora_extraction.report import LoraReport as LoraReport
