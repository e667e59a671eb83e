// One scale for a whole tensor of 16-bit floats, chosen by what its residuals cost.
//
// Where most changes are rounded to nothing, the variance of those that are left says little about the size of the others,
// which grows with the distance to the next float. Then the exponent of the base alone tells how likely a change is.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../common/floats.h"
#include "float_map.h"
#include "symbol_model.h"

namespace hf_ext::delta {

class ResidualCounts {
   public:
    explicit ResidualCounts(const FloatType& type) : type_(type), by_exponent_(size_t(type.infinity) + 1) {}

    void add(uint16_t base, uint16_t value) {
        const int residual = int(to_ordered(value)) - int(to_ordered(base));
        Group& counts = by_exponent_[size_t(std::max((base & 0x7fff) >> type_.mantissa, 1))];
        ++counts.residuals[size_t(std::clamp(residual, -WIDEST, WIDEST) + WIDEST)];
        ++counts.all;
        ++values_, zeros_ += residual == 0;
    }

    size_t values() const { return values_; }
    bool mostly_zeros() const { return 2 * zeros_ >= values_; }

    // Returns the scale whose contexts divide the residuals into the groups that cost the least. `share` is that of the counted
    // values among all.
    int16_t best_scale(double share) const {
        int best = 0;
        double least = std::numeric_limits<double>::infinity();
        const auto attempt = [&](int scale) {
            if (const double bits = cost(scale, share); bits < least) best = scale, least = bits;
        };
        std::vector<int> exponents;
        for (int exponent = 0; exponent <= type_.infinity; ++exponent)
            if (by_exponent_[size_t(exponent)].all) exponents.push_back(exponent);
        for (size_t i = 0; i < exponents.size(); i += 1 + exponents.size() / MOST_EXPONENTS)
            for (const int nearer : {-8, -4, 0, 4}) attempt(4 * (exponents[i] + type_.ulp_bias) + nearer);
        for (const int step : {2, 1})
            for (const int scale : {best - step, best + step}) attempt(scale);
        return int16_t(best);
    }

   private:
    static constexpr int WIDEST = 127;            // larger residuals count as this
    static constexpr double DESCRIPTION = 400;    // bits that a table of its own takes, about
    static constexpr size_t MOST_EXPONENTS = 64;  // at which scales are tried

    struct Group {
        std::array<uint32_t, 2 * WIDEST + 1> residuals{};
        uint64_t all = 0;
    };

    // Returns the bits of all residuals if each group has the default table, or its own where that saves its description.
    double cost(int scale, double share) const {
        std::array<std::array<uint64_t, SYMBOLS>, CONTEXT_TABLES> groups{};
        double bits = 0;
        for (int exponent = 0; exponent <= type_.infinity; ++exponent) {
            const Group& counts = by_exponent_[size_t(exponent)];
            if (!counts.all) continue;
            const Context context = context_of(int16_t(scale - 4 * (exponent + type_.ulp_bias)), type_.mantissa);
            bits += double(counts.all) * context.shift();
            for (int residual = -WIDEST; residual <= WIDEST; ++residual)
                if (const uint32_t count = counts.residuals[size_t(residual + WIDEST)])
                    groups[size_t(context.table())][symbol_id(residual >> context.shift())] += count;
        }
        for (size_t table = 0; table < groups.size(); ++table) {
            double all = 0, own = 0, usual = 0;
            for (int id = 0; id < SYMBOLS; ++id) {
                const double count = double(groups[table][size_t(id)]);
                if (count == 0) continue;
                const bool coded = DEFAULT_TABLES[table][size_t(id)] != 0;
                all += count;
                own += count * (extra_bits_of(id) - std::log2(count));
                usual += count * ((coded ? extra_bits_of(id) : 32) + PROBABILITY_BITS -
                                  std::log2(double(DEFAULT_TABLES[table][size_t(coded ? id : ESCAPE)])));
            }
            if (all > 0) bits += std::min(own + all * std::log2(all) + DESCRIPTION * share, usual);
        }
        return bits;
    }

    FloatType type_;
    std::vector<Group> by_exponent_;
    size_t values_ = 0, zeros_ = 0;
};

}  // namespace hf_ext::delta
