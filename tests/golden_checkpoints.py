"""Makes the golden files: a compressed file and a merge of each format version, which every later release must read.

    PYTHONPATH=. python tests/golden_checkpoints.py

It writes tests/storage/golden/vN and tests/emr/golden/vN, where N is the version that this checkout writes, and never
overwrites them. The tensors are computed from integers alone, so the bases, which are not stored, can be made again on any
machine. Never change the tensors of a version that has files. For a later version, add tensors under `if version >= N`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from hf_ext import emr
from hf_ext.emr import modulators
from hf_ext.storage.delta import payload
from hf_ext.storage.delta.writer import write_delta
from hf_ext.storage.safetensors_file import RawTensor, SafetensorsFile
from hf_ext.storage.stored import Stored, plain_base

TESTS = Path(__file__).parent
DELTAS, MERGES = TESTS / "storage" / "golden", TESTS / "emr" / "golden"
Tensors = dict[str, torch.Tensor]
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def integers(seed: int, count: int) -> np.ndarray:
    """Returns random 64-bit integers: the outputs of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def bell(seed: int, *shape: int) -> np.ndarray:
    """Returns nearly normal numbers of variance 1/3: sums of four uniform ones, without any rounding."""
    pieces = integers(seed, int(np.prod(shape))).reshape(*shape, 1) >> np.arange(0, 64, 16, dtype=np.uint64)
    fine = integers(seed + 1, int(np.prod(shape))).reshape(shape) >> np.uint64(36)
    units = (pieces & np.uint64(0xFFFF)).sum(-1).astype(np.float64) - 2 * 0xFFFF
    return units / 65536 + fine / 2.0**44


def tensors(version: int) -> tuple[Tensors, Tensors]:
    """Returns a base and its fine-tune, with every kind of tensor that the delta format knows."""
    base: Tensors = {}
    tuned: Tensors = {}

    def add(name: str, before: np.ndarray, after: np.ndarray, dtype: torch.dtype) -> None:
        base[name], tuned[name] = (torch.from_numpy(values).to(dtype) for values in (before, after))

    def with_landmarks(tensor: torch.Tensor, step: int) -> torch.Tensor:
        """Puts zeros, subnormals, infinities and NaNs with payloads, of both signs, at every `step`-th place."""
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
    before = (bell(424, 2, 24, 64) / 16).astype(np.float32)
    add("widened", before[0], before[0] + bell(426, 24, 64) / 2**12, torch.bfloat16)
    base["widened"], tuned["widened"] = base["widened"].float(), tuned["widened"].float()
    before[1, 5:20] = before[1, 5:20].astype(np.float16)
    tuned["mixed"] = torch.from_numpy(before[1])
    left, right = (np.rint(bell(seed, *shape) * 64) for seed, shape in ((430, (128, 2)), (432, (2, 128))))
    before = bell(434, 128, 128) / 16
    add("lora", before, before + left @ right / 2**20, torch.bfloat16)
    noisy = before + left @ right / 2**20 + bell(436, 128, 128) / 2**12
    add("low_rank", before[:48], noisy[:48], torch.float16)
    # Three experts: some rows changed, nothing changed, few values changed.
    experts = bell(450, 3, 64, 1024) / 16
    changed = np.zeros(experts.shape, bool)
    changed[0, ::16], changed[2] = True, integers(452, 65536).reshape(64, 1024) % np.uint64(1000) == 0
    add("experts", experts, np.where(changed, experts + bell(454, 3, 64, 1024) / 2**7, experts), torch.bfloat16)
    # A change in double precision; deflated tensors.
    add("lora.F32", before, before + left @ right / 2**20, torch.float32)
    add("int8", np.rint(before[:12] * 99), np.rint(noisy[:12] * 99), torch.int8)
    add("mask", before[:9], before[:9] + 1, torch.bool)
    tuned["steps"], tuned["empty"] = torch.arange(5), torch.empty(0, 3)
    tuned["scalar"] = torch.tensor(0.5)
    tuned["float8"] = torch.from_numpy((integers(440, 64) >> np.uint64(56)).astype(np.uint8)).view(torch.float8_e4m3fn)
    return base, tuned


def merge_tensors(version: int) -> tuple[Tensors, dict[str, Tensors]]:
    """Returns a base and its fine-tunes, with two float types, untouched rows, longer and shorter vocabularies, heads of their
    own, and an integer."""
    shapes = {"embed_tokens.weight": (96, 16), "mlp.weight": (64, 16), "norm.weight": (16,), "lm_head.weight": (96, 16)}
    base = {name: torch.from_numpy(bell(500 + 2 * i, *shape) / 16).float() for i, (name, shape) in enumerate(shapes.items())}
    base["half"] = torch.from_numpy(bell(510, 30, 10) / 16).bfloat16()
    tasks = {}
    for seed, (task, rows) in enumerate({"plain": 96, "longer": 100, "shorter": 90, "alone": 96}.items(), 1):
        tasks[task] = {}
        for i, (name, tensor) in enumerate(base.items()):
            change = torch.from_numpy(bell(1000 * seed + 2 * i, *tensor.shape) / 2**10)
            change[::3] = 0
            tasks[task][name] = (tensor.double() + change).to(tensor.dtype)
        for name in ("embed_tokens.weight", "lm_head.weight"):
            more = torch.from_numpy(bell(1000 * seed + 100, 4, 16) / 16).float()
            tasks[task][name] = torch.cat([tasks[task][name], more])[:rows] if rows != 96 else tasks[task][name]
        tasks[task]["steps"] = torch.tensor(seed)
        if task != "plain":
            tasks[task]["head.weight"] = torch.from_numpy(bell(1000 * seed + 200, seed, 6)).float()
    base["steps"] = torch.tensor(0)
    return base, tasks


def write_folder(folder: Path, tensors: Tensors) -> Path:
    """Writes a checkpoint folder."""
    folder.mkdir(parents=True)
    vocabulary = len(tensors.get("embed_tokens.weight", ()))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": vocabulary}) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_delta_files(out: Path, scratch: Path) -> None:
    before, after = tensors(payload.VERSION)
    base = plain_base(Stored(str(write_folder(scratch / "base", before))))
    base.name = "base"  # the recorded name has no path of this machine
    original = write_folder(scratch / "tuned", after) / "model.safetensors"
    out.mkdir(parents=True)
    write_delta([[SafetensorsFile(original)]], base, out, name="base")
    (out / "original.sha256").write_text(sha256(original) + "\n")


def write_merge(out: Path, scratch: Path) -> None:
    before, after = merge_tensors(modulators.SEAL.version)
    tasks = {name: write_folder(scratch / name, task) for name, task in after.items()}
    base = write_folder(scratch / "base", before)
    emr.merge(base, tasks, scratch / "merge", method="emr")
    weights = {}
    for name in tasks:
        emr.extract(scratch / "merge", name, scratch / "extracted" / name)
        weights[name] = sha256(scratch / "extracted" / name / "model.safetensors")
    (scratch / "merge" / "README.md").unlink()
    (scratch / "merge" / "weights.json").write_text(json.dumps(weights, indent=2) + "\n")
    shutil.copytree(scratch / "merge", out)


def main() -> None:
    for out, write in (
        (DELTAS / f"v{payload.VERSION}", write_delta_files),
        (MERGES / f"v{modulators.SEAL.version}", write_merge),
    ):
        if out.exists():
            print(f"{out} exists and stays as it is")
            continue
        # A fixed path, because a merge records the path of its base.
        scratch = Path(tempfile.gettempdir(), "golden")
        shutil.rmtree(scratch, ignore_errors=True)
        write(out, scratch)
        shutil.rmtree(scratch)
        print(f"{out}: {sum(path.stat().st_size for path in out.rglob('*') if path.is_file())} bytes")


if __name__ == "__main__":
    main()
