"""Bytes: safetensors files, model folders, the Hub, and the delta format. Needs neither Transformers nor PEFT.

The codec requires numpy and xxhash; the rest also safetensors and huggingface_hub. PyTorch is required only for tensors and to
compress at levels 2 and 3.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
