// The expected size of residuals: sigma of element (i, j) is 2^((rows[i] + columns[j]) / 4). It is a value, not a number of
// steps.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../common/bits.h"

namespace hf_ext::delta {

constexpr int SCALE_LIMIT = 8000;  // in quarter octaves; beyond the range of float64

inline int16_t quarter_octaves(double variance) {
    return int16_t(
        std::clamp(std::lround(2 * std::log2(std::clamp(variance, 1e-300, 1e300))), -long(SCALE_LIMIT), long(SCALE_LIMIT)));
}

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

// Fits variance(i, j) = R[i] C[j] to `squares` (rows × columns) by alternating maximum likelihood. Returns the scales of C.
template <class Real>
std::vector<int16_t> fit_columns(const std::vector<Real>& squares, size_t rows, size_t columns) {
    std::vector<Real> inverse(columns, 1), sum(columns);
    for (int round = 0; round < 3; ++round) {
        std::fill(sum.begin(), sum.end(), Real(0));
        for (size_t i = 0; i < rows; ++i) {
            const Real* row = squares.data() + i * columns;
            const Real weight = 1 / std::max(weighted_sum(row, inverse.data(), columns), std::numeric_limits<Real>::min());
            for (size_t j = 0; j < columns; ++j) sum[j] += row[j] * weight;
        }
        double log_mean = 0;
        for (const Real s : sum) log_mean += std::log2(std::clamp<double>(s, 1e-30, 1e30)) / double(columns);
        for (size_t j = 0; j < columns; ++j) inverse[j] = Real(std::exp2(log_mean) / std::clamp<double>(sum[j], 1e-30, 1e30));
    }
    std::vector<int16_t> result(columns);
    for (size_t j = 0; j < columns; ++j) result[j] = quarter_octaves(1 / double(inverse[j]));
    return result;
}

inline void put_scales(BitWriter& out, const std::vector<int16_t>& scales) {
    if (scales.empty()) return;
    std::vector<int16_t> sorted = scales;
    std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
    const int center = sorted[sorted.size() / 2];
    std::vector<uint32_t> codes;
    for (int16_t scale : scales) codes.push_back(zigzag(scale - center));
    const int k = best_rice(codes);
    out.put(uint16_t(center), 16);
    out.put(uint64_t(k), 3);
    for (uint32_t code : codes) put_rice(out, code, k);
}

inline std::vector<int16_t> get_scales(BitReader& in, size_t count) {
    if (count == 0) return {};
    const int center = int16_t(in.get(16));
    const int k = int(in.get(3));
    std::vector<int16_t> scales(count);
    get_rice(in, k, count, 16, [&](size_t i, int difference) {
        scales[i] = int16_t(std::clamp(center + difference, -SCALE_LIMIT, SCALE_LIMIT));
    });
    return scales;
}

}  // namespace hf_ext::delta
