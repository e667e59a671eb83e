"""A tensor of several large matrices, such as fused experts, is encoded matrix by matrix and can be read so."""

import math
import struct

import numpy as np
import pytest
import torch
from test_codec import assert_comes_back, bits
from tiny_checkpoints import write_folder

from hf_ext import fm_delta
from hf_ext.errors import BaseModelError, CorruptFileError
from hf_ext.storage import apply, decode, encode
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.codec import decode_rows
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.delta.payload import CODED, STACKED, STORED, read_header, write_payload
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.safetensors_file import RawTensor

SHAPE = (6, 256, 256)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def base_of(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Weights of which some rows and columns are larger than others."""
    *stack, rows, columns = shape
    spread = (randn(*stack, rows, 1, seed=1) + randn(*stack, 1, columns, seed=2)).mul(0.3).exp()
    return (0.02 * randn(*shape, seed=3) * spread).to(dtype)


def dense(base: torch.Tensor) -> torch.Tensor:
    return (base.float() + 1e-3 * randn(*base.shape, seed=4)).to(base.dtype)


def with_lora(base: torch.Tensor) -> torch.Tensor:
    *stack, rows, columns = base.shape
    return (base.float() + 3e-4 * randn(*stack, rows, 8, seed=5) @ randn(*stack, 8, columns, seed=6)).to(base.dtype)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [dense, with_lora, None], ids=["dense", "merged LoRA", "no base"])
def test_fused_experts_are_as_small_as_single_ones(change):
    base = base_of((6, 512, 512))
    tensor, twin = (base, None) if change is None else (change(base), base)
    fused = len(encode(tensor, twin))
    single = sum(len(encode(tensor[i], None if twin is None else twin[i])) for i in range(len(tensor)))
    assert fused < 1.01 * single


@pytest.mark.parametrize(
    "shape", [(512, 256, 3, 3), (64, 8, 2, 2), (256, 128, 14, 14), (1280, 128, 3), (64, 64, 64), (0, 256, 256)]
)
def test_convolutions_and_tiny_matrices_stay_in_one_piece(shape):
    assert read_header(encode(torch.ones(shape))).mode == (CODED if math.prod(shape) else STORED)


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_stacks_of_every_type_come_back_on_any_threads(dtype):
    base = base_of(dtype=dtype)
    for tensor, twin in ((dense(base), base), (with_lora(base), base), (base, None), (base.clone(), base)):
        payload = assert_comes_back(tensor, twin)
        assert read_header(payload).mode == STACKED
        assert encode(tensor, twin, threads=4) == payload
        assert bits(decode(payload, twin, threads=4)) == bits(tensor)


def test_more_dimensions_and_a_single_matrix_come_back():
    for shape in ((2, 3, 256, 256), (1, 300, 512), (1, 1, 64, 1024)):
        base = base_of(shape)
        payload = assert_comes_back(dense(base), base)
        assert read_header(payload).mode == STACKED


def test_each_matrix_has_its_own_mode():
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32))
    fine = base_of((1, 256, 256), torch.float32)
    tensor = torch.cat([noise.reshape(1, 256, 256), fine.bfloat16().float(), fine, torch.zeros(1, 256, 256)])
    assert_comes_back(tensor)
    assert_comes_back(tensor, tensor.flip(0))
    assert read_header(encode(tensor[:1])).mode == STORED  # noise alone does not grow by the headers of matrices


def test_other_bases_predict_what_they_can():
    base = base_of()
    tensor = dense(base)
    for twin, expected in ((base[:4], 4), (torch.cat([base, base]), 6), (base.float(), 6), (base[:, :128], 0), (base[0], 0)):
        header = read_header(assert_comes_back(tensor, twin))
        assert header.base_values == expected * 256 * 256


def test_a_wrong_base_is_an_error():
    base = base_of()
    payload = encode(dense(base), base)
    other = base.clone()
    other[5, 7, 7] += 1
    for twin in (None, other, base[:5], base.float(), base[:, :128]):
        with pytest.raises(BaseModelError):
            decode(payload, twin)


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_rows_are_decoded_without_the_other_matrices(tmp_path):
    base = base_of((6, 2, 256, 256))
    tensors = {"experts": dense(base), "router": dense(base_of((6, 256)))}
    write_folder(tmp_path / "base", {"experts": base, "router": base_of((6, 256))})
    fm_delta.compress_checkpoint(write_folder(tmp_path / "tuned", tensors), tmp_path / "base", tmp_path / "small")
    with fm_delta.open(tmp_path / "small") as checkpoint:
        for rows in (slice(2, 4), slice(None), slice(5, 2), 3, -1, (slice(1, 5, 2), 1, slice(3))):
            for name, tensor in tensors.items():
                index = rows if name == "experts" or not isinstance(rows, tuple) else rows[0]
                assert torch.equal(checkpoint.get_slice(name)[index], tensor[index])
    changed = base.clone()
    changed[:2] += 1
    write_folder(tmp_path / "base", {"experts": changed, "router": base_of((6, 256))})
    source = DeltaCheckpoint([CompressedFile(tmp_path / "small/model.safetensors")], Checkpoint(tmp_path / "base"))
    assert bits(source.read_rows("experts", 2, 6).to_torch()) == bits(tensors["experts"][2:])
    with pytest.raises(BaseModelError, match=r"experts\[2\].*another base"):
        source.read_rows("experts", 1, 3)


def test_rows_beyond_those_of_the_base_are_decoded():
    base = base_of()
    tensor = dense(base)
    payload = encode(tensor, base[:4])
    rows = decode_rows(payload, RawTensor.from_torch(base[3:4]), read_header(payload), 3, 6, threads=2)
    assert bits(rows.to_torch()) == bits(tensor[3:])


def test_a_stack_is_changed_in_place():
    base = base_of((4, 2, 256, 256))
    tensor = base.clone()
    tensor[1, 0] = dense(base[1, 0])  # all values, few, and those of one row
    few = randn(256, 256) > 3
    tensor[2, 1] = torch.where(few, base[2, 1] * 1.0625, base[2, 1])
    tensor[3, 0, 5] *= 2
    payload, live = encode(tensor, base), base.clone()
    assert apply(payload, live).tolist() == [1, 2, 3]
    assert bits(live) == bits(tensor)
    for place in ((3, 1, 0, 0), (0, 0, 255, 255)):
        other = base.clone()
        other[place] += 1
        before = bits(other)
        with pytest.raises(BaseModelError):
            apply(payload, other)
        assert bits(other) == before


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_every_damaged_byte_of_the_table_is_noticed():
    base = base_of((2, 256, 256))
    payload = encode(dense(base), base)
    header, twin = read_header(payload), RawTensor.from_torch(base)
    for place in range(header.body, header.body + 36):
        for bit in (1, 128):
            damaged = payload[:place] + bytes([payload[place] ^ bit]) + payload[place + 1 :]
            with pytest.raises((CorruptFileError, BaseModelError)):  # with the header of the right payload
                decode_rows(damaged, twin, header, 0, 2)


def test_a_huge_stack_without_its_base_takes_no_memory():
    table = struct.pack("<BBQQ", CODED, 1, 0, 0)
    texts, shape = ("F32", "F32", "a", "b"), (1, 1 << 30, 1 << 29)
    payload = write_payload(texts, shape, STACKED, math.prod(shape), 0, table)
    with pytest.raises(BaseModelError, match="needs the tensor 'b'"):
        decode(payload)
    with pytest.raises(BaseModelError, match="another base model"):
        decode(payload, torch.zeros(1, 256, 256))
