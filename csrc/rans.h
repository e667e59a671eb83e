// Interleaved range asymmetric numeral systems (Duda, arXiv 1311.2540): 32-bit states, 16-bit words, one state a lane.
//
// Element i belongs to lane i mod LANES. A row of LANES elements is coded in three phases, each over all its lanes in order:
// the symbols, the raw low bits, the extra bits of tail symbols. So a row decodes with vectors of any width up to LANES.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "symbol_model.h"

namespace fm_delta {

constexpr uint32_t STATE_LOW = 1u << 16;  // every state lies in [2^16, 2^32) between steps, and starts at 2^16

// The bits below a shift. Looked up, because shifting by a variable is slow where it is not one instruction.
constexpr std::array<uint32_t, MAX_SHIFT + 1> LOW_MASKS = [] {
    std::array<uint32_t, MAX_SHIFT + 1> masks{};
    for (uint32_t shift = 0; shift < masks.size(); ++shift) masks[shift] = (1u << shift) - 1;
    return masks;
}();

struct Element {
    int32_t value;
    Context context;
};

// What the decoder looks up by the low bits of a state.
struct DecodeTable {
    std::array<uint32_t, PROBABILITY_SUM> slots;  // id | frequency << 6 | offset << 18

    explicit DecodeTable(const Frequencies& frequencies) {
        uint32_t slot = 0;
        for (uint32_t id = 0; id < SYMBOLS; ++id)
            for (uint32_t offset = 0; offset < frequencies[id]; ++offset) slots[slot++] = id | uint32_t(frequencies[id]) << 6 | offset << 18;
    }
};

struct EncodeTable {
    Frequencies frequencies;
    std::array<uint16_t, SYMBOLS> starts;

    explicit EncodeTable(const Frequencies& f) : frequencies(f) {
        uint16_t start = 0;
        for (int id = 0; id < SYMBOLS; ++id) {
            starts[id] = start;
            start = uint16_t(start + f[id]);
        }
    }
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
                const EncodeTable& table = tables[first[lane].context.table];
                const int32_t s = first[lane].value >> first[lane].context.shift;
                symbols[lane] = symbol_of(s);
                if (table.frequencies[symbols[lane].id] == 0) symbols[lane] = {ESCAPE, 32, uint32_t(s)};
            }
            for (int lane = lanes; lane-- > 0;) {
                if (symbols[lane].extra_bits > 16) put_bits(lane, symbols[lane].extra >> 16, 16);
                if (symbols[lane].extra_bits) put_bits(lane, symbols[lane].extra & 0xffff, std::min<int>(symbols[lane].extra_bits, 16));
            }
            for (int lane = lanes; lane-- > 0;) {
                const int shift = first[lane].context.shift;
                put_bits(lane, uint32_t(first[lane].value) & LOW_MASKS[shift], shift);
            }
            for (int lane = lanes; lane-- > 0;) put_symbol(lane, tables[first[lane].context.table], symbols[lane].id);
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
        const uint32_t frequency = table.frequencies[id];
        make_room(x, uint64_t(frequency) << (32 - PROBABILITY_BITS));
        x = ((x / frequency) << PROBABILITY_BITS) + x % frequency + table.starts[id];
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

template <int LANES>
class Decoder {
   public:
    Decoder(const uint8_t* data, size_t bytes) {
        if (bytes < sizeof states_ || (bytes - sizeof states_) % 2) throw std::runtime_error("an entropy-coded block has an impossible size");
        std::memcpy(states_, data, sizeof states_);
        for (uint32_t state : states_)
            if (state < STATE_LOW) throw std::runtime_error("an entropy-coded block starts from an impossible state");
        // A row reads at most four words a lane: with that much room behind the end one check a row is enough.
        const size_t count = (bytes - sizeof states_) / 2;
        words_.resize(count + 4 * LANES + 1);
        std::memcpy(words_.data(), data + sizeof states_, 2 * count);
        next_ = words_.data();
        end_ = next_ + count;
    }

    // `count` must be a multiple of LANES except in the last call. `tables` are all TABLES of them.
    void decode(const Context* contexts, int32_t* values, size_t count, const DecodeTable* tables) {
        for (size_t row = 0; row < count; row += LANES) {
            if (count - row >= LANES)
                decode_row(contexts + row, values + row, LANES, tables);
            else
                decode_row(contexts + row, values + row, int(count - row), tables);
        }
    }

    void finish() const {
        if (next_ != end_ || std::any_of(states_, states_ + LANES, [](uint32_t x) { return x != STATE_LOW; }))
            throw std::runtime_error("an entropy-coded block does not end where it should");
    }

   private:
    // Without a branch: which states are low is random. (A conditional expression here is compiled to a jump.)
    static uint32_t refill(uint32_t x, const uint16_t*& next) {
        const int64_t low = (int64_t(x) - STATE_LOW) >> 63;  // all ones or zero
        const uint32_t filled = x << 16 | *next;
        next -= low;
        return x ^ ((x ^ filled) & uint32_t(low));
    }

    [[gnu::always_inline]] inline void decode_row(const Context* contexts, int32_t* values, int lanes, const DecodeTable* tables) {
        uint8_t ids[LANES];
        const uint16_t* next = next_;
        uint32_t tails = 0;
        for (int lane = 0; lane < lanes; ++lane) {
            const uint32_t x = states_[lane];
            const uint32_t slot = tables[contexts[lane].table].slots[x & (PROBABILITY_SUM - 1)];
            const uint32_t id = slot & 63;
            ids[lane] = uint8_t(id);
            tails |= id & id << 1;  // bit 5 is set by ids from 48 on, and by no others
            states_[lane] = refill((slot >> 6 & 0xfff) * (x >> PROBABILITY_BITS) + (slot >> 18), next);
        }
        for (int lane = 0; lane < lanes; ++lane) {
            const uint32_t x = states_[lane], mask = LOW_MASKS[contexts[lane].shift];
            values[lane] = int32_t(uint32_t(ids[lane] - LINEAR) * (mask + 1) | (x & mask));
            states_[lane] = refill(x >> contexts[lane].shift, next);
        }
        for (int lane = 0; tails & 32 && lane < lanes; ++lane) {
            if (ids[lane] < TAIL) continue;
            const int bits = extra_bits_of(ids[lane]);
            uint32_t extra = take_bits(lane, std::min(bits, 16), next);
            if (bits > 16) extra |= take_bits(lane, 16, next) << 16;
            const uint32_t mask = LOW_MASKS[contexts[lane].shift];
            values[lane] = int32_t(uint32_t(value_of(ids[lane], extra)) * (mask + 1) | (uint32_t(values[lane]) & mask));
        }
        if (next > end_) throw std::runtime_error("an entropy-coded block ends too early");
        next_ = next;
    }

    uint32_t take_bits(int lane, int count, const uint16_t*& next) {
        const uint32_t x = states_[lane];
        states_[lane] = refill(x >> count, next);
        return x & ((1u << count) - 1);
    }

    std::vector<uint16_t> words_;
    const uint16_t* next_;
    const uint16_t* end_;
    uint32_t states_[LANES];
};

}  // namespace fm_delta
