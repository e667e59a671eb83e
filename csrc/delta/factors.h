// The factors of a low-rank change, and the sums of their products. All sums are exact.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../common/floats.h"
#include "../common/intrinsics.h"

namespace hf_ext::delta {

// Factors of any size. Sums are below 2^53.
class AnyFactors {
   public:
    using Sum = double;
    // Rows and columns that are summed together, few enough to keep all sums in registers. There are more than 16 columns,
    // because gcc unrolls shorter loops before it tries to vectorize them.
    template <Instructions SET>
    static constexpr size_t ROWS = SET == Instructions::AVX512 ? 4 : 1;
    template <Instructions SET>
    static constexpr size_t COLUMNS = SET == Instructions::SCALAR ? 24 : 32;

    AnyFactors() = default;
    // Takes rows × rank and rank × length factors.
    AnyFactors(const std::vector<int32_t>& rows, const std::vector<int32_t>& columns, size_t rank)
        : rank_(rank),
          length_(columns.size() / rank),
          rows_(rows.begin(), rows.end()),
          columns_(columns.begin(), columns.end()) {
        columns_.resize(columns.size() + 32);  // because sums are computed for whole tiles
    }

    // Computes the sums of COUNT rows and WIDTH columns, from `row` and `column` on. `column` must be a multiple of WIDTH.
    template <Instructions SET, size_t COUNT, size_t WIDTH>
    void sum(size_t row, size_t column, Sum (&sums)[COUNT][WIDTH]) const {
        for (size_t i = 0; i < COUNT; ++i)
            for (size_t j = 0; j < WIDTH; ++j) sums[i][j] = 0;
        for (size_t k = 0; k < rank_; ++k)
            for (size_t i = 0; i < COUNT; ++i)
                for (size_t j = 0; j < WIDTH; ++j) {
                    const double first = rows_[(row + i) * rank_ + k], second = columns_[k * length_ + column + j];
                    // Both are exact; fma is slow without an instruction for it.
                    if constexpr (SET == Instructions::SCALAR)
                        sums[i][j] += first * second;
                    else
                        sums[i][j] = std::fma(first, second, sums[i][j]);
                }
    }

   private:
    size_t rank_ = 0, length_ = 0;
    std::vector<double> rows_, columns_;
};

// Factors of 8 bits with sums of 16, or factors of 16 bits with sums of 32. Two of a row or of a column are next to each other,
// because vector instructions multiply and add pairs.
template <class Integer>
class PairedFactors {
    static constexpr bool BYTES = sizeof(Integer) == 2;
    using RowFactor = std::conditional_t<BYTES, int8_t, int16_t>;
    // The instruction for bytes takes one of the two without a sign, so BIAS is added to the factors of columns. It saturates,
    // but not below the limits of the factors.
    using ColumnFactor = std::conditional_t<BYTES, uint8_t, int16_t>;
    static constexpr int32_t BIAS = BYTES ? 64 : 0;

   public:
    using Sum = Integer;
    static constexpr int32_t MOST_ROW = BYTES ? INT8_MAX : INT16_MAX, MOST_COLUMN = BYTES ? BIAS - 1 : INT16_MAX;
    template <Instructions SET>
    static constexpr size_t ROWS = SET == Instructions::AVX512 || BYTES ? 4 : 2;
    template <Instructions SET>
    static constexpr size_t COLUMNS = SET == Instructions::AVX512 ? 64 : 32;

    // Takes rows × rank and rank × length factors. If the rank is odd, the last ones are paired with 0.
    PairedFactors(const std::vector<int32_t>& rows, const std::vector<int32_t>& columns, size_t rank)
        : depth_((rank + 1) / 2), rows_(rows.size() / rank * depth_), starts_(rows.size() / rank) {
        for (size_t row = 0; row < starts_.size(); ++row) {
            const int32_t* from = &rows[row * rank];
            RowPair* to = &rows_[row * depth_];
            int32_t sum = 0;
            for (size_t k = 0; k + 1 < rank; k += 2) {
                to[k / 2] = {RowFactor(from[k]), RowFactor(from[k + 1])};
                sum += from[k] + from[k + 1];
            }
            if (rank % 2) to[rank / 2] = {RowFactor(from[rank - 1]), 0}, sum += from[rank - 1];
            starts_[row] = Sum(-BIAS * sum);
        }
        const size_t length = columns.size() / rank;
        const int32_t zeros[TILE] = {};
        tiles_.resize((length + TILE - 1) / TILE * depth_);
        for (size_t i = 0; i < tiles_.size(); ++i) {
            const size_t first = i / depth_ * TILE, k = i % depth_ * 2;
            const int32_t *one = &columns[k * length + first], *other = k + 1 < rank ? one + length : zeros;
            for (size_t j = 0; j < std::min(TILE, length - first); ++j)
                tiles_[i].columns[j] = {ColumnFactor(one[j] + BIAS), ColumnFactor(other[j] + BIAS)};
        }
    }

    // See AnyFactors.
    template <Instructions SET, size_t COUNT, size_t WIDTH>
    void sum(size_t row, size_t column, Sum (&sums)[COUNT][WIDTH]) const {
        static_assert(TILE % WIDTH == 0);
#ifdef HF_EXT_X86
        if constexpr (SET == Instructions::AVX512) return sum_avx512(row, column, sums);
        if constexpr (SET == Instructions::AVX2) return sum_avx2(row, column, sums);
#elif defined(HF_EXT_NEON)
        if constexpr (SET == Instructions::NEON) return sum_neon(row, column, sums);
#endif
        for (size_t i = 0; i < COUNT; ++i)
            for (size_t j = 0; j < WIDTH; ++j) sums[i][j] = starts_[row + i];
        for (size_t k = 0; k < depth_; ++k)
            for (size_t i = 0; i < COUNT; ++i) {
                const RowPair& pair = rows_[(row + i) * depth_ + k];
                const ColumnPair* columns = columns_of(column, k);
                for (size_t j = 0; j < WIDTH; ++j)
                    sums[i][j] = Sum(sums[i][j] + pair[0] * columns[j][0] + pair[1] * columns[j][1]);
            }
    }

   private:
    static constexpr size_t TILE = 64;  // columns whose factors are next to each other
    using RowPair = std::array<RowFactor, 2>;
    using ColumnPair = std::array<ColumnFactor, 2>;
    struct alignas(64) Tile {
        ColumnPair columns[TILE];
    };

    const ColumnPair* columns_of(size_t column, size_t k) const {
        return tiles_[column / TILE * depth_ + k].columns + column % TILE;
    }

#ifdef HF_EXT_X86
    template <size_t COUNT, size_t WIDTH>
    [[HF_EXT_AVX2]] void sum_avx2(size_t row, size_t column, Sum (&sums)[COUNT][WIDTH]) const {
        constexpr size_t LANES = 32 / sizeof(Sum), VECTORS = WIDTH / LANES;
        __m256i sum[COUNT][VECTORS];
        for (size_t i = 0; i < COUNT; ++i)
            for (size_t j = 0; j < VECTORS; ++j)
                sum[i][j] = BYTES ? _mm256_set1_epi16(int16_t(starts_[row + i])) : _mm256_setzero_si256();
        for (size_t k = 0; k < depth_; ++k)
            for (size_t i = 0; i < COUNT; ++i) {
                const RowPair pair = rows_[(row + i) * depth_ + k];
                const auto* columns = reinterpret_cast<const __m256i*>(columns_of(column, k));
                for (size_t j = 0; j < VECTORS; ++j) {
                    const __m256i factors = _mm256_load_si256(columns + j);
                    if constexpr (BYTES)
                        sum[i][j] = _mm256_add_epi16(sum[i][j],
                                                     _mm256_maddubs_epi16(factors, _mm256_set1_epi16(bits_as<int16_t>(pair))));
                    else
                        sum[i][j] =
                            _mm256_add_epi32(sum[i][j], _mm256_madd_epi16(factors, _mm256_set1_epi32(bits_as<int32_t>(pair))));
                }
            }
        for (size_t i = 0; i < COUNT; ++i)
            for (size_t j = 0; j < VECTORS; ++j)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums[i] + j * LANES), sum[i][j]);
    }

    template <size_t COUNT, size_t WIDTH>
    [[HF_EXT_AVX512]] void sum_avx512(size_t row, size_t column, Sum (&sums)[COUNT][WIDTH]) const {
        constexpr size_t LANES = 64 / sizeof(Sum), VECTORS = WIDTH / LANES;
        __m512i sum[COUNT][VECTORS];
        for (size_t i = 0; i < COUNT; ++i)
            for (size_t j = 0; j < VECTORS; ++j)
                sum[i][j] = BYTES ? _mm512_set1_epi16(int16_t(starts_[row + i])) : _mm512_setzero_si512();
        for (size_t k = 0; k < depth_; ++k)
            for (size_t i = 0; i < COUNT; ++i) {
                const RowPair pair = rows_[(row + i) * depth_ + k];
                const ColumnPair* columns = columns_of(column, k);
                for (size_t j = 0; j < VECTORS; ++j) {
                    const __m512i factors = _mm512_load_si512(columns + j * LANES);
                    if constexpr (BYTES)
                        sum[i][j] = _mm512_add_epi16(sum[i][j],
                                                     _mm512_maddubs_epi16(factors, _mm512_set1_epi16(bits_as<int16_t>(pair))));
                    else
                        sum[i][j] =
                            _mm512_add_epi32(sum[i][j], _mm512_madd_epi16(factors, _mm512_set1_epi32(bits_as<int32_t>(pair))));
                }
            }
        for (size_t i = 0; i < COUNT; ++i)
            for (size_t j = 0; j < VECTORS; ++j) _mm512_storeu_si512(sums[i] + j * LANES, sum[i][j]);
    }
#elif defined(HF_EXT_NEON)
    // Loads the first factors of some pairs, and the second ones.
    static int8x8x2_t separated(const int8_t* pairs) { return vld2_s8(pairs); }
    static int16x4x2_t separated(const int16_t* pairs) { return vld2_s16(pairs); }

    static int16x8_t add_products(int16x8_t sum, int8x8_t columns, int8_t row) {
        return vmlal_s8(sum, columns, vdup_n_s8(row));
    }
    static int32x4_t add_products(int32x4_t sum, int16x4_t columns, int16_t row) { return vmlal_n_s16(sum, columns, row); }

    // The factors of columns are below 128 despite their bias, so that they can be read as signed bytes.
    template <size_t COUNT, size_t WIDTH>
    void sum_neon(size_t row, size_t column, Sum (&sums)[COUNT][WIDTH]) const {
        constexpr size_t LANES = 16 / sizeof(Sum), VECTORS = WIDTH / LANES;
        std::conditional_t<BYTES, int16x8_t, int32x4_t> sum[COUNT][VECTORS];
        for (size_t i = 0; i < COUNT; ++i) std::fill_n(sums[i], WIDTH, starts_[row + i]);
        std::memcpy(sum, sums, sizeof sum);
        for (size_t k = 0; k < depth_; ++k) {
            const auto* columns = reinterpret_cast<const RowFactor*>(columns_of(column, k));
            decltype(separated(columns)) factors[VECTORS];
            for (size_t j = 0; j < VECTORS; ++j) factors[j] = separated(columns + 2 * LANES * j);
            for (size_t i = 0; i < COUNT; ++i) {
                const RowPair pair = rows_[(row + i) * depth_ + k];
                for (size_t j = 0; j < VECTORS; ++j)
                    sum[i][j] = add_products(add_products(sum[i][j], factors[j].val[0], pair[0]), factors[j].val[1], pair[1]);
            }
        }
        std::memcpy(sums, sum, sizeof sum);
    }
#endif

    size_t depth_;  // pairs per row and per column
    std::vector<RowPair> rows_;
    std::vector<Tile> tiles_;
    std::vector<Sum> starts_;  // for each row, what the bias adds to its sums, negated
};

}  // namespace hf_ext::delta
