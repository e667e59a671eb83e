// Which symbol stands for a residual, and how probable it is in its context. Encoder and decoder share this specification.
//
// A residual v is cut into s = v >> shift and `shift` low bits, which are as good as random. The shift and one of 32 tables
// follow from the context c: the expected size of v in quarter octaves (c = 4 log2 sigma). While sigma is below 4 nothing is
// cut; above, s has a sigma of 4 to 8; where sigma comes near the base value itself a step of the mantissa is no longer a
// step of the value, and a third group of tables takes over.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "default_tables.h"

namespace fm_delta {

constexpr int LINEAR = 24;   // s in [-24, 24) has a symbol of its own: s + 24
constexpr int SYMBOLS = 64;  // 48 linear, 14 tail (7 classes by sign), escape, one unused
constexpr int TAIL = 48;
constexpr int ESCAPE = 62;  // s itself follows in 32 bits
constexpr std::array<int, 7> TAIL_BITS = {3, 4, 5, 6, 7, 8, 10};
constexpr std::array<int, 8> TAIL_START = {0, 8, 24, 56, 120, 248, 504, 1528};

constexpr int CONTEXT_TABLES = 32;
constexpr int ALONE_TABLE = 32;  // for values that have no base
constexpr int TABLES = 33;
constexpr int MAX_SHIFT = 16;  // the entropy coder takes at most 16 raw bits a step

constexpr int PROBABILITY_BITS = 11;
constexpr int PROBABILITY_SUM = 1 << PROBABILITY_BITS;

using Frequencies = std::array<uint16_t, SYMBOLS>;

// Mantissa bits that are left once the low `plane` bytes travel verbatim.
template <class F>
constexpr int mantissa_above(int plane) {
    return F::MANTISSA - 8 * plane;
}

// Which table codes a value, and how many of its low bits stay raw.
struct Context {
    uint16_t bits;

    Context() = default;
    Context(int shift, int table) : bits(uint16_t(shift | table << 8)) {}
    int shift() const { return bits & 0xff; }
    int table() const { return bits >> 8; }
};

// In 16 bits and without a branch, so that loops over it become vector code.
inline Context context_of(int16_t c, int mantissa) {
    const int16_t near_value = int16_t(4 * (mantissa - 2)), most = int16_t(std::min(mantissa - 2, MAX_SHIFT));
    const int16_t over = int16_t(c - 8), beyond = int16_t(c - near_value);
    const int16_t shift = std::clamp<int16_t>(int16_t(over >> 2), 0, most);
    const int16_t fine = std::max<int16_t>(int16_t(c + 8), 0), cut = int16_t(16 + (c & 3));
    const int16_t far = std::min<int16_t>(int16_t(20 + (beyond >> 1)), CONTEXT_TABLES - 1);
    const int16_t near = over < 0 ? fine : cut;
    return {shift, beyond < 0 ? near : far};
}

// Without a base the prediction is the expected magnitude, the sign is the lowest bit, and a step is a quarter octave.
template <class F>
inline Context alone_context(int plane) {
    return {std::min(mantissa_above<F>(plane) + 1 - 2, MAX_SHIFT), ALONE_TABLE};
}

// Without a branch, so that loops over it become vector code.
inline uint8_t symbol_id(int32_t s) {
    const int32_t negative = s >> 31, magnitude = (s ^ negative) - LINEAR;
    int32_t id = TAIL - negative;
    for (size_t k = 1; k < TAIL_START.size(); ++k) id += 2 * (magnitude >= TAIL_START[k]);
    id = magnitude >= TAIL_START.back() ? ESCAPE : id;
    return uint8_t(magnitude < 0 ? s + LINEAR : id);
}

inline uint32_t extra_of(int id, int32_t s) { return uint32_t((s < 0 ? -1 - s : s) - LINEAR - TAIL_START[size_t(id - TAIL) >> 1]); }

inline int extra_bits_of(int id) { return id < TAIL ? 0 : id < ESCAPE ? TAIL_BITS[(id - TAIL) >> 1] : 32; }

inline int32_t value_of(int id, uint32_t extra) {
    if (id < TAIL) return id - LINEAR;
    if (id >= ESCAPE) return int32_t(extra);
    const int32_t magnitude = TAIL_START[(id - TAIL) >> 1] + int32_t(extra);
    return (id - TAIL) & 1 ? -LINEAR - 1 - magnitude : LINEAR + magnitude;
}

// Scales counts to PROBABILITY_SUM. A symbol too rare to be worth a slot gets none and is escaped; the escape always has one.
inline Frequencies normalise(const std::array<uint64_t, SYMBOLS>& counts) {
    Frequencies frequencies{};
    uint64_t total = 0;
    for (uint64_t count : counts) total += count;
    int used = 0;
    for (int id = 0; id < SYMBOLS; ++id) {
        const double share = total ? double(counts[id]) * PROBABILITY_SUM / double(total) : 0;
        if (share >= 0.07 || id == ESCAPE) frequencies[id] = uint16_t(std::max(1.0, share + 0.5));
        used += frequencies[id];
    }
    // The most probable symbols absorb what rounding left over or took too much.
    while (used != PROBABILITY_SUM) {
        auto largest = std::max_element(frequencies.begin(), frequencies.end());
        const int change = std::max(PROBABILITY_SUM - used, 1 - int(*largest));
        *largest = uint16_t(*largest + (change < 0 ? std::max(change, -std::max(1, *largest / 8)) : change));
        used = 0;
        for (uint16_t f : frequencies) used += f;
    }
    return frequencies;
}

}  // namespace fm_delta
