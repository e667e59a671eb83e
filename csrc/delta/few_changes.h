// The classes of values in a block of which few changed, and where the changes are.
#pragma once

#include <algorithm>
#include <array>

#include "blocks.h"
#include "change_classes.h"
#include "masks.h"

namespace hf_ext::delta {

// Returns a mask of up to 64 values that differ from others.
template <Instructions SET>
[[gnu::always_inline]] inline uint64_t differing(const uint16_t* values, const uint16_t* others, size_t count) {
    return count == WORD ? Masks<SET>::differing(values, others) : ScalarMasks::differing(values, others, count);
}

// Divides up to 64 values into classes.
template <Instructions SET>
class Classifier {
   public:
    explicit Classifier(const Plan& plan) : last_(plan.classes.size() - 1), mantissa_(plan.type().mantissa) {
        for (size_t k = 0; k < last_; ++k) limits_[k] = uint8_t(plan.classes[k].end);
    }

    // Calls f(index of the class, mask of its values) for each class.
    template <class Function>
    [[gnu::always_inline]] inline void operator()(const uint16_t* values, size_t count, Function&& f) const {
        uint64_t below[MAX_CLASSES], rest = ~uint64_t(0);
        if (count >= WORD) {
            Masks<SET>::below(values, mantissa_, limits_.data(), last_, below);
        } else {
            uint16_t copy[WORD] = {};
            std::copy(values, values + count, copy);
            rest = (uint64_t(1) << count) - 1;
            Masks<SET>::below(copy, mantissa_, limits_.data(), last_, below);
        }
        for (size_t k = 0; k < last_; ++k) {
            f(k, below[k] & rest);
            rest &= ~below[k];
        }
        f(last_, rest);
    }

   private:
    size_t last_;
    int mantissa_;
    std::array<uint8_t, MAX_CLASSES> limits_{};
};

// The class of a value, from its exponent field.
class ClassOf {
   public:
    explicit ClassOf(const Plan& plan) : mantissa_(plan.type().mantissa) {
        for (size_t exponent = 0; exponent < indices_.size(); ++exponent)
            while (indices_[exponent] + size_t(1) < plan.classes.size() &&
                   int(exponent) >= plan.classes[indices_[exponent]].end)
                ++indices_[exponent];
    }

    size_t operator()(uint16_t value) const { return indices_[size_t((value & 0x7fff) >> mantissa_)]; }

   private:
    int mantissa_;
    std::array<uint8_t, 256> indices_{};
};

}  // namespace hf_ext::delta
