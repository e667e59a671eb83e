// Vector instructions as functions. This header takes most of a second to compile, so only files that call them include it.
#pragma once

#include "instruction_sets.h"

#ifdef HF_EXT_X86
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 warns of its own functions
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(HF_EXT_NEON)
#include <arm_neon.h>
#endif
