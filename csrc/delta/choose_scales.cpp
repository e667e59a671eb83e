#include "choose_scales.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "../common/instruction_sets.h"
#include "../common/threads.h"
#include "float_map.h"
#include "scales.h"

namespace hf_ext::delta {
namespace {

constexpr size_t FIT_VALUES = 1 << 18;                    // values on which column scales are fitted
constexpr size_t FIT_ROWS = 64;                           // fewest rows; with fewer, column scales cost more than they save
constexpr size_t MORE_ROWS = 256, MOST_VALUES = 1 << 22;  // rows of long rows, as long as they have at most so many values
constexpr size_t ROWS_AT_ONCE = 64;                       // rows whose scales a thread measures at a time

template <class F>
constexpr Real<F> LEAST_SQUARE = Real<F>(1.0 / 1024);  // of a coarse change, in units

int16_t quarter_octaves(double variance) {
    return int16_t(
        std::clamp(std::lround(2 * std::log2(std::clamp(variance, 1e-300, 1e300))), -long(SCALE_LIMIT), long(SCALE_LIMIT)));
}

// Fits variance(i, j) = R[i] C[j] to `squares` (rows × columns) by alternating maximum likelihood. Returns the scales of C.
template <class Real>
std::vector<int16_t> fit_columns(const std::vector<Real>& squares, size_t rows, size_t columns) {
    std::vector<Real> inverse(columns, 1), sum(columns);
    with_instructions([&](auto) {
        for (int round = 0; round < 3; ++round) {
            std::fill(sum.begin(), sum.end(), Real(0));
            for (size_t i = 0; i < rows; ++i) {
                const Real* row = squares.data() + i * columns;
                const Real weight = 1 / std::max(weighted_sum(row, inverse.data(), columns), std::numeric_limits<Real>::min());
                for (size_t j = 0; j < columns; ++j) sum[j] += row[j] * weight;
            }
            double log_mean = 0;
            for (const Real s : sum) log_mean += std::log2(std::clamp<double>(s, 1e-30, 1e30)) / double(columns);
            for (size_t j = 0; j < columns; ++j)
                inverse[j] = Real(std::exp2(log_mean) / std::clamp<double>(sum[j], 1e-30, 1e30));
        }
    });
    std::vector<int16_t> result(columns);
    for (size_t j = 0; j < columns; ++j) result[j] = quarter_octaves(1 / double(inverse[j]));
    return result;
}

// Computes what the scales are fitted to: the squared change plus the variance of its rounding, or the squared value where
// there is no base. The squares are bounded, because an infinite one would spoil all scales of its row and column.
template <class F>
void squares(const Plan& plan, const typename F::U* tensor, const typename F::U* base, size_t at, size_t count, Real<F>* out) {
    using U = typename F::U;
    constexpr Real<F> MOST = F::WIDTH == 64 ? Real<F>(1e300) : Real<F>(1e37f);
    const U* x = tensor + at;
    if (at >= plan.shape.base_values) {
        for (size_t i = 0; i < count; ++i) out[i] = std::min(finite_value<F>(x[i]) * finite_value<F>(x[i]), MOST);
        return;
    }
    const U* b = base + at;
    if (const Coarse coarse = plan.coarse) {
        for (size_t i = 0; i < count; ++i) {
            const Real<F> unit = unit_of<F>(b[i], coarse.step), change = unit * Real<F>(number_of<F>(x[i], b[i], coarse));
            out[i] = std::min(change * change + unit * unit * LEAST_SQUARE<F>, MOST);
        }
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        const Real<F> change = finite_value<F>(x[i]) - finite_value<F>(b[i]);
        out[i] = std::min(change * change + grid_variance<F>(b[i]), MOST);
    }
}

// Compiled once for each set of instructions, which all callers share.
template <class F>
void vectorized_squares(const Plan& plan, const typename F::U* tensor, const typename F::U* base, size_t at, size_t count,
                        Real<F>* out) {
    with_instructions([&](auto) { squares<F>(plan, tensor, base, at, count, out); });
}

template <class Real>
double weighted_mean(const Real* values, const Real* weights, size_t count) {
    Real sum = 0;
    with_instructions([&](auto) { sum = weighted_sum(values, weights, count); });
    return double(sum) / double(count);
}

template <class F>
void choose_scales(Plan& plan, const typename F::U* tensor, const typename F::U* base, int threads) {
    const size_t length = plan.shape.row_length, rows = plan.rows.size();
    std::vector<Real<F>> weights(std::min(length, plan.shape.values), 1), sample;
    // Column scales are fitted on the rows with a base, or on the others if only few have one. A short last row is ignored.
    const size_t with_base = plan.parts[1].first_row - plan.first_scaled();
    const size_t first = with_base >= FIT_ROWS ? 0 : plan.parts[1].first_row;
    const size_t usable =
        (with_base >= FIT_ROWS ? with_base : rows) - first - (rows && plan.row_values(plan.rows.back()) < length);
    if (usable >= FIT_ROWS && usable <= rows && length > 1) {
        const size_t more = std::min(MORE_ROWS, MOST_VALUES / length);
        const size_t sampled = std::min(usable, std::max({FIT_ROWS, FIT_VALUES / length, more}));
        sample.resize(sampled * length);
        parallel_for((sampled + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, threads, [&](size_t group) {
            for (size_t i = group * ROWS_AT_ONCE; i < std::min(sampled, (group + 1) * ROWS_AT_ONCE); ++i)
                vectorized_squares<F>(plan, tensor, base, plan.rows[first + i * usable / sampled] * length, length,
                                      &sample[i * length]);
        });
        plan.column_scales = fit_columns(sample, sampled, length);
        for (size_t j = 0; j < length; ++j) weights[j] = Real<F>(std::exp2(-0.5 * plan.column_scales[j]));
        if (sampled < rows) sample.clear();
    }
    plan.row_scales.assign(rows, 0);
    const size_t begin = plan.first_scaled();
    parallel_for((rows - begin + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, threads, [&](size_t group) {
        std::vector<Real<F>> row(weights.size());
        const size_t at = begin + group * ROWS_AT_ONCE;
        for (size_t i = at; i < std::min(rows, at + ROWS_AT_ONCE); ++i) {
            const size_t count = plan.row_values(plan.rows[i]);
            if (sample.empty()) vectorized_squares<F>(plan, tensor, base, plan.rows[i] * length, count, row.data());
            const Real<F>* known = sample.empty() ? row.data() : &sample[i * length];
            plan.row_scales[i] = quarter_octaves(weighted_mean(known, weights.data(), count));
        }
    });
}

template <class F>
void choose_plane(Plan& plan, const typename F::U* base) {
    if constexpr (F::WIDTH == 16) return;
    constexpr int least = F::WIDTH == 64 ? 5 : 0, most = F::WIDTH == 64 ? 6 : 2;
    plan.plane = most;
    const Part& part = plan.parts[0];
    if (part.values == 0) return;
    std::array<size_t, 64> octaves{};  // counts of the expected residuals' sizes, as powers of two
    const size_t stride = std::max<size_t>(1, (plan.parts[1].first_row * plan.shape.row_length) >> 16);
    size_t sampled = 0;
    for (size_t i = 0; i < part.values; i += stride, ++sampled) {
        for_pieces(plan, part, i, 1, [&](size_t offset, size_t, size_t, size_t row, size_t column) {
            const int scale = plan.row_scales[row] + (plan.column_scales.empty() ? 0 : plan.column_scales[column]);
            const int octave = (scale >> 2) - F::ULP_BIAS - grid_exponent<F>(base[offset]);
            ++octaves[size_t(std::clamp(octave, 0, 63))];
        });
    }
    for (; plan.plane > least; --plan.plane) {
        size_t small = 0;
        for (int octave = 0; octave < 8 * plan.plane + 2; ++octave) small += octaves[size_t(octave)];
        if (small * 1000 <= sampled) return;
    }
}

}  // namespace

void choose_scales(Plan& plan, const void* tensor, const void* base, int threads) {
    with_float(plan.shape.dtype, [&](auto type) {
        using F = decltype(type);
        choose_scales<F>(plan, static_cast<const typename F::U*>(tensor), static_cast<const typename F::U*>(base), threads);
    });
}

void choose_plane(Plan& plan, const void* base) {
    with_float(plan.shape.dtype, [&](auto type) {
        using F = decltype(type);
        if constexpr (F::WIDTH > 16) choose_plane<F>(plan, static_cast<const typename F::U*>(base));
    });
}

}  // namespace hf_ext::delta
