// One tensor to bytes and back. docs/fm_delta_format.md describes the bytes; they are its "body".
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fm_delta {

// `values` elements of float type `dtype` in rows of `row_length` (the last may be shorter). The first `base_values` of them
// have a twin in `base`, of the same type; that count is 0, all, or whole rows.
struct Shape {
    int dtype;
    size_t values;
    size_t row_length;
    size_t base_values;
};

// Throws std::invalid_argument when the shape contradicts itself.
void check(const Shape& shape);

// What moves a base before the tensor is compared with it: rows · columns · 2^-exponent. Rank 0 stands for no change.
struct Factors {
    int rank = 0;
    int exponent = 0;
    const int32_t* rows = nullptr;     // base rows × rank
    const int32_t* columns = nullptr;  // rank × row length
};

// With whichever of the candidates, or none, the body is smallest.
std::vector<uint8_t> encode(const Shape& shape, const void* tensor, const void* base, const std::vector<Factors>& candidates, int threads);

// Throws std::runtime_error when the body is not one that encode makes. Reads and writes only inside the given memory.
void decode(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, void* tensor, int threads);

// How often each symbol occurs in each table: TABLES × SYMBOLS counts. The default tables are made from this.
std::vector<uint64_t> count_symbols(const Shape& shape, const void* tensor, const void* base);

// tensor - base as float, 0 where that is not finite, and of each row the sum of its squares.
void subtract(const Shape& shape, const void* tensor, const void* base, float* change, double* energies);

// `values` floats of type `from` rounded to type `to`.
void cast(int from, int to, const void* source, void* target, size_t values);

// Bytes of one value of a dtype code; 0 if there is no such code.
int width(int dtype);

}  // namespace fm_delta
