#include "emr.h"

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "../common/floats.h"
#include "../common/intrinsics.h"
#include "../common/threads.h"

namespace hf_ext::emr {
namespace {

constexpr size_t BLOCK = 256;         // elements processed together, few enough for the first-level cache
constexpr size_t CHUNK = 64 * BLOCK;  // elements that a thread takes at a time
constexpr size_t LANES = 8;           // partial sums

// For each byte of a mask, eight numbers: all ones for a bit that is set, otherwise 0.
template <class U>
constexpr std::array<std::array<U, 8>, 256> expansions() {
    std::array<std::array<U, 8>, 256> table{};
    for (int byte = 0; byte < 256; ++byte)
        for (int bit = 0; bit < 8; ++bit) table[size_t(byte)][size_t(bit)] = U(U(0) - U(byte >> bit & 1));
    return table;
}
template <class U>
constexpr auto EXPANSIONS = expansions<U>();

// Eight partial sums, so that sums are vectorized and have the same order on every machine.
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

inline void load(Eight& eight, const double* place) { std::memcpy(&eight, place, sizeof eight); }

inline double total(const Eight& eight) {
    double lane[LANES];
    std::memcpy(lane, &eight, sizeof eight);
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

// Elects up to BLOCK values. `moves` has room for BLOCK numbers per task, `still` for a flag per task: equal to the base in
// this block. The tasks' masks are `stride` bytes apart. The block is padded to a multiple of LANES with elements that no task
// moved.
template <class F>
inline void elect_block(size_t values, const typename F::U* base, const void* const* tasks, size_t offset, size_t count,
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
            mask[i / 8] = uint8_t(bytes * 0x0102040810204080 >> 56);  // byte k, which is 0 or 1, becomes bit k
        }
    }
}

// Sets the elements whose bit in the mask is set to all ones, the others to 0.
template <class U>
inline void expand(const uint8_t* mask, size_t values, U* set) {
    if (mask)
        for (size_t i = 0; i < values; i += 8) std::memcpy(set + i, EXPANSIONS<U>[mask[i / 8]].data(), 8 * sizeof(U));
    else
        std::memset(set, 0, values * sizeof(U));
}

template <class U>
inline U select(U set, U first, U second) {
    return U((first & set) | (second & U(~set)));
}

template <class F>
inline void modulate_block(size_t values, const typename F::U* base, const typename F::U* elected, const uint8_t* mask,
                           double scale, typename F::U* out) {
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

// Returns 0 if the mask has no bit set.
inline uint64_t any_bits(const uint8_t* mask, size_t values) {
    uint64_t bits = 0;
    if (mask)
        for (size_t i = 0; i < (values + 7) / 8; ++i) bits |= mask[i];
    return bits;
}

// Fills `next` with the second task's weights. Returns 0 if `live` holds the first task's.
template <class F>
inline typename F::U blend(size_t begin, size_t end, const typename F::U* base, const typename F::U* elected, double from,
                           double to, const typename F::U* from_set, const typename F::U* to_set, const typename F::U* live,
                           typename F::U* next) {
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

#ifdef HF_EXT_X86
// `blend` with the processor's own conversions, for the largest multiple of 8 values.
[[HF_EXT_AVX2]] inline uint16_t blend_f16c(size_t values, const uint16_t* base, const uint16_t* elected, double from, double to,
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
#endif

// Replaces the first task's weights in `live` by the second's. If `live` does not hold the first task's, writes nothing and
// returns false.
template <class F, Instructions SET>
inline bool retarget_block(size_t values, const typename F::U* base, const typename F::U* elected, Modulator from, Modulator to,
                           typename F::U* live) {
    using U = typename F::U;
    U difference = 0;
    if (!(any_bits(from.mask, values) | any_bits(to.mask, values))) {
        for (size_t i = 0; i < values; ++i) difference = U(difference | (live[i] ^ base[i]));
        return difference == 0;
    }
    U from_set[BLOCK], to_set[BLOCK], next[BLOCK];
    prefetch(base, BLOCK, BLOCK);
    prefetch(elected, BLOCK, BLOCK);
    prefetch(live, BLOCK, BLOCK);
    expand<U>(from.mask, values, from_set);
    expand<U>(to.mask, values, to_set);
    size_t done = 0;
#ifdef HF_EXT_X86
    if constexpr (std::is_same_v<F, F16> && SET != Instructions::SCALAR) {
        difference = blend_f16c(values, base, elected, from.scale, to.scale, from_set, to_set, live, next);
        done = values / 8 * 8;
    }
#endif
    difference = U(difference | blend<F>(done, values, base, elected, from.scale, to.scale, from_set, to_set, live, next));
    if (difference == 0) std::memcpy(live, next, values * sizeof(U));
    return difference == 0;
}

const uint8_t* at(const uint8_t* mask, size_t element) { return mask ? mask + element / 8 : nullptr; }

// The chunk from `begin` to `end`, block by block.
template <class F, class U = typename F::U>
void modulate_chunk(size_t begin, size_t end, const U* base, const U* elected, Modulator task, U* out) {
    with_instructions([&](auto) {
        for (size_t i = begin; i < end; i += BLOCK)
            modulate_block<F>(std::min(BLOCK, end - i), base + i, elected + i, at(task.mask, i), task.scale, out + i);
    });
}

// As retarget_block: if any value is not the first task's, restores the chunk and returns false.
template <class F, class U = typename F::U>
bool retarget_chunk(size_t begin, size_t end, const U* base, const U* elected, Modulator from, Modulator to, U* live) {
    size_t done = begin;
    with_instructions([&](auto set) {
        for (; done < end; done += BLOCK) {
            const Modulator old{at(from.mask, done), from.scale}, next{at(to.mask, done), to.scale};
            if (!retarget_block<F, set()>(std::min(BLOCK, end - done), base + done, elected + done, old, next, live + done))
                return;
        }
    });
    if (done >= end) return true;
    modulate_chunk<F>(begin, done, base, elected, from, live);
    return false;
}

size_t chunks_of(size_t values) { return (values + CHUNK - 1) / CHUNK; }

}  // namespace

void elect(int dtype, size_t values, const void* base, const void* const* tasks, size_t count, void* elected, uint8_t* masks,
           Sums* sums, int threads) {
    const size_t stride = (values + 7) / 8, chunks = chunks_of(values);
    std::vector<Sums> parts(chunks * count, Sums{});
    with_float(dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        parallel_for(chunks, threads, [&](size_t chunk) {
            const size_t begin = chunk * CHUNK, end = std::min(values, begin + CHUNK);
            std::vector<double> moves(count * BLOCK);
            std::vector<uint8_t> still(count);
            with_instructions([&](auto) {
                for (size_t i = begin; i < end; i += BLOCK)
                    elect_block<F>(std::min(BLOCK, end - i), static_cast<const U*>(base) + i, tasks, i, count,
                                   static_cast<U*>(elected) + i, masks + i / 8, stride, moves.data(), still.data(),
                                   parts.data() + chunk * count);
            });
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
    with_float(dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        parallel_for(chunks_of(values), threads, [&](size_t chunk) {
            const size_t begin = chunk * CHUNK, end = std::min(values, begin + CHUNK);
            modulate_chunk<F>(begin, end, static_cast<const U*>(base), static_cast<const U*>(elected), task,
                              static_cast<U*>(out));
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
            with_float(target.dtype, [&](auto type) { work(type, target, chunks[i]); });
        });
    };
    std::atomic<size_t> strange{count};
    for_each([&](auto type, const Target& target, Chunk& chunk) {
        using F = decltype(type);
        using U = typename F::U;
        if (strange != count) return;
        chunk.written =
            retarget_chunk<F>(chunk.begin, chunk.end, static_cast<const U*>(target.base), static_cast<const U*>(target.elected),
                              target.from, target.to, static_cast<U*>(target.live));
        if (!chunk.written) strange = chunk.target;
    });
    if (strange != count)
        for_each([&](auto type, const Target& target, const Chunk& chunk) {
            using F = decltype(type);
            using U = typename F::U;
            if (chunk.written)
                modulate_chunk<F>(chunk.begin, chunk.end, static_cast<const U*>(target.base),
                                  static_cast<const U*>(target.elected), target.from, static_cast<U*>(target.live));
        });
    return strange;
}

}  // namespace hf_ext::emr
