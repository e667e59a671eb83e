// How few changes of 16-bit floats are described. Encoder and decoder share this specification.
//
// The smaller a value, the finer the spacing of floats around it, and the likelier a small step changes it. So the values are
// divided into classes by the exponent of the base. In each class a change is two numbers: the gap, which counts the values of
// the class between one changed value and the next, and the size. Nothing is coded for a value that did not change.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/bits.h"
#include "geometric_tables.h"
#include "symbol_model.h"

namespace hf_ext::delta {

constexpr size_t MAX_CLASSES = 16;

// A number is coded as `shift` raw low bits and a symbol, whose usual frequencies are GEOMETRIC_TABLES[usual].
struct NumberCode {
    int shift = 0;
    int usual = 0;
};

// The values whose exponent field is below `end` and that are in no class before. The last class has all others; the end of any
// other is at most the field of infinity.
struct Class {
    int end = 0;
    NumberCode gap, size;
    int center = 1;  // steps that the size is counted from
};

// The indices of the tables that code the numbers of a class.
constexpr int gap_table(size_t index) { return int(2 * index); }
constexpr int size_table(size_t index) { return int(2 * index + 1); }

// The size of a change of an ordered integer, counted from the center; the sign is in the lowest bit.
constexpr int32_t to_number(int32_t change, int center) {
    const int32_t size = change < 0 ? -change : change;
    return int32_t(uint32_t(size - center) << 1 | uint32_t(change < 0));
}
constexpr int32_t to_change(int32_t number, int center) {
    const uint32_t size = uint32_t(number >> 1) + uint32_t(center);
    return int32_t(number & 1 ? 0 - size : size);
}

inline void put_classes(BitWriter& out, const std::vector<Class>& classes) {
    out.put(classes.size() - 1, 4);
    for (const Class& one : classes) {
        if (&one != &classes.back()) out.put(uint64_t(one.end), 8);
        for (const NumberCode& code : {one.gap, one.size}) {
            out.put(uint64_t(code.shift), 5);
            out.put(uint64_t(code.usual), 4);
        }
        out.put(uint64_t(one.center), 16);
    }
}

inline std::vector<Class> get_classes(BitReader& in, int exponents) {
    std::vector<Class> classes(size_t(in.get(4)) + 1);
    int before = 0;
    for (Class& one : classes) {
        one.end = &one == &classes.back() ? exponents : int(in.get(8));
        for (NumberCode* code : {&one.gap, &one.size}) {
            code->shift = int(in.get(5));
            code->usual = int(in.get(4));
            if (code->shift > MAX_SHIFT || size_t(code->usual) >= GEOMETRIC_TABLES.size())
                throw std::runtime_error("a class of values has an impossible code");
        }
        one.center = int(in.get(16));
        if (one.end < before || one.end > exponents) throw std::runtime_error("the classes of values are not in order");
        before = one.end;
    }
    return classes;
}

}  // namespace hf_ext::delta
