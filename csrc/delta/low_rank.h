// Moves a base by a low-rank change: base + rows · columns · 2^-exponent. The factors are integers and their product is exact,
// so each value takes one IEEE rounding and is the same on every machine.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "../common/bits.h"
#include "../common/instruction_sets.h"
#include "blocks.h"

namespace hf_ext::delta {

constexpr int MAX_RANK = 1024, MAX_EXPONENT = 100;
constexpr double NARROW_SUMS = 0x1p24, WIDE_SUMS = 0x1p53;  // float and double represent every integer below these

class LowRank {
   public:
    int rank = 0;
    int exponent = 0;
    std::vector<int32_t> rows, columns;  // (coded rows that have a base) × rank, and rank × row length

    // Must be called once the fields are filled in. Throws std::runtime_error if sums might not be exact.
    void prepare(bool doubles) {
        const double most = double(rank) * largest(rows) * largest(columns);
        wide_ = doubles || most >= NARROW_SUMS;
        if (most >= WIDE_SUMS || rank < 1 || rank > MAX_RANK || std::abs(exponent) > MAX_EXPONENT)
            throw std::runtime_error("the low-rank factors are impossible");
        if (wide_) {
            fill(row_doubles_, column_doubles_);
        } else {
            fill(row_floats_, column_floats_);
        }
    }

    // Writes the moved base of a block to the same positions in `out`. The block's values must have a base.
    template <class F>
    void predict(const Plan& plan, const Part& part, size_t begin, size_t size, const typename F::U* base,
                 typename F::U* out) const {
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
    static constexpr size_t BAND = 1024;  // columns whose factors fit in the second-level cache
    // Rows and columns that are summed together, few enough to keep all sums in registers. There are more than 16 columns,
    // because gcc unrolls shorter loops before it tries to vectorize them.
    template <class Sum, Instructions SET>
    static constexpr size_t ROWS = SET == Instructions::AVX512                     ? 4
                                   : SET == Instructions::AVX2 && sizeof(Sum) == 4 ? 2
                                                                                   : 1;
    template <class Sum, Instructions SET>
    static constexpr size_t COLUMNS = SET == Instructions::AVX512 && sizeof(Sum) == 4   ? 64
                                      : SET == Instructions::SCALAR && sizeof(Sum) == 8 ? 24
                                                                                        : 32;

    // The caller may have set another rounding mode or flush denormals to zero.
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
        column_factors.resize(columns.size() + BAND);    // because sums are computed for whole tiles
        for (Sum& factor : row_factors) factor *= unit;  // by a power of two, which keeps the sums exact
    }

    template <class F, Instructions SET, class Sum>
    void move(const Plan& plan, const Part& part, size_t begin, size_t size, const typename F::U* base, typename F::U* out,
              const std::vector<Sum>& row_factors, const std::vector<Sum>& column_factors) const {
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
                    if (first < last)
                        move_rows<F, SET, 1>(places, first - row * length, last - row * length, length, base, out, factors,
                                             column_factors.data());
                    ++row;
                }
            }
        }
    }

    // Moves columns `first` to `last` of COUNT rows. `places` are the indices of these rows in the tensor.
    template <class F, Instructions SET, size_t COUNT, class Sum>
    void move_rows(const uint32_t* places, size_t first, size_t last, size_t length, const typename F::U* base,
                   typename F::U* out, const Sum* rows, const Sum* columns) const {
        constexpr size_t WIDTH = COLUMNS<Sum, SET>;
        for (size_t column = first; column < last; column += WIDTH) {
            Sum sums[COUNT][WIDTH];
            for (size_t i = 0; i < COUNT; ++i)
                for (size_t j = 0; j < WIDTH; ++j)
                    sums[i][j] = rows[i * size_t(rank)] * columns[column + j] + Sum(0);  // + 0 turns -0 into 0
            for (int k = 1; k < rank; ++k)
                for (size_t i = 0; i < COUNT; ++i)
                    for (size_t j = 0; j < WIDTH; ++j) {
                        const Sum row = rows[i * size_t(rank) + size_t(k)], factor = columns[size_t(k) * length + column + j];
                        // Both are exact; fma is slow without an instruction for it.
                        if constexpr (SET == Instructions::SCALAR)
                            sums[i][j] += row * factor;
                        else
                            sums[i][j] = std::fma(row, factor, sums[i][j]);
                    }
            const size_t count = std::min(WIDTH, last - column);
            for (size_t i = 0; i < COUNT; ++i) {
                const size_t at = places[i] * length + column;
                prefetch(base + at, COUNT * length, count);
                for (size_t j = 0; j < count; ++j) out[at + j] = moved<F>(base[at + j], sums[i][j]);
            }
        }
    }

    // Returns the float nearest to base + change. Leaves NaN and infinity unchanged.
    template <class F, class Sum>
    static typename F::U moved(typename F::U base, Sum change) {
        using U = typename F::U;
        const U stays = U(U(0) - U(U(base & U(~F::SIGN)) >= F::INFINITY_BITS));
        return U((base & stays) | (round_to<F>(Real<F>(Sum(finite_value<F>(base)) + change)) & U(~stays)));
    }

    template <class F>
    static typename F::U round_to(Real<F> value) {
        if constexpr (!std::is_same_v<F, F16>) {
            return rounded<F>(value);
        } else {
            // Faster than `rounded`. Subnormals are rounded twice; the format prescribes exactly this.
            const uint32_t bits = bits_as<uint32_t>(value),
                           magnitude = bits_as<uint32_t>(bits_as<float>(bits & 0x7fffffff) * 0x1p-112f);
            return uint16_t(std::min((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13, uint32_t(F::INFINITY_BITS)) |
                            (bits >> 16 & F::SIGN));
        }
    }

    bool wide_ = false;  // sums of products need double precision
    std::vector<float> row_floats_, column_floats_;
    std::vector<double> row_doubles_, column_doubles_;
};

// Writes rank and exponent, then for each component its row factors and its column factors. Each list has its own Rice
// parameter.
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
        put(row_count ? change.rows.data() + k : nullptr, row_count, size_t(change.rank));
        put(change.columns.data() + size_t(k) * row_length, row_length, 1);
    }
}

inline LowRank get_low_rank(BitReader& in, size_t row_count, size_t row_length, bool doubles) {
    LowRank change;
    change.rank = int(in.get(16));
    change.exponent = int16_t(in.get(16));
    // A factor takes at least one bit. This bounds the memory that a forged rank can request.
    if (change.rank < 1 || change.rank > MAX_RANK || in.left() / (row_count + row_length) < size_t(change.rank))
        throw std::runtime_error("the low-rank factors are impossible");
    change.rows.resize(row_count * size_t(change.rank));
    change.columns.resize(row_length * size_t(change.rank));
    const auto get = [&in](int32_t* factors, size_t count, size_t stride) {
        const int k = int(in.get(5));
        get_rice(in, k, count, 32, [&](size_t i, int32_t factor) { factors[i * stride] = factor; });
    };
    for (int k = 0; k < change.rank; ++k) {
        get(row_count ? change.rows.data() + k : nullptr, row_count, size_t(change.rank));
        get(change.columns.data() + size_t(k) * row_length, row_length, 1);
    }
    change.prepare(doubles);
    return change;
}

}  // namespace hf_ext::delta
