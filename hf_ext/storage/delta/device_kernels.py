"""Triton kernels that decode compressed tensors on a GPU. docs/fm_delta_format.md has the terms.

Most kernels run one program for each block of 262,144 values, on vectors of 64 values: those of the 64 interleaved lanes of the
entropy coder. All lanes read from one sequence of words. In each phase, a prefix sum over the lanes that need a word gives each
lane the place of its own. Blocks with fewer lanes leave the others idle. Whatever the data say, no program reads or writes
outside the memory of its block.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(64)
TABLE = tl.constexpr(2048)  # slots of a table
TAIL, ESCAPE = tl.constexpr(48), tl.constexpr(62)
MOST_CLASSES = tl.constexpr(16)
COPIED = tl.constexpr(512)  # values of a verbatim block that are copied at once
TILE = tl.constexpr(256)  # values among which changes are placed together
ROWS, COLUMNS = tl.constexpr(16), tl.constexpr(128)  # of a tile whose base is moved
# Numbers of 64 bits that describe a block, a tensor, and a band of rows whose base is moved.
BLOCK_FIELDS, TENSOR_FIELDS, BAND_FIELDS = tl.constexpr(10), tl.constexpr(17), tl.constexpr(3)


@triton.jit
def decode_values(arena, blocks, tensors, errors, _numbers, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    """Decodes blocks of kinds 0 to 2 that are no lists of changes."""
    index, alone, row, column, values, lanes, begin, end, _numbers_at, _counts_at = _block(blocks)
    tensor = tensors + index * TENSOR_FIELDS
    out, length, rows = _tensor(arena, tensor, WIDTH)
    row_scales = _array(arena, tl.load(tensor + 3), tl.int16)
    column_scales = _array(arena, tl.load(tensor + 4), tl.int16)
    table_of = _array(arena, tl.load(tensor + 5), tl.int32)
    slots = _array(arena, tl.load(tensor + 6), tl.uint32)
    scaled, plane = tl.load(tensor + 7).to(tl.int32), tl.load(tensor + 8).to(tl.int32)  # scaled: all columns, or none
    step = tl.load(tensor + 9).to(tl.int32).to(tl.float32, bitcast=True)
    data, lane = arena + begin, tl.arange(0, LANES)
    if lanes == 0:
        for first in range(0, values, COPIED):
            i = first + tl.arange(0, COPIED)
            active = i < values
            _row, _column, place = _places(rows, row, column + i, length, active)
            value = _little_endian(data, i * (WIDTH // 8), WIDTH // 8, active)
            tl.store(out + place, value.to(out.dtype.element_ty), active)
    else:
        size, position = (end - begin).to(tl.int32), plane * values
        state, position, failed = _first_states(data, position, size, lane, lanes)
        for first in range(0, values, lanes):
            active = (lane < lanes) & (first + lane < values)
            coded_row, coded_column, place = _places(rows, row, column + first + lane, length, active)
            scale = tl.load(row_scales + coded_row, active, 0).to(tl.int32)
            scale += tl.load(column_scales + coded_column, active & (coded_column < scaled), 0).to(tl.int32)
            bits = tl.load(out + place, active, 0).to(tl.uint32)  # means nothing if alone
            grid = _grid_exponent(bits, WIDTH, MANTISSA)
            shift, table = _context(scale, grid, alone, plane, step, MANTISSA)
            number, state, position = _round(
                state, position, data, size, active, shift, tl.load(table_of + table, active, 0), slots
            )
            residual = number
            if WIDTH == 32:
                low = _little_endian(data, (first + lane) * plane, 2, active)
                residual = number << (8 * plane) | low & ((1 << (8 * plane)) - 1)
            if alone != 0:
                value = _from_rotated(_expected_magnitude(scale, WIDTH, MANTISSA) + residual, WIDTH)
            elif step > 0:
                value = _moved_coarsely(bits, number.to(tl.int32), grid, step, WIDTH, MANTISSA)
            else:
                value = _from_ordered(_to_ordered(bits, WIDTH) + residual, WIDTH)
            tl.store(out + place, value.to(out.dtype.element_ty), active)
        failed |= (position != size) | (tl.max((state != 1 << 16).to(tl.int32)) != 0)
        if failed:
            tl.store(errors + index, 1)


@triton.jit
def decode_numbers(arena, blocks, tensors, errors, all_numbers):
    """Decodes the numbers of lists of changes. Of gaps, stores the running sum of each and one more."""
    index, _alone, _row, _column, _values, lanes, begin, end, numbers, counts_at = _block(blocks)
    tensor = tensors + index * TENSOR_FIELDS
    table_of = _array(arena, tl.load(tensor + 5), tl.int32)
    slots = _array(arena, tl.load(tensor + 6), tl.uint32)
    classes, class_count = _array(arena, tl.load(tensor + 10), tl.int32), tl.load(tensor + 11).to(tl.int32)
    counts = _counts_of(arena, counts_at, class_count)
    ends, changes = tl.cumsum(counts, 0), tl.sum(counts)
    data, lane, size = arena + begin, tl.arange(0, LANES), (end - begin).to(tl.int32)
    if size > 0:
        state, position, failed = _first_states(data, 0, size, lane, lanes)
        total = tl.zeros((), tl.int32)
        for first in range(0, 2 * changes, lanes):
            i = first + lane
            active = (lane < lanes) & (i < 2 * changes)
            is_size = (i >= changes).to(tl.int32)
            j = i - is_size * changes
            member = tl.sum((j[:, None] >= ends[None, :]).to(tl.int32), 1)
            shift = tl.load(classes + member * 4 + 1 + is_size, active, 0)
            table = tl.load(table_of + 2 * member + is_size, active, 0)
            number, state, position = _round(state, position, data, size, active, shift, table, slots)
            steps = tl.where(active & (is_size == 0), number.to(tl.int32) + 1, 0)
            sums = total + tl.cumsum(steps, 0)
            total += tl.sum(steps)
            tl.store(all_numbers + numbers + i, tl.where(is_size != 0, number.to(tl.int32), sums), active)
        if failed | (position != size) | (tl.max((state != 1 << 16).to(tl.int32)) != 0):
            tl.store(errors + index, 1)


@triton.jit
def apply_changes(arena, blocks, tensors, errors, all_numbers, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    """Applies lists of changes. A value of a class changes if its rank in the class is among the running sums of the gaps."""
    index, _alone, row, column, values, _lanes, _begin, _end, numbers_at, counts_at = _block(blocks)
    tensor = tensors + index * TENSOR_FIELDS
    out, length, rows = _tensor(arena, tensor, WIDTH)
    classes, class_count = _array(arena, tl.load(tensor + 10), tl.int32), tl.load(tensor + 11).to(tl.int32)
    counts, k = _counts_of(arena, counts_at, class_count), tl.arange(0, MOST_CLASSES)
    numbers, changes, left = all_numbers + numbers_at, tl.sum(counts), tl.max(counts)
    if left > 0:
        ends = tl.cumsum(counts, 0)
        next_change = ends - counts  # of each class
        before = tl.load(numbers + next_change - 1, next_change > 0, 0)  # sum of the gaps of the classes before
        class_end = tl.load(classes + 4 * k, k < class_count - 1, 1 << 16)
        center = tl.load(classes + 4 * k + 3, k < class_count, 0)
        first = tl.zeros((), tl.int32)
        while (first < values) & (left > 0):
            i = first + tl.arange(0, TILE)
            active = i < values
            _coded_row, _coded_column, place = _places(rows, row, column + i, length, active)
            bits = tl.load(out + place, active, 0).to(tl.uint32)
            field = _exponent_field(bits, WIDTH, MANTISSA)
            member = tl.sum((field[:, None] >= class_end[None, :]).to(tl.int32), 1)
            is_in = ((member[:, None] == k[None, :]) & active[:, None]).to(tl.int32)
            wanted = tl.sum(is_in * (tl.cumsum(is_in, 0) + before[None, :]), 1)
            low = tl.sum(is_in * next_change[None, :], 1)
            in_class = tl.sum(is_in, 0)
            last = tl.sum(is_in * tl.minimum(ends, next_change + in_class)[None, :], 1)
            high = last
            while tl.max(high - low) > 0:
                middle = (low + high) >> 1
                is_below = tl.load(numbers + middle, low < high, 0) < wanted
                high = tl.where(is_below, high, middle)
                low = tl.where(is_below & (low < high), middle + 1, low)
            is_changed = (low < last) & (tl.load(numbers + low, low < last, 0) == wanted)
            number = tl.load(numbers + changes + low, is_changed, 0)
            size = (number >> 1) + tl.sum(is_in * center[None, :], 1)
            change = tl.where((number & 1) != 0, -size, size).to(tl.uint32)
            value = _from_ordered(_to_ordered(bits, WIDTH) + change, WIDTH)
            tl.store(out + place, value.to(out.dtype.element_ty), is_changed)
            before += in_class
            next_change += tl.sum(is_in * is_changed.to(tl.int32)[:, None], 0)
            left = tl.max(ends - next_change)
            first += TILE
        if left > 0:
            tl.store(errors + index, 1)


@triton.jit
def move_base(arena, bands, tensors, _errors, _numbers, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, WIDE: tl.constexpr):
    """Adds the low-rank change to a band of rows: an exact integer, then one rounding, or two where sums are wide."""
    band = bands + tl.program_id(0) * BAND_FIELDS
    tensor = tensors + tl.load(band) * TENSOR_FIELDS
    out, length, rows = _tensor(arena, tensor, WIDTH)
    row_factors, column_factors = _array(arena, tl.load(tensor + 12), tl.int32), _array(arena, tl.load(tensor + 13), tl.int32)
    rank, exponent = tl.load(tensor + 14).to(tl.int32), tl.load(tensor + 15).to(tl.int32)
    values = tl.load(tensor + 16)  # that have a base
    i = tl.load(band + 1).to(tl.int32) + tl.arange(0, ROWS)
    is_row = i < tl.load(band + 2).to(tl.int32)
    place = tl.load(rows + i, is_row, 0).to(tl.uint32, bitcast=True).to(tl.int64) * length
    for first in range(0, length, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        if WIDE:
            sums = tl.zeros((ROWS, COLUMNS), tl.int64)
        else:
            sums = tl.zeros((ROWS, COLUMNS), tl.int32)
        for component in range(rank):
            left = tl.load(row_factors + i.to(tl.int64) * rank + component, is_row, 0)
            right = tl.load(column_factors + component * length + column, column < length, 0)
            sums += left.to(sums.dtype)[:, None] * right.to(sums.dtype)[None, :]
        at = place[:, None] + column[None, :]
        active = is_row[:, None] & (column < length)[None, :] & (at < values)
        bits = tl.load(out + at, active, 0).to(tl.uint32)
        base = _finite_value(bits, WIDTH, MANTISSA)
        if WIDE:
            unit = ((1023 - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
            moved = (base.to(tl.float64) + sums.to(tl.float64) * unit).to(tl.float32)
        else:
            unit = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
            moved = base + sums.to(tl.float32) * unit
        value = tl.where(_is_finite(bits, WIDTH, MANTISSA), _rounded(moved, WIDTH, MANTISSA), bits)
        tl.store(out + at, value.to(out.dtype.element_ty), active)


# ---- The entropy coder ----


@triton.jit
def _first_states(data, position, size, lane, lanes):
    """Returns the first states, the position of the first word, and whether a state is impossible. Idle lanes are at rest."""
    state = tl.where(lane < lanes, _little_endian(data, position + 4 * lane, 4, lane < lanes), 1 << 16).to(tl.uint32)
    return state, position + 4 * lanes, tl.min(state >> 16) == 0


@triton.jit
def _round(state, position, data, size, active, shift, table, slots):
    """Takes a number in each active lane. Returns the numbers, the new states and the position of the next word."""
    slot = tl.load(slots + table * TABLE + (state & (TABLE - 1)).to(tl.int32), active, 0)
    symbol = (slot >> 26).to(tl.int32)
    state = tl.where(active, (slot & 0xFFF) * (state >> 11) + (slot >> 12 & (TABLE - 1)), state)
    state, position = _refill(state, position, data, size)
    shift = tl.where(active, shift, 0).to(tl.uint32)
    raw = state & ((1 << shift) - 1)
    state, position = _refill(state >> shift, position, data, size)
    high = (symbol - 24).to(tl.uint32)
    if tl.max(symbol) >= TAIL:
        is_tail, is_escape = symbol >= TAIL, symbol >= ESCAPE
        tail = tl.where(is_tail & (symbol < ESCAPE), (symbol - TAIL) >> 1, 0)
        bits = tl.where(is_escape, 16, tl.where(is_tail, tail + 3 + (tail == 6), 0)).to(tl.uint32)
        extra, rest = state & ((1 << bits) - 1), state >> bits
        words = (rest < 1 << 16).to(tl.int32) + is_escape.to(tl.int32)  # an escape takes 16 bits twice
        at = position + 2 * (tl.cumsum(words, 0) - words)
        first = _word(data, at, size, words > 0)
        second = _word(data, at + 2, size, words > 1)
        state = tl.where(words > 0, rest << 16 | tl.where(is_escape, second, first), rest)
        position += 2 * tl.sum(words)
        magnitude = extra + (8 << tail) + 16
        signed = tl.where((symbol & 1) != 0, ~magnitude, magnitude)
        high = tl.where(is_escape, extra | first << 16, tl.where(is_tail, signed, high))
    return high << shift | raw, state, position


@triton.jit
def _refill(state, position, data, size):
    """Appends the next words to the states that are low, in the order of the lanes."""
    words = (state < 1 << 16).to(tl.int32)
    word = _word(data, position + 2 * (tl.cumsum(words, 0) - words), size, words > 0)
    return tl.where(words > 0, state << 16 | word, state), position + 2 * tl.sum(words)


@triton.jit
def _word(data, at, size, active):
    """Returns words of two bytes at any addresses, 0 beyond the block's end."""
    return _little_endian(data, at, 2, active & (at < size - 1))


@triton.jit
def _little_endian(data, at, BYTES: tl.constexpr, active):
    """Returns numbers of some bytes at any addresses."""
    number = tl.load(data + at, active, 0).to(tl.uint32)
    for i in tl.static_range(1, BYTES):
        number |= tl.load(data + at + i, active, 0).to(tl.uint32) << (8 * i)
    return number


# ---- Descriptions of blocks and tensors ----


@triton.jit
def _block(blocks):
    """Returns the description of the program's block."""
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    index, alone = tl.load(block), tl.load(block + 1)
    row, column, values = tl.load(block + 2).to(tl.int32), tl.load(block + 3).to(tl.int32), tl.load(block + 4).to(tl.int32)
    lanes, begin, end = tl.load(block + 5).to(tl.int32), tl.load(block + 6), tl.load(block + 7)
    return index, alone, row, column, values, lanes, begin, end, tl.load(block + 8), tl.load(block + 9)


@triton.jit
def _tensor(arena, tensor, WIDTH: tl.constexpr):
    """Returns the address of a tensor, the length of its rows and the places of its coded rows."""
    if WIDTH == 16:
        out = tl.load(tensor).to(tl.pointer_type(tl.uint16))
    else:
        out = tl.load(tensor).to(tl.pointer_type(tl.uint32))
    return out, tl.load(tensor + 1).to(tl.int32), _array(arena, tl.load(tensor + 2), tl.int32)


@triton.jit
def _array(arena, offset, TYPE: tl.constexpr):
    return (arena + offset).to(tl.pointer_type(TYPE))


@triton.jit
def _counts_of(arena, offset, class_count):
    k = tl.arange(0, MOST_CLASSES)
    return tl.load(_array(arena, offset, tl.int32) + k, k < class_count, 0)


@triton.jit
def _places(rows, row, column, length, active):
    """Returns the coded rows, the columns and the places in the tensor of values that are counted from the start of a row."""
    row += column // length
    column %= length
    return row, column, tl.load(rows + row, active, 0).to(tl.uint32, bitcast=True).to(tl.int64) * length + column


# ---- Floats ----


@triton.jit
def _exponent_field(bits, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    return (bits >> MANTISSA).to(tl.int32) & ((1 << (WIDTH - 1 - MANTISSA)) - 1)


@triton.jit
def _grid_exponent(bits, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    return tl.maximum(_exponent_field(bits, WIDTH, MANTISSA), 1) - (((1 << (WIDTH - 2 - MANTISSA)) - 1) + MANTISSA)


@triton.jit
def _is_finite(bits, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    return _exponent_field(bits, WIDTH, MANTISSA) != (1 << (WIDTH - 1 - MANTISSA)) - 1


@triton.jit
def _finite_value(bits, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    """Returns floats as float32; 0 for NaN and infinity."""
    finite = tl.where(_is_finite(bits, WIDTH, MANTISSA), bits, 0)
    if MANTISSA == 10:
        return finite.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return (finite << (32 - WIDTH)).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(value, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    """Rounds float32 to bits of the type, as "The moved base" says."""
    bits = value.to(tl.uint32, bitcast=True)
    if WIDTH == 32:
        return bits
    if MANTISSA == 7:
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    small = (tl.abs(value) * 1.925929944387236e-34).to(tl.uint32, bitcast=True)  # 2^-112
    return tl.minimum((small + 0xFFF + (small >> 13 & 1)) >> 13, 0x7C00) | bits >> 16 & 0x8000


@triton.jit
def _to_ordered(bits, WIDTH: tl.constexpr):
    SIGN: tl.constexpr = 1 << (WIDTH - 1)
    return bits ^ tl.where((bits & SIGN) != 0, 2 * SIGN - 1, SIGN).to(tl.uint32)


@triton.jit
def _from_ordered(ordered, WIDTH: tl.constexpr):
    SIGN: tl.constexpr = 1 << (WIDTH - 1)
    return (ordered ^ tl.where((ordered & SIGN) != 0, SIGN, 2 * SIGN - 1).to(tl.uint32)) & (2 * SIGN - 1)


@triton.jit
def _from_rotated(rotated, WIDTH: tl.constexpr):
    return (rotated & ((1 << WIDTH) - 1)) >> 1 | (rotated & 1) << (WIDTH - 1)


@triton.jit
def _expected_magnitude(scale, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    """Returns rotated floats of about 2^(scale / 4)."""
    EXPONENTS: tl.constexpr = 1 << (WIDTH - 1 - MANTISSA)
    field = tl.minimum(tl.maximum((scale >> 2) + (EXPONENTS // 2 - 1), 0), EXPONENTS - 2)
    return (field << MANTISSA | (scale & 3) << (MANTISSA - 2)).to(tl.uint32) << 1


@triton.jit
def _context(scale, grid, alone, plane, step, MANTISSA: tl.constexpr):
    """Returns the shifts and tables of numbers."""
    mantissa = MANTISSA - 8 * plane
    if alone != 0:
        shift, table = tl.zeros_like(grid) + tl.minimum(mantissa - 1, 16), tl.zeros_like(grid) + 32
    else:
        c = scale - 4 * grid - 32 * plane
        if step > 0:
            c = scale - tl.maximum(4 * grid, (step.to(tl.int32, bitcast=True) >> 21) - 508) >> 1
        near = 4 * (mantissa - 2)
        shift = tl.minimum(tl.maximum((c - 8) >> 2, 0), tl.minimum(mantissa - 2, 16))
        below = tl.where(c >= 8, 16 + (c & 3), tl.maximum(c + 8, 0))
        table = tl.where(c >= near, tl.minimum(20 + ((c - near) >> 1), 31), below)
    return shift, table


@triton.jit
def _moved_coarsely(bits, number, grid, step, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    """Adds so many units to values."""
    unit = tl.maximum(((tl.maximum(grid, -126) + 127) << 23).to(tl.float32, bitcast=True), step)
    total = _finite_value(bits, WIDTH, MANTISSA) + number.to(tl.float32) * unit
    return tl.where(number == 0, bits, _rounded(total, WIDTH, MANTISSA))


#: The warps of a program of each kernel, in the order in which they run.
WARPS = {move_base: 4, decode_values: 1, decode_numbers: 1, apply_changes: 4}
