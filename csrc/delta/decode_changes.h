// Decoding of a block of which few values changed.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>

#include "few_changes.h"
#include "rans.h"

namespace hf_ext::delta {

// A bit for each value of each class: it is set if the value changed.
class Marks {
   public:
    // The places of the changes among the values of their class are the sums of the gaps.
    Marks(const int32_t* gaps, const std::vector<size_t>& counts, size_t values)
        : words_(values / WORD + PADDING * counts.size()) {
        size_t first = 0;
        for (size_t k = 0; k < counts.size(); ++k) {
            uint64_t place = 0;
            for (size_t i = 0; i < counts[k]; ++i, ++place) {
                place += uint32_t(*gaps++);
                // The values of the classes before are not of this one.
                if (place >= values) throw std::runtime_error("a change lies outside its block");
                words_[first + place / WORD] |= uint64_t(1) << place % WORD;
            }
            values -= size_t(place);
            first_[k] = first;
            length_[k] = size_t(place);
            first += size_t(place) / WORD + PADDING;
        }
    }

    // Returns the bits of 64 values of a class.
    uint64_t get(size_t k, size_t place) const {
        place = std::min(place, length_[k]);
        const uint64_t* word = &words_[first_[k] + place / WORD];
        return word[0] >> place % WORD | word[1] << 1 << (WORD - 1 - place % WORD);
    }

   private:
    static constexpr size_t PADDING = 2;                  // words behind the whole ones of a class, for `get`
    std::array<size_t, MAX_CLASSES> first_{}, length_{};  // word, and number of values up to the last change
    std::vector<uint64_t> words_;
};

template <class F, Instructions SET>
class DecodedChanges {
   public:
    using U = typename F::U;

    // `tables` has an entry for each of the plan's. The block's kind is not RAW.
    DecodedChanges(const Plan& plan, const Block& block, const uint8_t* data, size_t bytes, Kind kind,
                   const DecodeTable* tables)
        : plan_(plan), block_(block), counts_(plan.classes.size()) {
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
        const Marks marks(numbers_.get(), counts_, block_.size);
        const std::array<uint8_t, 256> class_of = class_of_exponents(plan_.classes);
        std::array<const int32_t*, MAX_CLASSES> sizes{numbers_.get() + all_};
        for (size_t k = 1; k < plan_.classes.size(); ++k) sizes[k] = sizes[k - 1] + counts_[k - 1];
        std::array<size_t, MAX_CLASSES> seen{};
        size_t found = 0;
        for_words<F, SET>(plan_, block_, base, [&](size_t at, size_t, const uint64_t* masks) {
            uint64_t changed = 0;
            for (size_t k = 0; k < plan_.classes.size(); ++k) {
                changed |= Masks<SET>::deposit(marks.get(k, seen[k]), masks[k]);
                seen[k] += Masks<SET>::ones(masks[k]);
            }
            for (; changed; changed &= changed - 1) {
                const size_t place = at + size_t(trailing_zeros(changed));
                const size_t k = class_of[size_t((base[place] & U(~F::SIGN)) >> F::MANTISSA)];
                const int32_t change = to_change(*sizes[k]++, plan_.classes[k].center);
                f(found++, place, from_ordered<F>(U(to_ordered<F>(base[place]) + U(change))));
            }
        });
        if (found != all_) throw std::runtime_error("a change lies outside its block");
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

    const Plan& plan_;
    const Block block_;
    std::vector<size_t> counts_;  // of the changes of each class
    size_t all_ = 0;
    std::unique_ptr<int32_t[]> numbers_;  // the gaps of all classes, then the sizes
};

}  // namespace hf_ext::delta
