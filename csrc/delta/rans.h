// Interleaved range asymmetric numeral systems (rANS; Duda, arXiv 1311.2540): 32-bit states, 16-bit words, one state per lane.
//
// Element i belongs to lane i mod `lanes`. A row of `lanes` elements is coded in three phases: symbols, raw low bits, extra
// bits of tail symbols. Each phase handles all lanes in order, so a row can be decoded with vectors of any width up to `lanes`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "rans_lane.h"

namespace hf_ext::delta {

constexpr size_t MOST_LANES = 64;

// Returns the bytes that a row may read: at most four words per lane, and a vector load may go beyond them.
constexpr size_t room_for(size_t lanes) { return 2 * 4 * lanes + 32; }

// Encodes backwards: the decoder reads first what was written last.
class Encoder {
   public:
    // `lanes` is 1, 8 or 64.
    Encoder(size_t lanes, size_t elements);

    // Must be called for the last values first. `count` must be a multiple of `lanes` except in the first call. `ids` are the
    // values' symbols (see `symbol_ids`); `tables` has TABLES entries.
    void encode(const Context* contexts, const int32_t* values, const uint8_t* ids, size_t count, const EncodeTable* tables);

    // Appends the states and the words in the order in which the decoder reads them.
    void finish(std::vector<uint8_t>& out) const;

   private:
    size_t lanes_, capacity_;
    std::unique_ptr<uint16_t[]> words_;  // filled from the end
    uint16_t* next_;
    uint32_t states_[MOST_LANES];
};

class Decoder {
   public:
    // `lanes` is 1, 8 or 64. The data must outlive the decoder. Throws std::runtime_error, as the other functions do, if the
    // data cannot come from an encoder.
    Decoder(size_t lanes, const uint8_t* data, size_t bytes);

    // `count` must be a multiple of `lanes` except in the last call. `tables` has TABLES entries.
    void decode(const Context* contexts, int32_t* values, size_t count, const DecodeTable* tables);

    void finish() const;

   private:
    const uint8_t* require_room();
    size_t decode_rows(const uint8_t* limit, const Context* contexts, int32_t* values, size_t rows, const DecodeTable* tables);

    size_t lanes_;
    const uint8_t* next_;
    const uint8_t* end_;
    uint32_t states_[MOST_LANES];
    uint8_t last_[2 * room_for(MOST_LANES)];  // the last words, then zeros
};

// Sets the symbol of each value.
void symbol_ids(const Context* contexts, const int32_t* values, size_t count, uint8_t* ids);

}  // namespace hf_ext::delta
