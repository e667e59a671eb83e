// 64 neighboring 16-bit floats as the bits of words: those whose exponent is below a limit, those that differ from others.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>

#include "../common/bits.h"
#include "../common/intrinsics.h"

namespace hf_ext::delta {

constexpr size_t WORD = 64;  // values whose bits fit a word

struct ScalarMasks {
    // Fills a mask for each of `count` limits of the exponent field, which follows on the `mantissa` lowest bits.
    static void below(const uint16_t* values, int mantissa, const uint8_t* limits, size_t count, uint64_t* masks) {
        for (size_t k = 0; k < count; ++k) {
            masks[k] = 0;
            for (size_t i = 0; i < WORD; ++i) masks[k] |= uint64_t((values[i] & 0x7fff) >> mantissa < limits[k]) << i;
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

    [[HF_EXT_AVX2]] static void below(const uint16_t* values, int mantissa, const uint8_t* limits, size_t count,
                                      uint64_t* masks) {
        const __m256i magnitude = _mm256_set1_epi16(0x7fff), zero = _mm256_setzero_si256();
        __m256i fields[4], bytes[2];
        for (size_t i = 0; i < 4; ++i)
            fields[i] = _mm256_srl_epi16(_mm256_and_si256(load(values + 16 * i), magnitude), _mm_cvtsi32_si128(mantissa));
        for (size_t i = 0; i < 2; ++i)
            bytes[i] = _mm256_permute4x64_epi64(_mm256_packus_epi16(fields[2 * i], fields[2 * i + 1]), 0xd8);
        for (size_t k = 0; k < count; ++k) {
            const __m256i limit = _mm256_set1_epi8(char(limits[k]));  // a difference of 0 or less saturates to 0
            uint32_t others[2];
            for (size_t i = 0; i < 2; ++i)
                others[i] = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_subs_epu8(limit, bytes[i]), zero)));
            masks[k] = ~(others[0] | uint64_t(others[1]) << 32);
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
    using Bytes = uint8x16_t[4];

    static void narrow(const uint16x8_t (&numbers)[8], Bytes& bytes) {
        for (size_t i = 0; i < 4; ++i)
            bytes[i] = vuzp1q_u8(vreinterpretq_u8_u16(numbers[2 * i]), vreinterpretq_u8_u16(numbers[2 * i + 1]));
    }

    // Returns a bit for each of 64 comparisons.
    [[gnu::always_inline]] static inline uint64_t bits_of(const Bytes& hits) {
        const uint8x16_t bits = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));  // each byte of eight has one of its own
        // Each step adds neighbors; three of them add eight bytes to one.
        const uint8x16_t fours = vpaddq_u8(vpaddq_u8(vandq_u8(bits, hits[0]), vandq_u8(bits, hits[1])),
                                           vpaddq_u8(vandq_u8(bits, hits[2]), vandq_u8(bits, hits[3])));
        return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(fours, fours)), 0);
    }

    static void below(const uint16_t* values, int mantissa, const uint8_t* limits, size_t count, uint64_t* masks) {
        uint16x8_t fields[8];
        Bytes bytes, hits;
        for (size_t i = 0; i < 8; ++i)
            fields[i] = vshlq_u16(vandq_u16(vld1q_u16(values + 8 * i), vdupq_n_u16(0x7fff)), vdupq_n_s16(int16_t(-mantissa)));
        narrow(fields, bytes);
        for (size_t k = 0; k < count; ++k) {
            for (size_t i = 0; i < 4; ++i) hits[i] = vcltq_u8(bytes[i], vdupq_n_u8(limits[k]));
            masks[k] = bits_of(hits);
        }
    }

    static uint64_t differing(const uint16_t* values, const uint16_t* others) {
        uint16x8_t same[8];
        Bytes bytes;
        for (size_t i = 0; i < 8; ++i) same[i] = vceqq_u16(vld1q_u16(values + 8 * i), vld1q_u16(others + 8 * i));
        narrow(same, bytes);
        return ~bits_of(bytes);
    }
};

using VectorMasks = NeonMasks;
#else
using VectorMasks = ScalarMasks;
#endif

template <Instructions SET>
using Masks = std::conditional_t<SET == Instructions::SCALAR, ScalarMasks, VectorMasks>;

}  // namespace hf_ext::delta
