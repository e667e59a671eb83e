// Coarse changes: a value is its base's plus a number of units. A unit is the tensor's step, or the spacing of values around
// the base's where that is larger. Encoder and decoder share this.
#pragma once

#include <cmath>

#include "../common/floats.h"

namespace hf_ext::delta {

constexpr float LEAST_STEP = 0x1p-100f, MOST_STEP = 0x1p100f;

// A change of less than `threshold` units is left out.
struct Coarse {
    float step = 0;  // 0: values are exact
    float threshold = 0.5f;

    explicit operator bool() const { return step > 0; }
    // About 4 log2 step, from its exponent and two bits of its mantissa: the same on every machine.
    int quarter_octaves() const { return int(bits_as<uint32_t>(step) >> 21) - 4 * 127; }
};

template <class F>
inline Real<F> unit_of(typename F::U base, Real<F> step) {
    constexpr int BIAS = F::WIDTH == 64 ? 1023 : 127, SHIFT = F::WIDTH == 64 ? 52 : 23;
    const Wide<F> field = Wide<F>(std::max(grid_exponent<F>(base) + F::ULP_BIAS + BIAS, 1));
    return std::max(bits_as<Real<F>>(field << SHIFT), step);
}

template <class F>
inline typename F::U moved(typename F::U base, int32_t number, Real<F> step) {
    const typename F::U result = rounded<F>(finite_value<F>(base) + Real<F>(number) * unit_of<F>(base, step));
    return number == 0 ? base : result;
}

// Returns the number of units for a value; 0 if it or its base is not finite, or the result would not be. It has no branch, so
// that loops over it are vectorized.
template <class F>
inline int32_t number_of(typename F::U value, typename F::U base, const Coarse& coarse) {
    constexpr Real<F> MOST = 1 << 30;
    const Real<F> largest = hf_ext::value_of<F>(typename F::U(F::INFINITY_BITS - 1));
    const Real<F> step = coarse.step, unit = unit_of<F>(base, step), prior = hf_ext::value_of<F>(base);
    const Real<F> change = hf_ext::value_of<F>(value) - prior, size = std::min(std::fabs(change) / unit, MOST);
    const Real<F> least = 1 - (unit > step ? Real<F>(0.5) : Real<F>(coarse.threshold));
    const Real<F> finite = std::fabs(change) <= largest ? size + least : Real<F>(0);
    const int32_t whole = int32_t(finite), sign = change < 0 ? -1 : 1, number = sign * whole;
    return number * int32_t(std::fabs(prior + Real<F>(number) * unit) <= largest);
}

}  // namespace hf_ext::delta
