"""The XXH3-64 checksums of tensors on a GPU.

XXH3 adds up stripes of 64 bytes, and mixes the sums after each block of 1024 bytes. The sums of a block do not depend on other
blocks, so one kernel computes all of them at once. A second one, with one program for each tensor, mixes them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

LEAST = 241  # bytes; XXH3 has other forms for shorter data
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
SMALL_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
START = (SMALL_PRIMES[2], *PRIMES[:4], SMALL_PRIMES[1], PRIMES[4], SMALL_PRIMES[0])
WORD = (1 << 64) - 1

STRIPE, STRIPES = tl.constexpr(8), tl.constexpr(16)  # words of 64 bits in a stripe, stripes in a block
GROUP = tl.constexpr(16)  # blocks that a program sums up
FIELDS = tl.constexpr(3)  # of a tensor: address, bytes, number of the blocks before


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the checksums of contiguous tensors of LEAST bytes or more, all on one device, at multiples of 8 bytes."""
    sizes = [tensor.nbytes for tensor in tensors]
    blocks = [(size - 1) // 1024 for size in sizes]
    before = np.cumsum([0, *blocks])
    groups = [(i, first) for i, count in enumerate(blocks) for first in range(0, count, GROUP.value)]
    device = tensors[0].device

    def moved(numbers: object) -> torch.Tensor:
        return torch.from_numpy(np.array(numbers, np.uint64).view(np.int64)).to(device)

    secret, states = (moved(numbers).view(torch.uint64) for numbers in (np.frombuffer(SECRET, np.uint64), [START] * len(sizes)))
    described = moved([*zip([tensor.data_ptr() for tensor in tensors], sizes, before.tolist())])
    sums = torch.empty(8 * int(before[-1]), dtype=torch.uint64, device=device)
    if groups:
        sum_blocks[(len(groups),)](secret, moved(groups), described, sums, num_warps=1)
    chain_blocks[(len(sizes),)](secret, described, sums, states, num_warps=1)
    return [_finished(state, size) for state, size in zip(states.cpu().numpy().view(np.uint64).tolist(), sizes)]


def _finished(state: Sequence[int], size: int) -> int:
    """Returns the checksum, given the accumulators at the end of the data."""
    total = size * PRIMES[0]
    for i in range(0, 8, 2):
        first, second = (int.from_bytes(SECRET[11 + 8 * j :][:8], "little") ^ state[j] for j in (i, i + 1))
        total += (first * second & WORD) ^ (first * second >> 64)
    total = (total & WORD) ^ (total & WORD) >> 37
    total = total * 0x165667919E3779F9 & WORD
    return total ^ total >> 32


@triton.jit
def sum_blocks(secret, groups, tensors, sums):
    """Sums up the stripes of whole blocks of XXH3, which do not depend on each other."""
    group = groups + tl.program_id(0) * 2
    entry, first = tensors + tl.load(group) * FIELDS, tl.load(group + 1)
    data, size = tl.load(entry).to(tl.pointer_type(tl.uint64)), tl.load(entry + 1)
    stripe, word = tl.arange(0, STRIPES)[:, None], tl.arange(0, STRIPE)[None, :]
    for block in range(first, tl.minimum(first + GROUP, (size - 1) // 1024)):
        total = _stripes(data + (block * STRIPES + stripe) * STRIPE, secret, stripe, word, stripe < STRIPES)
        tl.store(sums + (tl.load(entry + 2) + block) * STRIPE + tl.arange(0, STRIPE), total)


@triton.jit
def chain_blocks(secret, tensors, sums, accumulators):
    """Chains the blocks of XXH3 of a tensor, up to what depends on its length alone."""
    entry = tensors + tl.program_id(0) * FIELDS
    address, size = tl.load(entry), tl.load(entry + 1)
    lane, blocks = tl.arange(0, STRIPE), (size - 1) // 1024
    key = tl.load(secret + STRIPES + lane)
    of_blocks = sums + tl.load(entry + 2) * STRIPE + lane
    state = tl.load(accumulators + tl.program_id(0) * STRIPE + lane)
    for block in range(0, blocks):
        state += tl.load(of_blocks + block * STRIPE)
        state = (state ^ state >> 47 ^ key) * 0x9E3779B1
    stripe, word = tl.arange(0, STRIPES)[:, None], tl.arange(0, STRIPE)[None, :]
    rest, begin = (size - 1 - blocks * 1024) // 64, address.to(tl.pointer_type(tl.uint64)) + blocks * STRIPES * STRIPE
    state += _stripes(begin + stripe * STRIPE, secret, stripe, word, stripe < rest)
    # The last stripe and its part of the secret begin at any byte.
    shifts = 8 * tl.arange(0, 8)[None, :]
    place = lane[:, None] * 8 + tl.arange(0, 8)[None, :]
    last, secret_bytes = (address + size - 64).to(tl.pointer_type(tl.uint8)), secret.to(tl.pointer_type(tl.uint8)) + 121
    value = tl.sum(tl.load(last + place).to(tl.uint64) << shifts, 1)
    swapped = tl.sum(tl.load(last + (place ^ 8)).to(tl.uint64) << shifts, 1)
    keyed = value ^ tl.sum(tl.load(secret_bytes + place).to(tl.uint64) << shifts, 1)
    state += swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32)
    tl.store(accumulators + tl.program_id(0) * STRIPE + lane, state)


@triton.jit
def _stripes(data, secret, stripe, word, active):
    """Returns what some stripes of XXH3 add to the accumulators."""
    value, swapped = tl.load(data + word, active, 0), tl.load(data + (word ^ 1), active, 0)
    keyed = value ^ tl.load(secret + stripe + word)
    return tl.sum(tl.where(active, swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32), 0), 0)
