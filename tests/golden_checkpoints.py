"""Compressed files that must always load, and the command that adds those of a new format version:

    PYTHONPATH=. python tests/golden_checkpoints.py

It writes tests/fm_delta/golden/vN-generated, N being the version that this checkout writes, and never touches one that is
there. The tensors come from integers alone, so that the base, which is not kept, can be made again on any machine for ever.
Never change what `tensors` makes for a version that has files: add to it under `if version >= N`.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from hf_ext.storage.delta.file import VERSION
from hf_ext.storage.delta.writer import write_delta
from hf_ext.storage.open import open_plain
from hf_ext.storage.safetensors_file import RawTensor, SafetensorsFile

GOLDEN = Path(__file__).parent / "fm_delta" / "golden"
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def integers(seed: int, count: int) -> np.ndarray:
    """Random 64-bit integers: the outputs of SplitMix64 (Steele, Lea and Flood, 2014) from a seed of our own."""
    x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def bell(seed: int, *shape: int) -> np.ndarray:
    """Numbers of variance 1/3 that are distributed almost normally: sums of four uniform ones, without any rounding."""
    pieces = integers(seed, int(np.prod(shape))).reshape(*shape, 1) >> np.arange(0, 64, 16, dtype=np.uint64)
    fine = integers(seed + 1, int(np.prod(shape))).reshape(shape) >> np.uint64(36)
    units = (pieces & np.uint64(0xFFFF)).sum(-1).astype(np.float64) - 2 * 0xFFFF
    return units / 65536 + fine / 2.0**44


def tensors(version: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A base and its fine-tune, of every kind of tensor that a version of the format knows."""
    base: dict[str, torch.Tensor] = {}
    tuned: dict[str, torch.Tensor] = {}

    def add(name: str, before: np.ndarray, after: np.ndarray, dtype: torch.dtype) -> None:
        base[name], tuned[name] = (torch.from_numpy(values).to(dtype) for values in (before, after))

    def with_landmarks(tensor: torch.Tensor, step: int) -> torch.Tensor:
        """The tensor with zeros, subnormals, infinities and NaNs with payloads, of both signs, in every `step`-th place."""
        width, infinity = 8 * tensor.dtype.itemsize, torch.tensor([torch.inf], dtype=tensor.dtype)
        top = int.from_bytes(RawTensor.from_torch(infinity).data.tobytes(), "little")
        marks = [0, 1, 2, top >> 1, top - 1, top, top + 1, top | top >> 1, (1 << width - 1) - 1]
        marks += [mark | 1 << width - 1 for mark in marks]
        bits = b"".join(mark.to_bytes(width // 8, "little") for mark in marks)
        tensor = tensor.clone()
        tensor.view(-1)[: step * len(marks) : step] = torch.frombuffer(bytearray(bits), dtype=tensor.dtype)
        return tensor

    for seed, (name, dtype) in enumerate(TYPES.items()):
        rows = 8 if name == "F64" else 24
        before = bell(100 + 10 * seed, rows, 64) / 16
        add(f"matrix.{name}", before, before + bell(104 + 10 * seed, rows, 64) / 2**12, dtype)
        add(f"landmarks.{name}", before, before + bell(108 + 10 * seed, rows, 64) / 2**12, dtype)
        base[f"landmarks.{name}"] = with_landmarks(base[f"landmarks.{name}"], 12)
        tuned[f"landmarks.{name}"] = with_landmarks(tuned[f"landmarks.{name}"], 18)
        tuned[f"alone.{name}"] = torch.from_numpy(bell(300 + 10 * seed, 8, 64) / 16).to(dtype)

    # Untouched rows, in an embedding that grew; a vector; a base of another type; a merged LoRA; what is stored.
    before = bell(400, 60, 64) / 16
    changed = (integers(402, 60) % np.uint64(3) == 0)[:, None]
    add("embedding", before, np.where(changed, before + bell(404, 60, 64) / 2**10, before), torch.bfloat16)
    tuned["embedding"] = torch.cat([tuned["embedding"], torch.from_numpy(bell(406, 5, 64) / 16).bfloat16()])
    add("vector", bell(410, 300), bell(410, 300) + bell(412, 300) / 2**12, torch.float32)
    add("cast", bell(420, 12, 64) / 16, bell(420, 12, 64) / 16 + bell(422, 12, 64) / 2**12, torch.float32)
    tuned["cast"] = tuned["cast"].half()  # of a float32 base
    left, right = (np.rint(bell(seed, *shape) * 64) for seed, shape in ((430, (128, 2)), (432, (2, 128))))
    before = bell(434, 128, 128) / 16
    add("lora", before, before + left @ right / 2**20, torch.bfloat16)
    noisy = before + left @ right / 2**20 + bell(436, 128, 128) / 2**12
    add("low_rank", before[:48], noisy[:48], torch.float16)
    if version >= 2:  # in double precision; deflated
        add("lora.F32", before, before + left @ right / 2**20, torch.float32)
        add("int8", np.rint(before[:12] * 99), np.rint(noisy[:12] * 99), torch.int8)
        add("mask", before[:9], before[:9] + 1, torch.bool)
    tuned["steps"], tuned["empty"] = torch.arange(5), torch.empty(0, 3)
    tuned["scalar"] = torch.tensor(0.5)
    tuned["float8"] = torch.from_numpy((integers(440, 64) >> np.uint64(56)).astype(np.uint8)).view(torch.float8_e4m3fn)
    return base, tuned


def write_base(folder: Path, version: int) -> Path:
    """The base of a version's files as a checkpoint folder."""
    folder.mkdir()
    save_file(tensors(version)[0], folder / "model.safetensors")
    return folder


def main() -> None:
    out = GOLDEN / f"v{VERSION}-generated"
    if out.exists():
        raise SystemExit(f"{out} is there already; golden files stay as they are.")
    with tempfile.TemporaryDirectory() as scratch:
        base = open_plain(write_base(Path(scratch) / "base", VERSION))
        base.name = "base"  # what is recorded: no path of this machine
        original = Path(scratch) / "model.safetensors"
        save_file(tensors(VERSION)[1], original, metadata={"format": "pt"})
        made = Path(scratch) / "made"
        made.mkdir()
        write_delta([[SafetensorsFile(original)]], base, made)
        (made / "original.sha256").write_text(hashlib.sha256(original.read_bytes()).hexdigest() + "\n")
        shutil.copytree(made, out)
    print(f"{out}: {(out / 'model.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
