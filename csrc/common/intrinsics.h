// Vector instructions as functions. This header takes most of a second to compile, so only files that call them include it.
#pragma once

#include "instruction_sets.h"

#ifdef HF_EXT_X86
#include <immintrin.h>
#elif defined(HF_EXT_NEON)
#include <arm_neon.h>
#endif
