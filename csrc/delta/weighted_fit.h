// Fits a product of two matrices to a tensor's change, by weighted least squares.
#pragma once

#include <cstddef>

namespace hf_ext::delta {

// A change, and what its values weigh: 4 to the power of how far the exponent of a value's spacing is below `top`, from 0 to
// `most` (at most 60). It has `rows` rows of `length` values of float type `dtype`. With `by_columns`, these are the columns of
// the matrix that the buffers hold, of which only every `step`-th row counts.
struct WeightedChange {
    int dtype;
    size_t rows, length;
    const void *tensor, *base;
    int top, most;
    bool by_columns;
    size_t step;
};

// Improves the rows' factors (rows × rank) of a product in place, by so many steps of conjugate gradients. Each row is a
// problem of its own: the number of threads does not change the result. Sets of instructions without fused products round
// differently.
//
// `fixed`: the columns' factors (length × rank); `inverse`: approximately the inverse of their Gram matrix (rank × rank).
void fit_rows(const WeightedChange& change, const float* fixed, const float* inverse, size_t rank, int steps, float* own,
              int threads);

}  // namespace hf_ext::delta
