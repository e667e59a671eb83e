// A stream of bits, lowest first, for the side information of a tensor: row bitmap, scales, tables.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace fm_delta {

class BitWriter {
   public:
    // `count` is at most 32.
    void put(uint64_t bits, int count) {
        pending_ |= (bits & ((uint64_t(1) << count) - 1)) << held_;
        for (held_ += count; held_ >= 8; held_ -= 8, pending_ >>= 8) bytes_.push_back(uint8_t(pending_));
    }

    std::vector<uint8_t> bytes() const {
        std::vector<uint8_t> all = bytes_;
        if (held_) all.push_back(uint8_t(pending_));
        return all;
    }

   private:
    std::vector<uint8_t> bytes_;
    uint64_t pending_ = 0;
    int held_ = 0;
};

class BitReader {
   public:
    BitReader(const uint8_t* data, size_t bytes) : data_(data), bytes_(bytes) {}

    size_t left() const { return 8 * bytes_ - position_; }

    // `count` is at most 32.
    uint64_t get(int count) {
        const uint64_t bits = peek() & ((uint64_t(1) << count) - 1);
        skip(count);
        return bits;
    }

    // How many ones come before a zero, which is read too; after `limit` of them no zero follows. `limit` is at most 32.
    int ones(int limit) {
        const uint64_t zeros = ~peek();
        int count = 0;
        while (count < limit && !(zeros >> count & 1)) ++count;
        skip(count + (count < limit));
        return count;
    }

   private:
    // The next bits, at least 57 of them, as if zeros followed the data.
    uint64_t peek() const {
        uint64_t bits = 0;
        const size_t byte = position_ / 8;
        std::memcpy(&bits, data_ + byte, std::min<size_t>(8, bytes_ - byte));
        return bits >> (position_ % 8);
    }

    void skip(int count) {
        if (left() < size_t(count)) throw std::runtime_error("the side information ends too early");
        position_ += size_t(count);
    }

    const uint8_t* data_;
    size_t bytes_;
    size_t position_ = 0;
};

// Rice code of signed differences from a centre: zigzag, quotient by 2^k in unary, remainder in k bits. A quotient of
// RICE_LIMIT is followed by the value itself instead, in `width` bits.
constexpr int RICE_LIMIT = 20;

constexpr uint32_t zigzag(int32_t x) { return uint32_t(x) << 1 ^ uint32_t(x >> 31); }
constexpr int32_t unzigzag(uint32_t x) { return int32_t(x >> 1 ^ (0u - (x & 1))); }

inline size_t rice_bits(uint32_t code, int k, int width) { return code >> k < RICE_LIMIT ? (code >> k) + 1 + k : RICE_LIMIT + width; }

inline void put_rice(BitWriter& out, uint32_t code, int k, int width = 16) {
    const uint32_t quotient = std::min<uint32_t>(code >> k, RICE_LIMIT);
    out.put((uint64_t(1) << quotient) - 1, int(quotient));
    if (quotient == RICE_LIMIT) return out.put(code, width);
    out.put(0, 1);
    out.put(code, k);
}

inline uint32_t get_rice(BitReader& in, int k, int width = 16) {
    const uint32_t quotient = uint32_t(in.ones(RICE_LIMIT));
    if (quotient == RICE_LIMIT) return uint32_t(in.get(width));
    return quotient << k | uint32_t(in.get(k));
}

// The k that codes these best.
template <class Codes>
int best_rice(const Codes& codes, int width = 16, size_t* bits = nullptr) {
    int best = 0;
    size_t best_bits = SIZE_MAX;
    for (int k = 0; k < (width == 16 ? 8 : 24); ++k) {
        size_t total = 0;
        for (uint32_t code : codes) total += rice_bits(code, k, width);
        if (total < best_bits) best = k, best_bits = total;
    }
    if (bits) *bits = best_bits;
    return best;
}

}  // namespace fm_delta
