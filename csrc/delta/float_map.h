// Floats as integers that keep their order (FM-Delta, section 3), and the spacing of values around each of them.
#pragma once

#include "../common/floats.h"

namespace hf_ext::delta {

// Larger floats give larger integers: flips all bits of a negative number, and the sign bit of any other.
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

// Moves the sign into the lowest bit: floats of similar magnitude give similar integers, whatever their signs.
template <class F>
constexpr typename F::U to_rotated(typename F::U bits) {
    return typename F::U(bits << 1 | bits >> (F::WIDTH - 1));
}

template <class F>
constexpr typename F::U from_rotated(typename F::U rotated) {
    return typename F::U(rotated >> 1 | rotated << (F::WIDTH - 1));
}

// Returns the variance of rounding to the spacing of a value, limited to what Real can hold.
template <class F>
inline Real<F> grid_variance(typename F::U bits) {
    constexpr int LIMIT = F::WIDTH == 64 ? 1000 : 100, BIAS = F::WIDTH == 64 ? 1023 : 127, SHIFT = F::WIDTH == 64 ? 52 : 23;
    const int exponent = std::clamp(2 * (grid_exponent<F>(bits) + F::ULP_BIAS), -LIMIT, LIMIT);
    return bits_as<Real<F>>(Wide<F>(exponent + BIAS) << SHIFT) * Real<F>(1.0 / 12);
}

}  // namespace hf_ext::delta
