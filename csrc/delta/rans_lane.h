// One lane of the entropy coder: tables and steps. See rans.h.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "symbol_model.h"

namespace hf_ext::delta {

constexpr uint32_t STATE_LOW = 1u << 16;  // between steps, every state is in [2^16, 2^32); the first is 2^16

// The masks of the bits below a shift. A table, because without BMI2 a shift by a variable is slow.
constexpr std::array<uint32_t, MAX_SHIFT + 1> LOW_MASKS = [] {
    std::array<uint32_t, MAX_SHIFT + 1> masks{};
    for (uint32_t shift = 0; shift < masks.size(); ++shift) masks[shift] = (1u << shift) - 1;
    return masks;
}();

// The decoder's table, indexed by the low bits of a state.
struct DecodeTable {
    std::array<uint32_t, PROBABILITY_SUM> slots;  // frequency | offset << 12 | id << 26

    explicit DecodeTable(const Frequencies& frequencies) {
        uint32_t slot = 0;
        for (uint32_t id = 0; id < SYMBOLS; ++id)
            for (uint32_t offset = 0; offset < frequencies[id]; ++offset)
                slots[slot++] = uint32_t(frequencies[id]) | offset << 12 | id << 26;
    }
};

// The encoder's table, indexed by symbol.
struct EncodeTable {
    std::array<uint32_t, SYMBOLS> slots;  // frequency | start << 16

    explicit EncodeTable(const Frequencies& frequencies) {
        uint32_t start = 0;
        for (int id = 0; id < SYMBOLS; ++id) {
            slots[size_t(id)] = frequencies[id] | start << 16;
            start += frequencies[id];
        }
    }
};

// Appends the next word to a state that is low. It has no branch, because no processor can predict which states are low.
// (Compilers turn a conditional expression here into a jump.)
inline uint32_t refill(uint32_t x, const uint8_t*& next) {
    uint16_t word;
    std::memcpy(&word, next, 2);
    const int64_t low = (int64_t(x) - STATE_LOW) >> 63;  // all ones or zero
    const uint32_t filled = x << 16 | word;
    next -= 2 * low;
    return x ^ ((x ^ filled) & uint32_t(low));
}

inline uint32_t take_bits(uint32_t& x, int count, const uint8_t*& next) {
    const uint32_t bits = x & LOW_MASKS[size_t(count)];
    x = refill(x >> count, next);
    return bits;
}

// Reads the extra bits of a tail symbol or an escape and adds them to a value that has its raw bits.
inline void take_tail(uint32_t& x, const uint8_t*& next, int id, int shift, int32_t& value) {
    const int bits = extra_bits_of(id);
    uint32_t extra = take_bits(x, std::min(bits, 16), next);
    if (bits > 16) extra |= take_bits(x, 16, next) << 16;
    const uint32_t mask = LOW_MASKS[size_t(shift)];
    value = int32_t(uint32_t(value_of(id, extra)) * (mask + 1) | (uint32_t(value) & mask));
}

// Moves the low word out of a state that has reached the limit. It has no branch, for the same reason.
inline void make_room(uint32_t& x, uint16_t*& next, uint64_t limit) {
    const uint32_t full = x >= limit;
    next[-1] = uint16_t(x);
    next -= full;
    x ^= (x ^ x >> 16) & (0u - full);
}

inline void put_bits(uint32_t& x, uint16_t*& next, uint32_t bits, int count) {
    make_room(x, next, uint64_t(1) << (32 - count));
    x = x << count | bits;
}

inline bool is_coded(uint32_t slot) { return slot & 0xffff; }

inline void put_symbol(uint32_t& x, uint16_t*& next, uint32_t slot) {
    const uint32_t frequency = slot & 0xffff;
    make_room(x, next, uint64_t(frequency) << (32 - PROBABILITY_BITS));
    x = ((x / frequency) << PROBABILITY_BITS) + x % frequency + (slot >> 16);
}

// Writes the extra bits of a tail symbol, or of one that is escaped because its frequency in the table is 0.
inline void put_tail(uint32_t& x, uint16_t*& next, const EncodeTable& table, int id, int32_t s) {
    const bool escaped = id == ESCAPE || !is_coded(table.slots[size_t(id)]);
    const uint32_t extra = escaped ? uint32_t(s) : extra_of(id, s);
    if (escaped) put_bits(x, next, extra >> 16, 16);
    put_bits(x, next, extra & 0xffff, escaped ? 16 : extra_bits_of(id));
}

}  // namespace hf_ext::delta
