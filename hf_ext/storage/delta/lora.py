"""The LoRA of a compressed checkpoint, in a folder of its own that PEFT loads. Its product moves the base of the weights.

docs/fm_delta_format.md describes how. The product is a sum of integers, so it is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hf_ext.errors import CorruptFileError
from hf_ext.storage.delta.payload import Factors
from hf_ext.storage.layout import ADAPTER
from hf_ext.storage.native import FLOATS, _native, aligned, as_numbers
from hf_ext.storage.remote import RemoteFile
from hf_ext.storage.safetensors_file import RawTensor, SafetensorsFile

LORA = Path("lora")  # the folder, beside the compressed weights
BITS = {"F32": 25, "F64": 25, "F16": 14, "BF16": 14}  # of a factor's magnitude, by the type of A, for rank 1 and 2
MOST = 50  # limit of the exponents


@dataclass(frozen=True)
class LoraPart:
    """The LoRA of one tensor.

    Attributes:
        layer: the start of the names of its two tensors, which end in `.lora_A.weight` and `.lora_B.weight`.
        transposed: whether the tensor is inputs × outputs.
        moves: whether it moves the base of the tensor, because the payload is smaller then.
        checksum: XXH3-64 of the data of A, then of B.
    """

    layer: str
    transposed: bool
    moves: bool
    checksum: str


class StoredLora:
    """A LoRA that lies beside compressed weights.

    Args:
        file: the adapter's weights.
        parts: by the names of the compressed tensors.
    """

    def __init__(self, file: SafetensorsFile | RemoteFile, parts: Mapping[str, LoraPart]):
        self.file, self.parts = file, parts

    @classmethod
    def written(cls, folder: Path, layers: Mapping[str, tuple[str, bool]]) -> StoredLora:
        """Opens the LoRA that was written into a folder, with `layer` and `transposed` of each tensor. It moves them all."""
        file = SafetensorsFile(folder / ADAPTER)
        checksums = {name: checksum_of(*_sides(file, layer)) for name, (layer, _) in layers.items()}
        return cls(file, {name: LoraPart(*layers[name], True, checksum) for name, checksum in checksums.items()})

    def check(self) -> None:
        """Raises CorruptFileError unless the adapter is the one that was compressed with these tensors."""
        for name in self.parts:
            self.sides(name)

    def sides(self, name: str) -> tuple[RawTensor, RawTensor]:
        """Returns the LoRA of a tensor: A (rank × inputs) and B (outputs × rank).

        Raises:
            CorruptFileError: the adapter is damaged, or is another one.
        """
        part = self.parts[name]
        try:
            sides = _sides(self.file, part.layer)
            if checksum_of(*sides) == part.checksum and _fit(*sides):
                return sides
        except KeyError:
            pass
        raise self._damaged(name)

    def factors(self, name: str) -> Factors:
        """Returns the integers that approximate a LoRA. Sums of their products are exact: below 2^30, or 2^52 of a LoRA in 32
        bits.

        Raises:
            CorruptFileError: the adapter is damaged, or is another one.
        """
        sides = self.sides(name)
        A, B = (as_numbers(side.data, side.dtype).reshape(side.shape).astype(float) for side in sides)
        left, right = (A.T, B.T) if self.parts[name].transposed else (B, A)
        bits = BITS[sides[0].dtype] - (len(right) - 1).bit_length() // 2
        integers, exponent = [], 0
        for side in (left, right):
            most = float(np.abs(side).max(initial=0))
            if not most < 2.0**MOST:
                raise self._damaged(name)
            scale = min(bits - math.frexp(most)[1], MOST)
            integers.append(np.ascontiguousarray(np.rint(np.ldexp(side, scale)).astype(np.int32)))
            exponent += scale
        return Factors(integers[0], integers[1], exponent)

    def move(self, name: str, base: RawTensor, threads: int = 1) -> RawTensor:
        """Returns the base of a tensor, moved by the tensor's LoRA if this moves it.

        Raises:
            CorruptFileError: the adapter is damaged, or is another one.
        """
        if not self.parts[name].moves:
            return base
        factors = self.factors(name)
        if base.dtype not in FLOATS or base.shape != (len(factors.rows), factors.columns.shape[1]):
            raise self._damaged(name)
        data, values = np.empty(base.data.size, np.uint8), math.prod(base.shape)
        if values:
            dtype, length = FLOATS[base.dtype], base.shape[1]
            _native.move_base(data, aligned(base.data, base.dtype), dtype, length, values, threads, factors)
        return RawTensor(base.dtype, base.shape, data)

    def _damaged(self, name: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.file.path} is damaged, or is not the LoRA that the weights beside it were compressed with: checksum "
            f"mismatch in '{self.parts[name].layer}'. Download or save the whole folder again."
        )


def checksum_of(A: RawTensor, B: RawTensor) -> str:
    digest = xxhash.xxh3_64(A.data)
    digest.update(B.data)
    return digest.hexdigest()


def _sides(file: SafetensorsFile | RemoteFile, layer: str) -> tuple[RawTensor, RawTensor]:
    return file[f"{layer}.lora_A.weight"], file[f"{layer}.lora_B.weight"]


def _fit(A: RawTensor, B: RawTensor) -> bool:
    """Checks that two tensors of a file, whose header may be forged, are matrices with a product."""
    return {A.dtype, B.dtype} <= FLOATS.keys() and len(A.shape) == len(B.shape) == 2 and 0 < A.shape[0] == B.shape[1] <= 1024
