#include "floats.h"

#include "instruction_sets.h"

namespace hf_ext {

int width(int dtype) {
    if (dtype < 1 || dtype > 4) return 0;
    int bytes = 0;
    with_float(dtype, [&](auto type) { bytes = sizeof(typename decltype(type)::U); });
    return bytes;
}

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
