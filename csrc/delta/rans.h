// Interleaved range asymmetric numeral systems (rANS; Duda, arXiv 1311.2540): 32-bit states, 16-bit words, one state per lane.
//
// Element i belongs to lane i mod LANES. A row of LANES elements is coded in three phases: symbols, raw low bits, extra bits of
// tail symbols. Each phase handles all lanes in order, so a row can be decoded with vectors of any width up to LANES.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "../common/instruction_sets.h"
#include "rans_lane.h"
#include "rans_neon.h"
#include "rans_x86.h"

namespace hf_ext::delta {

// Encodes backwards: the decoder reads first what was written last. `SET` are the vector instructions for rows of 64 lanes.
template <int LANES, Instructions SET>
class Encoder {
   public:
    explicit Encoder(size_t elements)
        : capacity_(4 * elements + MARGIN), words_(new uint16_t[capacity_]), next_(words_.get() + capacity_) {
        std::fill(states_, states_ + LANES, STATE_LOW);
    }

    // Must be called for the last values first. `count` must be a multiple of LANES except in the first call. `ids` are the
    // values' symbols (see `symbol_id`); `tables` has TABLES entries.
    void encode(const Context* contexts, const int32_t* values, const uint8_t* ids, size_t count, const EncodeTable* tables) {
        const size_t rows = count / LANES, done = rows * LANES;
        if (done < count) encode_row(contexts + done, values + done, ids + done, int(count - done), tables);
#ifdef HF_EXT_X86
        if constexpr (LANES == 64 && SET == Instructions::AVX512)
            return Avx512::encode(states_, next_, contexts, values, ids, rows, tables);
        if constexpr (LANES == 64 && SET == Instructions::AVX2)
            return Avx2::encode(states_, next_, contexts, values, ids, rows, tables);
#endif
        for (size_t row = rows; row-- > 0;)
            encode_row(contexts + row * LANES, values + row * LANES, ids + row * LANES, LANES, tables);
    }

    // Appends the states and the words in the order in which the decoder reads them.
    void finish(std::vector<uint8_t>& out) const {
        const auto append = [&out](const void* data, size_t bytes) {
            const auto* begin = static_cast<const uint8_t*>(data);
            out.insert(out.end(), begin, begin + bytes);
        };
        append(states_, sizeof states_);
        append(next_, size_t(words_.get() + capacity_ - next_) * 2);
    }

   private:
    static constexpr size_t MARGIN = 16;  // a vector store may begin before the words

    [[gnu::always_inline]] inline void encode_row(const Context* contexts, const int32_t* values, const uint8_t* ids, int lanes,
                                                  const EncodeTable* tables) {
        uint32_t slots[LANES];
        uint64_t tails = 0;
        for (int lane = 0; lane < lanes; ++lane) {
            const EncodeTable& table = tables[contexts[lane].table()];
            slots[lane] = table.slots[ids[lane]];
            if (is_coded(slots[lane]) && ids[lane] < TAIL) continue;
            if (!is_coded(slots[lane])) slots[lane] = table.slots[ESCAPE];
            tails |= uint64_t(1) << lane;
        }
        for (int lane = lanes; tails && lane-- > 0;)
            if (tails >> lane & 1)
                put_tail(states_[lane], next_, tables[contexts[lane].table()], ids[lane],
                         values[lane] >> contexts[lane].shift());
        for (int lane = lanes; lane-- > 0;) {
            const int shift = contexts[lane].shift();
            put_bits(states_[lane], next_, uint32_t(values[lane]) & LOW_MASKS[size_t(shift)], shift);
        }
        for (int lane = lanes; lane-- > 0;) put_symbol(states_[lane], next_, slots[lane]);
    }

    size_t capacity_;
    std::unique_ptr<uint16_t[]> words_;  // filled from the end
    uint16_t* next_;
    uint32_t states_[LANES];
};

template <int LANES, Instructions SET>
class Decoder {
   public:
    // The data must outlive the decoder.
    Decoder(const uint8_t* data, size_t bytes) {
        if (bytes < sizeof states_ || (bytes - sizeof states_) % 2)
            throw std::runtime_error("an entropy-coded block has an impossible size");
        std::memcpy(states_, data, sizeof states_);
        for (uint32_t state : states_)
            if (state < STATE_LOW) throw std::runtime_error("an entropy-coded block starts from an impossible state");
        next_ = data + sizeof states_;
        end_ = data + bytes;
    }

    // `count` must be a multiple of LANES except in the last call. `tables` has TABLES entries.
    void decode(const Context* contexts, int32_t* values, size_t count, const DecodeTable* tables) {
        const size_t rows = count / LANES;
        for (size_t row = 0; row < rows;) {
            const uint8_t* limit = require_room();
            row += decode_rows(limit, contexts + row * LANES, values + row * LANES, rows - row, tables);
        }
        if (const size_t done = rows * LANES; done < count) {
            require_room();
            decode_row(contexts + done, values + done, int(count - done), tables);
        }
    }

    void finish() const {
        if (next_ != end_ || std::any_of(states_, states_ + LANES, [](uint32_t x) { return x != STATE_LOW; }))
            throw std::runtime_error("an entropy-coded block does not end where it should");
    }

   private:
    static constexpr ptrdiff_t ROOM =
        2 * 4 * LANES + 32;  // a row reads at most four words per lane, and a vector load may go beyond them

    // Makes one check per row enough: there must be room for a whole row behind the next word, so the last words are copied
    // into a larger buffer. Returns the last address at which a row may start.
    const uint8_t* require_room() {
        if (end_ - next_ >= ROOM) return end_ - ROOM;
        if (next_ > end_) throw std::runtime_error("an entropy-coded block ends too early");
        if (end_ != last_ + ROOM) {
            uint8_t* begin = last_ + ROOM - (end_ - next_);
            std::memcpy(begin, next_, size_t(end_ - next_));
            next_ = begin;
            end_ = last_ + ROOM;
        }
        return end_;
    }

    size_t decode_rows(const uint8_t* limit, const Context* contexts, int32_t* values, size_t rows, const DecodeTable* tables) {
#ifdef HF_EXT_X86
        if constexpr (LANES == 64 && SET == Instructions::AVX512)
            return Avx512::decode(states_, next_, limit, contexts, values, rows, tables);
        if constexpr (LANES == 64 && SET == Instructions::AVX2)
            return Avx2::decode(states_, next_, limit, contexts, values, rows, tables);
#elif defined(HF_EXT_NEON)
        if constexpr (LANES == 64 && SET == Instructions::NEON)
            return Neon::decode(states_, next_, limit, contexts, values, rows, tables);
#endif
        size_t row = 0;
        for (; row < rows && next_ <= limit; ++row) decode_row(contexts + row * LANES, values + row * LANES, LANES, tables);
        return row;
    }

    [[gnu::always_inline]] inline void decode_row(const Context* contexts, int32_t* values, int lanes,
                                                  const DecodeTable* tables) {
        uint32_t slots[LANES];
        const uint8_t* next = next_;
        uint32_t most = 0;
        for (int lane = 0; lane < lanes; ++lane) {
            const uint32_t x = states_[lane];
            const uint32_t slot = slots[lane] = tables[contexts[lane].table()].slots[x & (PROBABILITY_SUM - 1)];
            most = std::max(most, slot);
            states_[lane] = refill((slot & 0xfff) * (x >> PROBABILITY_BITS) + (slot >> 12 & (PROBABILITY_SUM - 1)), next);
        }
        for (int lane = 0; lane < lanes; ++lane) {
            const int shift = contexts[lane].shift();
            const uint32_t x = states_[lane], mask = LOW_MASKS[size_t(shift)];
            values[lane] = int32_t(uint32_t(int(slots[lane] >> 26) - LINEAR) * (mask + 1) | (x & mask));
            states_[lane] = refill(x >> shift, next);
        }
        for (int lane = 0; most >> 26 >= TAIL && lane < lanes; ++lane)
            if (slots[lane] >> 26 >= TAIL)
                take_tail(states_[lane], next, int(slots[lane] >> 26), contexts[lane].shift(), values[lane]);
        next_ = next;
    }

    const uint8_t* next_;
    const uint8_t* end_;
    uint32_t states_[LANES];
    uint8_t last_[2 * ROOM] = {};
};

}  // namespace hf_ext::delta
