// Chooses what describes the values of a tensor as a whole: the expected sizes of rows and columns, and the low bytes to store
// verbatim.
#pragma once

#include "blocks.h"

namespace hf_ext::delta {

// Fits the scales of rows and columns.
void choose_scales(Plan& plan, const void* tensor, const void* base, int threads);

// Stores as many low bytes verbatim as are random in all but one of a thousand values. Types of 16 bits have none.
void choose_plane(Plan& plan, const void* base);

}  // namespace hf_ext::delta
