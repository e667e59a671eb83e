#include "encode_changes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "few_changes.h"
#include "rans.h"
#include "table_choice.h"

namespace hf_ext::delta {
namespace {

constexpr double FEW = 0.1;                                  // share of changed values up to which this pays
constexpr size_t MEDIUM_CHANGES = 512, MANY_CHANGES = 4096;  // that have 8 and 64 lanes, so that their states cost little
constexpr size_t ENOUGH = 4096;                              // numbers of a kind from which their code is chosen
constexpr double LARGEST_MEAN = 5;               // of a number without its raw bits, so that most have a symbol of their own
constexpr double DESCRIPTION = 300, COUNT = 12;  // bits that a class and its number of changes in a block take
constexpr double NOTICEABLE = 0.01;              // a smaller share of the bits is not worth a class's time

// Returns the bits that it takes to say which of some values changed.
double place_bits(double changes, double values) {
    const double others = values - changes;
    if (changes <= 0 || others <= 0) return 0;
    return changes * std::log2(values / changes) + others * std::log2(values / others);
}

// Returns 1 unless the sizes of nearly all changes are far from it and close together.
int center_of(const std::vector<int32_t>& changes) {
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
double choose_code(const std::vector<int32_t>& numbers, int least, int id, double share, NumberCode& code, Plan& plan) {
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

[[gnu::noinline]] void resize(Changes& changes, size_t k, size_t count) {
    changes.gaps[k].resize(count);
    changes.changes[k].resize(count);
}

}  // namespace

bool ChangeCounts::few() const { return double(values_ - unchanged_) <= FEW * double(values_); }

double ChangeCounts::saved_bits(double counted, double coded, double all) const {
    const double changes = counted * double(values_ - unchanged_) / double(std::max<size_t>(values_, 1));
    return place_bits(changes, all) - place_bits(changes, coded);
}

std::vector<Class> ChangeCounts::classes(double share, size_t blocks) const {
    std::vector<Group> groups;
    for (size_t exponent = 0; exponent < by_exponent_.size(); ++exponent)
        if (by_exponent_[exponent].all()) {
            groups.push_back(by_exponent_[exponent]);
            groups.back().end = int(exponent) + 1;
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

double ChangeCounts::Group::all() const { return std::accumulate(octaves.begin(), octaves.end(), 0.0); }

ChangeCounts::Group ChangeCounts::Group::operator+(const Group& next) const {
    Group sum = next;
    for (size_t i = 0; i < octaves.size(); ++i) sum.octaves[i] += octaves[i];
    return sum;
}

// Returns the entropy of the changes. The sizes within an octave are equally likely: with their signs, octave i has 2^i.
double ChangeCounts::Group::bits() const {
    const double values = all();
    double bits = values * std::log2(values);
    for (size_t i = 0; i < octaves.size(); ++i)
        if (const double count = octaves[i]; count > 0) bits += count * (double(i) - std::log2(count));
    return bits;
}

Changes find_changes(const Plan& plan, size_t index, const uint16_t* tensor, const uint16_t* base) {
    Changes found;
    const std::vector<Stretch> stretches = stretches_of(plan, block_at(plan, index));
    with_instructions([&](auto set) {
        const size_t classes = plan.classes.size();
        const Classifier<set()> classify(plan);
        const ClassOf class_of(plan);
        std::array<size_t, MAX_CLASSES> counts{}, seen{}, next{};  // next: the place of a change without a gap
        uint64_t masks[MAX_CLASSES];
        for (const Stretch& stretch : stretches)
            for (size_t at = stretch.begin; at < stretch.end; at += WORD) {
                const size_t count = std::min(WORD, stretch.end - at);
                classify(base + at, count, [&](size_t k, uint64_t mask) {
                    masks[k] = mask;
                    seen[k] += Masks<set()>::ones(mask);
                });
                for (uint64_t changed = differing<set()>(tensor + at, base + at, count); changed; changed &= changed - 1) {
                    const size_t i = size_t(trailing_zeros(changed)), place = at + i, k = class_of(base[place]);
                    const size_t rank = seen[k] - Masks<set()>::ones(masks[k] >> i);
                    if (counts[k] == found.gaps[k].size()) resize(found, k, 2 * counts[k] + WORD);
                    found.gaps[k][counts[k]] = int32_t(rank - next[k]);
                    found.changes[k][counts[k]++] = int(to_ordered(tensor[place])) - int(to_ordered(base[place]));
                    next[k] = rank + 1;
                }
            }
        for (size_t k = 0; k < classes; ++k) resize(found, k, counts[k]);
    });
    return found;
}

double choose_codes(const std::vector<std::pair<size_t, Changes>>& found, double share, Plan& plan) {
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
    symbol_ids(contexts.get(), numbers.get(), 2 * all, ids.get());
    Encoder encoder(lanes_of(kind), 2 * all);
    encoder.encode(contexts.get(), numbers.get(), ids.get(), 2 * all, tables.data());
    encoder.finish(out);
    return out;
}

}  // namespace hf_ext::delta
