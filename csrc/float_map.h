// Floats as integers that keep their order (FM-Delta, section 3), and what the codec must know of each float type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace fm_delta {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the codec reads and writes little-endian memory in place"
#endif

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A float type by its bits: U holds one value, MANTISSA and EXPONENT are the widths of its fields.
template <class Bits, int M, int E>
struct Float {
    using U = Bits;
    static constexpr int WIDTH = 8 * sizeof(U);
    static constexpr int MANTISSA = M;
    static constexpr U SIGN = U(1) << (WIDTH - 1);
    static constexpr U INFINITY_BITS = ((U(1) << E) - 1) << M;
    // A value whose exponent field is e (at least 1) lies on a grid of spacing 2^(e + ULP_BIAS).
    static constexpr int ULP_BIAS = 1 - (1 << (E - 1)) - M;
};

using F32 = Float<uint32_t, 23, 8>;
using F16 = Float<uint16_t, 10, 5>;
using BF16 = Float<uint16_t, 7, 8>;
using F64 = Float<uint64_t, 52, 11>;

// Calls f with the float type of a dtype code (docs/fm_delta_format.md has the codes).
template <class Function>
void with_float(int dtype, Function&& f) {
    switch (dtype) {
        case 1: return f(F32{});
        case 2: return f(F16{});
        case 3: return f(BF16{});
        case 4: return f(F64{});
        default: throw std::invalid_argument("unknown float type code");
    }
}

// Monotone: of a negative number all bits are flipped, of any other the sign bit.
template <class F>
constexpr typename F::U to_ordered(typename F::U bits) {
    using U = typename F::U;
    return U(bits ^ (U(U(0) - U(bits >> (F::WIDTH - 1))) | F::SIGN));
}

template <class F>
constexpr typename F::U from_ordered(typename F::U ordered) {
    using U = typename F::U;
    return U(ordered ^ (U(U(ordered >> (F::WIDTH - 1)) - 1) | F::SIGN));
}

// Sign last: neighbours in magnitude are neighbours as integers, whatever their signs.
template <class F>
constexpr typename F::U to_rotated(typename F::U bits) {
    return typename F::U(bits << 1 | bits >> (F::WIDTH - 1));
}

template <class F>
constexpr typename F::U from_rotated(typename F::U rotated) {
    return typename F::U(rotated >> 1 | rotated << (F::WIDTH - 1));
}

// The exponent field; subnormals share the grid of exponent 1.
template <class F>
constexpr int grid_exponent(typename F::U bits) {
    const int exponent = int((bits & typename F::U(~F::SIGN)) >> F::MANTISSA);
    return exponent + (exponent == 0);
}

// The arithmetic in which scales are fitted.
template <class F>
using Real = std::conditional_t<F::WIDTH == 64, double, float>;

template <class F>
using Wide = std::conditional_t<F::WIDTH == 64, uint64_t, uint32_t>;

// The value; 0 for NaN and infinities. Without a branch, so that loops over it become vector code.
template <class F>
inline Real<F> finite_value(typename F::U bits) {
    using W = Wide<F>;
    const W magnitude = bits & typename F::U(~F::SIGN);
    const W finite = W(0) - W(magnitude < F::INFINITY_BITS);
    if constexpr (std::is_same_v<F, F16>) {
        // Exponent and mantissa moved under a float's, then scaled by 2^(127 - 15).
        const float value = bits_as<float>((magnitude & finite) << 13) * 0x1p112f;
        return bits_as<float>(bits_as<uint32_t>(value) | (W(bits) & F::SIGN) << 16);
    } else {
        return bits_as<Real<F>>((W(bits) & finite) << (8 * sizeof(W) - F::WIDTH));
    }
}

// The variance of rounding to the grid of a value, as far as Real can hold it.
template <class F>
inline Real<F> grid_variance(typename F::U bits) {
    constexpr int LIMIT = F::WIDTH == 64 ? 1000 : 100, BIAS = F::WIDTH == 64 ? 1023 : 127, SHIFT = F::WIDTH == 64 ? 52 : 23;
    const int exponent = std::clamp(2 * (grid_exponent<F>(bits) + F::ULP_BIAS), -LIMIT, LIMIT);
    return bits_as<Real<F>>(Wide<F>(exponent + BIAS) << SHIFT) * Real<F>(1.0 / 12);
}

// Rounds to the nearest, ties to even, in integers only: a prediction must be the same on every machine.
template <class From, class To>
constexpr typename To::U cast(typename From::U bits) {
    using U = typename To::U;
    const U sign = bits & From::SIGN ? To::SIGN : U(0);
    const uint64_t magnitude = bits & typename From::U(~From::SIGN);
    if (magnitude > From::INFINITY_BITS) return U(sign | To::INFINITY_BITS | U(1) << (To::MANTISSA - 1));
    if (magnitude == From::INFINITY_BITS) return U(sign | To::INFINITY_BITS);
    const int exponent = grid_exponent<From>(bits);
    uint64_t mantissa = magnitude & ((uint64_t(1) << From::MANTISSA) - 1);
    if (magnitude >> From::MANTISSA) mantissa |= uint64_t(1) << From::MANTISSA;
    if (mantissa == 0) return sign;
    const int grid = exponent + From::ULP_BIAS;
    int top = grid;
    for (uint64_t rest = mantissa; rest >>= 1;) ++top;
    const int target = top - To::MANTISSA > To::ULP_BIAS + 1 ? top - To::MANTISSA : To::ULP_BIAS + 1;
    const int shift = target - grid;
    if (shift > 62) return sign;
    if (shift > 0) {
        const uint64_t half = uint64_t(1) << (shift - 1), rest = mantissa & ((uint64_t(1) << shift) - 1);
        mantissa >>= shift;
        mantissa += rest > half || (rest == half && (mantissa & 1));
    } else {
        mantissa <<= -shift;
    }
    // The hidden bit of a normal number, or the carry of a rounding, moves into the exponent field by itself.
    const int field = target - To::ULP_BIAS - 1;
    if (field >= int(To::INFINITY_BITS >> To::MANTISSA)) return U(sign | To::INFINITY_BITS);
    const uint64_t result = (uint64_t(field) << To::MANTISSA) + mantissa;
    return U(sign | (result >= To::INFINITY_BITS ? To::INFINITY_BITS : U(result)));
}

}  // namespace fm_delta
