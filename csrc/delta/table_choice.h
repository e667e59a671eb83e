// The cost of symbols, and the choice between a default table and one of the tensor's own.
#pragma once

#include <array>
#include <cmath>
#include <vector>

#include "blocks.h"

namespace hf_ext::delta {

using Counts = std::array<uint64_t, SYMBOLS>;

// Returns the bits of symbols that are counted, without the extra bits of those that are not escaped.
inline double cost(const Counts& counts, const Frequencies& frequencies) {
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

inline std::vector<uint32_t> differences(const Frequencies& own, const Frequencies& usual) {
    std::vector<uint32_t> codes;
    for (size_t id = 0; id < SYMBOLS - 1; ++id) codes.push_back(zigzag(int(own[id]) - int(usual[id])));
    return codes;
}

// Gives the plan a table of its own if that saves more bits than its description takes. `share` is that of the counted symbols
// among all. Returns the bits of the counted symbols.
inline double choose_table(const Counts& counts, int id, double share, Plan& plan) {
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
