// Floats as integers that keep their order (FM-Delta, section 3), and the spacing of values around each of them.
#pragma once

#include "../common/floats.h"

namespace hf_ext::delta {

// Larger floats give larger integers: flips all bits of a negative number, and the sign bit of any other.
template <class U>
constexpr U to_ordered(U bits) {
    return U(bits ^ (U(U(0) - U(bits >> (8 * sizeof(U) - 1))) | U(1) << (8 * sizeof(U) - 1)));
}

template <class U>
constexpr U from_ordered(U ordered) {
    return U(ordered ^ (U(U(ordered >> (8 * sizeof(U) - 1)) - 1) | U(1) << (8 * sizeof(U) - 1)));
}

// Moves the sign into the lowest bit: floats of similar magnitude give similar integers, whatever their signs.
template <class U>
constexpr U to_rotated(U bits) {
    return U(bits << 1 | bits >> (8 * sizeof(U) - 1));
}

template <class U>
constexpr U from_rotated(U rotated) {
    return U(rotated >> 1 | rotated << (8 * sizeof(U) - 1));
}

// Returns the variance of rounding to the spacing of a value, limited to what Real can hold.
template <class F>
inline Real<F> grid_variance(typename F::U bits) {
    constexpr int LIMIT = F::WIDTH == 64 ? 1000 : 100, BIAS = F::WIDTH == 64 ? 1023 : 127, SHIFT = F::WIDTH == 64 ? 52 : 23;
    const int exponent = std::clamp(2 * (grid_exponent<F>(bits) + F::ULP_BIAS), -LIMIT, LIMIT);
    return bits_as<Real<F>>(Wide<F>(exponent + BIAS) << SHIFT) * Real<F>(1.0 / 12);
}

}  // namespace hf_ext::delta
