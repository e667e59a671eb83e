// A stream of bits, lowest first, for the side information of a tensor: row bitmap, scales, tables.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace fm_delta {

class BitWriter {
   public:
    void put(uint64_t bits, int count) {
        for (int i = 0; i < count; ++i, ++length_) {
            if (length_ % 8 == 0) bytes_.push_back(0);
            bytes_.back() |= uint8_t((bits >> i & 1) << (length_ % 8));
        }
    }
    const std::vector<uint8_t>& bytes() const { return bytes_; }

   private:
    std::vector<uint8_t> bytes_;
    size_t length_ = 0;
};

class BitReader {
   public:
    BitReader(const uint8_t* data, size_t bytes) : data_(data), length_(8 * bytes) {}

    uint64_t get(int count) {
        if (length_ - position_ < size_t(count)) throw std::runtime_error("the side information ends too early");
        uint64_t bits = 0;
        for (int i = 0; i < count; ++i, ++position_) bits |= uint64_t(data_[position_ / 8] >> (position_ % 8) & 1) << i;
        return bits;
    }

   private:
    const uint8_t* data_;
    size_t length_;
    size_t position_ = 0;
};

// Rice code of signed differences from a centre: zigzag, quotient by 2^k in unary, remainder in k bits. A quotient of
// RICE_LIMIT is followed by the 16 bits of the value instead.
constexpr int RICE_LIMIT = 20;

constexpr uint32_t zigzag(int32_t x) { return uint32_t(x) << 1 ^ uint32_t(x >> 31); }
constexpr int32_t unzigzag(uint32_t x) { return int32_t(x >> 1 ^ (0u - (x & 1))); }

inline size_t rice_bits(uint32_t code, int k) { return code >> k < RICE_LIMIT ? (code >> k) + 1 + k : RICE_LIMIT + 16; }

inline void put_rice(BitWriter& out, uint32_t code, int k) {
    const uint32_t quotient = std::min<uint32_t>(code >> k, RICE_LIMIT);
    out.put((uint64_t(1) << quotient) - 1, int(quotient));
    if (quotient == RICE_LIMIT) return out.put(code, 16);
    out.put(0, 1);
    out.put(code, k);
}

inline uint32_t get_rice(BitReader& in, int k) {
    uint32_t quotient = 0;
    while (quotient < RICE_LIMIT && in.get(1)) ++quotient;
    if (quotient == RICE_LIMIT) return uint32_t(in.get(16));
    return quotient << k | uint32_t(in.get(k));
}

// The k in [0, 8) that codes these best.
template <class Codes>
int best_rice(const Codes& codes, size_t* bits = nullptr) {
    int best = 0;
    size_t best_bits = SIZE_MAX;
    for (int k = 0; k < 8; ++k) {
        size_t total = 0;
        for (uint32_t code : codes) total += rice_bits(code, k);
        if (total < best_bits) best = k, best_bits = total;
    }
    if (bits) *bits = best_bits;
    return best;
}

}  // namespace fm_delta
