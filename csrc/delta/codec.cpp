#include "codec.h"

#include "../common/floats.h"
#include "../common/instruction_sets.h"
#include "scales.h"

namespace hf_ext::delta {

void check(const Shape& shape) {
    const bool whole_rows =
        shape.base_values == shape.values || (shape.row_length && shape.base_values % shape.row_length == 0);
    if (!width(shape.dtype)) throw std::invalid_argument("unknown float type code");
    if (shape.row_length == 0 || shape.base_values > shape.values || !whole_rows ||
        shape.values / shape.row_length >= UINT32_MAX)
        throw std::invalid_argument("the sizes of the tensor contradict each other");
}

void subtract(const Shape& shape, const void* tensor, const void* base, float* change, double* energies) {
    with_float(shape.dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        const auto *x = static_cast<const U*>(tensor), *b = static_cast<const U*>(base);
        with_instructions([&](auto) {
            for (size_t at = 0, row = 0; at < shape.values; at += shape.row_length, ++row) {
                const size_t count = std::min(shape.row_length, shape.values - at);
                for (size_t i = at; i < at + count; ++i) {
                    const auto is_finite = [](U bits) { return U(bits & U(~F::SIGN)) < F::INFINITY_BITS; };
                    const float difference = float(finite_value<F>(x[i]) - finite_value<F>(b[i]));
                    const bool finite =
                        is_finite(x[i]) & is_finite(b[i]) & ((bits_as<uint32_t>(difference) & 0x7fffffff) < 0x7f800000);
                    change[i] = finite ? difference : 0;
                }
                energies[row] = double(weighted_sum(change + at, change + at, count));
            }
        });
    });
}

void weigh(int dtype, const void* tensor, size_t values, int top, int most, float* weights) {
    with_float(dtype, [&](auto type) {
        using F = decltype(type);
        const auto* x = static_cast<const typename F::U*>(tensor);
        with_instructions([&](auto) {
            for (size_t i = 0; i < values; ++i) {
                const int below = std::clamp(top - int(grid_exponent<F>(x[i])) - F::ULP_BIAS, 0, most);
                weights[i] = bits_as<float>(uint32_t(127 + 2 * below) << 23);
            }
        });
    });
}

}  // namespace hf_ext::delta
