// The symbols of residuals and their probabilities. Encoder and decoder share this specification.
//
// A residual v is split into s = v >> shift and `shift` low bits, which are nearly random. The context c, the expected size of
// v in quarter octaves (c = 4 log2 sigma), selects the shift and one of 32 tables. Below a sigma of 4 the shift is 0; above, s
// has a sigma of 4 to 8. Where sigma is close to the base value itself, steps of the mantissa no longer have the same size, and
// a third group of tables applies.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "default_tables.h"

namespace hf_ext::delta {

constexpr int LINEAR = 24;   // each s in [-24, 24) has its own symbol, s + 24
constexpr int SYMBOLS = 64;  // 48 linear, 14 tail (7 classes × sign), escape, 1 unused
constexpr int TAIL = 48;
constexpr int ESCAPE = 62;  // s follows in 32 bits
constexpr std::array<int, 7> TAIL_BITS = {3, 4, 5, 6, 7, 8, 10};
constexpr std::array<int, 8> TAIL_START = {0, 8, 24, 56, 120, 248, 504, 1528};

constexpr int CONTEXT_TABLES = 32;
constexpr int ALONE_TABLE = 32;  // for values without a base
constexpr int TABLES = 33;
constexpr int MAX_SHIFT = 16;  // the entropy coder handles at most 16 raw bits per step

constexpr int PROBABILITY_BITS = 11;
constexpr int PROBABILITY_SUM = 1 << PROBABILITY_BITS;

using Frequencies = std::array<uint16_t, SYMBOLS>;

// The table that codes a value, and the number of its low bits that are stored raw.
struct Context {
    uint16_t bits;

    Context() = default;
    Context(int shift, int table) : bits(uint16_t(shift | table << 8)) {}
    int shift() const { return bits & 0xff; }
    int table() const { return bits >> 8; }
};

// `mantissa` is the number of mantissa bits that are coded. It uses 16 bits and no branch, so that loops over it are
// vectorized.
inline Context context_of(int16_t c, int mantissa) {
    const int16_t near_value = int16_t(4 * (mantissa - 2)), most = int16_t(std::min(mantissa - 2, MAX_SHIFT));
    const int16_t over = int16_t(c - 8), beyond = int16_t(c - near_value);
    const int16_t shift = std::clamp<int16_t>(int16_t(over >> 2), 0, most);
    const int16_t fine = std::max<int16_t>(int16_t(c + 8), 0), cut = int16_t(16 + (c & 3));
    const int16_t far = std::min<int16_t>(int16_t(20 + (beyond >> 1)), CONTEXT_TABLES - 1);
    const int16_t near = over < 0 ? fine : cut;
    return {shift, beyond < 0 ? near : far};
}

// Without a base, the prediction is the expected magnitude, the sign is the lowest bit, and a step of s is a quarter octave.
inline Context alone_context(int mantissa) { return {std::min(mantissa + 1 - 2, MAX_SHIFT), ALONE_TABLE}; }

// Returns the number of tail classes whose magnitudes are all below this one. (gcc does not vectorize loops around a loop.)
template <size_t... K>
constexpr int32_t classes_below(int32_t magnitude, std::index_sequence<K...>) {
    return (0 + ... + int32_t(magnitude >= TAIL_START[K + 1]));
}

// It has no branch, so that loops over it are vectorized.
inline uint8_t symbol_id(int32_t s) {
    const int32_t negative = s >> 31, magnitude = (s ^ negative) - LINEAR;
    const int32_t tail = TAIL - negative + 2 * classes_below(magnitude, std::make_index_sequence<TAIL_BITS.size()>());
    const int32_t id = magnitude >= TAIL_START.back() ? ESCAPE : tail;
    return uint8_t(magnitude < 0 ? s + LINEAR : id);
}

inline uint32_t extra_of(int id, int32_t s) {
    return uint32_t((s < 0 ? -1 - s : s) - LINEAR - TAIL_START[size_t(id - TAIL) >> 1]);
}

inline int extra_bits_of(int id) { return id < TAIL ? 0 : id < ESCAPE ? TAIL_BITS[(id - TAIL) >> 1] : 32; }

inline int32_t value_of(int id, uint32_t extra) {
    if (id < TAIL) return id - LINEAR;
    if (id >= ESCAPE) return int32_t(extra);
    const int32_t magnitude = TAIL_START[(id - TAIL) >> 1] + int32_t(extra);
    return (id - TAIL) & 1 ? -LINEAR - 1 - magnitude : LINEAR + magnitude;
}

}  // namespace hf_ext::delta
