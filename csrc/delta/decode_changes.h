// Decoding of a block of which few values changed.
#pragma once

#include <array>
#include <stdexcept>
#include <vector>

#include "few_changes.h"
#include "rans.h"

namespace hf_ext::delta {

template <class F, Instructions SET>
class DecodedChanges {
   public:
    // `tables` has an entry for each of the plan's. The block's kind is not RAW.
    DecodedChanges(const Plan& plan, const Block& block, const uint8_t* data, size_t bytes, Kind kind, const DecodeTable* tables)
        : walks_(plan.classes.size()) {
        if (bytes == 0) return;  // no value changed
        const uint8_t* const end = data + bytes;
        std::vector<size_t> counts(plan.classes.size());
        size_t all = 0;
        for (size_t& count : counts) all += count = get_count(data, end);
        if (all > block.size) throw std::runtime_error("a block has more changes than values");
        const std::unique_ptr<Context[]> contexts(new Context[2 * all]);
        Context* next = contexts.get();
        for (size_t k = 0; k < counts.size(); ++k)
            next = std::fill_n(next, counts[k], Context(plan.classes[k].gap.shift, gap_table(k)));
        for (size_t k = 0; k < counts.size(); ++k)
            next = std::fill_n(next, counts[k], Context(plan.classes[k].size.shift, size_table(k)));
        numbers_.reset(new int32_t[2 * all]);
        const auto decode = [&](auto decoder) {
            decoder.decode(contexts.get(), numbers_.get(), 2 * all, tables);
            decoder.finish();
        };
        switch (kind) {
            case INTERLEAVED: decode(Decoder<64, SET>(data, size_t(end - data))); break;
            case MEDIUM: decode(Decoder<8, SET>(data, size_t(end - data))); break;
            default: decode(Decoder<1, SET>(data, size_t(end - data)));
        }
        const int32_t* gaps = numbers_.get();
        for (size_t k = 0; k < counts.size(); gaps += counts[k++]) walks_[k] = Walk(gaps, gaps + all, counts[k]);
    }

    // Calls f(offset in the tensor, new value) for every change; f may store the value there. `base` holds all values.
    template <class Function>
    void visit(const Plan& plan, const Block& block, const typename F::U* base, Function&& f) {
        if (!numbers_) return;
        const Classifier<F, SET> classify(plan.classes);
        uint64_t masks[MAX_CLASSES];
        for_stretches(plan, block, [&](size_t offset, size_t size) {
            for (size_t at = offset; at < offset + size; at += WORD) {
                classify(base + at, std::min(WORD, offset + size - at), masks);
                for (size_t k = 0; k < walks_.size(); ++k)
                    walks_[k].template pass<SET>(masks[k], [&](size_t place, int32_t number) {
                        using U = typename F::U;
                        const int32_t change = to_change(number, plan.classes[k].center);
                        f(at + place, from_ordered<F>(U(to_ordered<F>(base[at + place]) + U(change))));
                    });
            }
        });
        for (const Walk& walk : walks_)
            if (!walk.at_end()) throw std::runtime_error("a change lies outside its block");
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

    std::vector<Walk> walks_;                // of each class
    std::unique_ptr<int32_t[]> numbers_;  // the gaps of all classes, then the sizes
};

}  // namespace hf_ext::delta
