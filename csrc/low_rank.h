// A base moved by a low-rank change: base + rows · columns · 2^-exponent, with integers as factors. Their product is
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
#include "instruction_sets.h"

namespace fm_delta {

constexpr int MAX_RANK = 1024, MAX_EXPONENT = 100;
constexpr double NARROW_SUMS = 0x1p24, WIDE_SUMS = 0x1p53;  // below, float and double hold every integer

class LowRank {
   public:
    int rank = 0;
    int exponent = 0;
    std::vector<int32_t> rows, columns;  // coded rows with a base × rank, and rank × row length

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
        with_instructions([&](auto set) {
            if (F::WIDTH == 64 || wide_) {
                move<F, set()>(plan, part, begin, size, base, out, row_doubles_, column_doubles_);
            } else if constexpr (F::WIDTH != 64) {
                move<F, set()>(plan, part, begin, size, base, out, row_floats_, column_floats_);
            }
        });
    }

   private:
    static constexpr size_t BAND = 1024;  // columns whose factors stay in the second-level cache
    // Rows summed at a time, of so many columns that all sums stay in registers. (More than 16 columns: gcc takes shorter loops
    // apart before it sees that they are vector code.)
    template <class Sum, Instructions SET>
    static constexpr size_t ROWS = SET == Instructions::AVX512 ? 4 : SET == Instructions::AVX2 && sizeof(Sum) == 4 ? 2 : 1;
    template <class Sum, Instructions SET>
    static constexpr size_t COLUMNS = SET == Instructions::AVX512 && sizeof(Sum) == 4 ? 64 : SET == Instructions::SCALAR && sizeof(Sum) == 8 ? 24 : 32;

    // Whoever calls may flush denormals to zero or round otherwise.
    struct DefaultRounding {
        DefaultRounding() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
        ~DefaultRounding() { std::fesetenv(&before); }
        std::fenv_t before;
    };

    static double largest(const std::vector<int32_t>& factors) {
        int32_t least = 0, most = 0;
        for (const int32_t factor : factors) least = std::min(least, factor), most = std::max(most, factor);
        return std::max(-double(least), double(most));
    }

    template <class Sum>
    void fill(std::vector<Sum>& row_factors, std::vector<Sum>& column_factors) {
        const Sum unit = Sum(std::ldexp(1.0, -exponent));
        row_factors.assign(rows.begin(), rows.end());
        column_factors.assign(columns.begin(), columns.end());
        column_factors.resize(columns.size() + BAND);  // so that sums of whole tiles can be taken
        for (Sum& factor : row_factors) factor *= unit;  // a power of two: the sums stay exact
    }

    template <class F, Instructions SET, class Sum>
    void move(const Plan& plan, const Part& part, size_t begin, size_t size, const typename F::U* base, typename F::U* out, const std::vector<Sum>& row_factors,
              const std::vector<Sum>& column_factors) const {
        constexpr size_t COUNT = ROWS<Sum, SET>;
        const size_t length = plan.shape.row_length, end = begin + size;
        for (size_t band = 0; band < length; band += BAND) {
            const size_t band_end = std::min(length, band + BAND);
            for (size_t row = begin / length; row * length < end;) {
                const Sum* factors = &row_factors[row * size_t(rank)];
                const uint32_t* places = &plan.rows[part.first_row + row];
                if (row * length >= begin && (row + COUNT) * length <= end) {
                    move_rows<F, SET, COUNT>(places, band, band_end, length, base, out, factors, column_factors.data());
                    row += COUNT;
                } else {
                    const size_t first = std::max(begin, row * length + band), last = std::min(end, row * length + band_end);
                    if (first < last) move_rows<F, SET, 1>(places, first - row * length, last - row * length, length, base, out, factors, column_factors.data());
                    ++row;
                }
            }
        }
    }

    // Columns from `first` to `last` of some rows, which stand at `places`.
    template <class F, Instructions SET, size_t COUNT, class Sum>
    void move_rows(const uint32_t* places, size_t first, size_t last, size_t length, const typename F::U* base, typename F::U* out, const Sum* rows, const Sum* columns) const {
        constexpr size_t WIDTH = COLUMNS<Sum, SET>;
        for (size_t column = first; column < last; column += WIDTH) {
            Sum sums[COUNT][WIDTH];
            for (size_t i = 0; i < COUNT; ++i)
                for (size_t j = 0; j < WIDTH; ++j) sums[i][j] = rows[i * size_t(rank)] * columns[column + j] + Sum(0);  // no negative zero
            for (int k = 1; k < rank; ++k)
                for (size_t i = 0; i < COUNT; ++i)
                    for (size_t j = 0; j < WIDTH; ++j) {
                        const Sum row = rows[i * size_t(rank) + size_t(k)], factor = columns[size_t(k) * length + column + j];
                        // Either way exact.
                        if constexpr (SET == Instructions::SCALAR) sums[i][j] += row * factor;
                        else sums[i][j] = std::fma(row, factor, sums[i][j]);
                    }
            const size_t count = std::min(WIDTH, last - column);
            for (size_t i = 0; i < COUNT; ++i) {
                const size_t at = places[i] * length + column;
                prefetch(base + at, COUNT * length, count);
                for (size_t j = 0; j < count; ++j) out[at + j] = moved<F>(base[at + j], sums[i][j]);
            }
        }
    }

    // The float next to base + change; NaNs and infinities stay what they are.
    template <class F, class Sum>
    static typename F::U moved(typename F::U base, Sum change) {
        using U = typename F::U;
        const U stays = U(U(0) - U(U(base & U(~F::SIGN)) >= F::INFINITY_BITS));
        return U((base & stays) | (round_to<F>(Real<F>(Sum(finite_value<F>(base)) + change)) & U(~stays)));
    }

    template <class F>
    static typename F::U round_to(Real<F> value) {
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

    bool wide_ = false;  // sums of the factors' products need double precision
    std::vector<float> row_floats_, column_floats_;
    std::vector<double> row_doubles_, column_doubles_;
};

// Each component is a Rice parameter and its factors, for the rows and then for the columns.
inline void put_low_rank(BitWriter& out, const LowRank& change, size_t row_count, size_t row_length) {
    out.put(uint64_t(change.rank), 16);
    out.put(uint16_t(change.exponent), 16);
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
    // No factor takes less than a bit: a forged rank asks for no more memory than its bytes allow.
    if (change.rank < 1 || change.rank > MAX_RANK || in.left() / (row_count + row_length) < size_t(change.rank)) throw std::runtime_error("the low-rank factors are impossible");
    change.rows.resize(row_count * size_t(change.rank));
    change.columns.resize(row_length * size_t(change.rank));
    const auto get = [&in](int32_t* factors, size_t count, size_t stride) {
        const int k = int(in.get(5));
        get_rice(in, k, count, 32, [&](size_t i, int32_t factor) { factors[i * stride] = factor; });
    };
    for (int k = 0; k < change.rank; ++k) {
        get(change.rows.data() + k, row_count, size_t(change.rank));
        get(change.columns.data() + size_t(k) * row_length, row_length, 1);
    }
    change.prepare(doubles);
    return change;
}

}  // namespace fm_delta
