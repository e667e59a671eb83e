// The loops over values: predictions and contexts, and the residuals between values and predictions.
#pragma once

#include "blocks.h"

namespace hf_ext::delta {

constexpr size_t CHUNK = 4096;  // values processed together, few enough for the first-level cache

// Neighboring values of a part. `predict` comes first; the encoder then calls `split`, the decoder fills `highs` and calls
// `join`.
class Chunk {
   public:
    explicit Chunk(const Plan& plan) : plan_(plan) {}

    // Fills contexts and predictions from the base of the whole tensor. The decoder knows both before it reads a bit.
    void predict(const Part& part, size_t begin, size_t size, const void* base);

    // Fills `highs` and `ids` from the whole tensor.
    void split(const void* tensor);

    // Writes the low bytes, `plane` for each value.
    void put_lows(const void* tensor, uint8_t* lows) const;

    // Writes the values to their places in the tensor.
    void join(const uint8_t* lows, void* tensor) const;

    size_t size() const { return size_; }

    Context contexts[CHUNK];
    int32_t highs[CHUNK];  // residuals without their low bytes, which are stored separately
    uint8_t ids[CHUNK];    // the symbols of the residuals

   private:
    template <class U>
    U* predictions() {
        return reinterpret_cast<U*>(predictions_);
    }
    template <class U>
    const U* predictions() const {
        return reinterpret_cast<const U*>(predictions_);
    }

    const Plan& plan_;
    const Part* part_ = nullptr;
    size_t begin_ = 0, size_ = 0;
    alignas(64) unsigned char predictions_[sizeof(uint64_t) * CHUNK];  // ordered; rotated without a base; as they are if coarse
};

}  // namespace hf_ext::delta
