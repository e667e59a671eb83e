"""Makes tests/fuzz/seeds, where `make fuzz` starts: pieces of a real fine-tune, in the layout of tests/fuzz/decode.cpp.

    PYTHONPATH=. python tests/fuzz/seeds.py --base BASE --fine-tune FINE_TUNE

BASE and FINE_TUNE are checkpoint folders of all-MiniLM-L6-v2 and of a fine-tune of it (see benchmarks/fine_tunes.py). Run it
again when the format of compressed tensors changes.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_ext.storage.delta.low_rank import Factors
from hf_ext.storage.delta.payload import row_length
from hf_ext.storage.native import FLOATS, WIDTHS, _native, cast
from hf_ext.storage.safetensors_file import RawTensor

SEEDS = Path(__file__).parent / "seeds"
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
MATRIX, EMBEDDING, VECTOR = (
    "encoder.layer.5.attention.self.query.weight",
    "embeddings.word_embeddings.weight",
    "encoder.layer.5.attention.output.LayerNorm.weight",
)


def seed(
    tensor: RawTensor, base: RawTensor | None, rows: int | None = None, threads: int = 1, changes: tuple[Factors, ...] = ()
) -> bytes:
    """Returns a tensor's type, sizes, base and body. The base predicts the first `rows` rows; None for all."""
    length, values = row_length(tensor.shape), tensor.data.size // WIDTHS[tensor.dtype]
    base_values = 0 if base is None else values if rows is None else rows * length
    source = b"" if base is None else base.data.tobytes()[: base_values * WIDTHS[base.dtype]]
    prediction = None if base is None else cast(base.data[: len(source)], base.dtype, tensor.dtype)
    body = _native.encode(tensor.data, prediction, FLOATS[tensor.dtype], length, base_values, 1, changes)
    types = FLOATS[tensor.dtype] - 1 + 4 * (FLOATS[base.dtype if base else tensor.dtype] - 1) + 16 * (threads - 1)
    return b"".join((bytes([types]), *(n.to_bytes(3, "little") for n in (values, length, base_values)), source, body))


def seeds(base: dict[str, torch.Tensor], tuned: dict[str, torch.Tensor]) -> Iterator[tuple[str, bytes]]:
    torch.manual_seed(0)
    for name, dtype in TYPES.items():

        def pair(key: str, *where: slice, dtype: torch.dtype = dtype) -> tuple[RawTensor, RawTensor]:
            tensors = (tensors[key][where].to(dtype).contiguous() for tensors in (tuned, base))
            return tuple(map(RawTensor.from_torch, tensors))

        matrix, twin = pair(MATRIX, slice(12), slice(64))
        yield f"{name}-delta", seed(matrix, twin)
        yield f"{name}-alone", seed(matrix, None)
        yield f"{name}-resized", seed(matrix, twin, rows=8, threads=2)
        yield f"{name}-rows", seed(*pair(EMBEDDING, slice(1000, 1024), slice(64)))
        yield f"{name}-vector", seed(*pair(VECTOR))
        other = "BF16" if name == "F32" else "F32"
        yield f"{name}-from-{other}", seed(matrix, pair(MATRIX, slice(12), slice(64), dtype=TYPES[other])[1])
        changes = tuple(
            Factors(*(torch.randint(-n, n, shape, dtype=torch.int32).numpy() for shape in ((12, 2), (2, 64))), exponent)
            for n, exponent in ((50, 18), (2**20, 46))
        )
        for kind, change in zip(("narrow", "wide"), changes):
            before = pair(MATRIX, slice(12), slice(64))[1]
            moves = torch.from_numpy(change.rows.astype(float) @ change.columns) / 2.0**change.exponent
            after = before.to_torch().double() + moves
            yield f"{name}-{kind}", seed(RawTensor.from_torch(after.to(dtype)), before, changes=(change,))
    for name in ("F16", "BF16"):
        before = base[MATRIX][:22].to(TYPES[name])
        for kind, share in (("few", 0.001), ("some", 0.1)):
            changed = torch.rand(before.shape) < share
            after = torch.where(changed, before * (1 + 2**-6), before)
            yield f"{name}-{kind}-changes", seed(*map(RawTensor.from_torch, (after, before)))
            if kind == "few":
                longer = RawTensor.from_torch(torch.cat([after, base[MATRIX][22:26].to(TYPES[name])]))
                yield f"{name}-few-changes-resized", seed(longer, RawTensor.from_torch(before), rows=22)
    large, twin = (RawTensor.from_torch(tensors[MATRIX][:43].bfloat16()) for tensors in (tuned, base))
    yield "BF16-lanes", seed(large, twin)
    yield "BF16-lanes-alone", seed(large, None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkpoint folder of the base model")
    parser.add_argument("--fine-tune", type=Path, required=True, help="checkpoint folder of a full fine-tune of it")
    args = parser.parse_args()
    base, tuned = (load_file(folder / "model.safetensors") for folder in (args.base, args.fine_tune))
    tuned = {name.removeprefix("bert."): tensor for name, tensor in tuned.items()}
    SEEDS.mkdir(exist_ok=True)
    for name, content in seeds(base, tuned):
        (SEEDS / name).write_bytes(content)


if __name__ == "__main__":
    main()
