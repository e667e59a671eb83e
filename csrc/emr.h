// EMR-Merging (arXiv 2405.17461, section 3) on flat arrays of one float type: electing a unified weight, and giving a task's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emr {

// Sums over the elements of one task's tensor, with t = task - base and u = elected - base where t and u agree in sign, else 0.
struct Sums {
    double moved;           // elements with t != 0
    double agreeing;        // elements with u != 0: the bits of the mask that are set
    double task_l1;         // |t|
    double unified_l1;      // |u|
    double task_squares;    // t^2
    double unified_squares; // u^2
    double product;         // t u
    double base_squares;    // base^2
    double not_finite;      // elements that are infinite or NaN and not those of the base; they count as 0
};

// For each element the sign is elected by the sum of all t (a sum of 0 elects minus), then the value by the largest |t| of that
// sign: `elected` receives the weight of the task that has it, or the base's where no task moved that way. Bit i % 8 of byte
// i / 8 of a mask says whether t has the elected sign. Masks are (values + 7) / 8 bytes long each, one behind the other.
void elect(int dtype, size_t values, const void* base, const void* const* tasks, size_t count, void* elected, uint8_t* masks,
           Sums* sums, int threads);

// What makes a task's tensor of the elected one: base + scale * (elected - base) where the mask's bit is set, else the base.
// A scale of 1 gives the elected value itself. A null mask has no bits set.
struct Modulator {
    const uint8_t* mask;
    double scale;
};

void modulate(int dtype, size_t values, const void* base, const void* elected, Modulator task, void* out, int threads);

// A tensor in use that is to become another task's.
struct Target {
    int dtype;
    size_t values;
    const void* base;
    const void* elected;
    Modulator from, to;
    void* live;
};

// Overwrites the tensors of one task by those of another, all or none. Returns how many there are, or, if a tensor is not the first
// task's to the last bit, its place among them, after which all are as they were.
size_t retarget(const Target* targets, size_t count, int threads);

}  // namespace emr
