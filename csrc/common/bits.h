// A stream of bits, lowest bit first, and the Rice code. The side information of a compressed tensor is such a stream.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace hf_ext {

class BitWriter {
   public:
    // `count` is at most 56.
    void put(uint64_t bits, int count) {
        pending_ |= (bits & ((uint64_t(1) << count) - 1)) << held_;
        held_ += count;
        const size_t whole = size_t(held_) / 8;
        if (bytes_.size() < size_ + 8) bytes_.resize(2 * size_ + 64);
        std::memcpy(bytes_.data() + size_, &pending_, 8);
        size_ += whole;
        pending_ = whole == 8 ? 0 : pending_ >> (8 * whole);
        held_ %= 8;
    }

    std::vector<uint8_t> bytes() const {
        std::vector<uint8_t> all(bytes_.begin(), bytes_.begin() + ptrdiff_t(size_));
        if (held_) all.push_back(uint8_t(pending_));
        return all;
    }

   private:
    std::vector<uint8_t> bytes_;  // may be larger than what was written
    size_t size_ = 0;
    uint64_t pending_ = 0;  // bits of the last byte, which is not full
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

    // Returns at least the next PEEK bits. Behind the end of the data, all bits are 0.
    static constexpr int PEEK = 57;
    uint64_t peek() const {
        uint64_t bits = 0;
        const size_t byte = position_ / 8;
        if (bytes_ - byte >= 8) {
            std::memcpy(&bits, data_ + byte, 8);
        } else {
            std::memcpy(&bits, data_ + byte, bytes_ - byte);
        }
        return bits >> (position_ % 8);
    }

    void skip(int count) {
        if (left() < size_t(count)) throw std::runtime_error("the side information ends too early");
        position_ += size_t(count);
    }

   private:
    const uint8_t* data_;
    size_t bytes_;
    size_t position_ = 0;
};

// Rice code of signed numbers: zigzag, then the quotient by 2^k in unary and the remainder in k bits. After a quotient of
// RICE_LIMIT, the zigzag code itself follows in `width` bits.
constexpr int RICE_LIMIT = 20;

constexpr uint32_t zigzag(int32_t x) { return uint32_t(x) << 1 ^ uint32_t(x >> 31); }
constexpr int32_t unzigzag(uint32_t x) { return int32_t(x >> 1 ^ (0u - (x & 1))); }

// Returns the number of trailing zeros, 64 for 0.
inline int trailing_zeros(uint64_t bits) {
#ifdef __GNUC__
    return bits ? __builtin_ctzll(bits) : 64;
#else
    int count = 0;
    while (count < 64 && !(bits >> count & 1)) ++count;
    return count;
#endif
}

void put_rice(BitWriter& out, uint32_t code, int k, int width = 16);

// Reads `count` numbers and calls put(i, number) for each.
template <class Put>
void get_rice(BitReader& in, int k, size_t count, int width, Put&& put) {
    const uint64_t remainder = (uint64_t(1) << k) - 1;
    for (size_t i = 0; i < count;) {
        // Decodes every code that is complete in the bits of one peek. Even the longest code fits.
        uint64_t zeros = ~in.peek();
        int used = 0;
        do {
            const int quotient = trailing_zeros(zeros);
            const bool rice = quotient < RICE_LIMIT;
            const int length = rice ? quotient + 1 + k : RICE_LIMIT + width;
            if (used + length > BitReader::PEEK) break;
            const uint64_t code = rice ? uint64_t(quotient) << k | (~(zeros >> (quotient + 1)) & remainder)
                                       : ~(zeros >> RICE_LIMIT) & ((uint64_t(1) << width) - 1);
            put(i++, unzigzag(uint32_t(code)));
            zeros >>= length;
            used += length;
        } while (i < count);
        in.skip(used);
    }
}

// Returns the best k: tries those around the best one for a geometric distribution with the same mean.
int best_rice(const std::vector<uint32_t>& codes, int width = 16, size_t* bits = nullptr);

}  // namespace hf_ext
