"""Codes blocks of a compressed tensor again, with any number of lanes.

The encoder of hf_ext interleaves only long blocks, but a decoder takes any kind for any size, and the short ones are quick to
test.
"""

import struct

import numpy as np
import reference_codec as reference
from reference_codec import ESCAPE, LANES, LINEAR, TABLE_BITS, TAIL, TAIL_BITS, TAIL_START


def symbol_of(s: int, frequencies: np.ndarray) -> tuple[int, int, int]:
    """Returns the symbol of a number, its extra bits and how many these are."""
    size = (s if s >= 0 else -1 - s) - LINEAR
    symbol, extra, bits = s + LINEAR, 0, 0
    if size >= 0:
        tail = sum(size >= start for start in TAIL_START) - 1
        symbol, extra, bits = TAIL + 2 * tail + (s < 0), size - TAIL_START[tail], TAIL_BITS[tail]
    if size >= 0 and extra >> bits or not frequencies[symbol]:
        return ESCAPE, s & 0xFFFFFFFF, 32
    return symbol, extra, bits


def encode_numbers(numbers: np.ndarray, lanes: int, shift: np.ndarray, table: np.ndarray, tables: np.ndarray) -> bytes:
    """Inverts `reference_codec.decode_numbers`."""
    states, words = [1 << 16] * lanes, []

    def make_room(lane: int, limit: int) -> None:
        if states[lane] >= limit:
            words.append(states[lane] & 0xFFFF)
            states[lane] >>= 16

    def put_bits(lane: int, value: int, count: int) -> None:
        make_room(lane, 1 << (32 - count))
        states[lane] = states[lane] << count | value

    starts = np.cumsum(tables, axis=1) - tables
    for first in range(len(numbers) - 1 - (len(numbers) - 1) % lanes, -1, -lanes):
        turn = [*enumerate(range(first, min(first + lanes, len(numbers))))][::-1]
        coded = [symbol_of(int(numbers[i]) >> int(shift[i]), tables[table[i]]) for _, i in turn]
        for (lane, _), (_, extra, bits) in zip(turn, coded):
            for part in (extra >> 16, extra & 0xFFFF) if bits == 32 else (extra,):
                put_bits(lane, part, min(bits, 16))
        for lane, i in turn:
            put_bits(lane, int(numbers[i]) & ((1 << int(shift[i])) - 1), int(shift[i]))
        for (lane, i), (symbol, *_) in zip(turn, coded):
            frequency, start = (int(array[table[i], symbol]) for array in (tables, starts))
            make_room(lane, frequency << (32 - TABLE_BITS))
            states[lane] = (states[lane] // frequency << TABLE_BITS) + states[lane] % frequency + start
    return struct.pack(f"<{lanes}I", *states) + struct.pack(f"<{len(words)}H", *words[::-1])


def recoded(body: bytes, kind: int, base: np.ndarray | None, code: int, *sizes: int) -> bytes:
    """Returns a body whose entropy-coded blocks are of another kind. `sizes` are values, row length and base values."""
    calls, decode_numbers = [], reference.decode_numbers

    def keep(data: bytes, width: int, *contexts: np.ndarray) -> np.ndarray:
        numbers = decode_numbers(data, width, *contexts)
        calls.append((len(data), numbers, contexts))
        return numbers

    reference.decode_numbers = keep
    try:
        reference.decode_body(body, base, code, *sizes)
    finally:
        reference.decode_numbers = decode_numbers
    at = 14 + struct.unpack_from("<I", body, 10)[0]
    sizes_left, entries, end = len(body) - at, [], at
    while sizes_left:  # the table has as many entries as the sizes in it say
        entries.append(struct.unpack_from("<I", body, end)[0])
        sizes_left, end = sizes_left - 4 - (entries[-1] >> 2), end + 4
    table, blocks = [], []
    for entry in entries:
        data, end = body[end : end + (entry >> 2)], end + (entry >> 2)
        if entry & 3 and data:
            size, numbers, contexts = calls.pop(0)
            data = data[: len(data) - size] + encode_numbers(numbers, LANES[kind], *contexts)
            entry = kind
        table.append(len(data) << 2 | entry & 3)
        blocks.append(data)
    assert not calls
    return body[:at] + struct.pack(f"<{len(table)}I", *table) + b"".join(blocks)
