// The choice between a default table and one of the tensor's own.
#pragma once

#include <array>
#include <vector>

#include "blocks.h"

namespace hf_ext::delta {

using Counts = std::array<uint64_t, SYMBOLS>;

// Returns the frequencies of a table as codes of their differences from the usual ones.
std::vector<uint32_t> differences(const Frequencies& own, const Frequencies& usual);

// Gives the plan a table of its own if that saves more bits than its description takes. `share` is that of the counted symbols
// among all. Returns the bits of the counted symbols.
double choose_table(const Counts& counts, int id, double share, Plan& plan);

}  // namespace hf_ext::delta
