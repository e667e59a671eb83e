"""Bytes: safetensors files, model folders, the Hub, and the delta format. Needs neither Transformers nor PEFT."""
