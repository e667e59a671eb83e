// Rows of 64 lanes with vector instructions. The results are those of the loops over lanes in rans.h.
#pragma once

#include "../common/intrinsics.h"
#include "rans_lane.h"

#ifdef HF_EXT_X86
namespace hf_ext::delta {

struct Avx512 {
    static constexpr int LANES = 64;
    static constexpr int GROUP = 16, GROUPS = 4;  // lanes per vector, vectors per row

    // Appends a word to each state that is low. The words are in the order of the lanes.
    [[HF_EXT_AVX512, gnu::always_inline]] static inline void refill(__m512i (&x)[GROUPS], const uint8_t*& next) {
        __mmask16 low[GROUPS];
        for (int g = 0; g < GROUPS; ++g) low[g] = _mm512_cmplt_epu32_mask(x[g], _mm512_set1_epi32(STATE_LOW));
        for (int g = 0; g < GROUPS; ++g) {
            const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
            x[g] = _mm512_mask_or_epi32(x[g], low[g], _mm512_slli_epi32(x[g], 16), _mm512_maskz_expand_epi32(low[g], words));
            next += 2 * __builtin_popcount(low[g]);
        }
    }

    // Returns false if no value of a row has raw bits: then the row's step for them changes no state.
    [[HF_EXT_AVX512, gnu::always_inline]] static inline bool has_raw_bits(const Context* contexts) {
        const __m512i all = _mm512_or_si512(_mm512_loadu_si512(contexts), _mm512_loadu_si512(contexts + LANES / 2));
        return _mm512_test_epi32_mask(all, _mm512_set1_epi16(0xff));
    }

    // Decodes up to `rows` rows, as long as `next` is not beyond `limit`. Returns their number.
    [[HF_EXT_AVX512]] static size_t decode(uint32_t* states, const uint8_t*& next, const uint8_t* limit,
                                           const Context* contexts, int32_t* values, size_t rows, const DecodeTable* tables) {
        const auto* slots = reinterpret_cast<const int*>(tables->slots.data());
        const uint8_t* word = next;
        __m512i x[GROUPS];
        for (int g = 0; g < GROUPS; ++g) x[g] = _mm512_loadu_si512(states + GROUP * g);
        size_t row = 0;
        for (; row < rows && word <= limit; ++row, contexts += LANES, values += LANES) {
            __m512i context[GROUPS], slot[GROUPS];
            __mmask16 tails[GROUPS];
            for (int g = 0; g < GROUPS; ++g) {
                // The low byte of a context is the shift, the high byte the table. A table has 2048 slots.
                context[g] = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(contexts + GROUP * g)));
                const __m512i first =
                    _mm512_slli_epi32(_mm512_and_si512(context[g], _mm512_set1_epi32(0xff00)), PROBABILITY_BITS - 8);
                const __m512i place = _mm512_and_si512(x[g], _mm512_set1_epi32(PROBABILITY_SUM - 1));
                slot[g] = _mm512_i32gather_epi32(_mm512_or_si512(first, place), slots, 4);
                // x = frequency * (x >> 11) + offset
                const __m512i frequency = _mm512_and_si512(slot[g], _mm512_set1_epi32(0xfff));
                const __m512i offset = _mm512_and_si512(_mm512_srli_epi32(slot[g], 12), _mm512_set1_epi32(PROBABILITY_SUM - 1));
                x[g] = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(x[g], PROBABILITY_BITS)), offset);
                tails[g] = _mm512_cmpge_epu32_mask(slot[g], _mm512_set1_epi32(int(uint32_t(TAIL) << 26)));
            }
            refill(x, word);
            if (has_raw_bits(contexts)) {
                for (int g = 0; g < GROUPS; ++g) {
                    // value = (id - 24) << shift | low bits of x; x >>= shift
                    const __m512i shift = _mm512_and_si512(context[g], _mm512_set1_epi32(0xff));
                    const __m512i s = _mm512_sub_epi32(_mm512_srli_epi32(slot[g], 26), _mm512_set1_epi32(LINEAR));
                    const __m512i high = _mm512_sllv_epi32(_mm512_set1_epi32(-1), shift);
                    _mm512_storeu_si512(values + GROUP * g,
                                        _mm512_or_si512(_mm512_sllv_epi32(s, shift), _mm512_andnot_si512(high, x[g])));
                    x[g] = _mm512_srlv_epi32(x[g], shift);
                }
                refill(x, word);
            } else {
                for (int g = 0; g < GROUPS; ++g)
                    _mm512_storeu_si512(values + GROUP * g,
                                        _mm512_sub_epi32(_mm512_srli_epi32(slot[g], 26), _mm512_set1_epi32(LINEAR)));
            }
            if (uint64_t tail = uint64_t(tails[3]) << 48 | uint64_t(tails[2]) << 32 | uint32_t(tails[1]) << 16 | tails[0]) {
                for (int g = 0; g < GROUPS; ++g) _mm512_storeu_si512(states + GROUP * g, x[g]);
                uint32_t ids[LANES];
                for (int g = 0; g < GROUPS; ++g) _mm512_storeu_si512(ids + GROUP * g, _mm512_srli_epi32(slot[g], 26));
                for (; tail; tail &= tail - 1) {
                    const int lane = __builtin_ctzll(tail);
                    take_tail(states[lane], word, int(ids[lane]), contexts[lane].shift(), values[lane]);
                }
                for (int g = 0; g < GROUPS; ++g) x[g] = _mm512_loadu_si512(states + GROUP * g);
            }
        }
        for (int g = 0; g < GROUPS; ++g) _mm512_storeu_si512(states + GROUP * g, x[g]);
        next = word;
        return row;
    }

    // Moves the low word out of each full state, the last lane first.
    [[HF_EXT_AVX512, gnu::always_inline]] static inline void make_room(__m512i (&x)[GROUPS], const __mmask16 (&full)[GROUPS],
                                                                       uint16_t*& next) {
        for (int g = GROUPS; g-- > 0;) {
            const int count = __builtin_popcount(full[g]);
            next -= count;
            _mm256_mask_storeu_epi16(next, __mmask16((1u << count) - 1),
                                     _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full[g], x[g])));
            x[g] = _mm512_mask_srli_epi32(x[g], full[g], x[g], 16);
        }
    }

    // Encodes `rows` rows, the last one first.
    [[HF_EXT_AVX512]] static void encode(uint32_t* states, uint16_t*& next, const Context* contexts, const int32_t* values,
                                         const uint8_t* ids, size_t rows, const EncodeTable* tables) {
        const auto* slots = reinterpret_cast<const int*>(tables->slots.data());
        uint16_t* word = next;
        __m512i x[GROUPS];
        for (int g = 0; g < GROUPS; ++g) x[g] = _mm512_loadu_si512(states + GROUP * g);
        for (size_t row = rows; row-- > 0;) {
            const Context* context = contexts + row * LANES;
            const int32_t* value = values + row * LANES;
            const uint8_t* id = ids + row * LANES;
            __m512i frequency[GROUPS], start[GROUPS], shift[GROUPS];
            __mmask16 full[GROUPS];
            uint64_t tails = 0;
            for (int g = 0; g < GROUPS; ++g) {
                // The low byte of a context is the shift, the high byte the table. A table has 64 symbols.
                const __m512i both =
                    _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(context + GROUP * g)));
                const __m512i symbol = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(id + GROUP * g)));
                const __m512i first = _mm512_srli_epi32(_mm512_and_si512(both, _mm512_set1_epi32(0xff00)), 2);
                __m512i slot = _mm512_i32gather_epi32(_mm512_or_si512(first, symbol), slots, 4);
                // A symbol whose frequency is 0 is escaped.
                const __mmask16 escaped = _mm512_testn_epi32_mask(slot, _mm512_set1_epi32(0xffff));
                slot = _mm512_mask_i32gather_epi32(slot, escaped, _mm512_or_si512(first, _mm512_set1_epi32(ESCAPE)), slots, 4);
                tails |= uint64_t(uint32_t(escaped | _mm512_cmpge_epi32_mask(symbol, _mm512_set1_epi32(TAIL)))) << (GROUP * g);
                frequency[g] = _mm512_and_si512(slot, _mm512_set1_epi32(0xffff));
                start[g] = _mm512_srli_epi32(slot, 16);
                shift[g] = _mm512_and_si512(both, _mm512_set1_epi32(0xff));
            }
            if (tails) {
                for (int g = 0; g < GROUPS; ++g) _mm512_storeu_si512(states + GROUP * g, x[g]);
                for (; tails; tails ^= uint64_t(1) << (63 - __builtin_clzll(tails))) {
                    const int lane = 63 - __builtin_clzll(tails);
                    put_tail(states[lane], word, tables[context[lane].table()], id[lane], value[lane] >> context[lane].shift());
                }
                for (int g = 0; g < GROUPS; ++g) x[g] = _mm512_loadu_si512(states + GROUP * g);
            }
            // x = x << shift | the low bits of the value, once x is below 2^(32 - shift)
            for (int g = 0; g < GROUPS; ++g) {
                const __m512i over = _mm512_srlv_epi32(x[g], _mm512_sub_epi32(_mm512_set1_epi32(32), shift[g]));
                full[g] = _mm512_test_epi32_mask(over, over);
            }
            make_room(x, full, word);
            for (int g = 0; g < GROUPS; ++g) {
                const __m512i high = _mm512_sllv_epi32(_mm512_set1_epi32(-1), shift[g]);
                x[g] = _mm512_or_si512(_mm512_sllv_epi32(x[g], shift[g]),
                                       _mm512_andnot_si512(high, _mm512_loadu_si512(value + GROUP * g)));
                full[g] = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x[g], 32 - PROBABILITY_BITS), frequency[g]);
            }
            // x = (x / frequency << 11) + x % frequency + start, once x is below frequency << 21
            make_room(x, full, word);
            for (int g = 0; g < GROUPS; ++g) {
                // The quotient is below 2^21, so in float it is off by at most one.
                __m512i quotient =
                    _mm512_cvttps_epi32(_mm512_div_ps(_mm512_cvtepu32_ps(x[g]), _mm512_cvtepi32_ps(frequency[g])));
                __m512i rest = _mm512_sub_epi32(x[g], _mm512_mullo_epi32(quotient, frequency[g]));
                const __mmask16 above = _mm512_movepi32_mask(rest);
                quotient = _mm512_mask_sub_epi32(quotient, above, quotient, _mm512_set1_epi32(1));
                rest = _mm512_mask_add_epi32(rest, above, rest, frequency[g]);
                const __mmask16 below = _mm512_cmpge_epi32_mask(rest, frequency[g]);
                quotient = _mm512_mask_add_epi32(quotient, below, quotient, _mm512_set1_epi32(1));
                rest = _mm512_mask_sub_epi32(rest, below, rest, frequency[g]);
                x[g] = _mm512_add_epi32(_mm512_slli_epi32(quotient, PROBABILITY_BITS), _mm512_add_epi32(rest, start[g]));
            }
        }
        for (int g = 0; g < GROUPS; ++g) _mm512_storeu_si512(states + GROUP * g, x[g]);
        next = word;
    }
};

// Permutations for each of the 256 sets of 8 lanes. `expand` permutes bytes: it gives each lane of the set a word, the others
// 0. `compress` moves the lanes of the set to the end of the vector.
struct Avx2Permutations {
    uint8_t expand[256][32] = {}, compress[256][8] = {};
    constexpr Avx2Permutations() {
        for (int set = 0; set < 256; ++set) {
            int word = 0, place = 8;
            for (int lane = 0; lane < 8; ++lane) {
                const bool in = set >> lane & 1;
                for (int byte = 0; byte < 4; ++byte)
                    expand[set][4 * lane + byte] = uint8_t(in && byte < 2 ? 2 * word + byte : 0x80);
                word += in;
            }
            for (int lane = 8; lane-- > 0;)
                if (set >> lane & 1) compress[set][--place] = uint8_t(lane);
        }
    }
};
inline constexpr Avx2Permutations AVX2_PERMUTATIONS;

// The same as Avx512, but a row needs half of the sixteen registers for its states: the phases pass all else through memory.
struct Avx2 {
    static constexpr int LANES = 64, GROUP = 8, GROUPS = 8;

    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i load(const void* from) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(from));
    }
    [[HF_EXT_AVX2, gnu::always_inline]] static inline void store(void* to, __m256i x) {
        _mm256_storeu_si256(static_cast<__m256i*>(to), x);
    }
    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i load_words(const void* from) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
    }
    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i permutation(const uint8_t (&indices)[8]) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(indices)));
    }
    [[HF_EXT_AVX2, gnu::always_inline]] static inline unsigned lanes_of(__m256i mask) {
        return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
    }

    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i refill(__m256i x, const uint8_t*& next) {
        const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
        const unsigned lanes = lanes_of(low);
        const __m256i eight = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
        const __m256i words = _mm256_shuffle_epi8(eight, load(AVX2_PERMUTATIONS.expand[lanes]));
        next += 2 * __builtin_popcount(lanes);
        return _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), words), low);
    }

    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i linear(__m256i slot) {
        return _mm256_sub_epi32(_mm256_srli_epi32(slot, 26), _mm256_set1_epi32(LINEAR));
    }

    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i is_tail(__m256i slot) {
        return _mm256_cmpgt_epi32(_mm256_srli_epi32(slot, 26), _mm256_set1_epi32(TAIL - 1));
    }

    // Returns false if no value of a row has raw bits: then the row's step for them changes no state.
    [[HF_EXT_AVX2, gnu::always_inline]] static inline bool has_raw_bits(const Context* contexts) {
        const __m256i first = _mm256_or_si256(load(contexts), load(contexts + 16)),
                      second = _mm256_or_si256(load(contexts + 32), load(contexts + 48));
        return !_mm256_testz_si256(_mm256_or_si256(first, second), _mm256_set1_epi16(0xff));
    }

    // Loads one entry for each lane. The gather instruction is slower on many processors.
    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i look_up(const uint32_t* table, __m256i indices) {
        const __m128i low = _mm256_castsi256_si128(indices), high = _mm256_extracti128_si256(indices, 1);
        return _mm256_set_m128i(look_up_four(table, high), look_up_four(table, low));
    }

    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m128i look_up_four(const uint32_t* table, __m128i indices) {
        const auto first = uint64_t(_mm_cvtsi128_si64(indices)), second = uint64_t(_mm_extract_epi64(indices, 1));
        return _mm_setr_epi32(int(table[uint32_t(first)]), int(table[first >> 32]), int(table[uint32_t(second)]),
                              int(table[second >> 32]));
    }

    [[HF_EXT_AVX2]] static size_t decode(uint32_t* states, const uint8_t*& next, const uint8_t* limit, const Context* contexts,
                                         int32_t* values, size_t rows, const DecodeTable* tables) {
        const uint32_t* slots = tables->slots.data();
        const uint8_t* word = next;
        const __m256i in_table = _mm256_set1_epi32(PROBABILITY_SUM - 1);
        __m256i x[GROUPS];
        for (int g = 0; g < GROUPS; ++g) x[g] = load(states + GROUP * g);
        size_t row = 0;
        for (; row < rows && word <= limit; ++row, contexts += LANES, values += LANES) {
            alignas(32) uint32_t slot_of[LANES];
            __m256i most = _mm256_setzero_si256();
#pragma GCC unroll 8  // so that the states stay in registers
            for (int g = 0; g < GROUPS; ++g) {
                const __m256i context = load_words(contexts + GROUP * g);
                const __m256i first =
                    _mm256_slli_epi32(_mm256_and_si256(context, _mm256_set1_epi32(0xff00)), PROBABILITY_BITS - 8);
                const __m256i slot = look_up(slots, _mm256_or_si256(first, _mm256_and_si256(x[g], in_table)));
                store(slot_of + GROUP * g, slot);
                most = _mm256_max_epu32(most, slot);
                // x = frequency * (x >> 11) + offset
                const __m256i frequency = _mm256_and_si256(slot, _mm256_set1_epi32(0xfff)),
                              offset = _mm256_and_si256(_mm256_srli_epi32(slot, 12), in_table);
                const __m256i product = _mm256_mullo_epi32(frequency, _mm256_srli_epi32(x[g], PROBABILITY_BITS));
                x[g] = refill(_mm256_add_epi32(product, offset), word);
            }
            if (has_raw_bits(contexts)) {
#pragma GCC unroll 8
                for (int g = 0; g < GROUPS; ++g) {
                    // value = (id - 24) << shift | low bits of x; x >>= shift
                    const __m256i shift = _mm256_and_si256(load_words(contexts + GROUP * g), _mm256_set1_epi32(0xff));
                    const __m256i s = linear(load(slot_of + GROUP * g)), high = _mm256_srlv_epi32(x[g], shift);
                    store(values + GROUP * g, _mm256_add_epi32(x[g], _mm256_sllv_epi32(_mm256_sub_epi32(s, high), shift)));
                    x[g] = refill(high, word);
                }
            } else {
                for (int g = 0; g < GROUPS; ++g) store(values + GROUP * g, linear(load(slot_of + GROUP * g)));
            }
            if (lanes_of(is_tail(most))) {
                for (int g = 0; g < GROUPS; ++g) store(states + GROUP * g, x[g]);
                for (int g = 0; g < GROUPS; ++g)
                    for (unsigned tails = lanes_of(is_tail(load(slot_of + GROUP * g))); tails; tails &= tails - 1) {
                        const int lane = GROUP * g + __builtin_ctz(tails);
                        take_tail(states[lane], word, int(slot_of[lane] >> 26), contexts[lane].shift(), values[lane]);
                    }
                for (int g = 0; g < GROUPS; ++g) x[g] = load(states + GROUP * g);
            }
        }
        for (int g = 0; g < GROUPS; ++g) store(states + GROUP * g, x[g]);
        next = word;
        return row;
    }

    [[HF_EXT_AVX2, gnu::always_inline]] static inline __m256i make_room(__m256i x, __m256i full, uint16_t*& next) {
        const unsigned lanes = lanes_of(full);
        const __m256i words = _mm256_and_si256(_mm256_permutevar8x32_epi32(x, permutation(AVX2_PERMUTATIONS.compress[lanes])),
                                               _mm256_set1_epi32(0xffff));
        // The store also writes before the words; later words overwrite that.
        _mm_storeu_si128(reinterpret_cast<__m128i*>(next - GROUP),
                         _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
        next -= __builtin_popcount(lanes);
        return _mm256_blendv_epi8(x, _mm256_srli_epi32(x, 16), full);
    }

    [[HF_EXT_AVX2]] static void encode(uint32_t* states, uint16_t*& next, const Context* contexts, const int32_t* values,
                                       const uint8_t* ids, size_t rows, const EncodeTable* tables) {
        const auto* slots = reinterpret_cast<const int*>(tables->slots.data());
        uint16_t* word = next;
        const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi32(1), low = _mm256_set1_epi32(0xffff);
        for (size_t row = rows; row-- > 0;) {
            const Context* context = contexts + row * LANES;
            const int32_t* value = values + row * LANES;
            const uint8_t* id = ids + row * LANES;
            uint32_t slot_of[LANES];
            uint64_t tails = 0;
            for (int g = 0; g < GROUPS; ++g) {
                const __m256i symbol = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(id + GROUP * g)));
                const __m256i first =
                    _mm256_srli_epi32(_mm256_and_si256(load_words(context + GROUP * g), _mm256_set1_epi32(0xff00)), 2);
                __m256i slot = _mm256_i32gather_epi32(slots, _mm256_or_si256(first, symbol), 4);
                // A symbol whose frequency is 0 is escaped.
                const __m256i escaped = _mm256_cmpeq_epi32(_mm256_and_si256(slot, low), zero);
                slot = _mm256_mask_i32gather_epi32(slot, slots, _mm256_or_si256(first, _mm256_set1_epi32(ESCAPE)), escaped, 4);
                store(slot_of + GROUP * g, slot);
                tails |= uint64_t(lanes_of(_mm256_or_si256(escaped, _mm256_cmpgt_epi32(symbol, _mm256_set1_epi32(TAIL - 1)))))
                         << (GROUP * g);
            }
            for (; tails; tails ^= uint64_t(1) << (63 - __builtin_clzll(tails))) {
                const int lane = 63 - __builtin_clzll(tails);
                put_tail(states[lane], word, tables[context[lane].table()], id[lane], value[lane] >> context[lane].shift());
            }
            for (int g = has_raw_bits(context) ? GROUPS : 0; g-- > 0;) {
                // x = x << shift | the low bits of the value, once x is below 2^(32 - shift)
                const __m256i x = load(states + GROUP * g),
                              shift = _mm256_and_si256(load_words(context + GROUP * g), _mm256_set1_epi32(0xff));
                const __m256i over = _mm256_srlv_epi32(x, _mm256_sub_epi32(_mm256_set1_epi32(32), shift));
                const __m256i room =
                    make_room(x, _mm256_xor_si256(_mm256_cmpeq_epi32(over, zero), _mm256_set1_epi32(-1)), word);
                const __m256i mask = _mm256_sub_epi32(_mm256_sllv_epi32(one, shift), one);
                store(states + GROUP * g,
                      _mm256_or_si256(_mm256_sllv_epi32(room, shift), _mm256_and_si256(mask, load(value + GROUP * g))));
            }
            for (int g = GROUPS; g-- > 0;) {
                // x = (x / frequency << 11) + x % frequency + start, once x is below frequency << 21
                const __m256i slot = load(slot_of + GROUP * g), frequency = _mm256_and_si256(slot, low),
                              start = _mm256_srli_epi32(slot, 16);
                const __m256i before = load(states + GROUP * g);
                const __m256i full =
                    _mm256_cmpgt_epi32(_mm256_add_epi32(_mm256_srli_epi32(before, 32 - PROBABILITY_BITS), one), frequency);
                const __m256i x = make_room(before, full, word);
                // The quotient is below 2^21, so in float it is off by at most one. The conversion is signed: it converts half
                // the state.
                const __m256 halves = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 1)), whole = _mm256_add_ps(halves, halves);
                __m256i quotient = _mm256_cvttps_epi32(_mm256_div_ps(whole, _mm256_cvtepi32_ps(frequency)));
                __m256i rest = _mm256_sub_epi32(x, _mm256_mullo_epi32(quotient, frequency));
                const __m256i above = _mm256_srai_epi32(rest, 31);
                quotient = _mm256_add_epi32(quotient, above);
                rest = _mm256_add_epi32(rest, _mm256_and_si256(above, frequency));
                const __m256i below = _mm256_cmpgt_epi32(_mm256_add_epi32(rest, one), frequency);
                quotient = _mm256_sub_epi32(quotient, below);
                rest = _mm256_sub_epi32(rest, _mm256_and_si256(below, frequency));
                store(states + GROUP * g,
                      _mm256_add_epi32(_mm256_slli_epi32(quotient, PROBABILITY_BITS), _mm256_add_epi32(rest, start)));
            }
        }
        next = word;
    }
};

}  // namespace hf_ext::delta
#endif
