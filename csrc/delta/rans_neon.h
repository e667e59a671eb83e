// Rows of 64 lanes with the vector instructions of 64-bit ARM. The results are those of the loops over lanes in rans.h.
#pragma once

#include "../common/intrinsics.h"
#include "rans_lane.h"

#ifdef HF_EXT_NEON
namespace hf_ext::delta {

// For each of the 16 sets of 4 lanes, the bytes of the states after the lanes of the set have got a word each. Bytes 0 to 15
// are those of the states before, bytes 16 to 23 those of the next four words.
struct NeonPermutations {
    uint8_t bytes[16][16] = {};
    constexpr NeonPermutations() {
        for (int set = 0; set < 16; ++set) {
            int word = 16;
            for (int lane = 0; lane < 4; ++lane) {
                const int state = 4 * lane;
                const bool in = set >> lane & 1;
                const int from[4] = {in ? word : state, in ? word + 1 : state + 1, in ? state : state + 2,
                                     in ? state + 1 : state + 3};
                for (int byte = 0; byte < 4; ++byte) bytes[set][state + byte] = uint8_t(from[byte]);
                word += 2 * in;
            }
        }
    }
};
inline constexpr NeonPermutations NEON_PERMUTATIONS;

struct Neon {
    static constexpr int LANES = 64, GROUP = 4, GROUPS = 16;  // lanes per vector, vectors per row

    // Appends a word to each state that is low. The words are in the order of the lanes.
    [[gnu::always_inline]] static inline uint32x4_t refill(uint32x4_t x, const uint8_t*& next) {
        // The sum of these over the low lanes: their set in the lower byte, the bytes of their words in the upper.
        const uint32x4_t parts = {0x201, 0x202, 0x204, 0x208};
        const uint32_t sum = vaddvq_u32(vandq_u32(vcltq_u32(x, vdupq_n_u32(STATE_LOW)), parts));
        const uint8x16x2_t bytes = {{vreinterpretq_u8_u32(x), vld1q_u8(next)}};
        next += sum >> 8;
        return vreinterpretq_u32_u8(vqtbl2q_u8(bytes, vld1q_u8(NEON_PERMUTATIONS.bytes[sum & 15])));
    }

    // Loads one entry for each lane: there is no gather instruction.
    [[gnu::always_inline]] static inline uint32x4_t look_up(const uint32_t* table, uint32x4_t indices) {
        const uint64_t first = vgetq_lane_u64(vreinterpretq_u64_u32(indices), 0),
                       second = vgetq_lane_u64(vreinterpretq_u64_u32(indices), 1);
        return uint32x4_t{table[uint32_t(first)], table[first >> 32], table[uint32_t(second)], table[second >> 32]};
    }

    static int32x4_t linear(uint32x4_t slot) {
        return vreinterpretq_s32_u32(vsubq_u32(vshrq_n_u32(slot, 26), vdupq_n_u32(LINEAR)));
    }

    // Returns false if no value of a row has raw bits: then the row's step for them changes no state.
    static bool has_raw_bits(const Context* contexts) {
        uint16x8_t all = vdupq_n_u16(0);
        for (int i = 0; i < LANES; i += 8) all = vorrq_u16(all, vld1q_u16(reinterpret_cast<const uint16_t*>(contexts + i)));
        return vmaxvq_u16(vandq_u16(all, vdupq_n_u16(0xff)));
    }

    static bool has_tail(uint32x4_t slot) { return vmaxvq_u32(slot) >> 26 >= TAIL; }

    // Decodes up to `rows` rows, as long as `next` is not beyond `limit`. Returns their number.
    static size_t decode(uint32_t* states, const uint8_t*& next, const uint8_t* limit, const Context* contexts, int32_t* values,
                         size_t rows, const DecodeTable* tables) {
        const uint32_t* slots = tables->slots.data();
        const uint8_t* word = next;
        const uint32x4_t in_table = vdupq_n_u32(PROBABILITY_SUM - 1);
        uint32x4_t x[GROUPS];
        for (int g = 0; g < GROUPS; ++g) x[g] = vld1q_u32(states + GROUP * g);
        size_t row = 0;
        for (; row < rows && word <= limit; ++row, contexts += LANES, values += LANES) {
            uint32_t slot_of[LANES];
            uint32x4_t most = vdupq_n_u32(0);
#pragma GCC unroll 16  // so that the states stay in registers
            for (int g = 0; g < GROUPS; ++g) {
                // The low byte of a context is the shift, the high byte the table. A table has 2048 slots.
                const uint32x4_t context = vmovl_u16(vld1_u16(reinterpret_cast<const uint16_t*>(contexts + GROUP * g)));
                const uint32x4_t slot = look_up(slots, vsliq_n_u32(x[g], vshrq_n_u32(context, 8), PROBABILITY_BITS));
                vst1q_u32(slot_of + GROUP * g, slot);
                most = vmaxq_u32(most, slot);
                // x = frequency * (x >> 11) + offset
                const uint32x4_t frequency = vandq_u32(slot, vdupq_n_u32(0xfff)),
                                 offset = vandq_u32(vshrq_n_u32(slot, 12), in_table);
                x[g] = refill(vmlaq_u32(offset, frequency, vshrq_n_u32(x[g], PROBABILITY_BITS)), word);
            }
            if (has_raw_bits(contexts)) {
#pragma GCC unroll 16
                for (int g = 0; g < GROUPS; ++g) {
                    // value = (id - 24) << shift | low bits of x; x >>= shift
                    const uint32x4_t context = vmovl_u16(vld1_u16(reinterpret_cast<const uint16_t*>(contexts + GROUP * g)));
                    const int32x4_t shift = vreinterpretq_s32_u32(vandq_u32(context, vdupq_n_u32(0xff)));
                    const uint32x4_t s = vreinterpretq_u32_s32(linear(vld1q_u32(slot_of + GROUP * g)));
                    const uint32x4_t high = vshlq_u32(x[g], vnegq_s32(shift));  // a shift by less than 0 is one to the right
                    vst1q_s32(values + GROUP * g, vreinterpretq_s32_u32(vaddq_u32(x[g], vshlq_u32(vsubq_u32(s, high), shift))));
                    x[g] = refill(high, word);
                }
            } else {
                for (int g = 0; g < GROUPS; ++g) vst1q_s32(values + GROUP * g, linear(vld1q_u32(slot_of + GROUP * g)));
            }
            if (has_tail(most)) {
                for (int g = 0; g < GROUPS; ++g) vst1q_u32(states + GROUP * g, x[g]);
                for (int g = 0; g < GROUPS; ++g) {
                    if (!has_tail(vld1q_u32(slot_of + GROUP * g))) continue;
                    for (int lane = GROUP * g; lane < GROUP * g + GROUP; ++lane)
                        if (const uint32_t id = slot_of[lane] >> 26; id >= TAIL)
                            take_tail(states[lane], word, int(id), contexts[lane].shift(), values[lane]);
                }
                for (int g = 0; g < GROUPS; ++g) x[g] = vld1q_u32(states + GROUP * g);
            }
        }
        for (int g = 0; g < GROUPS; ++g) vst1q_u32(states + GROUP * g, x[g]);
        next = word;
        return row;
    }
};

}  // namespace hf_ext::delta
#endif
