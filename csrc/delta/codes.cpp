#include "codes.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../common/instruction_sets.h"

namespace hf_ext::delta {
namespace {

constexpr uint32_t EXPONENT = 120;  // of codes that count as 0, so that the squares of all steps are normal floats
constexpr uint32_t MIDDLE = 64;     // of the mantissas

// A number has the exponent of its base's code and counts the steps between the two. No function of these types has a branch,
// so that loops over it are vectorized.
template <class Code, int WIDTH>
struct Steps {
    using Number = uint16_t;

    static uint32_t start(uint32_t base) { return ((EXPONENT + Code::exponent(base)) << 7 | MIDDLE) - Code::place(base); }
    static uint32_t number(uint32_t code, uint32_t base) { return start(base) + Code::place(code); }
    static uint32_t code(uint32_t number, uint32_t base) { return Code::at((number - start(base)) & ((1u << WIDTH) - 1)); }
};

// Codes of the same spacing. Those in the order of their values are their places; FLIP turns two's complement into that order.
template <int WIDTH, uint32_t FLIP>
struct Integer : Steps<Integer<WIDTH, FLIP>, WIDTH> {
    static uint32_t exponent(uint32_t) { return 0; }
    static uint32_t place(uint32_t code) { return code ^ FLIP; }
    static uint32_t at(uint32_t place) { return place ^ FLIP; }
};

// Codes of a sign, an exponent and a mantissa.
template <int WIDTH, int MANTISSA>
struct SmallFloat : Steps<SmallFloat<WIDTH, MANTISSA>, WIDTH> {
    static constexpr uint32_t SIGN = 1u << (WIDTH - 1), REST = SIGN - 1;

    static uint32_t exponent(uint32_t code) { return std::max((code & REST) >> MANTISSA, 1u); }
    static uint32_t place(uint32_t code) { return code ^ (SIGN | (REST & (0 - (code >> (WIDTH - 1))))); }
    static uint32_t at(uint32_t place) { return place ^ (SIGN | (REST & ((place >> (WIDTH - 1)) - 1))); }
};

// Bytes of which all but the highest bit are moved up.
template <int SHIFT>
struct Moved {
    using Number = uint16_t;
    static constexpr uint32_t SIGN = SHIFT ? 0x80 : 0;

    static uint32_t number(uint32_t code, uint32_t) { return (code & SIGN) << 8 | (code & ~SIGN) << SHIFT; }
    static uint32_t code(uint32_t number, uint32_t) { return (number >> 8 & SIGN) | (number >> SHIFT & (0xff - SIGN)); }
};

// Two codes of four bits.
template <class Code>
struct Halves {
    using Number = uint32_t;

    static uint32_t number(uint32_t both, uint32_t base) {
        return Code::number(both & 15, base & 15) | Code::number(both >> 4, base >> 4) << 16;
    }
    static uint32_t code(uint32_t both, uint32_t base) {
        return Code::code(both, base & 15) | Code::code(both >> 16, base >> 4) << 4;
    }
};

// Fills the numbers of codes. The buffers don't overlap. The compiler vectorizes the loop only if it knows that.
template <class Code>
void fill_numbers(const uint8_t* codes, const uint8_t* base, size_t bytes, uint16_t* __restrict numbers) {
    for (size_t i = 0; i < bytes; ++i) {
        const auto number = typename Code::Number(Code::number(codes[i], base[i]));
        std::memcpy(numbers + i * (sizeof number / 2), &number, sizeof number);
    }
}

// Inverts `fill_numbers`.
template <class Code>
void fill_codes(const uint16_t* numbers, const uint8_t* base, size_t bytes, uint8_t* __restrict codes) {
    for (size_t i = 0; i < bytes; ++i) {
        typename Code::Number number;
        std::memcpy(&number, numbers + i * (sizeof number / 2), sizeof number);
        codes[i] = uint8_t(Code::code(number, base[i]));
    }
}

// Calls f with the type of the codes.
template <class Function>
void with_codes(Codes kind, Function&& f) {
    switch (kind) {
        case Codes::E4M3: return f(SmallFloat<8, 3>());
        case Codes::E5M2: return f(SmallFloat<8, 2>());
        case Codes::INT8: return f(Integer<8, 0x80>());
        case Codes::INT4: return f(Halves<Integer<4, 0>>());
        case Codes::E2M1: return f(Halves<SmallFloat<4, 1>>());
        case Codes::BYTES: return f(Moved<0>());
        case Codes::E4M3_BYTES: return f(Moved<4>());
        case Codes::E5M2_BYTES: return f(Moved<5>());
    }
    throw std::invalid_argument("unknown kind of codes");
}

}  // namespace

void codes_to_numbers(Codes kind, const uint8_t* codes, const uint8_t* base, size_t bytes, uint16_t* numbers) {
    with_codes(kind,
               [=](auto code) { with_instructions([=](auto) { fill_numbers<decltype(code)>(codes, base, bytes, numbers); }); });
}

void numbers_to_codes(Codes kind, const uint16_t* numbers, const uint8_t* base, size_t bytes, uint8_t* codes) {
    with_codes(kind,
               [=](auto code) { with_instructions([=](auto) { fill_codes<decltype(code)>(numbers, base, bytes, codes); }); });
}

}  // namespace hf_ext::delta
