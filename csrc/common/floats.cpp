#include "floats.h"

#include "instruction_sets.h"

namespace hf_ext {

FloatType float_type(int dtype) {
    FloatType numbers{};
    with_float(dtype, [&](auto type) {
        using F = decltype(type);
        numbers = {F::WIDTH / 8, F::MANTISSA, F::ULP_BIAS, int(F::INFINITY_BITS >> F::MANTISSA)};
    });
    return numbers;
}

int width(int dtype) { return dtype < 1 || dtype > 4 ? 0 : float_type(dtype).width; }

void cast(int from, int to, const void* source, void* target, size_t values) {
    with_float(from, [&](auto from_type) {
        with_float(to, [&](auto to_type) {
            using From = decltype(from_type);
            using To = decltype(to_type);
            const auto* in = static_cast<const typename From::U*>(source);
            auto* out = static_cast<typename To::U*>(target);
            with_instructions([=](auto) {
                for (size_t i = 0; i < values; ++i) {
                    if constexpr (From::WIDTH <= 32 && To::WIDTH <= 32)
                        out[i] = converted_by_float<From, To>(in[i]);
                    else
                        out[i] = converted<From, To>(in[i]);
                }
            });
        });
    });
}

}  // namespace hf_ext
