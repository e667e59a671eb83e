"""Bytes: safetensors files, model folders, the Hub, and the delta format. Needs neither Transformers nor PEFT.

Requires numpy, safetensors, xxhash and huggingface_hub, and PyTorch only for tensors and to compress at levels 2 and 3.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
