#include "instruction_sets.h"

#ifdef HF_EXT_X86
#include <cpuid.h>
#endif

namespace hf_ext {

std::vector<Instructions> supported_instructions() {
#ifdef HF_EXT_X86
    // From the processor itself: the libraries of some compilers do not answer __builtin_cpu_supports. A set can be used if the
    // system keeps its registers, which XGETBV tells: bits 1 and 2 for AVX, 5 to 7 more for AVX-512.
    unsigned a, b, c, d, first = 0, seventh = 0, extended = 0, kept = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) first = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) seventh = b;
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) extended = c;
    // volatile, or the compiler may run it before the condition, and older processors do not know it.
    if (first & bit_OSXSAVE) asm volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    const auto all = [](unsigned bits, unsigned needed) { return (bits & needed) == needed; };
    if (!all(kept, 0x06) || !all(first, bit_AVX | bit_F16C | bit_FMA | bit_POPCNT) || !all(extended, bit_LZCNT) ||
        !all(seventh, bit_AVX2 | bit_BMI | bit_BMI2))
        return {Instructions::SCALAR};
    if (!all(kept, 0xe6) || !all(seventh, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL))
        return {Instructions::SCALAR, Instructions::AVX2};
    return {Instructions::SCALAR, Instructions::AVX2, Instructions::AVX512};
#elif defined(HF_EXT_NEON)
    return {Instructions::SCALAR, Instructions::NEON};
#else
    return {Instructions::SCALAR};
#endif
}

std::atomic<Instructions>& instructions() {
    static std::atomic<Instructions> chosen{supported_instructions().back()};
    return chosen;
}

}  // namespace hf_ext
