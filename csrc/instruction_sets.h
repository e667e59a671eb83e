// The vector instructions that the codec works with, chosen while it runs. All of them give the same bytes.
//
// No file is compiled for more than the oldest processor: what a linker shares between files (templates of the standard
// library) must run everywhere. Only functions marked AVX2 or AVX512 are, and what is inlined into them.
#pragma once

#include <atomic>
#include <cstddef>
#include <type_traits>

#if defined(__GNUC__) && defined(__x86_64__)
#define FM_DELTA_X86
#include <immintrin.h>
#define FM_DELTA_AVX2 gnu::target("avx2,bmi,bmi2,fma,lzcnt,popcnt")
#ifdef __clang__  // knows no other width for these
#define FM_DELTA_WIDTH
#else
#define FM_DELTA_WIDTH ",prefer-vector-width=512"
#endif
#define FM_DELTA_AVX512 gnu::target("avx2,bmi,bmi2,fma,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl" FM_DELTA_WIDTH)
#endif

namespace fm_delta {

enum class Instructions { SCALAR, AVX2, AVX512 };

constexpr const char* INSTRUCTIONS[] = {"scalar", "avx2", "avx512"};

// The most that this processor has.
inline Instructions best_instructions() {
#ifdef FM_DELTA_X86
    __builtin_cpu_init();
    const auto has = [](auto... known) { return (known && ...); };
    if (!has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("bmi"), __builtin_cpu_supports("bmi2"), __builtin_cpu_supports("fma"),
             __builtin_cpu_supports("popcnt")))
        return Instructions::SCALAR;
    if (!has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"), __builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl")))
        return Instructions::AVX2;
    return Instructions::AVX512;
#else
    return Instructions::SCALAR;
#endif
}

// Those in use.
inline std::atomic<Instructions>& instructions() {
    static std::atomic<Instructions> chosen{best_instructions()};
    return chosen;
}

template <Instructions SET>
using With = std::integral_constant<Instructions, SET>;

#ifdef FM_DELTA_X86
// Flattened: the kernel and all that it calls become part of a function for these instructions, and its loops vector code.
template <class Kernel>
[[FM_DELTA_AVX2, gnu::flatten, gnu::noinline]] void run_avx2(const Kernel& kernel) {
    kernel(With<Instructions::AVX2>{});
}

template <class Kernel>
[[FM_DELTA_AVX512, gnu::flatten, gnu::noinline]] void run_avx512(const Kernel& kernel) {
    kernel(With<Instructions::AVX512>{});
}
#endif

// Calls kernel(With<the instructions in use>), compiled for them.
template <class Kernel>
void with_instructions(const Kernel& kernel) {
#ifdef FM_DELTA_X86
    switch (instructions().load(std::memory_order_relaxed)) {
        case Instructions::AVX512: return run_avx512(kernel);
        case Instructions::AVX2: return run_avx2(kernel);
        default: break;
    }
#endif
    kernel(With<Instructions::SCALAR>{});
}

}  // namespace fm_delta
