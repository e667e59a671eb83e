#include "weighted_fit.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../common/floats.h"
#include "../common/intrinsics.h"
#include "../common/threads.h"
#include "codec.h"

namespace hf_ext::delta {
namespace {

constexpr size_t LANES = 16;        // columns of a tile
constexpr size_t ROWS = 12;         // rows of a tile: their sums fill the registers
constexpr size_t SQUARE = 8;        // rows and columns of the squares in which a matrix is transposed
constexpr size_t PANEL = 4 * ROWS;  // rows that are read at once
constexpr size_t TASKS = 4;         // for each thread

size_t padded(size_t count) { return (count + LANES - 1) / LANES * LANES; }

// Returns the distance of rows in memory, an odd number of tiles: rows at powers of two would share few lines of the cache.
size_t row_stride(size_t columns) { return ((columns + LANES - 1) / LANES | 1) * LANES; }

// Multiplies ROWS rows of `depth` numbers by as many rows of LANES numbers.
template <class Set>
inline void multiply_tile(Set, const float* left, size_t stride, const float* right, size_t depth, float* out,
                          size_t out_stride) {
    for (size_t i = 0; i < ROWS; ++i) {
        float sums[LANES] = {};
        for (size_t k = 0; k < depth; ++k)
            for (size_t lane = 0; lane < LANES; ++lane) sums[lane] += left[i * stride + k] * right[k * LANES + lane];
        std::copy_n(sums, LANES, out + i * out_stride);
    }
}

#ifdef HF_EXT_X86
[[HF_EXT_AVX2]] inline void multiply_tile(With<Instructions::AVX2>, const float* left, size_t stride, const float* right,
                                          size_t depth, float* out, size_t out_stride) {
    constexpr size_t HALF = ROWS / 2;
    for (size_t row = 0; row < ROWS; row += HALF) {
        const float* from = left + row * stride;
        __m256 sums[HALF][2] = {};
        for (size_t k = 0; k < depth; ++k) {
            const __m256 low = _mm256_loadu_ps(right + k * LANES), high = _mm256_loadu_ps(right + k * LANES + 8);
#pragma GCC unroll 6
            for (size_t i = 0; i < HALF; ++i) {
                const __m256 factor = _mm256_broadcast_ss(from + i * stride + k);
                sums[i][0] = _mm256_fmadd_ps(factor, low, sums[i][0]);
                sums[i][1] = _mm256_fmadd_ps(factor, high, sums[i][1]);
            }
        }
#pragma GCC unroll 6
        for (size_t i = 0; i < HALF; ++i)
            for (size_t part = 0; part < 2; ++part) _mm256_storeu_ps(out + (row + i) * out_stride + 8 * part, sums[i][part]);
    }
}

[[HF_EXT_AVX512]] inline void multiply_tile(With<Instructions::AVX512>, const float* left, size_t stride, const float* right,
                                            size_t depth, float* out, size_t out_stride) {
    __m512 sums[ROWS] = {};
    for (size_t k = 0; k < depth; ++k) {
        const __m512 factors = _mm512_loadu_ps(right + k * LANES);
#pragma GCC unroll 12
        for (size_t i = 0; i < ROWS; ++i) sums[i] = _mm512_fmadd_ps(_mm512_set1_ps(left[i * stride + k]), factors, sums[i]);
    }
#pragma GCC unroll 12
    for (size_t i = 0; i < ROWS; ++i) _mm512_storeu_ps(out + i * out_stride, sums[i]);
}
#endif

// A matrix cut into strips of LANES columns. Their rows are those of `right` in `multiply_tile`.
class Strips {
   public:
    // at(row, column) gives the numbers of a matrix of depth × columns.
    template <class At>
    Strips(size_t depth, size_t columns, At&& at) : depth_(depth), values_(depth * padded(columns)) {
        for (size_t begin = 0; begin < columns; begin += LANES)
            for (size_t row = 0; row < depth; ++row)
                for (size_t column = begin; column < std::min(begin + LANES, columns); ++column)
                    values_[begin * depth + row * LANES + column - begin] = at(row, column);
    }

    size_t columns() const { return values_.size() / depth_; }

    // Computes columns of ROWS rows times this matrix.
    template <class Set>
    void multiply(Set set, const std::vector<float>& rows, size_t column, std::vector<float>& out) const {
        multiply_tile(set, rows.data(), rows.size() / ROWS, &values_[column * depth_], depth_, &out[column], out.size() / ROWS);
    }
    template <class Set>
    void multiply(Set set, const std::vector<float>& rows, std::vector<float>& out) const {
        for (size_t column = 0; column < columns(); column += LANES) multiply(set, rows, column, out);
    }

   private:
    size_t depth_;
    std::vector<float> values_;
};

struct FixedSide {
    Strips across, along, inverse;  // rank × length, length × rank, rank × rank
};

// ROWS rows of the change, and their factors. Rows and columns that fill up tiles are 0.
class Block {
   public:
    Block(const WeightedChange& change, size_t rank)
        : rank_(rank),
          width_(padded(change.length)),
          stride_(row_stride(change.length)),
          depth_(padded(rank)),
          change_(ROWS * stride_),
          weights_(change_),
          image_(change_),
          own_(ROWS * depth_),
          rest_(own_),
          scaled_(own_),
          direction_(own_) {}

    void read(const WeightedChange& change, const uint8_t* tensor, const uint8_t* base, size_t bytes, size_t count,
              const float* own) {
        if (count < ROWS)
            for (auto* values : {&change_, &weights_, &own_}) std::fill(values->begin(), values->end(), 0.0f);
        const size_t length = change.length;
        for (size_t i = 0; i < count; ++i, tensor += bytes, base += bytes) {
            double energy;
            subtract({change.dtype, length, length, length}, tensor, base, &change_[i * stride_], &energy);
            weigh(change.dtype, tensor, length, change.top, change.most, &weights_[i * stride_]);
            std::copy_n(own + i * rank_, rank_, &own_[i * depth_]);
        }
    }

    void write(size_t count, float* own) const {
        for (size_t i = 0; i < count; ++i) std::copy_n(&own_[i * depth_], rank_, own + i * rank_);
    }

    // Takes steps of conjugate gradients, each to the least error along its direction.
    template <class Set>
    void solve(Set set, const FixedSide& fixed, int steps) {
        for_tiles(set, own_, fixed.across,
                  [&](size_t at, size_t, size_t) { image_[at] = weights_[at] * (change_[at] - image_[at]); });
        fixed.along.multiply(set, image_, rest_);
        std::fill(direction_.begin(), direction_.end(), 0.0f);
        float before[ROWS] = {};
        for (int step = 1; step <= steps; ++step) {
            const bool is_last = step == steps;
            fixed.inverse.multiply(set, rest_, scaled_);
            for (size_t i = 0; i < ROWS; ++i) {
                const float gain = dot(&rest_[i * depth_], &scaled_[i * depth_]), share = before[i] > 0 ? gain / before[i] : 0;
                for (size_t k = i * depth_; k < (i + 1) * depth_; ++k) direction_[k] = scaled_[k] + share * direction_[k];
                before[i] = gain;
            }
            float costs[ROWS][LANES] = {};
            for_tiles(set, direction_, fixed.across, [&](size_t at, size_t i, size_t lane) {
                const float weighted = weights_[at] * image_[at];
                costs[i][lane] += weighted * image_[at];
                image_[at] = weighted;
            });
            if (!is_last) fixed.along.multiply(set, image_, scaled_);
            for (size_t i = 0; i < ROWS; ++i) {
                const float cost = std::accumulate(costs[i], costs[i] + LANES, 0.0f);
                const float length = cost > 0 ? before[i] / cost : 0;
                for (size_t k = i * depth_; k < (i + 1) * depth_; ++k) {
                    own_[k] += length * direction_[k];
                    rest_[k] -= length * scaled_[k];  // of no use in the last step
                }
            }
        }
    }

   private:
    // Fills the tiles of the image of some factors, each time calling f(place, row, lane) for its values.
    template <class Set, class Function>
    void for_tiles(Set set, const std::vector<float>& factors, const Strips& across, Function&& f) {
        for (size_t column = 0; column < width_; column += LANES) {
            across.multiply(set, factors, column, image_);
            for (size_t i = 0; i < ROWS; ++i)
                for (size_t lane = 0; lane < LANES; ++lane) f(i * stride_ + column + lane, i, lane);
        }
    }

    float dot(const float* x, const float* y) const {
        float sums[LANES] = {};
        for (size_t k = 0; k < depth_; ++k) sums[k % LANES] += x[k] * y[k];
        return std::accumulate(sums, sums + LANES, 0.0f);
    }

    size_t rank_, width_, stride_, depth_;
    std::vector<float> change_, weights_, image_, own_, rest_, scaled_, direction_;
};

template <class U>
void transpose(const U* from, size_t stride, size_t rows, size_t columns, U* to, size_t to_stride) {
#ifdef HF_EXT_X86
    if constexpr (sizeof(U) == 2) {
        if (rows == SQUARE && columns == SQUARE) {
            __m128i values[SQUARE], next[SQUARE];
            for (size_t i = 0; i < SQUARE; ++i)
                values[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
            for (int stage = 0; stage < 3; ++stage) {
                for (size_t i = 0; i < SQUARE / 2; ++i) {
                    next[2 * i] = _mm_unpacklo_epi16(values[i], values[i + SQUARE / 2]);
                    next[2 * i + 1] = _mm_unpackhi_epi16(values[i], values[i + SQUARE / 2]);
                }
                std::copy_n(next, SQUARE, values);
            }
            for (size_t i = 0; i < SQUARE; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), values[i]);
            return;
        }
    }
#endif
    for (size_t i = 0; i < columns; ++i)
        for (size_t j = 0; j < rows; ++j) to[i * to_stride + j] = from[j * stride + i];
}

// Returns some rows of a matrix; columns are copied to a buffer.
const uint8_t* rows_of(const WeightedChange& change, const void* values, size_t begin, size_t count, size_t row_bytes,
                       std::vector<uint8_t>& buffer) {
    if (!change.by_columns) return static_cast<const uint8_t*>(values) + begin * row_bytes;
    buffer.resize(count * row_bytes);
    with_float(change.dtype, [&](auto type) {
        using U = typename decltype(type)::U;
        const U* from = static_cast<const U*>(values) + begin;
        U* to = reinterpret_cast<U*>(buffer.data());
        const size_t row_length = row_bytes / sizeof(U), stride = change.rows * change.step;
        for (size_t j = 0; j < change.length; j += SQUARE)
            for (size_t i = 0; i < count; i += SQUARE) {
                const size_t height = std::min(SQUARE, change.length - j), width = std::min(SQUARE, count - i);
                transpose(from + j * stride + i, stride, height, width, to + i * row_length + j, row_length);
            }
    });
    return buffer.data();
}

}  // namespace

void fit_rows(const WeightedChange& change, const float* fixed, const float* inverse, size_t rank, int steps, float* own,
              int threads) {
    const FixedSide side{
        {rank, change.length, [&](size_t k, size_t j) { return fixed[j * rank + k]; }},
        {change.length, rank, [&](size_t j, size_t k) { return fixed[j * rank + k]; }},
        {rank, rank, [&](size_t k, size_t j) { return inverse[k * rank + j]; }},
    };
    const size_t row_bytes = size_t(width(change.dtype)) * (change.by_columns ? row_stride(change.length) : change.length),
                 panels = (change.rows + PANEL - 1) / PANEL;
    const size_t tasks = std::min(panels, TASKS * size_t(std::max(threads, 1)));
    parallel_for(tasks, threads, [&](size_t task) {
        Block block(change, rank);
        std::vector<uint8_t> buffers[2];
        for (size_t begin = task * PANEL; begin < change.rows; begin += tasks * PANEL) {
            const size_t end = std::min(change.rows, begin + PANEL);
            const uint8_t *tensor = rows_of(change, change.tensor, begin, end - begin, row_bytes, buffers[0]),
                          *base = rows_of(change, change.base, begin, end - begin, row_bytes, buffers[1]);
            for (size_t row = begin; row < end; row += ROWS, tensor += ROWS * row_bytes, base += ROWS * row_bytes) {
                const size_t count = std::min(ROWS, end - row);
                block.read(change, tensor, base, row_bytes, count, own + row * rank);
                with_instructions([&](auto set) { block.solve(set, side, steps); });
                block.write(count, own + row * rank);
            }
        }
    });
}

}  // namespace hf_ext::delta
