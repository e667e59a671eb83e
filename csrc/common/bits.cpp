#include "bits.h"

#include <algorithm>

namespace hf_ext {

void put_rice(BitWriter& out, uint32_t code, int k, int width) {
    const uint32_t quotient = std::min<uint32_t>(code >> k, RICE_LIMIT);
    const uint64_t ones = (uint64_t(1) << quotient) - 1;
    if (quotient == RICE_LIMIT) return out.put(ones | uint64_t(code) << RICE_LIMIT, RICE_LIMIT + width);
    const uint64_t remainder = code & ((uint64_t(1) << k) - 1);
    out.put(ones | remainder << (quotient + 1), int(quotient) + 1 + k);
}

int best_rice(const std::vector<uint32_t>& codes, int width, size_t* bits) {
    const int most = width == 16 ? 7 : 23;
    uint64_t sum = 0;
    for (const uint32_t code : codes) sum += code;
    int usual = 0;
    while (usual < most && codes.size() << (usual + 1) <= sum) ++usual;
    int best = 0;
    size_t best_bits = SIZE_MAX;
    for (int k = std::max(usual - 2, 0); k <= std::min(usual + 1, most); ++k) {
        size_t total = 0;
        for (const uint32_t code : codes) total += code >> k < RICE_LIMIT ? (code >> k) + 1 + k : RICE_LIMIT + width;
        if (total < best_bits) best = k, best_bits = total;
    }
    if (bits) *bits = best_bits;
    return best;
}

}  // namespace hf_ext
