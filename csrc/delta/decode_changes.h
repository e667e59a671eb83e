// Decoding of a block of which few values changed.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>

#include "few_changes.h"
#include "rans.h"

namespace hf_ext::delta {

template <class F, Instructions SET>
class DecodedChanges {
   public:
    using U = typename F::U;

    // `tables` has an entry for each of the plan's. The block's kind is not RAW.
    DecodedChanges(const Plan& plan, const Block& block, const uint8_t* data, size_t bytes, Kind kind,
                   const DecodeTable* tables)
        : plan_(plan), block_(block) {
        if (bytes == 0) return;  // no value changed
        const uint8_t* const end = data + bytes;
        for (size_t k = 0; k < plan.classes.size(); ++k) all_ += counts_[k] = get_count(data, end);
        if (all_ > block.size) throw std::runtime_error("a block has more changes than values");
        const std::unique_ptr<Context[]> contexts(new Context[2 * all_]);
        Context* next = contexts.get();
        for (size_t k = 0; k < plan.classes.size(); ++k)
            next = std::fill_n(next, counts_[k], Context(plan.classes[k].gap.shift, gap_table(k)));
        for (size_t k = 0; k < plan.classes.size(); ++k)
            next = std::fill_n(next, counts_[k], Context(plan.classes[k].size.shift, size_table(k)));
        numbers_.reset(new int32_t[2 * all_]);
        const auto decode = [&](auto decoder) {
            decoder.decode(contexts.get(), numbers_.get(), 2 * all_, tables);
            decoder.finish();
        };
        switch (kind) {
            case INTERLEAVED: decode(Decoder<64, SET>(data, size_t(end - data))); break;
            case MEDIUM: decode(Decoder<8, SET>(data, size_t(end - data))); break;
            default: decode(Decoder<1, SET>(data, size_t(end - data)));
        }
    }

    size_t count() const { return all_; }

    // Calls f(index of the change, offset in the tensor, new value) for every change; f may store the value there. `base` holds
    // the values of the whole tensor.
    template <class Function>
    void visit(const U* base, Function&& f) const {
        if (all_ == 0) return;
        const std::unique_ptr<size_t[]> places = find_places(base);
        const int32_t* sizes = numbers_.get() + all_;
        for (size_t k = 0, i = 0; k < plan_.classes.size(); ++k) {
            const int center = plan_.classes[k].center;
            for (const size_t end = i + counts_[k]; i < end; ++i) {
                const size_t place = places[i + k];
                f(i, place, from_ordered<F>(U(to_ordered<F>(base[place]) + U(to_change(sizes[i], center)))));
            }
        }
    }

   private:
    // Reads a number in groups of seven bits, the lowest first.
    static size_t get_count(const uint8_t*& data, const uint8_t* end) {
        size_t count = 0;
        for (int shift = 0; shift < 21 && data != end; shift += 7) {
            const uint8_t byte = *data++;
            count |= size_t(byte & 0x7f) << shift;
            if (byte < 0x80) return count;
        }
        throw std::runtime_error("a block has an impossible number of changes");
    }

    // Returns the offsets of all changes, with a free place after those of each class.
    std::unique_ptr<size_t[]> find_places(const U* base) const {
        const size_t classes = plan_.classes.size();
        const std::unique_ptr<uint32_t[]> ranks = this->ranks();
        std::unique_ptr<size_t[]> places(new size_t[all_ + classes]);
        std::array<size_t, MAX_CLASSES> next{};
        for (size_t k = 1; k < classes; ++k) next[k] = next[k - 1] + counts_[k - 1] + 1;
        std::array<uint32_t, MAX_CLASSES> seen{};
        for_words<F, SET>(plan_, block_, base, [&](size_t at, size_t, const uint64_t* masks) {
            for (size_t k = 0; k < classes; ++k) {
                const uint32_t end = seen[k] + uint32_t(Masks<SET>::ones(masks[k]));
                size_t i = next[k];
                for (; ranks[i] < end; ++i) places[i] = at + Masks<SET>::place_of(masks[k], ranks[i] - seen[k]);
                next[k] = i;
                seen[k] = end;
            }
        });
        for (size_t k = 0; k < classes; ++k)
            if (ranks[next[k]] != NONE) throw std::runtime_error("a change lies outside its block");
        return places;
    }

    // Returns the place of each change among the values of its class, and NONE after those of each class.
    std::unique_ptr<uint32_t[]> ranks() const {
        std::unique_ptr<uint32_t[]> ranks(new uint32_t[all_ + plan_.classes.size()]);
        const int32_t* gaps = numbers_.get();
        uint32_t* out = ranks.get();
        for (size_t k = 0; k < plan_.classes.size(); ++k) {
            uint64_t rank = 0;
            for (size_t i = 0; i < counts_[k]; ++i) {
                rank += uint32_t(*gaps++);
                if (rank >= block_.size) throw std::runtime_error("a change lies outside its block");
                *out++ = uint32_t(rank++);
            }
            *out++ = NONE;
        }
        return ranks;
    }

    static constexpr uint32_t NONE = ~0u;

    const Plan& plan_;
    const Block block_;
    std::array<size_t, MAX_CLASSES> counts_{};  // of the changes of each class
    size_t all_ = 0;
    std::unique_ptr<int32_t[]> numbers_;  // the gaps of all classes, then the sizes
};

}  // namespace hf_ext::delta
