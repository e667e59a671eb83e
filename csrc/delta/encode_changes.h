// Encoding of tensors of which few values changed: chooses the classes and the codes of their numbers by what they cost.
#pragma once

#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "blocks.h"
#include "float_map.h"
#include "rans_lane.h"

namespace hf_ext::delta {

constexpr size_t SAMPLED_BLOCKS = 4;  // blocks from which the codes are chosen

// The changes of a block, by class: how many values of the class are before each since the last, and the change of the ordered
// integer.
struct Changes {
    std::array<std::vector<int32_t>, MAX_CLASSES> gaps, changes;

    size_t count() const {
        size_t all = 0;
        for (const auto& list : gaps) all += list.size();
        return all;
    }
};

// Counts changes of a sample by the exponent of the base and by their size.
class ChangeCounts {
   public:
    explicit ChangeCounts(const FloatType& type) : mantissa_(type.mantissa), by_exponent_(size_t(type.infinity) + 1) {}

    void add(uint16_t base, uint16_t value) {
        Group& group = by_exponent_[size_t((base & 0x7fff) >> mantissa_)];
        ++values_;
        if (value == base) {
            ++unchanged_, ++group.octaves[0];
        } else {
            const int change = std::abs(int(to_ordered(value)) - int(to_ordered(base)));
            ++group.octaves[size_t(1 + int(std::log2(change)))];
        }
    }

    size_t values() const { return values_; }

    // Returns whether so few values changed that listing them pays.
    bool few() const;

    // Returns the bits that it saves to look for the changes among `coded` of `all` values. The values that were counted stand
    // for `counted`, which have all changes.
    double saved_bits(double counted, double coded, double all) const;

    // Returns classes, without codes, whose changes cost the least. `share` is that of the counted values among all; a class
    // costs its description, and some bytes for each of `blocks`.
    std::vector<Class> classes(double share, size_t blocks) const;

   private:
    struct alignas(128) Group {              // whose address is then a shift of its index
        std::array<uint32_t, 18> octaves{};  // of the sizes of changes; the first counts values that did not change
        int end = 0;

        double all() const;
        double bits() const;
        Group operator+(const Group& next) const;
    };

    int mantissa_;
    std::vector<Group> by_exponent_;
    size_t values_ = 0, unchanged_ = 0;
};

Changes find_changes(const Plan& plan, size_t index, const uint16_t* tensor, const uint16_t* base);

// Chooses the codes of the classes, and their tables, from the changes of some blocks. Returns the bits that these changes
// take. `share` is that of the values of these blocks among all.
double choose_codes(const std::vector<std::pair<size_t, Changes>>& found, double share, Plan& plan);

// Returns the bytes of a block and sets its kind; empty if nothing changed.
std::vector<uint8_t> code_changes(const Changes& found, const std::vector<Class>& classes,
                                  const std::vector<EncodeTable>& tables, Kind& kind);

}  // namespace hf_ext::delta
