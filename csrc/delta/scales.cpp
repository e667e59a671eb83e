#include "scales.h"

#include <algorithm>

namespace hf_ext::delta {

void put_scales(BitWriter& out, const std::vector<int16_t>& scales) {
    if (scales.empty()) return;
    std::vector<int16_t> sorted = scales;
    std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
    const int center = sorted[sorted.size() / 2];
    std::vector<uint32_t> codes;
    for (int16_t scale : scales) codes.push_back(zigzag(scale - center));
    const int k = best_rice(codes);
    out.put(uint16_t(center), 16);
    out.put(uint64_t(k), 3);
    for (uint32_t code : codes) put_rice(out, code, k);
}

std::vector<int16_t> get_scales(BitReader& in, size_t count) {
    if (count == 0) return {};
    const int center = int16_t(in.get(16));
    const int k = int(in.get(3));
    std::vector<int16_t> scales(count);
    get_rice(in, k, count, 16, [&](size_t i, int difference) {
        scales[i] = int16_t(std::clamp(center + difference, -SCALE_LIMIT, SCALE_LIMIT));
    });
    return scales;
}

}  // namespace hf_ext::delta
