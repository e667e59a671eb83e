#include "low_rank.h"

#include <cfenv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <variant>

#include "factors.h"

namespace hf_ext::delta {

struct ArrangedFactors {
    std::variant<AnyFactors, PairedFactors<int16_t>, PairedFactors<int32_t>> factors;
};

namespace {

constexpr int MAX_RANK = 1024, MAX_EXPONENT = 100;
constexpr double NARROW_SUMS = 0x1p24, WIDE_SUMS = 0x1p53;  // float and double represent every integer below these
constexpr size_t BAND = 960;  // columns whose factors fit in the second-level cache, a multiple of the columns of each tile

// The caller may have set another rounding mode or flush denormals to zero.
struct DefaultRounding {
    DefaultRounding() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
    ~DefaultRounding() { std::fesetenv(&before); }
    std::fenv_t before;
};

uint32_t magnitude(int32_t factor) { return factor < 0 ? 0u - uint32_t(factor) : uint32_t(factor); }

template <class Factors>
std::shared_ptr<const ArrangedFactors> arranged(const LowRank& change) {
    return std::make_shared<ArrangedFactors>(ArrangedFactors{Factors(change.rows, change.columns, size_t(change.rank))});
}

template <class F>
typename F::U round_to(Real<F> value) {
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

// Returns the float nearest to base + change. Leaves NaN and infinity unchanged.
template <class F, class Sum>
typename F::U moved(typename F::U base, Sum change) {
    using U = typename F::U;
    const U stays = U(U(0) - U(U(base & U(~F::SIGN)) >= F::INFINITY_BITS));
    return U((base & stays) | (round_to<F>(Real<F>(Sum(finite_value<F>(base)) + change)) & U(~stays)));
}

// Moves the values `first` to `last` of a tile.
template <class F, class Change, class Sum>
void move_values(const typename F::U* __restrict base, const Sum* __restrict sums, Change unit, size_t first, size_t last,
                 typename F::U* __restrict out) {
    // The product with a power of two is exact.
    for (size_t j = first; j < last; ++j) out[j] = moved<F>(base[j], Change(sums[j]) * unit);
}

// Moves the values `begin` to `end` of a part: whole tiles of COUNT rows, of which the loops are unrolled, and what is left of
// each row.
template <class F, Instructions SET, class Change, class AllFactors>
void move(const AllFactors& factors, const Plan& plan, const Part& part, size_t begin, size_t end, Change unit,
          const typename F::U* base, typename F::U* out) {
    constexpr size_t COUNT = AllFactors::template ROWS<SET>, WIDTH = AllFactors::template COLUMNS<SET>;
    static_assert(BAND % WIDTH == 0);
    const size_t length = plan.shape.row_length;
    const uint32_t* places = &plan.rows[part.first_row];
    for (size_t band = 0; band < length; band += BAND) {
        const size_t band_end = std::min(length, band + BAND);
        for (size_t row = begin / length, rows; row * length < end; row += rows) {
            const bool whole = row * length >= begin && (row + COUNT) * length <= end;
            const size_t tiles_end = whole ? band_end - band_end % WIDTH : band;
            rows = whole ? COUNT : 1;
            for (size_t column = band; column < tiles_end; column += WIDTH) {
                typename AllFactors::Sum sums[COUNT][WIDTH];
                factors.template sum<SET>(row, column, sums);
                for (size_t i = 0; i < COUNT; ++i) {
                    const size_t at = places[row + i] * length + column;
                    prefetch(base + at, COUNT * length, WIDTH);
                    move_values<F>(base + at, sums[i], unit, 0, WIDTH, out + at);
                }
            }
            for (size_t i = row; i < row + rows; ++i) {
                const size_t first = std::max(begin, i * length + tiles_end) - i * length,
                             last = std::min(end, i * length + band_end) - i * length;
                for (size_t column = first - first % WIDTH; column < last; column += WIDTH) {
                    typename AllFactors::Sum sums[1][WIDTH];
                    factors.template sum<SET>(i, column, sums);
                    const size_t at = places[i] * length + column;
                    move_values<F>(base + at, sums[0], unit, std::max(first, column) - column, std::min(last - column, WIDTH),
                                   out + at);
                }
            }
        }
    }
}

}  // namespace

void LowRank::prepare(bool doubles) {
    if (rank < 1 || rank > MAX_RANK || std::abs(exponent) > MAX_EXPONENT)
        throw std::runtime_error("the low-rank factors are impossible");
    const size_t count = size_t(rank), length = columns.size() / count;
    std::vector<uint32_t> row_limits(count), column_limits(count);  // the largest magnitudes of each component
    with_instructions([&](auto) {
        for (size_t i = 0; i < rows.size(); i += count)
            for (size_t k = 0; k < count; ++k) row_limits[k] = std::max(row_limits[k], magnitude(rows[i + k]));
        for (size_t k = 0; k < count; ++k)
            for (size_t j = 0; j < length; ++j)
                column_limits[k] = std::max(column_limits[k], magnitude(columns[k * length + j]));
    });
    double most_row = 0, most_column = 0, most_sum = 0;
    for (size_t k = 0; k < count; ++k) {
        most_row = std::max(most_row, double(row_limits[k]));
        most_column = std::max(most_column, double(column_limits[k]));
        most_sum += double(row_limits[k]) * column_limits[k];
    }
    const double most = double(rank) * most_row * most_column;
    if (most >= WIDE_SUMS) throw std::runtime_error("the low-rank factors are impossible");
    wide_ = doubles || most >= NARROW_SUMS;
    const auto fit = [&](auto sum) {
        using Factors = PairedFactors<decltype(sum)>;
        return most_row <= Factors::MOST_ROW && most_column <= Factors::MOST_COLUMN &&
               most_sum <= std::numeric_limits<decltype(sum)>::max();
    };
    if (fit(int16_t())) {
        factors_ = arranged<PairedFactors<int16_t>>(*this);
    } else if (fit(int32_t())) {
        factors_ = arranged<PairedFactors<int32_t>>(*this);
    } else {
        factors_ = arranged<AnyFactors>(*this);
    }
}

void LowRank::predict(const Plan& plan, const Part& part, size_t begin, size_t size, const void* base, void* out) const {
    const DefaultRounding rounding;
    const double unit = std::ldexp(1.0, -exponent);
    with_float(plan.shape.dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        std::visit(
            [&](const auto& factors) {
                // Factors whose sums have 16 bits are too small for wide sums. Other types of factors are used with both,
                // except that the rare ones of any size always have wide sums, which are rounded to the same values.
                using Sum = typename std::decay_t<decltype(factors)>::Sum;
                constexpr bool may_be_wide = F::WIDTH == 64 || sizeof(Sum) > 2, always_wide = std::is_same_v<Sum, double>;
                const U* from = static_cast<const U*>(base);
                U* to = static_cast<U*>(out);
                with_instructions([&](auto set) {
                    if constexpr (may_be_wide)
                        if (F::WIDTH == 64 || always_wide || wide_)
                            return move<F, set(), double>(factors, plan, part, begin, begin + size, unit, from, to);
                    if constexpr (F::WIDTH != 64 && !always_wide)
                        move<F, set(), float>(factors, plan, part, begin, begin + size, float(unit), from, to);
                });
            },
            factors_->factors);
    });
}

// Writes a list of factors.
static void put_factors(BitWriter& out, const int32_t* factors, size_t count, size_t stride) {
    std::vector<uint32_t> codes(count);
    for (size_t i = 0; i < count; ++i) codes[i] = zigzag(factors[i * stride]);
    const int k = best_rice(codes, 32);
    out.put(uint64_t(k), 5);
    for (const uint32_t code : codes) put_rice(out, code, k, 32);
}

void put_low_rank(BitWriter& out, const LowRank& change, size_t row_count, size_t row_length) {
    out.put(uint64_t(change.rank), 16);
    out.put(uint16_t(change.exponent), 16);
    for (int k = 0; k < change.rank; ++k) {
        put_factors(out, row_count ? change.rows.data() + k : nullptr, row_count, size_t(change.rank));
        put_factors(out, change.columns.data() + size_t(k) * row_length, row_length, 1);
    }
}

double column_factor_bits(const Factors& factors, size_t row_length) {
    BitWriter out;
    for (int k = 0; k < factors.rank; ++k) put_factors(out, factors.columns + size_t(k) * row_length, row_length, 1);
    return 8.0 * double(out.bytes().size());
}

LowRank get_low_rank(BitReader& in, size_t row_count, size_t row_length, bool doubles) {
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
    with_instructions([&](auto) {
        for (int k = 0; k < change.rank; ++k) {
            get(row_count ? change.rows.data() + k : nullptr, row_count, size_t(change.rank));
            get(change.columns.data() + size_t(k) * row_length, row_length, 1);
        }
    });
    change.prepare(doubles);
    return change;
}

}  // namespace hf_ext::delta
