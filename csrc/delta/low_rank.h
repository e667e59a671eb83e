// Moves a base by a low-rank change: base + rows · columns · 2^-exponent. The factors are integers and their product is exact,
// so each value takes one IEEE rounding and is the same on every machine.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../common/bits.h"
#include "blocks.h"

namespace hf_ext::delta {

class LowRank {
   public:
    int rank = 0;
    int exponent = 0;
    std::vector<int32_t> rows, columns;  // (coded rows that have a base) × rank, and rank × row length

    // Must be called once the fields are filled in. Throws std::runtime_error if sums might not be exact.
    void prepare(bool doubles);

    // Writes the moved base of a block to the same positions in `out`. The block's values must have a base.
    void predict(const Plan& plan, const Part& part, size_t begin, size_t size, const void* base, void* out) const;

    bool wide() const { return wide_; }

   private:
    bool wide_ = false;                                      // sums of products need double precision
    std::shared_ptr<const struct ArrangedFactors> factors_;  // in the layout that the sums are computed from
};

// Writes rank and exponent, then for each component its row factors and its column factors. Each list has its own Rice
// parameter.
void put_low_rank(BitWriter& out, const LowRank& change, size_t row_count, size_t row_length);

LowRank get_low_rank(BitReader& in, size_t row_count, size_t row_length, bool doubles);

// Returns the number of bits that the columns' factors take, rounded up to bytes.
double column_factor_bits(const Factors& factors, size_t row_length);

}  // namespace hf_ext::delta
