// Decoding of a block of which few values changed.
#pragma once

#include <memory>
#include <vector>

#include "blocks.h"
#include "rans_lane.h"

namespace hf_ext::delta {

// Reads the number of changes in each class at the beginning of a block, and moves `data` behind them. A block without data has
// none. Throws std::runtime_error if there are more than the block has values.
std::vector<size_t> get_counts(const Plan& plan, const Block& block, const uint8_t*& data, const uint8_t* end);

class DecodedChanges {
   public:
    // `tables` has an entry for each of the plan's. The block's kind is not RAW. Throws std::runtime_error, as the other
    // functions do, if the data are not valid.
    DecodedChanges(const Plan& plan, const Block& block, const uint8_t* data, size_t bytes, Kind kind,
                   const DecodeTable* tables);

    // Stores the new values in the tensor, which holds the base's.
    void apply(uint16_t* tensor) const;

    // Returns the places in the whole tensor, and the new values.
    Replacements list(const uint16_t* base) const;

   private:
    template <class Function>
    void visit(const uint16_t* base, Function f) const;

    const Plan& plan_;
    const Block block_;
    std::vector<size_t> counts_;  // of the changes of each class
    size_t all_ = 0;
    std::unique_ptr<int32_t[]> numbers_;  // the gaps of all classes, then the sizes
};

}  // namespace hf_ext::delta
