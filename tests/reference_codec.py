"""A second decoder of compressed tensors, simple and slow, for tests of the C++ codec.

It follows docs/fm_delta_format.md and uses the same terms. It shares nothing with the codec but the default tables.
"""

import struct
from dataclasses import dataclass

import numpy as np

from hf_ext.storage.native import _native

BLOCK = 256 * 1024
LANES = {1: 1, 2: 64, 3: 8}
LINEAR, TAIL, ESCAPE, SYMBOLS = 24, 48, 62, 64
TAIL_BITS = (3, 4, 5, 6, 7, 8, 10)
TAIL_START = (0, 8, 24, 56, 120, 248, 504)
ALONE_TABLE, TABLES, TABLE_BITS = 32, 33, 11
FEW_CHANGES = 8
COARSE = 16


@dataclass
class Class:
    """Values whose exponent field is below `end` and that are in no class before: how their changes are coded."""

    end: int
    gap_shift: int
    gap_table: int
    size_shift: int
    size_table: int
    center: int


@dataclass(frozen=True)
class FloatType:
    """A float type: the widths of its fields, the numbers of low bytes that may travel apart, NumPy's name for it."""

    width: int
    mantissa: int
    exponent: int
    planes: tuple[int, ...]
    numpy: str | None

    @property
    def unsigned(self) -> np.dtype:
        return np.dtype(f"<u{self.width // 8}")

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def exponent_bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    def exponent_field(self, bits: np.ndarray) -> np.ndarray:
        return (bits.astype(np.uint64) >> np.uint64(self.mantissa)).astype(np.int64) & ((1 << self.exponent) - 1)


TYPES = {
    1: FloatType(32, 23, 8, (0, 1, 2), "<f4"),
    2: FloatType(16, 10, 5, (0,), "<f2"),
    3: FloatType(16, 7, 8, (0,), None),
    4: FloatType(64, 52, 11, (5, 6), "<f8"),
}


class Bits:
    """The side information: bits, the lowest of each byte first."""

    def __init__(self, data: bytes) -> None:
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tolist()
        self.position = 0

    def take(self, count: int) -> int:
        """Returns the next bits as a number; the first is the lowest."""
        require(self.position + count <= len(self.bits), "the side information ends too early")
        taken = self.bits[self.position : self.position + count]
        self.position += count
        return sum(bit << i for i, bit in enumerate(taken))

    def rice(self, k: int, width: int = 16) -> int:
        """Reads a signed number: zigzag, then quotient by 2^k in unary and rest in k bits, or 20 ones and the code itself."""
        quotient = 0
        while quotient < 20 and self.take(1):
            quotient += 1
        code = self.take(width) if quotient == 20 else (quotient << k) + self.take(k)
        return -(code + 1) // 2 if code % 2 else code // 2

    def scales(self, count: int) -> np.ndarray:
        """Reads a list of scales in quarter octaves: a center, k, and the difference of each scale from the center."""
        if count == 0:
            return np.zeros(0, np.int64)
        center, k = self.take(16), self.take(3)
        center -= (center >> 15) << 16
        return np.clip(np.array([center + self.rice(k) for _ in range(count)]), -8000, 8000)

    def table(self, default: np.ndarray) -> np.ndarray:
        """Reads a table of the tensor's own: k, and the differences of 63 frequencies from the default ones."""
        k = self.take(3)
        table = np.array([frequency + self.rice(k) for frequency in default[:63].tolist()] + [0])
        require(table.min() >= 0 and table.sum() == 1 << TABLE_BITS, "a table's frequencies are impossible")
        return table

    def classes(self, infinity: int) -> list[Class]:
        """Reads the classes of the values that have a base; `infinity` is the exponent field of infinity."""
        count, classes = self.take(4) + 1, []
        for i in range(count):
            end = infinity if i == count - 1 else self.take(8)
            classes.append(Class(end, *(self.take(bits) for bits in (5, 4, 5, 4, 16))))
        ends = [each.end for each in classes]
        codes = all(
            max(each.gap_shift, each.size_shift) <= 16 and max(each.gap_table, each.size_table) < 12 for each in classes
        )
        require(codes and ends == sorted(ends), "the classes are impossible")
        return classes

    def factors(self, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """Reads a low-rank change: row factors, column factors, the exponent, and whether the sums are wide."""
        rank, exponent = self.take(16), self.take(16)
        exponent -= (exponent >> 15) << 16
        possible = 1 <= rank <= 1024 and abs(exponent) <= 100
        require(possible and len(self.bits) - self.position >= rank * (rows + columns), "the low-rank factors are impossible")
        lists = []
        for _ in range(rank):
            for count in (rows, columns):
                k = self.take(5)
                lists.append([self.rice(k, 32) for _ in range(count)])
        left = np.array(lists[::2], np.int64).reshape(rank, rows).T
        right = np.array(lists[1::2], np.int64).reshape(rank, columns)
        most = rank * int(np.abs(left).max(initial=0)) * int(np.abs(right).max(initial=0))
        require(most < 1 << 53, "the low-rank factors are impossible")
        return left, right, exponent, most >= 1 << 24


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def to_ordered(bits: np.ndarray, kind: FloatType) -> np.ndarray:
    """Returns floats as integers in the order of their values: negative ones inverted, the others with the top bit set."""
    sign = bits.dtype.type(1 << (kind.width - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def from_ordered(ordered: np.ndarray, kind: FloatType) -> np.ndarray:
    sign = ordered.dtype.type(1 << (kind.width - 1))
    return np.where(ordered & sign, ordered ^ sign, ~ordered)


def to_rotated(bits: np.ndarray, kind: FloatType) -> np.ndarray:
    """Returns floats as integers with the sign in the lowest bit."""
    one, top = bits.dtype.type(1), bits.dtype.type(kind.width - 1)
    return bits << one | bits >> top


def from_rotated(rotated: np.ndarray, kind: FloatType) -> np.ndarray:
    one, top = rotated.dtype.type(1), rotated.dtype.type(kind.width - 1)
    return rotated >> one | rotated << top


def numbers_of(bits: np.ndarray, kind: FloatType) -> np.ndarray:
    """Returns the values of floats as float64; 0 for NaN and infinity."""
    numbers = (bits.astype("<u4") << np.uint32(16)).view("<f4") if kind.numpy is None else bits.view(kind.numpy)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(numbers), numbers, 0).astype("<f8")


def round_to(numbers: np.ndarray, kind: FloatType) -> np.ndarray:
    """Rounds numbers (float64) to floats, by way of float32 unless the type is float64."""
    with np.errstate(all="ignore"):
        if kind.width == 64:
            return numbers.view("<u8")
        single = numbers.astype("<f4").view("<u4")
        if kind.width == 32:
            return single
        if kind.exponent == 8:
            return (single + np.uint32(0x7FFF) + (single >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)).astype("<u2")
        small = (np.abs(single.view("<f4")) * np.float32(2**-112)).view("<u4")
        nearest = small + np.uint32(0xFFF) + (small >> np.uint32(13) & np.uint32(1)) >> np.uint32(13)
        return (np.minimum(nearest, kind.infinity) | single >> np.uint32(16) & np.uint32(0x8000)).astype("<u2")


def move(bits: np.ndarray, change: np.ndarray, wide: bool, kind: FloatType) -> np.ndarray:
    """Adds changes to floats, in float32 or, if `wide`, in float64, and rounds the sums to the type. Keeps NaN and infinity."""
    magnitude = bits & bits.dtype.type((1 << (kind.width - 1)) - 1)
    precision = "<f8" if wide else "<f4"
    with np.errstate(all="ignore"):
        total = numbers_of(bits, kind).astype(precision) + change.astype(precision)
    return np.where(magnitude >= kind.infinity, bits, round_to(total.astype("<f8"), kind))


def move_coarsely(bits: np.ndarray, numbers: np.ndarray, grid: np.ndarray, step: np.ndarray, kind: FloatType) -> np.ndarray:
    """Adds to floats so many units, in float32, and rounds the sums to the type. A unit is the step, or the spacing of values
    around the float if that is larger."""
    unit = np.maximum(np.ldexp(np.float32(1), np.maximum(grid, -126)), step)
    with np.errstate(all="ignore"):
        total = numbers_of(bits, kind).astype("<f4") + numbers.astype("<i4").astype("<f4") * unit
    return np.where(numbers == 0, bits, round_to(total.astype("<f8"), kind))


def expected_magnitude(scale: np.ndarray, kind: FloatType) -> np.ndarray:
    """Returns floats of about 2^(scale / 4): octaves in the exponent field, quarters in the two top bits of the mantissa."""
    field = np.clip((scale // 4) + kind.exponent_bias, 0, (1 << kind.exponent) - 2)
    return (field << kind.mantissa | (scale % 4) << (kind.mantissa - 2)).astype(kind.unsigned)


def contexts(c: np.ndarray, mantissa: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of raw low bits of residuals of about 2^(c / 4), and the tables of their symbols."""
    near_value = 4 * (mantissa - 2)
    shift = np.clip((c - 8) // 4, 0, min(mantissa - 2, 16))
    small, cut, near = np.maximum(c + 8, 0), 16 + c % 4, np.minimum(20 + (c - near_value) // 2, 31)
    return shift, np.where(c >= near_value, near, np.where(c >= 8, cut, small))


class Lanes:
    """The states of an entropy-coded block, one per lane, and the words that refill them."""

    def __init__(self, data: bytes, lanes: int) -> None:
        require(len(data) >= 4 * lanes and len(data) % 2 == 0, "an entropy-coded block has an impossible size")
        self.states = np.frombuffer(data, "<u4", lanes).astype(np.int64)
        self.words = np.frombuffer(data, "<u2", offset=4 * lanes).astype(np.int64)
        require(bool((self.states >= 1 << 16).all()), "an entropy-coded block starts from an impossible state")

    def replace(self, lanes: np.ndarray, states: np.ndarray) -> None:
        """Sets the states of some lanes. A state below 2^16 takes the next word; the lanes go in order."""
        low = states < 1 << 16
        require(low.sum() <= len(self.words), "an entropy-coded block ends too early")
        words, self.words = np.split(self.words, [low.sum()])
        states[low] = states[low] << 16 | words
        self.states[lanes] = states

    def take_bits(self, lanes: np.ndarray, count: np.ndarray | int) -> np.ndarray:
        """Takes the low bits of the states of some lanes."""
        states = self.states[lanes]
        self.replace(lanes, states >> count)
        return states & ((1 << count) - 1)


def decode_numbers(data: bytes, width: int, shift: np.ndarray, table: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Decodes the numbers of a block in rounds of all lanes: first symbols, then raw bits, then extra bits."""
    symbol_at = np.stack([np.repeat(np.arange(SYMBOLS), frequencies) for frequencies in tables])
    starts = np.cumsum(tables, axis=1) - tables
    coder = Lanes(data, width)
    numbers = np.empty(len(shift), np.int64)
    for first in range(0, len(shift), width):
        turn = slice(first, first + width)
        lanes = np.arange(len(shift[turn]))
        states = coder.states[lanes]
        slot = states & ((1 << TABLE_BITS) - 1)
        symbol = symbol_at[table[turn], slot]
        frequency, start = tables[table[turn], symbol], starts[table[turn], symbol]
        coder.replace(lanes, frequency * (states >> TABLE_BITS) + slot - start)
        raw = coder.take_bits(lanes, shift[turn])
        high = symbol - LINEAR
        for lane in np.flatnonzero(symbol >= TAIL):
            one = lanes[lane : lane + 1]
            if symbol[lane] >= ESCAPE:
                high[lane] = coder.take_bits(one, 16)[0]
                high[lane] |= coder.take_bits(one, 16)[0] << 16
            else:
                tail, negative = divmod(int(symbol[lane]) - TAIL, 2)
                magnitude = LINEAR + TAIL_START[tail] + coder.take_bits(one, TAIL_BITS[tail])[0]
                high[lane] = -1 - magnitude if negative else magnitude
        numbers[turn] = high << shift[turn] | raw
    require(len(coder.words) == 0 and bool((coder.states == 1 << 16).all()), "a block does not end where it should")
    return numbers


def decode_changes(
    data: bytes, width: int, base: np.ndarray, classes: list[Class], tables: np.ndarray, kind: FloatType
) -> np.ndarray:
    """Decodes the changes of a block, class by class, and returns its new values."""
    new = base.copy()
    if not data:
        return new
    counts, at = [], 0
    for _ in classes:
        count = 0
        for shift in (0, 7, 14):
            require(at < len(data), "a block ends too early")
            byte, at = data[at], at + 1
            count |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        require(byte < 0x80, "a number of changes is impossible")
        counts.append(count)
    require(sum(counts) <= len(base), "a block has more changes than values")
    shifts = [np.full(n, each.gap_shift) for n, each in zip(counts, classes)]
    shifts += [np.full(n, each.size_shift) for n, each in zip(counts, classes)]
    which = [np.full(n, 2 * k + part) for part in (0, 1) for k, n in enumerate(counts)]
    numbers = decode_numbers(data[at:], width, np.concatenate(shifts), np.concatenate(which), tables)
    gaps, sizes = np.split(numbers, 2)
    of_class = np.searchsorted([each.end for each in classes[:-1]], kind.exponent_field(base), side="right")
    for k, (count, each) in enumerate(zip(counts, classes)):
        gap, gaps = np.split(gaps, [count])
        size, sizes = np.split(sizes, [count])
        places = np.cumsum(gap % (1 << 32) + 1) - 1
        members = np.flatnonzero(of_class == k)
        require(not count or int(places[-1]) < len(members), "a change lies outside its block")
        steps = each.center + (size >> 1)
        change = np.where(size & 1, -steps, steps)
        chosen = members[places]
        moved = to_ordered(base[chosen], kind).astype(np.int64) + change
        new[chosen] = from_ordered((moved % (1 << kind.width)).astype(kind.unsigned), kind)
    return new


def decode_body(
    body: bytes, base_bits: np.ndarray | None, dtype_code: int, values: int, row_length: int, base_values: int
) -> np.ndarray:
    """Returns the tensor's values as unsigned integers. Raises ValueError if the body is not valid."""
    kind = TYPES[dtype_code]
    base = np.asarray([] if base_bits is None else base_bits, kind.unsigned).ravel()[:base_values]
    row_count, base_rows = -(-values // row_length), -(-base_values // row_length)

    # The header.
    require(len(body) >= 14, "the compressed tensor ends too early")
    plane, flags, own_tables, side_length = struct.unpack_from("<BBQI", body)
    known = plane in kind.planes and flags < 32 and own_tables < 1 << TABLES
    known = known and not (flags & FEW_CHANGES and (flags & COARSE or kind.width != 16))
    known = known and not (flags & COARSE and (plane or kind.width == 64))
    require(known, "the compressed tensor uses an unknown feature")
    require(len(body) >= 14 + side_length, "the compressed tensor ends too early")

    # The side information.
    side = Bits(body[14 : 14 + side_length])
    step = np.zeros(1, np.float32)
    if flags & COARSE:
        step = np.array([side.take(32)], "<u4").view("<f4")
        require(bool(2**-100 <= step[0] <= 2**100), "the step is impossible")
    coded_row = np.ones(row_count, bool)
    if flags & 1:
        coded_row[:base_rows] = [not side.take(1) for _ in range(base_rows)]
    classes = side.classes((1 << kind.exponent) - 1) if flags & FEW_CHANGES else []
    has_scale = coded_row & (np.arange(row_count) >= base_rows) if classes else coded_row
    row_scale = np.zeros(row_count, np.int64)
    row_scale[has_scale] = side.scales(int(has_scale.sum()))
    column_scale = side.scales(row_length) if flags & 2 else np.zeros(row_length, np.int64)
    tables, geometric = (np.frombuffer(t, np.uint16).reshape(-1, SYMBOLS).astype(np.int64) for t in _native.default_tables())
    for k, each in enumerate(classes):
        tables[2 * k : 2 * k + 2] = geometric[[each.gap_table, each.size_table]]
    for i in range(TABLES):
        if own_tables >> i & 1:
            tables[i] = side.table(tables[i])
    moved = base
    if flags & 4:
        place = np.cumsum(coded_row[:base_rows]) - 1  # of each row among those that are coded; -1 before the first
        rows, columns, exponent, wide = side.factors(int(coded_row[:base_rows].sum()), row_length)
        row, column = np.divmod(np.arange(base_values), row_length)
        sums = np.vstack([rows @ columns, np.zeros(row_length, np.int64)])
        change = np.ldexp(sums[place[row], column].astype("<f8"), -exponent)
        moved = move(base, change, wide or kind.width == 64, kind)

    # The two parts, cut into blocks: with a base, then alone.
    position = np.arange(values)
    coded = coded_row[position // row_length]
    parts = position[coded & (position < base_values)], position[coded & (position >= base_values)]
    blocks = [part[i : i + BLOCK] for part in parts for i in range(0, len(part), BLOCK)]
    at = 14 + side_length + 4 * len(blocks)
    require(len(body) >= at, "the compressed tensor ends too early")
    entries = struct.unpack_from(f"<{len(blocks)}I", body, 14 + side_length)
    require(len(body) == at + sum(entry >> 2 for entry in entries), "the sizes of the blocks do not add up")

    out = np.empty(values, kind.unsigned)
    out[:base_values] = base  # the untouched rows are right, the others follow
    for block, entry in zip(blocks, entries, strict=True):
        data, at = body[at : at + (entry >> 2)], at + (entry >> 2)
        if entry & 3 == 0:
            require(len(data) == len(block) * kind.unsigned.itemsize, "a verbatim block has the wrong size")
            out[block] = np.frombuffer(data, kind.unsigned)
            continue
        if classes and block[0] < base_values:
            out[block] = decode_changes(data, LANES[entry & 3], moved[block], classes, tables, kind)
            continue
        require(entry & 3 != 3, "a block is of an unknown kind")
        require(len(data) >= plane * len(block), "a block is smaller than its low bytes")
        low_bytes = np.frombuffer(data, np.uint8, plane * len(block)).reshape(len(block), plane).astype(np.uint64)
        low = (low_bytes << np.arange(0, 8 * plane, 8, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        scale = row_scale[block // row_length] + column_scale[block % row_length]
        mantissa = kind.mantissa - 8 * plane
        if block[0] < base_values:
            grid = np.maximum(kind.exponent_field(moved[block]), 1) - kind.exponent_bias - kind.mantissa
            if flags & COARSE:
                least = (int(step.view("<u4")[0]) >> 21) - 4 * 127
                context = contexts(scale - np.maximum(4 * grid, least) >> 1, mantissa)
                numbers = decode_numbers(data, LANES[entry & 3], *context, tables)
                out[block] = move_coarsely(moved[block], numbers, grid, step, kind)
                continue
            shift, table = contexts(scale - 4 * grid - 32 * plane, mantissa)
            prediction, restore = to_ordered(moved[block], kind), from_ordered
        else:
            shift, table = np.full(len(block), min(mantissa - 1, 16)), np.full(len(block), ALONE_TABLE)
            prediction, restore = to_rotated(expected_magnitude(scale, kind), kind), from_rotated
        numbers = decode_numbers(data[plane * len(block) :], LANES[entry & 3], shift, table, tables)
        residual = (numbers.astype(np.uint64) << np.uint64(8 * plane) | low).astype(kind.unsigned)
        out[block] = restore(prediction + residual, kind)
    return out


def decode_mixed(body: bytes, dtype_code: int, narrow_code: int, values: int, row_length: int) -> np.ndarray:
    """Returns the values of a mixed tensor, as `decode_body` does. Some of its rows are of a narrower type."""
    rows = values // row_length
    flags, rest = np.frombuffer(body, np.uint8)[: -(-rows // 8)], body[-(-rows // 8) :]
    is_narrow = np.unpackbits(flags, bitorder="little")[:rows].astype(bool)
    size = int.from_bytes(rest[:8], "little")
    require(len(rest) >= 8 + size, "the compressed tensor ends too early")
    out = np.empty((rows, row_length), TYPES[dtype_code].unsigned)
    for code, where, part in ((narrow_code, is_narrow, rest[8 : 8 + size]), (dtype_code, ~is_narrow, rest[8 + size :])):
        decoded = decode_body(part, None, code, int(where.sum()) * row_length, row_length, 0)
        out[where] = (decoded if code == dtype_code else cast(decoded, code, dtype_code)).reshape(-1, row_length)
    return out.ravel()


def matrices(body: bytes, count: int) -> list[tuple[int, bool, int, bytes]]:
    """Returns the mode byte of each matrix of a stacked tensor, whether it has a base, its checksum and its body."""
    entries, at = [struct.unpack_from("<BBQQ", body, 18 * i) for i in range(count)], 18 * count
    require(len(body) == at + sum(entry[3] for entry in entries), "the sizes of the matrices do not add up")
    parts = []
    for kind, has_base, checksum, size in entries:
        parts.append((kind, bool(has_base), checksum, body[at : at + size]))
        at += size
    return parts


def cast(bits: np.ndarray, from_code: int, to_code: int) -> np.ndarray:
    """Rounds floats to another type, to nearest, ties to even. A NaN keeps only its sign."""
    source, target = TYPES[from_code], TYPES[to_code]
    bits = np.asarray(bits, source.unsigned)
    negative = (bits >> source.unsigned.type(source.width - 1)).astype(bool)
    quiet_nan = target.infinity | 1 << (target.mantissa - 1)
    minus_nan = quiet_nan | 1 << (target.width - 1)
    nan = np.where(negative, target.unsigned.type(minus_nan), target.unsigned.type(quiet_nan))
    with np.errstate(all="ignore"):
        exact = (bits.astype("<u4") << np.uint32(16)).view("<f4") if source.numpy is None else bits.view(source.numpy)
        exact = exact.astype("<f8")
        if target.numpy is None:
            # On a grid of 8 significant bits, or on that of the subnormals, each value is a float32 that ends in zeros.
            grid = np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 8, -133))
            result = ((np.rint(exact / grid) * grid).astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
        else:
            result = exact.astype(target.numpy).view(target.unsigned)
    return np.where(np.isnan(exact), nan, result)
