#include "rans.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "rans_neon.h"
#include "rans_x86.h"

namespace hf_ext::delta {
namespace {

// Calls f(std::integral_constant<size_t, lanes>).
template <class Function>
void with_lanes(size_t lanes, Function&& f) {
    switch (lanes) {
        case 64: return f(std::integral_constant<size_t, 64>());
        case 8: return f(std::integral_constant<size_t, 8>());
        default: return f(std::integral_constant<size_t, 1>());
    }
}

template <size_t LANES>
[[gnu::always_inline]] inline void encode_row(uint32_t* states, uint16_t*& next, const Context* contexts, const int32_t* values,
                                              const uint8_t* ids, size_t lanes, const EncodeTable* tables) {
    uint32_t slots[LANES];
    uint64_t tails = 0;
    for (size_t lane = 0; lane < lanes; ++lane) {
        const EncodeTable& table = tables[contexts[lane].table()];
        slots[lane] = table.slots[ids[lane]];
        if (is_coded(slots[lane]) && ids[lane] < TAIL) continue;
        if (!is_coded(slots[lane])) slots[lane] = table.slots[ESCAPE];
        tails |= uint64_t(1) << lane;
    }
    for (size_t lane = lanes; tails && lane-- > 0;)
        if (tails >> lane & 1)
            put_tail(states[lane], next, tables[contexts[lane].table()], ids[lane], values[lane] >> contexts[lane].shift());
    for (size_t lane = lanes; lane-- > 0;) {
        const int shift = contexts[lane].shift();
        put_bits(states[lane], next, uint32_t(values[lane]) & LOW_MASKS[size_t(shift)], shift);
    }
    for (size_t lane = lanes; lane-- > 0;) put_symbol(states[lane], next, slots[lane]);
}

// Encodes `rows` rows, the last one first.
template <size_t LANES, Instructions SET>
[[gnu::always_inline]] inline void encode_rows(uint32_t* states, uint16_t*& next, const Context* contexts,
                                               const int32_t* values, const uint8_t* ids, size_t rows,
                                               const EncodeTable* tables) {
#ifdef HF_EXT_X86
    if constexpr (LANES == 64 && SET == Instructions::AVX512)
        return Avx512::encode(states, next, contexts, values, ids, rows, tables);
    if constexpr (LANES == 64 && SET == Instructions::AVX2)
        return Avx2::encode(states, next, contexts, values, ids, rows, tables);
#endif
    uint32_t held[LANES];
    uint16_t* word = next;
    std::copy_n(states, LANES, held);
    for (size_t row = rows; row-- > 0;)
        encode_row<LANES>(held, word, contexts + row * LANES, values + row * LANES, ids + row * LANES, LANES, tables);
    std::copy_n(held, LANES, states);
    next = word;
}

template <size_t LANES>
[[gnu::always_inline]] inline void decode_row(uint32_t* states, const uint8_t*& next, const Context* contexts, int32_t* values,
                                              size_t lanes, const DecodeTable* tables) {
    uint32_t slots[LANES];
    const uint8_t* word = next;
    uint32_t most = 0;
    for (size_t lane = 0; lane < lanes; ++lane) {
        const uint32_t x = states[lane];
        const uint32_t slot = slots[lane] = tables[contexts[lane].table()].slots[x & (PROBABILITY_SUM - 1)];
        most = std::max(most, slot);
        states[lane] = refill((slot & 0xfff) * (x >> PROBABILITY_BITS) + (slot >> 12 & (PROBABILITY_SUM - 1)), word);
    }
    for (size_t lane = 0; lane < lanes; ++lane) {
        const int shift = contexts[lane].shift();
        const uint32_t x = states[lane], mask = LOW_MASKS[size_t(shift)];
        values[lane] = int32_t(uint32_t(int(slots[lane] >> 26) - LINEAR) * (mask + 1) | (x & mask));
        states[lane] = refill(x >> shift, word);
    }
    for (size_t lane = 0; most >> 26 >= TAIL && lane < lanes; ++lane)
        if (slots[lane] >> 26 >= TAIL)
            take_tail(states[lane], word, int(slots[lane] >> 26), contexts[lane].shift(), values[lane]);
    next = word;
}

// Decodes up to `rows` rows, as long as `next` is not beyond `limit`. Returns their number.
template <size_t LANES, Instructions SET>
[[gnu::always_inline]] inline size_t decode_rows_with(uint32_t* states, const uint8_t*& next, const uint8_t* limit,
                                                      const Context* contexts, int32_t* values, size_t rows,
                                                      const DecodeTable* tables) {
#ifdef HF_EXT_X86
    if constexpr (LANES == 64 && SET == Instructions::AVX512)
        return Avx512::decode(states, next, limit, contexts, values, rows, tables);
    if constexpr (LANES == 64 && SET == Instructions::AVX2)
        return Avx2::decode(states, next, limit, contexts, values, rows, tables);
#elif defined(HF_EXT_NEON)
    if constexpr (LANES == 64 && SET == Instructions::NEON)
        return Neon::decode(states, next, limit, contexts, values, rows, tables);
#endif
    size_t row = 0;
    for (; row < rows && next <= limit; ++row)
        decode_row<LANES>(states, next, contexts + row * LANES, values + row * LANES, LANES, tables);
    return row;
}

// The compiler vectorizes the loop only if it knows that the buffers don't overlap.
inline void fill_ids(const Context* __restrict contexts, const int32_t* __restrict values, size_t count,
                     uint8_t* __restrict ids) {
    for (size_t i = 0; i < count; ++i) ids[i] = symbol_id(values[i] >> contexts[i].shift());
}

}  // namespace

Encoder::Encoder(size_t lanes, size_t elements) : lanes_(lanes) {
    constexpr size_t MARGIN = 16;  // a vector store may begin before the words
    capacity_ = 4 * elements + MARGIN;
    words_.reset(new uint16_t[capacity_]);
    next_ = words_.get() + capacity_;
    std::fill_n(states_, lanes_, STATE_LOW);
}

void Encoder::encode(const Context* contexts, const int32_t* values, const uint8_t* ids, size_t count,
                     const EncodeTable* tables) {
    const size_t rows = count / lanes_, done = rows * lanes_;
    if (done < count) encode_row<MOST_LANES>(states_, next_, contexts + done, values + done, ids + done, count - done, tables);
    with_lanes(lanes_, [&](auto lanes) {
        with_instructions([&](auto set) { encode_rows<lanes(), set()>(states_, next_, contexts, values, ids, rows, tables); });
    });
}

void Encoder::finish(std::vector<uint8_t>& out) const {
    const auto append = [&out](const void* data, size_t bytes) {
        const auto* begin = static_cast<const uint8_t*>(data);
        out.insert(out.end(), begin, begin + bytes);
    };
    append(states_, lanes_ * sizeof *states_);
    append(next_, size_t(words_.get() + capacity_ - next_) * 2);
}

Decoder::Decoder(size_t lanes, const uint8_t* data, size_t bytes) : lanes_(lanes) {
    const size_t states_bytes = lanes * sizeof *states_;
    if (bytes < states_bytes || (bytes - states_bytes) % 2)
        throw std::runtime_error("an entropy-coded block has an impossible size");
    std::memcpy(states_, data, states_bytes);
    if (std::any_of(states_, states_ + lanes, [](uint32_t x) { return x < STATE_LOW; }))
        throw std::runtime_error("an entropy-coded block starts from an impossible state");
    next_ = data + states_bytes;
    end_ = data + bytes;
}

void Decoder::decode(const Context* contexts, int32_t* values, size_t count, const DecodeTable* tables) {
    const size_t rows = count / lanes_, done = rows * lanes_;
    for (size_t row = 0; row < rows;) {
        const uint8_t* limit = require_room();
        row += decode_rows(limit, contexts + row * lanes_, values + row * lanes_, rows - row, tables);
    }
    if (done < count) {
        require_room();
        decode_row<MOST_LANES>(states_, next_, contexts + done, values + done, count - done, tables);
    }
}

size_t Decoder::decode_rows(const uint8_t* limit, const Context* contexts, int32_t* values, size_t rows,
                            const DecodeTable* tables) {
    size_t decoded = 0;
    with_lanes(lanes_, [&](auto lanes) {
        with_instructions([&](auto set) {
            decoded = decode_rows_with<lanes(), set()>(states_, next_, limit, contexts, values, rows, tables);
        });
    });
    return decoded;
}

// Makes one check per row enough: there must be room for a whole row behind the next word, so the last words are copied into a
// larger buffer. Returns the last address at which a row may start.
const uint8_t* Decoder::require_room() {
    const size_t room = room_for(lanes_);
    if (end_ - next_ >= ptrdiff_t(room)) return end_ - room;
    if (next_ > end_) throw std::runtime_error("an entropy-coded block ends too early");
    if (end_ != last_ + room) {
        uint8_t* begin = last_ + room - (end_ - next_);
        std::memcpy(begin, next_, size_t(end_ - next_));
        std::memset(last_ + room, 0, room);
        next_ = begin;
        end_ = last_ + room;
    }
    return end_;
}

void Decoder::finish() const {
    if (next_ != end_ || std::any_of(states_, states_ + lanes_, [](uint32_t x) { return x != STATE_LOW; }))
        throw std::runtime_error("an entropy-coded block does not end where it should");
}

void symbol_ids(const Context* contexts, const int32_t* values, size_t count, uint8_t* ids) {
    with_instructions([=](auto) { fill_ids(contexts, values, count, ids); });
}

}  // namespace hf_ext::delta
