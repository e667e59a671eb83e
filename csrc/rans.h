// Interleaved range asymmetric numeral systems (Duda, arXiv 1311.2540): 32-bit states, 16-bit words, one state a lane.
//
// Element i belongs to lane i mod LANES. A row of LANES elements is coded in three phases, each over all its lanes in order:
// the symbols, the raw low bits, the extra bits of tail symbols. So a row decodes with vectors of any width up to LANES.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "instruction_sets.h"
#include "rans_lane.h"
#include "rans_x86.h"

namespace fm_delta {

struct Element {
    int32_t value;
    Context context;
};

// Encodes backwards: what is put last is read first.
template <int LANES>
class Encoder {
   public:
    explicit Encoder(size_t elements) : words_(4 * elements + 1), next_(words_.size()) { std::fill(states_, states_ + LANES, STATE_LOW); }

    void encode(const Element* elements, size_t count, const std::vector<EncodeTable>& tables) {
        for (size_t row = (count + LANES - 1) / LANES; row-- > 0;) {
            const Element* first = elements + row * LANES;
            const int lanes = int(std::min<size_t>(LANES, count - row * LANES));
            Symbol symbols[LANES]{};
            for (int lane = 0; lane < lanes; ++lane) {
                const EncodeTable& table = tables[first[lane].context.table()];
                const int32_t s = first[lane].value >> first[lane].context.shift();
                symbols[lane] = symbol_of(s);
                if (table.slots[symbols[lane].id] << 16 == 0) symbols[lane] = {ESCAPE, 32, uint32_t(s)};
            }
            for (int lane = lanes; lane-- > 0;) {
                if (symbols[lane].extra_bits > 16) put_bits(lane, symbols[lane].extra >> 16, 16);
                if (symbols[lane].extra_bits) put_bits(lane, symbols[lane].extra & 0xffff, std::min<int>(symbols[lane].extra_bits, 16));
            }
            for (int lane = lanes; lane-- > 0;) {
                const int shift = first[lane].context.shift();
                put_bits(lane, uint32_t(first[lane].value) & LOW_MASKS[shift], shift);
            }
            for (int lane = lanes; lane-- > 0;) put_symbol(lane, tables[first[lane].context.table()], symbols[lane].id);
        }
    }

    // Appends the states and the words in the order in which the decoder reads them.
    void finish(std::vector<uint8_t>& out) const {
        const auto append = [&out](const void* data, size_t bytes) {
            const auto* begin = static_cast<const uint8_t*>(data);
            out.insert(out.end(), begin, begin + bytes);
        };
        append(states_, sizeof states_);
        append(words_.data() + next_, 2 * (words_.size() - next_));
    }

   private:
    void put_symbol(int lane, const EncodeTable& table, int id) {
        uint32_t& x = states_[lane];
        const uint32_t frequency = table.slots[id] & 0xffff;
        make_room(x, uint64_t(frequency) << (32 - PROBABILITY_BITS));
        x = ((x / frequency) << PROBABILITY_BITS) + x % frequency + (table.slots[id] >> 16);
    }

    void put_bits(int lane, uint32_t bits, int count) {
        uint32_t& x = states_[lane];
        make_room(x, uint64_t(1) << (32 - count));
        x = x << count | bits;
    }

    // Moves a word out of a state that has reached the limit. Without a branch: which states do is random.
    void make_room(uint32_t& x, uint64_t limit) {
        const uint32_t full = x >= limit;
        words_[next_ - 1] = uint16_t(x);
        next_ -= full;
        x ^= (x ^ x >> 16) & (0u - full);
    }

    std::vector<uint16_t> words_;
    size_t next_;
    uint32_t states_[LANES];
};

// `SET` are the vector instructions for rows of 64 lanes.
template <int LANES, Instructions SET>
class Decoder {
   public:
    // The data must outlive the decoder.
    Decoder(const uint8_t* data, size_t bytes) {
        if (bytes < sizeof states_ || (bytes - sizeof states_) % 2) throw std::runtime_error("an entropy-coded block has an impossible size");
        std::memcpy(states_, data, sizeof states_);
        for (uint32_t state : states_)
            if (state < STATE_LOW) throw std::runtime_error("an entropy-coded block starts from an impossible state");
        next_ = data + sizeof states_;
        end_ = data + bytes;
    }

    // `count` must be a multiple of LANES except in the last call. `tables` are all TABLES of them.
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
    static constexpr ptrdiff_t ROOM = 2 * 4 * LANES + 32;  // a row reads at most four words a lane, and a vector beyond them

    // One check a row is enough, as long as there is room for a whole row behind the words: those at the end are moved to where
    // there is. Returns how far the next row may start.
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
#ifdef FM_DELTA_X86
        if constexpr (LANES == 64 && SET == Instructions::AVX512) return Avx512::decode(states_, next_, limit, contexts, values, rows, tables);
#endif
        size_t row = 0;
        for (; row < rows && next_ <= limit; ++row) decode_row(contexts + row * LANES, values + row * LANES, LANES, tables);
        return row;
    }

    [[gnu::always_inline]] inline void decode_row(const Context* contexts, int32_t* values, int lanes, const DecodeTable* tables) {
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
            if (slots[lane] >> 26 >= TAIL) take_tail(states_[lane], next, int(slots[lane] >> 26), contexts[lane].shift(), values[lane]);
        next_ = next;
    }

    const uint8_t* next_;
    const uint8_t* end_;
    uint32_t states_[LANES];
    uint8_t last_[2 * ROOM] = {};
};

}  // namespace fm_delta
