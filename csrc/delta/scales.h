// The expected size of residuals: sigma of element (i, j) is 2^((rows[i] + columns[j]) / 4). It is a value, not a number of
// steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/bits.h"

namespace hf_ext::delta {

constexpr int SCALE_LIMIT = 8000;  // in quarter octaves; beyond the range of float64

void put_scales(BitWriter& out, const std::vector<int16_t>& scales);

std::vector<int16_t> get_scales(BitReader& in, size_t count);

// Returns the dot product. The partial sums are vectorized and always added in the same order.
template <class Real>
Real weighted_sum(const Real* values, const Real* weights, size_t count) {
    constexpr size_t PARTS = 32;
    Real sums[PARTS] = {};
    size_t i = 0;
    for (; i + PARTS <= count; i += PARTS)
        for (size_t j = 0; j < PARTS; ++j) sums[j] += values[i + j] * weights[i + j];
    for (size_t j = 0; i + j < count; ++j) sums[j] += values[i + j] * weights[i + j];
    for (size_t half = PARTS / 2; half; half /= 2)
        for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
    return sums[0];
}

}  // namespace hf_ext::delta
