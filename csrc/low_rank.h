// A base moved by a low-rank change: base + rows · columns · 2^-exponent, with small integers as factors. Their product is
// exact and each value takes one rounding of IEEE's, so that a prediction is the same on every machine.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "bits.h"
#include "blocks.h"

namespace fm_delta {

constexpr int MAX_RANK = 1024, MAX_EXPONENT = 100;
constexpr double NARROW_SUMS = 0x1p24, WIDE_SUMS = 0x1p53;  // below, float and double hold every integer

class LowRank {
   public:
    int rank = 0;
    int exponent = 0;
    std::vector<int32_t> rows, columns;  // coded rows with a base × rank, and rank × row length

    // Whether sums of the factors' products need double precision.
    bool wide() const { return wide_; }

    // To be called when all is filled in. Throws std::runtime_error if sums might not be exact.
    void prepare(bool doubles) {
        const double most = double(rank) * largest(rows) * largest(columns);
        wide_ = doubles || most >= NARROW_SUMS;
        if (most >= WIDE_SUMS || rank < 1 || rank > MAX_RANK || std::abs(exponent) > MAX_EXPONENT) throw std::runtime_error("the low-rank factors are impossible");
        if (wide_) {
            fill(row_doubles_, column_doubles_);
        } else {
            fill(row_floats_, column_floats_);
        }
    }

    // The moved base of a block of values that have one, at their places in `out`.
    template <class F>
    void predict(const Plan& plan, const Part& part, size_t begin, size_t size, const typename F::U* base, typename F::U* out) const {
        const DefaultRounding rounding;
        if constexpr (F::WIDTH == 64) {
            move<F>(plan, part, begin, size, base, out, row_doubles_, column_doubles_);
        } else if (wide_) {
            move<F>(plan, part, begin, size, base, out, row_doubles_, column_doubles_);
        } else {
            move<F>(plan, part, begin, size, base, out, row_floats_, column_floats_);
        }
    }

   private:
    static constexpr size_t TILE = 64, BAND = 256;  // values summed at a time; columns whose factors stay in the first-level cache

    // Whoever calls may flush denormals to zero or round otherwise.
    struct DefaultRounding {
        DefaultRounding() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
        ~DefaultRounding() { std::fesetenv(&before); }
        std::fenv_t before;
    };

    static double largest(const std::vector<int32_t>& factors) {
        double most = 0;
        for (const int32_t factor : factors) most = std::max(most, std::abs(double(factor)));
        return most;
    }

    template <class Sum>
    void fill(std::vector<Sum>& row_factors, std::vector<Sum>& column_factors) {
        const Sum unit = Sum(std::ldexp(1.0, -exponent));
        row_factors.assign(rows.begin(), rows.end());
        column_factors.assign(columns.begin(), columns.end());
        for (Sum& factor : row_factors) factor *= unit;  // a power of two: the sums stay exact
    }

    template <class F, class Sum>
    void move(const Plan& plan, const Part& part, size_t begin, size_t size, const typename F::U* base, typename F::U* out, const std::vector<Sum>& row_factors,
              const std::vector<Sum>& column_factors) const {
        const size_t length = plan.shape.row_length, end = begin + size;
        for (size_t band = 0; band < length; band += BAND) {
            for (size_t row = begin / length; row * length < end; ++row) {
                const size_t first = std::max(begin, row * length + band), last = std::min(end, row * length + std::min(length, band + BAND));
                const size_t place = plan.rows[part.first_row + row] * length;
                for (size_t i = first; i < last; i += TILE) {
                    const size_t column = i - row * length;
                    move_tile<F>(base + place + column, out + place + column, std::min(TILE, last - i), &row_factors[row * size_t(rank)], &column_factors[column], length);
                }
            }
        }
    }

    template <class F, class Sum>
    void move_tile(const typename F::U* base, typename F::U* out, size_t count, const Sum* row, const Sum* columns, size_t length) const {
        Sum sums[TILE] = {};
        if (count == TILE) {
            for (int k = 0; k < rank; ++k)
                for (size_t j = 0; j < TILE; ++j) sums[j] += row[k] * columns[size_t(k) * length + j];
        } else {
            for (int k = 0; k < rank; ++k)
                for (size_t j = 0; j < count; ++j) sums[j] += row[k] * columns[size_t(k) * length + j];
        }
        for (size_t j = 0; j < count; ++j) out[j] = moved<F>(base[j], sums[j]);
    }

    // The float next to base + change; NaNs and infinities stay what they are.
    template <class F, class Sum>
    static typename F::U moved(typename F::U base, Sum change) {
        using U = typename F::U;
        const U stays = U(U(0) - U(U(base & U(~F::SIGN)) >= F::INFINITY_BITS));
        return U((base & stays) | (rounded<F>(Real<F>(Sum(finite_value<F>(base)) + change)) & U(~stays)));
    }

    template <class F>
    static typename F::U rounded(Real<F> value) {
        using U = typename F::U;
        if constexpr (F::WIDTH != 16) {
            return bits_as<U>(value);
        } else if constexpr (std::is_same_v<F, BF16>) {
            const uint32_t bits = bits_as<uint32_t>(value);
            return U((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        } else {
            // With its exponent moved to where a float16's lies under a float's, 13 bits are too many.
            const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits_as<uint32_t>(bits_as<float>(bits & 0x7fffffff) * 0x1p-112f);
            return U(std::min((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13, uint32_t(F::INFINITY_BITS)) | (bits >> 16 & F::SIGN));
        }
    }

    bool wide_ = false;
    std::vector<float> row_floats_, column_floats_;
    std::vector<double> row_doubles_, column_doubles_;
};

// Each component is a Rice parameter and its factors, for the rows and then for the columns.
inline void put_low_rank(BitWriter& out, const LowRank& change, size_t row_count, size_t row_length) {
    out.put(uint64_t(change.rank), 16);
    out.put(uint16_t(change.exponent), 16);
    out.put(change.wide(), 1);
    const auto put = [&out](const int32_t* factors, size_t count, size_t stride) {
        std::vector<uint32_t> codes(count);
        for (size_t i = 0; i < count; ++i) codes[i] = zigzag(factors[i * stride]);
        const int k = best_rice(codes, 32);
        out.put(uint64_t(k), 5);
        for (const uint32_t code : codes) put_rice(out, code, k, 32);
    };
    for (int k = 0; k < change.rank; ++k) {
        put(change.rows.data() + k, row_count, size_t(change.rank));
        put(change.columns.data() + size_t(k) * row_length, row_length, 1);
    }
}

inline LowRank get_low_rank(BitReader& in, size_t row_count, size_t row_length, bool doubles) {
    LowRank change;
    change.rank = int(in.get(16));
    change.exponent = int16_t(in.get(16));
    const bool wide = in.get(1);
    // No factor takes less than a bit: a forged rank asks for no more memory than its bytes allow.
    if (change.rank < 1 || change.rank > MAX_RANK || in.left() / (row_count + row_length) < size_t(change.rank)) throw std::runtime_error("the low-rank factors are impossible");
    change.rows.resize(row_count * size_t(change.rank));
    change.columns.resize(row_length * size_t(change.rank));
    const auto get = [&in](int32_t* factors, size_t count, size_t stride) {
        const int k = int(in.get(5));
        for (size_t i = 0; i < count; ++i) factors[i * stride] = unzigzag(get_rice(in, k, 32));
    };
    for (int k = 0; k < change.rank; ++k) {
        get(change.rows.data() + k, row_count, size_t(change.rank));
        get(change.columns.data() + size_t(k) * row_length, row_length, 1);
    }
    change.prepare(wide || doubles);
    return change;
}

}  // namespace fm_delta
