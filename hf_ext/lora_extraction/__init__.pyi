from .extract import extract_lora as extract_lora
from .report import LoraReport as LoraReport
