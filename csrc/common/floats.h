// The four float types by their bits: conversion, rounding, and calls by type code.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace hf_ext {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "this code reads and writes little-endian memory in place"
#endif

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A float type. U holds the bits of one value; M and E are the widths of mantissa and exponent.
template <class Bits, int M, int E>
struct Float {
    using U = Bits;
    static constexpr int WIDTH = 8 * sizeof(U);
    static constexpr int MANTISSA = M;
    static constexpr U SIGN = U(1) << (WIDTH - 1);
    static constexpr U INFINITY_BITS = ((U(1) << E) - 1) << M;
    // Values with exponent field e (at least 1) are multiples of 2^(e + ULP_BIAS).
    static constexpr int ULP_BIAS = 1 - (1 << (E - 1)) - M;
};

using F32 = Float<uint32_t, 23, 8>;
using F16 = Float<uint16_t, 10, 5>;
using BF16 = Float<uint16_t, 7, 8>;
using F64 = Float<uint64_t, 52, 11>;

// Calls f with the float type of a code. The codes are part of the file format.
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

// The numbers of a float type, for code that is compiled once for all types.
struct FloatType {
    int width, mantissa, ulp_bias;  // the width in bytes
    int infinity;                   // exponent field of infinity and NaN
};

// Returns the numbers of the type of a code. Throws std::invalid_argument if the code is unknown.
FloatType float_type(int dtype);

// Returns the bytes of one value, or 0 for an unknown code.
int width(int dtype);

// Converts `values` floats of type `from` to type `to`, rounding to nearest even.
void cast(int from, int to, const void* source, void* target, size_t values);

// The type for arithmetic on values of F.
template <class F>
using Real = std::conditional_t<F::WIDTH == 64, double, float>;

template <class F>
using Wide = std::conditional_t<F::WIDTH == 64, uint64_t, uint32_t>;

// Returns the exponent field. Subnormals have the spacing of exponent 1, so 0 becomes 1. It keeps the width of the type, so
// that vectors of it are not widened.
template <class F>
constexpr int grid_exponent(typename F::U bits) {
    using U = typename F::U;
    return int(std::max(U(U(bits & U(~F::SIGN)) >> F::MANTISSA), U(1)));
}

// Returns the value of a finite number.
template <class F>
inline Real<F> value_of(typename F::U bits) {
    if constexpr (std::is_same_v<F, F16>) {
        // Moves exponent and mantissa into those of a float, then scales by 2^(127 - 15).
        const uint32_t magnitude = uint32_t(bits & 0x7FFF) << 13, sign = uint32_t(bits & 0x8000) << 16;
        return bits_as<float>(bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f) | sign);
    } else {
        return bits_as<Real<F>>(Wide<F>(bits) << (8 * sizeof(Wide<F>) - F::WIDTH));
    }
}

// Returns the value, or 0 for NaN and infinity. It has no branch, so that loops over it are vectorized.
template <class F>
inline Real<F> finite_value(typename F::U bits) {
    using U = typename F::U;
    const U finite = U(U(0) - U(U(bits & U(~F::SIGN)) < F::INFINITY_BITS));
    return value_of<F>(U(bits & (finite | F::SIGN)));
}

// Rounds to the nearest value, ties to even. Not for NaN.
template <class F>
inline typename F::U rounded(Real<F> value) {
    if constexpr (std::is_same_v<F, BF16>) {
        const uint32_t bits = bits_as<uint32_t>(value);
        return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    } else if constexpr (std::is_same_v<F, F16>) {
        const uint32_t bits = bits_as<uint32_t>(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
        const uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        // The last bits of 0.5 + magnitude count the steps of a subnormal.
        const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
        const uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
        return uint16_t(sign | (magnitude >= 0x47800000u || half > 0x7C00u ? 0x7C00u : half));
    } else {
        return bits_as<typename F::U>(value);
    }
}

// Converts one value to another type, rounding to nearest even. It uses integers only: a prediction must be the same on every
// machine. A NaN becomes the quiet NaN of its sign.
template <class From, class To>
constexpr typename To::U converted(typename From::U bits) {
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
    // The addition below carries the hidden bit, and a carry from rounding, into the exponent field.
    const int field = target - To::ULP_BIAS - 1;
    if (field >= int(To::INFINITY_BITS >> To::MANTISSA)) return U(sign | To::INFINITY_BITS);
    const uint64_t result = (uint64_t(field) << To::MANTISSA) + mantissa;
    return U(sign | (result >= To::INFINITY_BITS ? To::INFINITY_BITS : U(result)));
}

// The same for types of at most 32 bits, in a form that compilers vectorize. No result depends on how the processor treats
// subnormals.
template <class From, class To>
inline typename To::U converted_by_float(typename From::U bits) {
    using U = typename To::U;
    uint32_t magnitude = uint32_t(bits) << (32 - From::WIDTH) & 0x7FFFFFFF;
    if constexpr (std::is_same_v<From, F16>) {
        magnitude >>= 3;
        const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude + (113u << 23)) - 0x1p-14f);
        const uint32_t finite = magnitude < (1u << 23) ? subnormal : magnitude + (112u << 23);
        magnitude = magnitude < (31u << 23) ? finite : magnitude + (224u << 23);
    }
    const U nearest =
        magnitude > 0x7F800000 ? U(To::INFINITY_BITS | U(1) << (To::MANTISSA - 1)) : rounded<To>(bits_as<float>(magnitude));
    return U((bits & From::SIGN ? To::SIGN : U(0)) | nearest);
}

}  // namespace hf_ext
