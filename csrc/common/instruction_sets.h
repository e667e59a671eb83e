// Vector instructions, chosen at run time. Every set gives the same bytes.
//
// Every file is compiled for the oldest processor, because the linker merges templates of the standard library between files,
// and these must run everywhere. Only functions marked AVX2 or AVX512, and what is inlined into them, use newer instructions.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#if defined(__GNUC__) && defined(__x86_64__)
#define HF_EXT_X86
#define HF_EXT_AVX2 gnu::target("avx2,bmi,bmi2,f16c,fma,lzcnt,popcnt")
#ifdef __clang__  // has no such option
#define HF_EXT_WIDTH
#else
#define HF_EXT_WIDTH ",prefer-vector-width=512"
#endif
#define HF_EXT_AVX512 gnu::target("avx2,bmi,bmi2,f16c,fma,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl" HF_EXT_WIDTH)
#elif defined(__GNUC__) && defined(__aarch64__)
#define HF_EXT_NEON  // part of every 64-bit ARM processor
#endif

namespace hf_ext {

enum class Instructions { SCALAR, AVX2, AVX512, NEON };

constexpr const char* INSTRUCTIONS[] = {"scalar", "avx2", "avx512", "neon"};

// Returns the sets that this processor supports, the fastest last.
std::vector<Instructions> supported_instructions();

// The set in use.
std::atomic<Instructions>& instructions();

template <Instructions SET>
using With = std::integral_constant<Instructions, SET>;

#ifdef HF_EXT_X86
// `flatten` inlines the kernel and everything it calls, so that all of it is compiled for these instructions. `cold` saves most of
// the compile time for processors without AVX2, which are rare.
template <class Kernel>
[[gnu::cold, gnu::flatten, gnu::noinline]] void run_scalar(const Kernel& kernel) {
    kernel(With<Instructions::SCALAR>{});
}

template <class Kernel>
[[HF_EXT_AVX2, gnu::flatten, gnu::noinline]] void run_avx2(const Kernel& kernel) {
    kernel(With<Instructions::AVX2>{});
}

template <class Kernel>
[[HF_EXT_AVX512, gnu::flatten, gnu::noinline]] void run_avx512(const Kernel& kernel) {
    kernel(With<Instructions::AVX512>{});
}
#endif

// Calls kernel(With<the set in use>), compiled for that set.
template <class Kernel>
void with_instructions(const Kernel& kernel) {
#ifdef HF_EXT_X86
    switch (instructions().load(std::memory_order_relaxed)) {
        case Instructions::AVX512: return run_avx512(kernel);
        case Instructions::AVX2: return run_avx2(kernel);
        default: return run_scalar(kernel);
    }
#else
#ifdef HF_EXT_NEON
    if (instructions().load(std::memory_order_relaxed) == Instructions::NEON) return kernel(With<Instructions::NEON>{});
#endif
    kernel(With<Instructions::SCALAR>{});
#endif
}

// Prefetches the `count` values that start `ahead` values behind a place. Processors do this by themselves only within a page.
template <class U>
void prefetch(const U* values, size_t ahead, size_t count) {
#ifdef __GNUC__
    const auto* lines = reinterpret_cast<const char*>(uintptr_t(values) + sizeof(U) * ahead);
    for (size_t at = 0; at < sizeof(U) * count; at += 64) __builtin_prefetch(lines + at, 0, 2);
#else
    (void)values, (void)ahead, (void)count;
#endif
}

}  // namespace hf_ext
