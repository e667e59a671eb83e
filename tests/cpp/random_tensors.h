// Random tensors of every kind that the codec treats in its own way, for the programs beside this file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "../../csrc/common/floats.h"
#include "../../csrc/delta/codec.h"

namespace {

using Bytes = std::vector<uint8_t>;
using hf_ext::delta::Shape;

std::mt19937_64 rng(20241);

size_t below(size_t end) { return size_t(rng() % end); }

Bytes random_bytes(size_t size) {
    Bytes bytes(size);
    for (uint8_t& byte : bytes) byte = uint8_t(rng());
    return bytes;
}

Bytes as_floats(const std::vector<double>& values, int dtype) {
    Bytes bytes(values.size() * size_t(hf_ext::width(dtype)));
    hf_ext::cast(4, dtype, values.data(), bytes.data(), values.size());
    return bytes;
}

struct Tensor {
    Shape shape;
    Bytes values, base;
    std::vector<int32_t> rows{}, columns{};  // of a low-rank change
    int rank = 0, exponent = 0;

    std::vector<hf_ext::delta::Factors> candidates() const {
        if (rank == 0) return {};
        return {{rank, exponent, rows.data(), columns.data()}};
    }
};

enum Content { BITS, FINE_TUNE, WILD_FINE_TUNE, SOME_ROWS, SOME_VALUES, EQUAL, LOW_RANK, CONTENTS };

Tensor make(Shape shape, Content content) {
    Tensor tensor{shape, {}, {}};
    const size_t width = size_t(hf_ext::width(shape.dtype)), rows_of = shape.row_length * width;
    if (content == BITS) {
        tensor.values = random_bytes(shape.values * width);
        tensor.base = random_bytes(shape.base_values * width);
        return tensor;
    }
    std::normal_distribution<double> normal;
    const int octave = int(below(60)) - 40;
    const double scale = std::exp2(octave);
    std::vector<double> before(shape.values), after(shape.values);
    if (content == LOW_RANK && shape.base_values) {
        const int bits = 1 + int(below(20));
        const auto draw = [bits] { return int32_t(below(size_t(2) << bits)) - (1 << bits); };
        tensor.rank = 1 + int(below(5));
        tensor.exponent = 2 * bits + 7 - octave;
        tensor.rows.resize((shape.base_values + shape.row_length - 1) / shape.row_length * size_t(tensor.rank));
        tensor.columns.resize(shape.row_length * size_t(tensor.rank));
        std::generate(tensor.rows.begin(), tensor.rows.end(), draw);
        std::generate(tensor.columns.begin(), tensor.columns.end(), draw);
    }
    for (size_t i = 0; i < shape.values; ++i) {
        before[i] = scale * normal(rng);
        after[i] = before[i] + (tensor.rank ? 0 : 0.01 * scale * normal(rng));
        const size_t rank = i < shape.base_values ? size_t(tensor.rank) : 0;
        for (size_t k = 0; k < rank; ++k)
            after[i] += std::ldexp(double(tensor.rows[i / shape.row_length * rank + k]) *
                                       tensor.columns[k * shape.row_length + i % shape.row_length],
                                   -tensor.exponent);
    }
    tensor.values = as_floats(after, shape.dtype);
    tensor.base = as_floats(before, shape.dtype);
    if (content == WILD_FINE_TUNE)
        for (size_t i = 0; i < tensor.values.size(); i += 1 + below(400)) tensor.values[i] = uint8_t(rng());
    if (content == SOME_VALUES)
        for (size_t i = 0; i < shape.values; ++i)
            if (below(20))
                std::copy_n(tensor.base.begin() + ptrdiff_t(i * width), width, tensor.values.begin() + ptrdiff_t(i * width));
    if (content == SOME_ROWS || content == EQUAL)
        for (size_t i = 0; i < tensor.values.size(); ++i)
            if (content == EQUAL || i / rows_of % 3) tensor.values[i] = tensor.base[i];
    Bytes(tensor.base.begin(), tensor.base.begin() + ptrdiff_t(shape.base_values * width)).swap(tensor.base);
    return tensor;
}

}  // namespace
