// Bytes of quantized weights as 16-bit numbers, which the codec takes for BF16. docs/fm_delta_format.md describes them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hf_ext::delta {

// The codes in a byte: floats, two's complement, or two of four bits, the lower one first, in the order of their values or with
// a sign. The last three are for bytes whose numbers do not depend on the base.
enum class Codes { E4M3, E5M2, INT8, INT4, E2M1, BYTES, E4M3_BYTES, E5M2_BYTES };

constexpr size_t codes_in_byte(Codes kind) { return kind == Codes::INT4 || kind == Codes::E2M1 ? 2 : 1; }

// Fills a number for each code.
void codes_to_numbers(Codes kind, const uint8_t* codes, const uint8_t* base, size_t bytes, uint16_t* numbers);

// Inverts `codes_to_numbers`.
void numbers_to_codes(Codes kind, const uint16_t* numbers, const uint8_t* base, size_t bytes, uint8_t* codes);

}  // namespace hf_ext::delta
