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
#include <immintrin.h>
#define CLONES 1
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define INLINED inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define CLONES 0
#define FOR_EACH_PROCESSOR
#define INLINED inline
#define PREFETCH(address) (void)(address)
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

constexpr size_t BLOCK = 256;         // elements worked on while they are in the nearest cache
constexpr size_t CHUNK = 64 * BLOCK;  // elements a thread takes at a time
constexpr size_t LANES = 8;           // partial sums

// A byte of a mask as eight numbers of all ones or none.
template <class U>
constexpr std::array<std::array<U, 8>, 256> expansions() {
    std::array<std::array<U, 8>, 256> table{};
    for (int byte = 0; byte < 256; ++byte)
        for (int bit = 0; bit < 8; ++bit) table[size_t(byte)][size_t(bit)] = U(U(0) - U(byte >> bit & 1));
    return table;
}
template <class U>
constexpr auto EXPANSIONS = expansions<U>();

// The value of a number that is finite.
template <class F>
INLINED Real<F> value_of(typename F::U bits) {
    if constexpr (std::is_same_v<F, F16>) {
        const uint32_t magnitude = uint32_t(bits & 0x7FFF) << 13, sign = uint32_t(bits & 0x8000) << 16;
        return bits_as<float>(bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f) | sign);
    } else if constexpr (std::is_same_v<F, BF16>) {
        return bits_as<float>(uint32_t(bits) << 16);
    } else {
        return bits_as<Real<F>>(bits);
    }
}

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

// Eight numbers that are worked on at once, so that sums are vector code and the same on every machine.
#if defined(__GNUC__)
typedef double Eight __attribute__((vector_size(8 * LANES)));
#else
struct Eight {
    double lane[LANES];
    Eight& operator+=(const Eight& other) {
        for (size_t i = 0; i < LANES; ++i) lane[i] += other.lane[i];
        return *this;
    }
    Eight operator*(const Eight& other) const {
        Eight product = *this;
        for (size_t i = 0; i < LANES; ++i) product.lane[i] *= other.lane[i];
        return product;
    }
};
#endif

INLINED void load(Eight& eight, const double* place) { std::memcpy(&eight, place, sizeof eight); }

INLINED double total(const Eight& eight) {
    double lane[LANES];
    std::memcpy(lane, &eight, sizeof eight);
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

// `values` is at most BLOCK, `moves` has room for BLOCK of each task, `still` for whether each is as the base here; masks of tasks lie
// `stride` bytes apart. Elements up to the next multiple of LANES are worked on too, as ones that no task moved.
template <class F>
INLINED void elect_block(size_t values, const typename F::U* base, const void* const* tasks, size_t offset, size_t count,
                         typename F::U* elected, uint8_t* masks, size_t stride, double* moves, uint8_t* still, Sums* sums) {
    using U = typename F::U;
    constexpr U MAGNITUDE = U(~F::SIGN);
    const size_t padded = (values + LANES - 1) / LANES * LANES;
    double prior[BLOCK], sign[BLOCK], best[BLOCK];
    Eight squares{};
    for (size_t i = 0; i < values; ++i) prior[i] = double(finite_value<F>(base[i]));
    for (size_t i = values; i < padded; ++i) prior[i] = 0;
    for (size_t i = 0; i < padded; i += LANES) {
        Eight value;
        load(value, prior + i);
        squares += value * value;
    }
    const double base_squares = total(squares);
    for (size_t i = 0; i < padded; ++i) sign[i] = best[i] = 0;
    std::memcpy(elected, base, values * sizeof(U));
    for (size_t task = 0; task < count; ++task) {
        const U* weights = static_cast<const U*>(tasks[task]) + offset;
        double* move = moves + task * BLOCK;
        sums[task].base_squares += base_squares;
        still[task] = std::memcmp(weights, base, values * sizeof(U)) == 0;
        if (still[task]) continue;
        for (size_t i = 0; i < values; ++i) move[i] = double(finite_value<F>(weights[i])) - prior[i];
        for (size_t i = values; i < padded; ++i) move[i] = 0;
        for (size_t i = 0; i < padded; ++i) sign[i] += move[i];
        uint32_t strange = 0;
        for (size_t i = 0; i < values; ++i) {
            const bool infinite = ((weights[i] & MAGNITUDE) >= F::INFINITY_BITS) | ((base[i] & MAGNITUDE) >= F::INFINITY_BITS);
            strange += uint32_t(infinite & (weights[i] != base[i]));
        }
        sums[task].not_finite += strange;
    }
    for (size_t i = 0; i < padded; ++i) sign[i] = sign[i] > 0 ? 1.0 : -1.0;
    for (size_t task = 0; task < count; ++task) {
        if (still[task]) continue;
        const U* weights = static_cast<const U*>(tasks[task]) + offset;
        double* move = moves + task * BLOCK;
        for (size_t i = 0; i < values; ++i) {
            const double along = move[i] * sign[i], most = best[i];
            move[i] = along;
            best[i] = along > most ? along : most;
            const U weight = weights[i], before = elected[i];
            elected[i] = along > most ? weight : before;
        }
    }
    for (size_t task = 0; task < count; ++task) {
        uint8_t* mask = masks + task * stride;
        if (still[task]) {
            std::memset(mask, 0, padded / 8);
            continue;
        }
        const double* move = moves + task * BLOCK;
        double unified[BLOCK], size[BLOCK];
        uint64_t moved = 0, agreeing = 0;
        for (size_t i = 0; i < padded; ++i) {
            unified[i] = move[i] > 0 ? best[i] : 0.0;
            size[i] = std::fabs(move[i]);
        }
        for (size_t i = 0; i < padded; ++i) moved += size[i] != 0;
        for (size_t i = 0; i < padded; ++i) agreeing += unified[i] != 0;
        Eight task_l1{}, unified_l1{}, task_squares{}, unified_squares{}, product{};
        for (size_t i = 0; i < padded; i += LANES) {
            Eight length, kept;
            load(length, size + i);
            load(kept, unified + i);
            task_l1 += length;
            unified_l1 += kept;
            task_squares += length * length;
            unified_squares += kept * kept;
            product += length * kept;
        }
        Sums& sum = sums[task];
        sum.moved += double(moved);
        sum.agreeing += double(agreeing);
        sum.task_l1 += total(task_l1);
        sum.unified_l1 += total(unified_l1);
        sum.task_squares += total(task_squares);
        sum.unified_squares += total(unified_squares);
        sum.product += total(product);
        uint8_t agrees[BLOCK];
        for (size_t i = 0; i < padded; ++i) agrees[i] = move[i] > 0;
        for (size_t i = 0; i < padded; i += 8) {
            uint64_t bytes;
            std::memcpy(&bytes, agrees + i, 8);
            mask[i / 8] = uint8_t(bytes * 0x0102040810204080 >> 56);  // the byte of place k, 0 or 1, becomes bit k
        }
    }
}

// All ones where the mask's bit is set.
template <class U>
INLINED void expand(const uint8_t* mask, size_t values, U* set) {
    if (mask)
        for (size_t i = 0; i < values; i += 8) std::memcpy(set + i, EXPANSIONS<U>[mask[i / 8]].data(), 8 * sizeof(U));
    else
        std::memset(set, 0, values * sizeof(U));
}

template <class U>
INLINED U select(U set, U first, U second) {
    return U((first & set) | (second & U(~set)));
}

template <class F>
INLINED void modulate_block(size_t values, const typename F::U* base, const typename F::U* elected, const uint8_t* mask, double scale,
                            typename F::U* out) {
    using U = typename F::U;
    if (!mask) {
        std::memcpy(out, base, values * sizeof(U));
        return;
    }
    U set[BLOCK];
    expand<U>(mask, values, set);
    if (scale == 1) {
        for (size_t i = 0; i < values; ++i) out[i] = select(set[i], elected[i], base[i]);
        return;
    }
    const Real<F> factor = Real<F>(scale);
    for (size_t i = 0; i < values; ++i) {
        const Real<F> from = value_of<F>(base[i]);
        const U moved = rounded<F>(from + factor * (value_of<F>(elected[i]) - from));
        out[i] = select(set[i], moved, base[i]);
    }
}

// All zero where neither mask has a bit set.
INLINED uint64_t any_bits(const uint8_t* mask, size_t values) {
    uint64_t bits = 0;
    if (mask)
        for (size_t i = 0; i < (values + 7) / 8; ++i) bits |= mask[i];
    return bits;
}

// Fills `next` with the second task's weights; what is not zero afterwards is where `live` differs from the first task's.
template <class F>
INLINED typename F::U blend(size_t begin, size_t end, const typename F::U* base, const typename F::U* elected, double from, double to,
                            const typename F::U* from_set, const typename F::U* to_set, const typename F::U* live, typename F::U* next) {
    using U = typename F::U;
    const U from_exact = U(U(0) - U(from == 1)), to_exact = U(U(0) - U(to == 1));
    const Real<F> from_factor = Real<F>(from), to_factor = Real<F>(to);
    U difference = 0;
    for (size_t i = begin; i < end; ++i) {
        const Real<F> prior = value_of<F>(base[i]), step = value_of<F>(elected[i]) - prior;
        const U before = select(from_exact, elected[i], rounded<F>(prior + from_factor * step));
        const U after = select(to_exact, elected[i], rounded<F>(prior + to_factor * step));
        difference = U(difference | (live[i] ^ select(from_set[i], before, base[i])));
        next[i] = select(to_set[i], after, base[i]);
    }
    return difference;
}

#if CLONES
// The same with the processor's own conversions, of as many values as make whole vectors.
__attribute__((target("avx2,f16c"))) uint16_t blend_f16c(size_t values, const uint16_t* base, const uint16_t* elected, double from, double to,
                                                         const uint16_t* from_set, const uint16_t* to_set, const uint16_t* live,
                                                         uint16_t* next) {
    const auto load = [](const uint16_t* place) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(place)); };
    const __m256 from_factor = _mm256_set1_ps(float(from)), to_factor = _mm256_set1_ps(float(to));
    const __m128i from_exact = _mm_set1_epi16(short(-(from == 1))), to_exact = _mm_set1_epi16(short(-(to == 1)));
    __m128i difference = _mm_setzero_si128();
    for (size_t i = 0; i + 8 <= values; i += 8) {
        const __m128i old = load(base + i), chosen = load(elected + i);
        const __m256 prior = _mm256_cvtph_ps(old), step = _mm256_sub_ps(_mm256_cvtph_ps(chosen), prior);
        const __m128i before = _mm256_cvtps_ph(_mm256_add_ps(prior, _mm256_mul_ps(from_factor, step)), 0);
        const __m128i after = _mm256_cvtps_ph(_mm256_add_ps(prior, _mm256_mul_ps(to_factor, step)), 0);
        const __m128i expected = _mm_blendv_epi8(old, _mm_blendv_epi8(before, chosen, from_exact), load(from_set + i));
        difference = _mm_or_si128(difference, _mm_xor_si128(load(live + i), expected));
        const __m128i made = _mm_blendv_epi8(old, _mm_blendv_epi8(after, chosen, to_exact), load(to_set + i));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(next + i), made);
    }
    return uint16_t(!_mm_testz_si128(difference, difference));
}
const bool HAS_F16C = (__builtin_cpu_init(), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"));
#endif

// Writes nothing, and returns false, if `live` does not hold the first task's weights.
template <class F>
INLINED bool retarget_block(size_t values, const typename F::U* base, const typename F::U* elected, Modulator from, Modulator to,
                            typename F::U* live) {
    using U = typename F::U;
    U difference = 0;
    if (!(any_bits(from.mask, values) | any_bits(to.mask, values))) {
        for (size_t i = 0; i < values; ++i) difference = U(difference | (live[i] ^ base[i]));
        return difference == 0;
    }
    U from_set[BLOCK], to_set[BLOCK], next[BLOCK];
    for (size_t i = BLOCK; i < 2 * BLOCK; i += 64 / sizeof(U)) {
        PREFETCH(base + i);
        PREFETCH(elected + i);
        PREFETCH(live + i);
    }
    expand<U>(from.mask, values, from_set);
    expand<U>(to.mask, values, to_set);
    size_t done = 0;
#if CLONES
    if constexpr (std::is_same_v<F, F16>)
        if (HAS_F16C) {
            difference = blend_f16c(values, base, elected, from.scale, to.scale, from_set, to_set, live, next);
            done = values / 8 * 8;
        }
#endif
    difference = U(difference | blend<F>(done, values, base, elected, from.scale, to.scale, from_set, to_set, live, next));
    if (difference == 0) std::memcpy(live, next, values * sizeof(U));
    return difference == 0;
}

const uint8_t* at(const uint8_t* mask, size_t element) { return mask ? mask + element / 8 : nullptr; }

// The loops over the blocks of a chunk. A template cannot be cloned for processors, hence one function for each float type.
template <class F>
struct Loops;

#define LOOPS_OF(F)                                                                                                                   \
    FOR_EACH_PROCESSOR void elect_##F(size_t begin, size_t end, const F::U* base, const void* const* tasks, size_t count,             \
                                      F::U* elected, uint8_t* masks, size_t stride, double* moves, uint8_t* still, Sums* sums) {      \
        for (size_t i = begin; i < end; i += BLOCK)                                                                                   \
            elect_block<F>(std::min(BLOCK, end - i), base + i, tasks, i, count, elected + i, masks + i / 8, stride, moves, still,     \
                           sums);                                                                                                     \
    }                                                                                                                                 \
    FOR_EACH_PROCESSOR void modulate_##F(size_t begin, size_t end, const F::U* base, const F::U* elected, Modulator task, F::U* out) { \
        for (size_t i = begin; i < end; i += BLOCK)                                                                                   \
            modulate_block<F>(std::min(BLOCK, end - i), base + i, elected + i, at(task.mask, i), task.scale, out + i);                \
    }                                                                                                                                 \
    FOR_EACH_PROCESSOR bool retarget_##F(size_t begin, size_t end, const F::U* base, const F::U* elected, Modulator from,             \
                                         Modulator to, F::U* live) {                                                                  \
        for (size_t i = begin; i < end; i += BLOCK) {                                                                                 \
            const Modulator old{at(from.mask, i), from.scale}, next{at(to.mask, i), to.scale};                                        \
            if (retarget_block<F>(std::min(BLOCK, end - i), base + i, elected + i, old, next, live + i)) continue;                    \
            for (size_t j = begin; j < i; j += BLOCK)                                                                                 \
                modulate_block<F>(BLOCK, base + j, elected + j, at(from.mask, j), from.scale, live + j);                              \
            return false;                                                                                                             \
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
            std::vector<double> moves(count * BLOCK);
            std::vector<uint8_t> still(count);
            Loops<F>::elect(begin, end, static_cast<const U*>(base), tasks, count, static_cast<U*>(elected), masks, stride, moves.data(),
                            still.data(), parts.data() + chunk * count);
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

size_t retarget(const Target* targets, size_t count, int threads) {
    struct Chunk {
        size_t target, begin, end;
        bool written;
    };
    std::vector<Chunk> chunks;
    for (size_t i = 0; i < count; ++i)
        for (size_t begin = 0; begin < targets[i].values; begin += CHUNK)
            chunks.push_back({i, begin, std::min(targets[i].values, begin + CHUNK), false});
    const auto for_each = [&](const auto& work) {
        parallel_for(chunks.size(), threads, [&](size_t i) {
            const Target& target = targets[chunks[i].target];
            fm_delta::with_float(target.dtype, [&](auto type) { work(type, target, chunks[i]); });
        });
    };
    std::atomic<size_t> strange{count};
    for_each([&](auto type, const Target& target, Chunk& chunk) {
        using F = decltype(type);
        using U = typename F::U;
        if (strange != count) return;
        chunk.written = Loops<F>::retarget(chunk.begin, chunk.end, static_cast<const U*>(target.base), static_cast<const U*>(target.elected),
                                           target.from, target.to, static_cast<U*>(target.live));
        if (!chunk.written) strange = chunk.target;
    });
    if (strange != count)
        for_each([&](auto type, const Target& target, const Chunk& chunk) {
            using F = decltype(type);
            using U = typename F::U;
            if (chunk.written)
                Loops<F>::modulate(chunk.begin, chunk.end, static_cast<const U*>(target.base), static_cast<const U*>(target.elected),
                                   target.from, static_cast<U*>(target.live));
        });
    return strange;
}

}  // namespace emr
