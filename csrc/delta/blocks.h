// Parts and blocks of a tensor, and what describes its values as a whole. Encoder and decoder share this.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/floats.h"
#include "change_classes.h"
#include "coarse.h"
#include "codec.h"
#include "symbol_model.h"

namespace hf_ext::delta {

constexpr size_t BLOCK = 256 * 1024;  // values in a block: its 64 states cost 0.008 bits per value

enum Flags : uint8_t { UNTOUCHED_ROWS = 1, COLUMN_SCALES = 2, LOW_RANK = 4, FEW_CHANGES = 8, COARSE = 16 };
enum Kind : uint32_t { RAW = 0, NARROW = 1, INTERLEAVED = 2, MEDIUM = 3 };  // low two bits of a block's entry; then its size

// Returns the lanes of the entropy coder.
constexpr size_t lanes_of(Kind kind) { return kind == INTERLEAVED ? 64 : kind == MEDIUM ? 8 : 1; }

// All coded rows with a base, or all without, seen as one sequence of values. Untouched rows are left out.
struct Part {
    bool alone;
    size_t first_row;  // index into Plan::rows
    size_t values;
};

// Everything that the blocks of a tensor share.
struct Plan {
    Shape shape;
    Coarse coarse;               // of the values that have a base
    int plane = 0;               // low bytes of each value that are stored verbatim
    std::vector<uint32_t> rows;  // the rows that are coded
    std::vector<int16_t> row_scales, column_scales;
    std::vector<Class> classes;  // of the values that have a base if few of them changed; then their rows have no scales
    std::vector<Frequencies> tables;
    uint64_t own_tables = 0;
    Part parts[2] = {{false, 0, 0}, {true, 0, 0}};  // with a base, then without

    FloatType type() const { return float_type(shape.dtype); }
    int coded_mantissa() const { return type().mantissa - 8 * plane; }
    size_t blocks(const Part& part) const { return (part.values + BLOCK - 1) / BLOCK; }
    size_t blocks() const { return blocks(parts[0]) + blocks(parts[1]); }
    size_t row_values(size_t row) const { return std::min(shape.row_length, shape.values - row * shape.row_length); }
    size_t all_rows() const { return shape.values ? (shape.values - 1) / shape.row_length + 1 : 0; }
    size_t base_rows() const { return shape.base_values ? (shape.base_values - 1) / shape.row_length + 1 : 0; }

    // Returns whether the values of a part are coded as changes.
    bool few_changes(const Part& part) const { return !classes.empty() && !part.alone; }

    // Returns the first of `rows` that has a scale.
    size_t first_scaled() const { return classes.empty() ? 0 : parts[1].first_row; }

    // Returns what a table is described as a difference from.
    const Frequencies& usual(int id) const {
        if (size_t(id) >= 2 * classes.size()) return DEFAULT_TABLES[size_t(id)];
        const Class& one = classes[size_t(id) / 2];
        return GEOMETRIC_TABLES[size_t(id % 2 ? one.size.usual : one.gap.usual)];
    }

    // Fills `rows` and `parts` anew from a list of flags, one for each row that has a base.
    void set_rows(const std::vector<bool>& untouched) {
        rows.clear();
        parts[0].values = parts[1].values = 0;
        for (size_t row = 0; row < all_rows(); ++row) {
            if (row == base_rows()) parts[1].first_row = rows.size();
            if (row < base_rows() && untouched[row]) continue;
            rows.push_back(uint32_t(row));
            parts[row >= base_rows()].values += row_values(row);
        }
        if (all_rows() == base_rows()) parts[1].first_row = rows.size();
    }
};

struct Block {
    const Part* part;
    size_t begin, size;
};

inline Block block_at(const Plan& plan, size_t index) {
    const size_t first = plan.blocks(plan.parts[0]);
    const Part& part = plan.parts[index >= first];
    const size_t begin = (index >= first ? index - first : index) * BLOCK;
    return {&part, begin, std::min(BLOCK, part.values - begin)};
}

// Splits a range of a part at the borders of rows. Calls f(offset in the tensor, position in the range, length, index in
// plan.rows, column) for each piece.
template <class Function>
void for_pieces(const Plan& plan, const Part& part, size_t begin, size_t size, Function&& f) {
    const size_t length = plan.shape.row_length;
    for (size_t done = 0; done < size;) {
        const size_t row = part.first_row + (begin + done) / length, column = (begin + done) % length;
        const size_t piece = std::min(size - done, length - column);
        f(plan.rows[row] * length + column, done, piece, row, column);
        done += piece;
    }
}

// Neighboring values of a tensor.
struct Stretch {
    size_t begin, end;
};

// Returns the stretches that a block consists of.
inline std::vector<Stretch> stretches_of(const Plan& plan, const Block& block) {
    std::vector<Stretch> stretches;
    for_pieces(plan, *block.part, block.begin, block.size, [&](size_t offset, size_t, size_t count, size_t, size_t) {
        if (stretches.empty() || stretches.back().end != offset) stretches.push_back({offset, offset});
        stretches.back().end += count;
    });
    return stretches;
}

}  // namespace hf_ext::delta
