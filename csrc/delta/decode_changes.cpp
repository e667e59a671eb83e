#include "decode_changes.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "few_changes.h"
#include "float_map.h"
#include "rans.h"

namespace hf_ext::delta {
namespace {

// Where the changes of each class are among its values: between two there are as many values as a gap says.
class Places {
   public:
    Places(const int32_t* gaps, const std::vector<size_t>& counts) {
        for (size_t k = 0; k < counts.size(); ++k) {
            gaps_[k] = gaps;
            last_[k] = gaps += counts[k];
            next_[k] = counts[k] ? uint32_t(*gaps_[k]) : NONE;
        }
    }

    // Returns the place of the next change of a class.
    size_t next(size_t k) const { return next_[k]; }

    void advance(size_t k) { next_[k] = ++gaps_[k] == last_[k] ? NONE : next_[k] + 1 + uint32_t(*gaps_[k]); }

   private:
    static constexpr size_t NONE = std::numeric_limits<size_t>::max();
    std::array<const int32_t*, MAX_CLASSES> gaps_{}, last_{};
    std::array<size_t, MAX_CLASSES> next_{};
};

// Reads a number in groups of seven bits, the lowest first.
size_t get_count(const uint8_t*& data, const uint8_t* end) {
    size_t count = 0;
    for (int shift = 0; shift < 21 && data != end; shift += 7) {
        const uint8_t byte = *data++;
        count |= size_t(byte & 0x7f) << shift;
        if (byte < 0x80) return count;
    }
    throw std::runtime_error("a block has an impossible number of changes");
}

}  // namespace

std::vector<size_t> get_counts(const Plan& plan, const Block& block, const uint8_t*& data, const uint8_t* end) {
    std::vector<size_t> counts(plan.classes.size());
    if (data == end) return counts;
    for (size_t& count : counts) count = get_count(data, end);
    if (std::accumulate(counts.begin(), counts.end(), size_t(0)) > block.size)
        throw std::runtime_error("a block has more changes than values");
    return counts;
}

DecodedChanges::DecodedChanges(const Plan& plan, const Block& block, const uint8_t* data, size_t bytes, Kind kind,
                               const DecodeTable* tables)
    : plan_(plan), block_(block) {
    const uint8_t* const end = data + bytes;
    counts_ = get_counts(plan, block, data, end);
    if (bytes == 0) return;
    all_ = std::accumulate(counts_.begin(), counts_.end(), size_t(0));
    const std::unique_ptr<Context[]> contexts(new Context[2 * all_]);
    Context* next = contexts.get();
    for (size_t k = 0; k < plan.classes.size(); ++k)
        next = std::fill_n(next, counts_[k], Context(plan.classes[k].gap.shift, gap_table(k)));
    for (size_t k = 0; k < plan.classes.size(); ++k)
        next = std::fill_n(next, counts_[k], Context(plan.classes[k].size.shift, size_table(k)));
    numbers_.reset(new int32_t[2 * all_]);
    Decoder decoder(lanes_of(kind), data, size_t(end - data));
    decoder.decode(contexts.get(), numbers_.get(), 2 * all_, tables);
    decoder.finish();
}

// Calls f(index of the change, offset in the tensor, new value) for every change; f may store the value there. `base` holds the
// values of the whole tensor.
template <class Function>
void DecodedChanges::visit(const uint16_t* base, Function f) const {
    if (all_ == 0) return;
    const std::vector<Stretch> stretches = stretches_of(plan_, block_);
    // Copies, which the compiler keeps in registers while `f` writes to the tensor.
    const size_t classes = counts_.size(), all = all_;
    std::array<int, MAX_CLASSES> centers{};
    for (size_t k = 0; k < classes; ++k) centers[k] = plan_.classes[k].center;
    with_instructions([=, this, &stretches](auto set) {
        Places places(numbers_.get(), counts_);
        const Classifier<set()> classify(plan_);
        const ClassOf class_of(plan_);
        std::array<const int32_t*, MAX_CLASSES> sizes{numbers_.get() + all};
        for (size_t k = 1; k < classes; ++k) sizes[k] = sizes[k - 1] + counts_[k - 1];
        std::array<size_t, MAX_CLASSES> seen{};
        size_t found = 0;
        for (const Stretch& stretch : stretches)
            for (size_t at = stretch.begin; at < stretch.end; at += WORD) {
                uint64_t changed = 0;
                classify(base + at, std::min(WORD, stretch.end - at), [&](size_t k, uint64_t mask) {
                    const size_t end = seen[k] + Masks<set()>::ones(mask);
                    for (; places.next(k) < end; places.advance(k))
                        changed |= Masks<set()>::deposit(uint64_t(1) << (places.next(k) - seen[k]), mask);
                    seen[k] = end;
                });
                for (; changed; changed &= changed - 1) {
                    const size_t place = at + size_t(trailing_zeros(changed)), k = class_of(base[place]);
                    const int32_t change = to_change(*sizes[k]++, centers[k]);
                    f(found++, place, from_ordered(uint16_t(to_ordered(base[place]) + uint16_t(change))));
                }
            }
        if (found != all) throw std::runtime_error("a change lies outside its block");
    });
}

void DecodedChanges::apply(uint16_t* tensor) const {
    visit(tensor, [tensor](size_t, size_t offset, uint16_t value) { tensor[offset] = value; });
}

Replacements DecodedChanges::list(const uint16_t* base) const {
    Replacements list{std::vector<uint32_t>(all_), std::vector<uint16_t>(all_)};
    visit(base, [places = list.places.data(), values = list.values.data()](size_t at, size_t offset, uint16_t value) {
        places[at] = uint32_t(offset);
        values[at] = value;
    });
    return list;
}

}  // namespace hf_ext::delta
