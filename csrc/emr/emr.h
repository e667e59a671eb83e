// EMR-Merging (arXiv 2405.17461, section 3) on flat arrays of one float type: elects unified weights and makes a task's from
// them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hf_ext::emr {

// Sums over the elements of one task's tensor: t = task - base; u = elected - base where t has the elected sign, otherwise 0.
struct Sums {
    double moved;            // elements with t != 0
    double agreeing;         // elements with u != 0, which are the set bits of the mask
    double task_l1;          // |t|
    double unified_l1;       // |u|
    double task_squares;     // t^2
    double unified_squares;  // u^2
    double product;          // t u
    double base_squares;     // base^2
    double not_finite;       // infinite or NaN elements that differ from the base's; they count as 0
};

// Elects the sign of each element by the sum of all t (a sum of 0 elects minus), then the value by the largest |t| of that
// sign. `elected` receives the weight of that task, or the base's if no task moved that way. A task's mask has bit i % 8 of
// byte i / 8 set where t has the elected sign. Each mask takes (values + 7) / 8 bytes; they follow one another.
void elect(int dtype, size_t values, const void* base, const void* const* tasks, size_t count, void* elected, uint8_t* masks,
           Sums* sums, int threads);

// Makes a task's tensor from the elected one: base + scale * (elected - base) where the mask's bit is set, otherwise the base.
// A scale of 1 gives exactly the elected value. A null mask has no bits set.
struct Modulator {
    const uint8_t* mask;
    double scale;
};

void modulate(int dtype, size_t values, const void* base, const void* elected, Modulator task, void* out, int threads);

// A live tensor that changes from one task's values to another's.
struct Target {
    int dtype;
    size_t values;
    const void* base;
    const void* elected;
    Modulator from, to;
    void* live;
};

// Overwrites the tensors of one task with those of another, all or none. Returns their number. If a tensor is not bit for bit
// the first task's, restores all of them and returns the index of that tensor.
size_t retarget(const Target* targets, size_t count, int threads);

}  // namespace hf_ext::emr
