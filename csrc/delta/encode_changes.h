// Encoding of tensors of which few values changed: chooses the classes and the codes of their numbers by what they cost.
#pragma once

#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "../common/threads.h"
#include "few_changes.h"
#include "rans.h"
#include "table_choice.h"

namespace hf_ext::delta {

constexpr double FEW = 0.1;                                  // share of changed values up to which this pays
constexpr size_t MEDIUM_CHANGES = 512, MANY_CHANGES = 4096;  // that have 8 and 64 lanes, so that their states cost little
constexpr size_t SAMPLED_BLOCKS = 4;                         // blocks from which the codes are chosen
constexpr size_t ENOUGH = 4096;                              // numbers of a kind from which their code is chosen
constexpr double LARGEST_MEAN = 5;  // of a number without its raw bits, so that most have a symbol of their own

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
template <class F>
class ChangeCounts {
   public:
    using U = typename F::U;

    void add(U base, U value) {
        const uint32_t change = uint32_t(std::abs(int(to_ordered<F>(value)) - int(to_ordered<F>(base))));
        ++by_exponent_[size_t((base & U(~F::SIGN)) >> F::MANTISSA)].octaves[size_t(octave(change))];
        ++values_, unchanged_ += change == 0;
    }

    size_t values() const { return values_; }
    bool few() const { return double(values_ - unchanged_) <= FEW * double(values_); }

    // Returns whether leaving out untouched rows saves more than a bit for each row. The `coded` values were counted.
    bool worth_a_bit_for_each_row(size_t coded, size_t all, size_t rows) const {
        const double changes = double(coded) * double(values_ - unchanged_) / double(std::max<size_t>(values_, 1));
        return place_bits(changes, double(all)) - place_bits(changes, double(coded)) > double(rows);
    }

    // Returns classes, without codes, whose changes cost the least. `share` is that of the counted values among all; a class
    // costs its description, and some bytes for each of `blocks`.
    std::vector<Class> classes(double share, size_t blocks) const {
        std::vector<Group> groups;
        for (int exponent = 0; exponent < EXPONENTS; ++exponent)
            if (const Group& group = by_exponent_[size_t(exponent)]; group.all()) {
                groups.push_back(group);
                groups.back().end = exponent + 1;
            }
        std::vector<double> costs;
        for (const Group& group : groups) costs.push_back(group.bits());
        double total = std::accumulate(costs.begin(), costs.end(), 0.0);
        const double description = (DESCRIPTION + COUNT * double(blocks)) * share;
        while (groups.size() > 1) {
            size_t best = 0;
            double least = std::numeric_limits<double>::infinity();
            for (size_t i = 0; i + 1 < groups.size(); ++i)
                if (const double more = (groups[i] + groups[i + 1]).bits() - costs[i] - costs[i + 1]; more < least)
                    best = i, least = more;
            if (groups.size() <= MAX_CLASSES && least > std::max(description, NOTICEABLE * total)) break;
            groups[best + 1] = groups[best] + groups[best + 1];
            costs[best + 1] = groups[best + 1].bits();
            total += least;
            groups.erase(groups.begin() + ptrdiff_t(best));
            costs.erase(costs.begin() + ptrdiff_t(best));
        }
        std::vector<Class> classes(std::max<size_t>(groups.size(), 1));
        for (size_t k = 0; k < groups.size(); ++k) classes[k].end = groups[k].end;
        return classes;
    }

   private:
    static constexpr int EXPONENTS = int(F::INFINITY_BITS >> F::MANTISSA) + 1, OCTAVES = 18;
    static constexpr double DESCRIPTION = 300, COUNT = 12;  // bits that a class and its number of changes in a block take
    static constexpr double NOTICEABLE = 0.01;              // a smaller share of the bits is not worth a class's time

    struct Group {
        std::array<uint32_t, OCTAVES> octaves{};  // of the sizes of changes; the first counts values that did not change
        int end = 0;

        double all() const { return std::accumulate(octaves.begin(), octaves.end(), 0.0); }

        Group operator+(const Group& next) const {
            Group sum = next;
            for (size_t i = 0; i < octaves.size(); ++i) sum.octaves[i] += octaves[i];
            return sum;
        }

        // Returns the entropy of the changes. The sizes within an octave are equally likely: with their signs, octave i has
        // 2^i.
        double bits() const {
            const double values = all();
            double bits = values * std::log2(values);
            for (size_t i = 0; i < octaves.size(); ++i)
                if (const double count = octaves[i]; count > 0) bits += count * (double(i) - std::log2(count));
            return bits;
        }
    };

    // Returns the bits that it takes to say which of some values changed.
    static double place_bits(double changes, double values) {
        const double others = values - changes;
        if (changes <= 0 || others <= 0) return 0;
        return changes * std::log2(values / changes) + others * std::log2(values / others);
    }

    static int octave(uint32_t change) { return change ? 1 + int(std::log2(change)) : 0; }

    std::vector<Group> by_exponent_{size_t(EXPONENTS)};
    size_t values_ = 0, unchanged_ = 0;
};

template <class F, Instructions SET>
Changes find_changes(const Plan& plan, size_t index, const typename F::U* tensor, const typename F::U* base) {
    using U = typename F::U;
    const size_t classes = plan.classes.size();
    const std::array<uint8_t, 256> class_of = class_of_exponents(plan.classes);
    Changes found;
    std::array<size_t, MAX_CLASSES> counts{}, seen{}, next{};  // next: the place of a change without a gap
    for_words<F, SET>(plan, block_at(plan, index), base, [&](size_t at, size_t count, const uint64_t* masks) {
        for (uint64_t changed = differing<SET>(tensor + at, base + at, count); changed; changed &= changed - 1) {
            const size_t i = size_t(trailing_zeros(changed)), place = at + i;
            const size_t k = class_of[size_t((base[place] & U(~F::SIGN)) >> F::MANTISSA)];
            const size_t rank = seen[k] + Masks<SET>::ones(masks[k] & ((uint64_t(1) << i) - 1));
            if (counts[k] == found.gaps[k].size()) {
                found.gaps[k].resize(2 * counts[k] + WORD);
                found.changes[k].resize(2 * counts[k] + WORD);
            }
            found.gaps[k][counts[k]] = int32_t(rank - next[k]);
            found.changes[k][counts[k]++] = int(to_ordered<F>(tensor[place])) - int(to_ordered<F>(base[place]));
            next[k] = rank + 1;
        }
        for (size_t k = 0; k < classes; ++k) seen[k] += Masks<SET>::ones(masks[k]);
    });
    for (size_t k = 0; k < classes; ++k) {
        found.gaps[k].resize(counts[k]);
        found.changes[k].resize(counts[k]);
    }
    return found;
}

// Returns 1 unless the sizes of nearly all changes are far from it and close together.
inline int center_of(const std::vector<int32_t>& changes) {
    if (changes.empty()) return 1;
    std::vector<int32_t> sizes;
    for (size_t i = 0; i < changes.size(); i += 1 + changes.size() / 256) sizes.push_back(std::abs(changes[i]));
    const auto at = [&](size_t rank) {
        std::nth_element(sizes.begin(), sizes.begin() + ptrdiff_t(rank), sizes.end());
        return sizes[rank];
    };
    const int32_t middle = at(sizes.size() / 2);
    return at(sizes.size() / 16) > middle / 2 ? std::min(middle, 0xffff) : 1;
}

// Chooses how to code the numbers of one kind: raw bits so that the rest is small, and a table. Returns the bits.
inline double choose_code(const std::vector<int32_t>& numbers, int least, int id, double share, NumberCode& code, Plan& plan) {
    code.shift = least;
    int64_t sum = 0;
    for (const int32_t number : numbers) sum += std::abs(int64_t(number));
    const double mean = double(sum) / double(std::max<size_t>(numbers.size(), 1));
    while (code.shift < MAX_SHIFT && mean > LARGEST_MEAN * double(1 << code.shift)) ++code.shift;
    Counts counts{};
    for (const int32_t number : numbers) ++counts[symbol_id(number >> code.shift)];
    // In a geometric distribution, one more takes so many bits more. The tables are half an octave apart.
    const double rest = std::max(mean - double((1 << code.shift) - 1) / 2, 1e-4) / double(1 << code.shift);
    const double bits = std::log2(1 + 1 / rest);
    code.usual = std::clamp(int(std::lround(2 * std::log2(bits))) + 4, 0, int(GEOMETRIC_TABLES.size()) - 1);
    return double(numbers.size()) * code.shift + choose_table(counts, id, share, plan);
}

// Chooses the codes of the classes, and their tables, from the changes of some blocks. Returns the bits that these changes
// take. `share` is that of the values of these blocks among all.
inline double choose_codes(const std::vector<std::pair<size_t, Changes>>& found, double share, Plan& plan) {
    double bits = 0;
    for (size_t k = 0; k < plan.classes.size(); ++k) {
        Class& one = plan.classes[k];
        size_t all = 0;
        for (const auto& [index, changes] : found) all += changes.gaps[k].size();
        std::vector<int32_t> gaps, sizes;
        for (const auto& [index, changes] : found) {
            const size_t some = changes.gaps[k].size() * std::min(all, ENOUGH) / std::max<size_t>(all, 1);
            gaps.insert(gaps.end(), changes.gaps[k].begin(), changes.gaps[k].begin() + ptrdiff_t(some));
            sizes.insert(sizes.end(), changes.changes[k].begin(), changes.changes[k].begin() + ptrdiff_t(some));
        }
        one.center = center_of(sizes);
        for (int32_t& size : sizes) size = to_number(size, one.center);
        const double part = all ? double(gaps.size()) / double(all) : 1;
        bits += choose_code(gaps, 0, gap_table(k), part * share, one.gap, plan) / part;
        bits += choose_code(sizes, 1, size_table(k), part * share, one.size, plan) / part;
    }
    return bits;
}

// Returns the bytes of a block and sets its kind; empty if nothing changed.
template <Instructions SET>
std::vector<uint8_t> code_changes(const Changes& found, const std::vector<Class>& classes,
                                  const std::vector<EncodeTable>& tables, Kind& kind) {
    std::vector<uint8_t> out;
    const size_t all = found.count();
    kind = all >= MANY_CHANGES ? INTERLEAVED : all >= MEDIUM_CHANGES ? MEDIUM : NARROW;
    if (all == 0) return out;
    const std::unique_ptr<Context[]> contexts(new Context[2 * all]);
    const std::unique_ptr<int32_t[]> numbers(new int32_t[2 * all]);
    const std::unique_ptr<uint8_t[]> ids(new uint8_t[2 * all]);
    size_t done = 0;
    const auto add = [&](const std::vector<int32_t>& list, Context context, auto&& number_of) {
        std::fill_n(&contexts[done], list.size(), context);
        for (size_t i = 0; i < list.size(); ++i) numbers[done + i] = number_of(list[i]);
        for (size_t i = 0; i < list.size(); ++i) ids[done + i] = symbol_id(numbers[done + i] >> context.shift());
        done += list.size();
    };
    for (size_t k = 0; k < classes.size(); ++k) {
        size_t count = found.gaps[k].size();
        for (; count >= 0x80; count >>= 7) out.push_back(uint8_t(count | 0x80));
        out.push_back(uint8_t(count));
        add(found.gaps[k], {classes[k].gap.shift, gap_table(k)}, [](int32_t gap) { return gap; });
    }
    for (size_t k = 0; k < classes.size(); ++k)
        add(found.changes[k], {classes[k].size.shift, size_table(k)},
            [center = classes[k].center](int32_t change) { return to_number(change, center); });
    const auto encode = [&](auto encoder) {
        encoder.encode(contexts.get(), numbers.get(), ids.get(), 2 * all, tables.data());
        encoder.finish(out);
    };
    switch (kind) {
        case INTERLEAVED: encode(Encoder<64, SET>(2 * all)); break;
        case MEDIUM: encode(Encoder<8, SET>(2 * all)); break;
        default: encode(Encoder<1, SET>(2 * all));
    }
    return out;
}

}  // namespace hf_ext::delta
