#include "emr.h"

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "float_map.h"
#include "threads.h"

// The compiler makes the hot loops for several generations of processors; the one at hand is chosen when the module is loaded.
// Products and sums are never fused (setup.py: -ffp-contract=off), so that all give the same bits.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define INLINED inline __attribute__((always_inline))
#else
#define FOR_EACH_PROCESSOR
#define INLINED inline
#endif

namespace emr {
namespace {

using fm_delta::BF16;
using fm_delta::bits_as;
using fm_delta::F16;
using fm_delta::F32;
using fm_delta::F64;
using fm_delta::finite_value;
using fm_delta::parallel_for;
using fm_delta::Real;

constexpr size_t BLOCK = 1024;        // elements worked on while they are in the nearest cache
constexpr size_t CHUNK = 64 * BLOCK;  // elements a thread takes at a time
constexpr size_t LANES = 8;           // partial sums, so that sums are vector code and the same on every machine

// A byte of a mask as eight bytes of all ones or none.
constexpr std::array<std::array<int8_t, 8>, 256> expansions() {
    std::array<std::array<int8_t, 8>, 256> table{};
    for (int byte = 0; byte < 256; ++byte)
        for (int bit = 0; bit < 8; ++bit) table[byte][bit] = int8_t(-(byte >> bit & 1));
    return table;
}
constexpr auto EXPANSIONS = expansions();

// Rounds to the nearest, ties to even. Not for NaN.
template <class F>
INLINED typename F::U rounded(Real<F> value) {
    if constexpr (std::is_same_v<F, BF16>) {
        const uint32_t bits = bits_as<uint32_t>(value);
        return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    } else if constexpr (std::is_same_v<F, F16>) {
        const uint32_t bits = bits_as<uint32_t>(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
        const uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        // Added to one half, a subnormal's steps are the last bits of the sum.
        const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
        const uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
        return uint16_t(sign | (magnitude >= 0x47800000u || half > 0x7C00u ? 0x7C00u : half));
    } else {
        return bits_as<typename F::U>(value);
    }
}

template <class F>
INLINED double difference(typename F::U bits, typename F::U base) {
    return double(finite_value<F>(bits)) - double(finite_value<F>(base));
}

// `values` is at most BLOCK; masks of tasks lie `stride` bytes apart.
template <class F>
INLINED void elect_block(size_t values, const typename F::U* base, const void* const* tasks, size_t offset, size_t count,
                         typename F::U* elected, uint8_t* masks, size_t stride, Sums* sums) {
    using U = typename F::U;
    double sign[BLOCK], best[BLOCK];
    uint8_t agrees[BLOCK];
    for (size_t i = 0; i < values; ++i) sign[i] = best[i] = 0;
    for (size_t task = 0; task < count; ++task) {
        const U* weights = static_cast<const U*>(tasks[task]) + offset;
        for (size_t i = 0; i < values; ++i) sign[i] += difference<F>(weights[i], base[i]);
    }
    for (size_t i = 0; i < values; ++i) sign[i] = sign[i] > 0 ? 1.0 : -1.0;
    std::memcpy(elected, base, values * sizeof(U));
    for (size_t task = 0; task < count; ++task) {
        const U* weights = static_cast<const U*>(tasks[task]) + offset;
        for (size_t i = 0; i < values; ++i) {
            const double move = sign[i] * difference<F>(weights[i], base[i]);
            elected[i] = move > best[i] ? weights[i] : elected[i];
            best[i] = move > best[i] ? move : best[i];
        }
    }
    for (size_t task = 0; task < count; ++task) {
        const U* weights = static_cast<const U*>(tasks[task]) + offset;
        double lanes[9][LANES] = {};
        const auto add = [&](size_t i, size_t lane) {
            constexpr U MAGNITUDE = U(~F::SIGN);
            const double value = double(finite_value<F>(weights[i])), move = value - double(finite_value<F>(base[i]));
            const double agreeing = sign[i] * move > 0 ? 1.0 : 0.0, size = std::fabs(move), unified = agreeing * best[i];
            const bool strange = (weights[i] & MAGNITUDE) >= F::INFINITY_BITS || (base[i] & MAGNITUDE) >= F::INFINITY_BITS;
            agrees[i] = uint8_t(sign[i] * move > 0);
            lanes[0][lane] += move != 0 ? 1.0 : 0.0;
            lanes[1][lane] += agreeing;
            lanes[2][lane] += size;
            lanes[3][lane] += unified;
            lanes[4][lane] += size * size;
            lanes[5][lane] += unified * unified;
            lanes[6][lane] += size * unified;
            lanes[7][lane] += value * value;
            lanes[8][lane] += strange && weights[i] != base[i] ? 1.0 : 0.0;
        };
        size_t i = 0;
        for (; i + LANES <= values; i += LANES)
            for (size_t lane = 0; lane < LANES; ++lane) add(i + lane, lane);
        for (size_t lane = 0; i < values; ++i, ++lane) add(i, lane);
        double* total = &sums[task].moved;
        for (size_t sum = 0; sum < 9; ++sum)
            for (size_t lane = 0; lane < LANES; ++lane) total[sum] += lanes[sum][lane];
        uint8_t* mask = masks + task * stride;
        for (i = 0; i < values; i += 8) {
            uint8_t byte = 0;
            for (size_t bit = 0; bit < 8 && i + bit < values; ++bit) byte |= uint8_t(agrees[i + bit] << bit);
            mask[i / 8] = byte;
        }
    }
}

// flags[i] = all ones where bit i of the mask is set.
INLINED void expand(const uint8_t* mask, size_t values, int8_t* flags) {
    for (size_t i = 0; i < values; i += 8) std::memcpy(flags + i, EXPANSIONS[mask[i / 8]].data(), 8);
}

template <class F>
INLINED void modulate_block(size_t values, const typename F::U* base, const typename F::U* elected, const uint8_t* mask, double scale,
                            typename F::U* out) {
    using U = typename F::U;
    if (!mask) {
        std::memcpy(out, base, values * sizeof(U));
        return;
    }
    int8_t flags[BLOCK];
    expand(mask, values, flags);
    if (scale == 1) {
        for (size_t i = 0; i < values; ++i) out[i] = flags[i] ? elected[i] : base[i];
        return;
    }
    const Real<F> factor = Real<F>(scale);
    for (size_t i = 0; i < values; ++i) {
        const Real<F> from = finite_value<F>(base[i]);
        const U moved = rounded<F>(from + factor * (finite_value<F>(elected[i]) - from));
        out[i] = flags[i] ? moved : base[i];
    }
}

template <class F>
INLINED bool same_block(size_t values, const typename F::U* first, const typename F::U* second) {
    typename F::U difference = 0;
    for (size_t i = 0; i < values; ++i) difference = typename F::U(difference | (first[i] ^ second[i]));
    return difference == 0;
}

const uint8_t* at(const uint8_t* mask, size_t element) { return mask ? mask + element / 8 : nullptr; }

// The loops over the blocks of a chunk. A template cannot be cloned for processors, hence one function for each float type.
template <class F>
struct Loops;

#define LOOPS_OF(F)                                                                                                                   \
    FOR_EACH_PROCESSOR void elect_##F(size_t begin, size_t end, const F::U* base, const void* const* tasks, size_t count,             \
                                      F::U* elected, uint8_t* masks, size_t stride, Sums* sums) {                                     \
        for (size_t i = begin; i < end; i += BLOCK)                                                                                   \
            elect_block<F>(std::min(BLOCK, end - i), base + i, tasks, i, count, elected + i, masks + i / 8, stride, sums);            \
    }                                                                                                                                 \
    FOR_EACH_PROCESSOR void modulate_##F(size_t begin, size_t end, const F::U* base, const F::U* elected, Modulator task, F::U* out) { \
        for (size_t i = begin; i < end; i += BLOCK)                                                                                   \
            modulate_block<F>(std::min(BLOCK, end - i), base + i, elected + i, at(task.mask, i), task.scale, out + i);                \
    }                                                                                                                                 \
    FOR_EACH_PROCESSOR bool retarget_##F(size_t begin, size_t end, const F::U* base, const F::U* elected, Modulator from,             \
                                         Modulator to, F::U* live) {                                                                  \
        F::U expected[BLOCK];                                                                                                         \
        for (size_t i = begin; i < end; i += BLOCK) {                                                                                 \
            const size_t values = std::min(BLOCK, end - i);                                                                           \
            modulate_block<F>(values, base + i, elected + i, at(from.mask, i), from.scale, expected);                                 \
            if (!same_block<F>(values, live + i, expected)) {                                                                         \
                for (size_t j = begin; j < i; j += BLOCK)                                                                             \
                    modulate_block<F>(BLOCK, base + j, elected + j, at(from.mask, j), from.scale, live + j);                          \
                return false;                                                                                                         \
            }                                                                                                                         \
            modulate_block<F>(values, base + i, elected + i, at(to.mask, i), to.scale, live + i);                                     \
        }                                                                                                                             \
        return true;                                                                                                                  \
    }                                                                                                                                 \
    template <>                                                                                                                       \
    struct Loops<F> {                                                                                                                 \
        static constexpr auto elect = elect_##F;                                                                                      \
        static constexpr auto modulate = modulate_##F;                                                                                \
        static constexpr auto retarget = retarget_##F;                                                                                \
    };

LOOPS_OF(F32)
LOOPS_OF(F16)
LOOPS_OF(BF16)
LOOPS_OF(F64)

size_t chunks_of(size_t values) { return (values + CHUNK - 1) / CHUNK; }

}  // namespace

void elect(int dtype, size_t values, const void* base, const void* const* tasks, size_t count, void* elected, uint8_t* masks,
           Sums* sums, int threads) {
    const size_t stride = (values + 7) / 8, chunks = chunks_of(values);
    std::vector<Sums> parts(chunks * count, Sums{});
    fm_delta::with_float(dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        parallel_for(chunks, threads, [&](size_t chunk) {
            const size_t begin = chunk * CHUNK, end = std::min(values, begin + CHUNK);
            Loops<F>::elect(begin, end, static_cast<const U*>(base), tasks, count, static_cast<U*>(elected), masks, stride,
                            parts.data() + chunk * count);
        });
    });
    for (size_t task = 0; task < count; ++task) sums[task] = Sums{};
    for (size_t part = 0; part < parts.size(); ++part) {
        double* total = &sums[part % count].moved;
        const double* added = &parts[part].moved;
        for (size_t sum = 0; sum < sizeof(Sums) / sizeof(double); ++sum) total[sum] += added[sum];
    }
}

void modulate(int dtype, size_t values, const void* base, const void* elected, Modulator task, void* out, int threads) {
    fm_delta::with_float(dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        parallel_for(chunks_of(values), threads, [&](size_t chunk) {
            const size_t begin = chunk * CHUNK, end = std::min(values, begin + CHUNK);
            Loops<F>::modulate(begin, end, static_cast<const U*>(base), static_cast<const U*>(elected), task, static_cast<U*>(out));
        });
    });
}

bool retarget(int dtype, size_t values, const void* base, const void* elected, Modulator from, Modulator to, void* live, int threads) {
    bool same = true;
    fm_delta::with_float(dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        const U *base_values = static_cast<const U*>(base), *elected_values = static_cast<const U*>(elected);
        const size_t chunks = chunks_of(values);
        std::vector<uint8_t> written(chunks, 0);
        std::atomic<bool> strange{false};
        parallel_for(chunks, threads, [&](size_t chunk) {
            const size_t begin = chunk * CHUNK, end = std::min(values, begin + CHUNK);
            if (strange) return;
            written[chunk] = Loops<F>::retarget(begin, end, base_values, elected_values, from, to, static_cast<U*>(live));
            if (!written[chunk]) strange = true;
        });
        if (!strange) return;
        same = false;
        parallel_for(chunks, threads, [&](size_t chunk) {
            const size_t begin = chunk * CHUNK, end = std::min(values, begin + CHUNK);
            if (written[chunk]) Loops<F>::modulate(begin, end, base_values, elected_values, from, static_cast<U*>(live));
        });
    });
    return same;
}

}  // namespace emr
