#include "chunk.h"

#include <cstring>
#include <type_traits>

#include "../common/instruction_sets.h"
#include "float_map.h"
#include "rans.h"

namespace hf_ext::delta {
namespace {

// Calls f(std::integral_constant<int, plane>) for a plane that the type may have.
template <class F, class Function>
[[gnu::always_inline]] inline void with_plane(int plane, Function&& f) {
    if constexpr (F::WIDTH == 64) return plane == 5 ? f(std::integral_constant<int, 5>()) : f(std::integral_constant<int, 6>());
    if constexpr (F::WIDTH == 32) {
        if (plane == 1) return f(std::integral_constant<int, 1>());
        if (plane == 2) return f(std::integral_constant<int, 2>());
    }
    if constexpr (F::WIDTH <= 32) f(std::integral_constant<int, 0>());
}

// Returns a float of about 2^(scale / 4), rotated.
template <class F>
typename F::U expected_magnitude(int scale) {
    using U = typename F::U;
    const int field = std::clamp((scale >> 2) - F::ULP_BIAS - F::MANTISSA, 0, int(F::INFINITY_BITS >> F::MANTISSA) - 1);
    return to_rotated(U(U(field) << F::MANTISSA | U(scale & 3) << (F::MANTISSA - 2)));
}

// Returns a residual without its low `plane` bytes. The difference wraps around; the result fits 32 bits.
template <class U>
int32_t high_part(U mapped, U prediction, int plane) {
    if constexpr (sizeof(U) == 2) {
        return int32_t(mapped) - int32_t(prediction);
    } else {
        return int32_t(std::make_signed_t<U>(mapped - prediction) >> (8 * plane));
    }
}

}  // namespace

void Chunk::predict(const Part& part, size_t begin, size_t size, const void* whole_base) {
    part_ = &part, begin_ = begin, size_ = size;
    int16_t sizes[CHUNK];  // expected sizes of the residuals, in quarter octaves
    with_float(plan_.shape.dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        const U* base = static_cast<const U*>(whole_base);
        with_instructions([&](auto) {
            for_pieces(plan_, part, begin, size, [&](size_t offset, size_t at, size_t count, size_t row, size_t column) {
                const int scale = plan_.row_scales[row];
                const int16_t* columns = plan_.column_scales.empty() ? nullptr : plan_.column_scales.data() + column;
                U* prediction = predictions<U>() + at;
                if (part.alone) {
                    if (!columns) std::fill_n(prediction, count, expected_magnitude<F>(scale));
                    for (size_t i = 0; columns && i < count; ++i) prediction[i] = expected_magnitude<F>(scale + columns[i]);
                    return;
                }
                const int from = scale - 4 * F::ULP_BIAS - 32 * plan_.plane;
                const int16_t least = plan_.coarse ? int16_t(plan_.coarse.quarter_octaves() - 4 * F::ULP_BIAS) : int16_t(0);
                prefetch(base + offset, CHUNK, count);
                for (size_t i = 0; i < count; ++i) {
                    const U bits = base[offset + i];
                    prediction[i] = plan_.coarse ? bits : to_ordered(bits);
                    sizes[at + i] = int16_t(from - std::max(int16_t(4 * grid_exponent<F>(bits)), least));
                }
                if (columns)
                    for (size_t i = 0; i < count; ++i) sizes[at + i] = int16_t(sizes[at + i] + columns[i]);
                if (plan_.coarse)  // most numbers are 0: sizes from 1/16 on differ, in half octaves
                    for (size_t i = 0; i < count; ++i) sizes[at + i] = int16_t(sizes[at + i] >> 1);
            });
        });
    });
    const int mantissa = plan_.coded_mantissa();
    with_instructions([&](auto) {
        if (part.alone)
            std::fill_n(contexts, size, alone_context(mantissa));
        else
            for (size_t i = 0; i < size; ++i) contexts[i] = context_of(sizes[i], mantissa);
    });
}

void Chunk::split(const void* whole) {
    with_float(plan_.shape.dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        const U* tensor = static_cast<const U*>(whole);
        with_instructions([&](auto) {
            for_pieces(plan_, *part_, begin_, size_, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                const U* __restrict x = tensor + offset;
                const U* __restrict prediction = predictions<U>() + at;
                int32_t* __restrict value = highs + at;
                const int plane = plan_.plane;
                const Coarse coarse = plan_.coarse;
                if (part_->alone)
                    for (size_t i = 0; i < count; ++i) value[i] = high_part(to_rotated(x[i]), prediction[i], plane);
                else if (coarse)
                    for (size_t i = 0; i < count; ++i) value[i] = number_of<F>(x[i], prediction[i], coarse);
                else
                    for (size_t i = 0; i < count; ++i) value[i] = high_part(to_ordered(x[i]), prediction[i], plane);
            });
        });
    });
    symbol_ids(contexts, highs, size_, ids);
}

void Chunk::put_lows(const void* whole, uint8_t* lows) const {
    if (plan_.plane == 0) return;
    with_float(plan_.shape.dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        with_plane<F>(plan_.plane, [&](auto plane) {
            if constexpr (plane() > 0)
                with_instructions([&](auto) {
                    for_pieces(plan_, *part_, begin_, size_, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                        const U* __restrict x = static_cast<const U*>(whole) + offset;
                        const U* __restrict prediction = predictions<U>() + at;
                        uint8_t* __restrict low = lows + at * plane();
                        const bool alone = part_->alone;
                        for (size_t i = 0; i < count; ++i) {
                            const U rest = U((alone ? to_rotated(x[i]) : to_ordered(x[i])) - prediction[i]);
                            if constexpr (plane() == 1)
                                low[i] = uint8_t(rest);
                            else
                                std::memcpy(low + i * plane(), &rest, plane());
                        }
                    });
                });
        });
    });
}

void Chunk::join(const uint8_t* lows, void* whole) const {
    with_float(plan_.shape.dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        with_plane<F>(plan_.plane, [&](auto plane) {
            using Low = std::conditional_t<plane() == 1, uint8_t, std::conditional_t<plane() == 2, uint16_t, U>>;
            with_instructions([&](auto) {
                for_pieces(plan_, *part_, begin_, size_, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                    // The buffers don't overlap. The compiler vectorizes the loops only if it knows that.
                    U* __restrict out = static_cast<U*>(whole) + offset;
                    const U* __restrict prediction = predictions<U>() + at;
                    const int32_t* __restrict high = highs + at;
                    const uint8_t* __restrict low = lows + at * plane();
                    const auto value = [=](size_t i) {
                        Low rest = 0;
                        std::memcpy(&rest, low + i * plane(), plane());
                        return U(prediction[i] + (U(U(high[i]) << (8 * plane())) | rest));
                    };
                    if (part_->alone)
                        for (size_t i = 0; i < count; ++i) out[i] = from_rotated(value(i));
                    else if (plan_.coarse)
                        for (size_t i = 0; i < count; ++i) out[i] = moved<F>(prediction[i], high[i], plan_.coarse.step);
                    else
                        for (size_t i = 0; i < count; ++i) out[i] = from_ordered(value(i));
                });
            });
        });
    });
}

}  // namespace hf_ext::delta
