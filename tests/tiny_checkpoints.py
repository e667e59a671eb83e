"""Folders of safetensors files, built in code and seeded: any names, types and headers, and no model behind them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_ext import fm_delta
from hf_ext.storage.safetensors_file import DTYPES, RawTensor, torch_dtype

TORCH_DTYPES = {name: torch_dtype(name) for name in DTYPES}
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Tensors = Mapping[str, torch.Tensor | RawTensor]

CONFIG = '{\n  "model_type": "bert",\n  "hidden_size": 16\n}\n'


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """An embedding, two layers, a norm and a head: 6,000 values that are distributed as trained weights are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (96, 16),
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.mlp.up_proj.weight": (64, 16),
        "model.layers.1.self_attn.q_proj.weight": (16, 16),
        "model.layers.1.mlp.up_proj.weight": (64, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (96, 16),
    }
    return {name: (torch.randn(shape, generator=generator) * 0.02).to(dtype) for name, shape in shapes.items()}


def fine_tune(tensors: Mapping[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """The same tensors after a little training."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.double() + torch.randn(tensor.shape, generator=generator) * 1e-4).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


def write_safetensors(
    path: Path, tensors: Tensors, metadata: dict[str, str] | None = None, padding: str = "", **dumps: Any
) -> Path:
    """One file, its header written by json.dumps with the given options, and with `padding` behind it: whatever order,
    layout and alignment the safetensors library reads but does not write."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    parts, end = [], 0
    for name, tensor in tensors.items():
        raw = tensor if isinstance(tensor, RawTensor) else RawTensor.from_torch(tensor)
        entries[name] = {"dtype": raw.dtype, "shape": raw.shape, "data_offsets": [end, end + raw.data.size]}
        parts.append(raw.data.tobytes())
        end += raw.data.size
    header = (json.dumps(entries, **dumps) + padding).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join([len(header).to_bytes(8, "little"), header, *parts]))
    return path


def write_folder(folder: Path, tensors: Tensors, config: str | None = CONFIG, shards: int = 1) -> Path:
    """A checkpoint as `save_pretrained` leaves it: one file, or shards and their index, and config.json."""
    names = list(tensors)
    parts = [names[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    for file, part in zip(files, parts, strict=True):
        write_safetensors(folder / file, {name: tensors[name] for name in part}, {"format": "pt"})
    if shards > 1:
        index = {
            "metadata": {},
            "weight_map": {name: file for file, part in zip(files, parts, strict=True) for name in part},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    if config is not None:
        (folder / "config.json").write_bytes(config.encode())
    return folder


def pair(folder: Path, dtype: torch.dtype = torch.float32, shards: int = 1) -> tuple[Path, Path]:
    """Folders of a fine-tune and of its base."""
    base = weights(dtype)
    return write_folder(folder / "tuned", fine_tune(base), shards=shards), write_folder(folder / "base", base)


def compressed_pair(folder: Path, dtype: torch.dtype = torch.float32, shards: int = 1) -> tuple[Path, Path, Path]:
    """Folders of a fine-tune, of its base, and of the fine-tune compressed against it."""
    tuned, base = pair(folder, dtype, shards)
    fm_delta.compress_checkpoint(tuned, base, folder / "small")
    return tuned, base, folder / "small"


def assert_restored(small: Path, expected: Path) -> None:
    """A compressed checkpoint gives back every file of the plain one."""
    back = small.with_name(f"{small.name}-back")
    shutil.rmtree(back, ignore_errors=True)
    fm_delta.decompress_checkpoint(small, back)
    assert contents(back) == contents(expected)


def flip_bit(path: Path, place: float = -1) -> None:
    """Damages a file: flips a bit of its last byte, or of the byte after a share of the file from 0 to 1."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data)) if place >= 0 else -1] ^= 1
    path.write_bytes(data)


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets fields of config.json, or removes them where the new value is None."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_settings(folder: Path, **changes: Any) -> None:
    """Sets fields of a compressed checkpoint's `quantization_config`, for example its base."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config=settings | changes)


def contents(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
