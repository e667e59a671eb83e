// The classes of values in a block of which few changed, and where the changes are.
#pragma once

#include <algorithm>
#include <array>

#include "blocks.h"
#include "change_classes.h"
#include "masks.h"

namespace hf_ext::delta {

// Calls f(offset in the tensor, count) for the stretches of a block that lie together in the tensor.
template <class Function>
void for_stretches(const Plan& plan, const Block& block, Function&& f) {
    size_t start = 0, length = 0;
    for_pieces(plan, *block.part, block.begin, block.size, [&](size_t offset, size_t, size_t count, size_t, size_t) {
        if (start + length != offset) {
            if (length) f(start, length);
            start = offset;
            length = 0;
        }
        length += count;
    });
    f(start, length);
}

// Returns a mask of up to 64 values that differ from others.
template <Instructions SET>
[[gnu::always_inline]] inline uint64_t differing(const uint16_t* values, const uint16_t* others, size_t count) {
    if (count == WORD) return Masks<SET>::differing(values, others);
    uint64_t mask = 0;
    for (size_t i = 0; i < count; ++i) mask |= uint64_t(values[i] != others[i]) << i;
    return mask;
}

// Divides up to 64 values into classes.
template <class F, Instructions SET>
class Classifier {
   public:
    explicit Classifier(const std::vector<Class>& classes) : last_(classes.size() - 1) {
        for (size_t k = 0; k < last_; ++k) limits_[k] = uint16_t(classes[k].end << F::MANTISSA);
    }

    // Fills a mask for each class.
    [[gnu::always_inline]] inline void operator()(const uint16_t* values, size_t count, uint64_t* masks) const {
        if (count >= WORD) return divide(values, ~uint64_t(0), masks);
        uint16_t copy[WORD] = {};
        std::copy(values, values + count, copy);
        divide(copy, (uint64_t(1) << count) - 1, masks);
    }

   private:
    [[gnu::always_inline]] inline void divide(const uint16_t* values, uint64_t rest, uint64_t* masks) const {
        Masks<SET>::below(values, limits_.data(), last_, masks);
        for (size_t k = 0; k < last_; ++k) {
            const uint64_t below = masks[k];
            masks[k] = below & rest;
            rest &= ~below;
        }
        masks[last_] = rest;
    }

    size_t last_;
    std::array<uint16_t, MAX_CLASSES> limits_{};
};

// Walks from one changed value of a class to the next.
class Walk {
   public:
    Walk() = default;
    Walk(const int32_t* gaps, const int32_t* sizes, size_t count) : gaps_(gaps), sizes_(sizes), left_(count) { advance(); }

    bool at_end() const { return next_ == NEVER; }

    // Goes past some values of the class. Calls f(place in the mask, number of the size) for those that changed.
    template <Instructions SET, class Function>
    [[gnu::always_inline]] inline void pass(uint64_t mask, Function&& f) {
        const uint64_t end = seen_ + Masks<SET>::ones(mask);
        while (next_ < end) {
            f(Masks<SET>::place_of(mask, size_t(next_ - seen_)), *sizes_++);
            advance();
        }
        seen_ = end;
    }

   private:
    static constexpr uint64_t NEVER = ~uint64_t(0);

    [[gnu::always_inline]] inline void advance() {
        next_ = left_ ? next_ + 1 + uint32_t(*gaps_++) : NEVER;
        left_ -= left_ != 0;
    }

    const int32_t* gaps_ = nullptr;
    const int32_t* sizes_ = nullptr;
    size_t left_ = 0;        // changes after the next one
    uint64_t next_ = NEVER;  // place of the next change among the values of the class
    uint64_t seen_ = 0;      // values of the class so far
};

}  // namespace hf_ext::delta
