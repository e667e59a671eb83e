// 64 neighboring 16-bit floats as the bits of words: those whose magnitude is below a limit, those that differ from others.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>

#include "../common/bits.h"
#include "../common/intrinsics.h"

namespace hf_ext::delta {

constexpr size_t WORD = 64;  // values whose bits fit a word

struct ScalarMasks {
    static void below(const uint16_t* values, const uint16_t* limits, size_t count, uint64_t* masks) {
        for (size_t k = 0; k < count; ++k) {
            masks[k] = 0;
            for (size_t i = 0; i < WORD; ++i) masks[k] |= uint64_t((values[i] & 0x7fff) < limits[k]) << i;
        }
    }

    static uint64_t differing(const uint16_t* values, const uint16_t* others, size_t count = WORD) {
        uint64_t mask = 0;
        for (size_t i = 0; i < count; ++i) mask |= uint64_t(values[i] != others[i]) << i;
        return mask;
    }

    static size_t ones(uint64_t mask) { return std::bitset<WORD>(mask).count(); }

    // Returns the bits, the lowest first, moved to the places of the ones of a mask.
    static uint64_t deposit(uint64_t bits, uint64_t mask) {
        uint64_t moved = 0;
        for (; mask && bits; mask &= mask - 1, bits >>= 1) moved |= bits & 1 ? mask & (0 - mask) : 0;
        return moved;
    }
};

#ifdef HF_EXT_X86
struct Avx2Masks : ScalarMasks {
    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i load(const uint16_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }

    // Returns a bit for each of 32 comparisons.
    [[HF_EXT_AVX2, gnu::always_inline]] static inline uint64_t bits_of(__m256i first, __m256i second) {
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xd8);
        return uint32_t(_mm256_movemask_epi8(bytes));
    }

    [[HF_EXT_AVX2]] static void below(const uint16_t* values, const uint16_t* limits, size_t count, uint64_t* masks) {
        __m256i magnitudes[4];
        for (size_t i = 0; i < 4; ++i) magnitudes[i] = _mm256_and_si256(load(values + 16 * i), _mm256_set1_epi16(0x7fff));
        for (size_t k = 0; k < count; ++k) {
            const __m256i limit = _mm256_set1_epi16(int16_t(limits[k]));
            masks[k] = bits_of(_mm256_cmpgt_epi16(limit, magnitudes[0]), _mm256_cmpgt_epi16(limit, magnitudes[1])) |
                       bits_of(_mm256_cmpgt_epi16(limit, magnitudes[2]), _mm256_cmpgt_epi16(limit, magnitudes[3])) << 32;
        }
    }

    [[HF_EXT_AVX2]] static uint64_t differing(const uint16_t* values, const uint16_t* others) {
        __m256i same[4];
        for (size_t i = 0; i < 4; ++i) same[i] = _mm256_cmpeq_epi16(load(values + 16 * i), load(others + 16 * i));
        return ~(bits_of(same[0], same[1]) | bits_of(same[2], same[3]) << 32);
    }

    [[HF_EXT_AVX2]] static uint64_t deposit(uint64_t bits, uint64_t mask) { return _pdep_u64(bits, mask); }
};

using VectorMasks = Avx2Masks;
#elif defined(HF_EXT_NEON)
struct NeonMasks : ScalarMasks {
    // Returns a bit for each of 64 comparisons.
    [[gnu::always_inline]] static inline uint64_t bits_of(const uint16x8_t (&hits)[8]) {
        const uint8x16_t bits = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));  // each byte of eight has one of its own
        uint8x16_t bytes[4];
        for (size_t i = 0; i < 4; ++i)
            bytes[i] = vandq_u8(bits, vuzp1q_u8(vreinterpretq_u8_u16(hits[2 * i]), vreinterpretq_u8_u16(hits[2 * i + 1])));
        // Each step adds neighbors; three of them add eight bytes to one.
        const uint8x16_t fours = vpaddq_u8(vpaddq_u8(bytes[0], bytes[1]), vpaddq_u8(bytes[2], bytes[3]));
        return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(fours, fours)), 0);
    }

    static void below(const uint16_t* values, const uint16_t* limits, size_t count, uint64_t* masks) {
        uint16x8_t magnitudes[8], hits[8];
        for (size_t i = 0; i < 8; ++i) magnitudes[i] = vandq_u16(vld1q_u16(values + 8 * i), vdupq_n_u16(0x7fff));
        for (size_t k = 0; k < count; ++k) {
            for (size_t i = 0; i < 8; ++i) hits[i] = vcltq_u16(magnitudes[i], vdupq_n_u16(limits[k]));
            masks[k] = bits_of(hits);
        }
    }

    static uint64_t differing(const uint16_t* values, const uint16_t* others) {
        uint16x8_t same[8];
        for (size_t i = 0; i < 8; ++i) same[i] = vceqq_u16(vld1q_u16(values + 8 * i), vld1q_u16(others + 8 * i));
        return ~bits_of(same);
    }
};

using VectorMasks = NeonMasks;
#else
using VectorMasks = ScalarMasks;
#endif

template <Instructions SET>
using Masks = std::conditional_t<SET == Instructions::SCALAR, ScalarMasks, VectorMasks>;

}  // namespace hf_ext::delta
