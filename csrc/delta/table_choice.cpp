#include "table_choice.h"

#include <algorithm>
#include <cmath>

#include "../common/bits.h"

namespace hf_ext::delta {
namespace {

// Scales counts to a sum of PROBABILITY_SUM. A symbol that is too rare for a slot gets frequency 0 and is escaped; the escape
// itself always has a slot.
Frequencies normalize(const Counts& counts) {
    Frequencies frequencies{};
    uint64_t total = 0;
    for (uint64_t count : counts) total += count;
    int used = 0;
    for (int id = 0; id < SYMBOLS; ++id) {
        const double share = total ? double(counts[id]) * PROBABILITY_SUM / double(total) : 0;
        if (share >= 0.07 || id == ESCAPE) frequencies[id] = uint16_t(std::max(1.0, share + 0.5));
        used += frequencies[id];
    }
    // The most probable symbols absorb the rounding error of the sum.
    while (used != PROBABILITY_SUM) {
        auto largest = std::max_element(frequencies.begin(), frequencies.end());
        const int change = std::max(PROBABILITY_SUM - used, 1 - int(*largest));
        *largest = uint16_t(*largest + (change < 0 ? std::max(change, -std::max(1, *largest / 8)) : change));
        used = 0;
        for (uint16_t f : frequencies) used += f;
    }
    return frequencies;
}

// Returns the bits of symbols that are counted, without the extra bits of those that are not escaped.
double cost(const Counts& counts, const Frequencies& frequencies) {
    double bits = 0;
    for (int id = 0; id < SYMBOLS; ++id) {
        if (!counts[size_t(id)]) continue;
        const bool coded = frequencies[size_t(id)] != 0;
        const double extra = coded ? 0 : 32 - extra_bits_of(id);
        bits += double(counts[size_t(id)]) *
                (extra + PROBABILITY_BITS - std::log2(double(frequencies[size_t(coded ? id : ESCAPE)])));
    }
    return bits;
}

}  // namespace

std::vector<uint32_t> differences(const Frequencies& own, const Frequencies& usual) {
    std::vector<uint32_t> codes;
    for (size_t id = 0; id < SYMBOLS - 1; ++id) codes.push_back(zigzag(int(own[id]) - int(usual[id])));
    return codes;
}

double choose_table(const Counts& counts, int id, double share, Plan& plan) {
    const Frequencies &usual = plan.usual(id), own = normalize(counts);
    plan.tables[size_t(id)] = usual;
    plan.own_tables &= ~(uint64_t(1) << id);
    size_t description = 0;
    best_rice(differences(own, usual), 16, &description);
    const double bits = cost(counts, usual), saved = bits - cost(counts, own);
    if (saved <= double(description + 3) * share) return bits;
    plan.tables[size_t(id)] = own;
    plan.own_tables |= uint64_t(1) << id;
    return bits - saved;
}

}  // namespace hf_ext::delta
