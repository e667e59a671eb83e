#include "codec.h"

#include "float_map.h"

namespace fm_delta {

int width(int dtype) {
    int bytes = 0;
    if (dtype < 1 || dtype > 4) return bytes;
    with_float(dtype, [&](auto type) { bytes = sizeof(typename decltype(type)::U); });
    return bytes;
}

void check(const Shape& shape) {
    const bool whole_rows = shape.base_values == shape.values || (shape.row_length && shape.base_values % shape.row_length == 0);
    if (!width(shape.dtype)) throw std::invalid_argument("unknown float type code");
    if (shape.row_length == 0 || shape.base_values > shape.values || !whole_rows || shape.values / shape.row_length >= UINT32_MAX)
        throw std::invalid_argument("the sizes of the tensor contradict each other");
}

void cast(int from, int to, const void* source, void* target, size_t values) {
    with_float(from, [&](auto from_type) {
        with_float(to, [&](auto to_type) {
            using From = decltype(from_type);
            using To = decltype(to_type);
            const auto* in = static_cast<const typename From::U*>(source);
            auto* out = static_cast<typename To::U*>(target);
            for (size_t i = 0; i < values; ++i) out[i] = cast<From, To>(in[i]);
        });
    });
}

}  // namespace fm_delta
