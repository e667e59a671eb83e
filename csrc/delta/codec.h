// Encodes one tensor to bytes and back. docs/fm_delta_format.md describes the bytes, which it calls the body.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hf_ext::delta {

// A tensor has `values` elements of float type `dtype` in rows of `row_length`; the last row may be shorter. The first
// `base_values` elements (0, all, or whole rows) have a counterpart in `base`, which has the same type.
struct Shape {
    int dtype;
    size_t values;
    size_t row_length;
    size_t base_values;
};

// Throws std::invalid_argument if the fields of the shape contradict each other.
void check(const Shape& shape);

// A low-rank change that is added to the base before the prediction: rows · columns · 2^-exponent. Rank 0 is no change.
struct Factors {
    int rank = 0;
    int exponent = 0;
    const int32_t* rows = nullptr;     // base rows × rank
    const int32_t* columns = nullptr;  // rank × row length
};

struct Coarse;

// Returns the body, made with the candidate (or none) that is expected to give the smallest.
std::vector<uint8_t> encode(const Shape& shape, const void* tensor, const void* base, const std::vector<Factors>& candidates,
                            int threads);

// Returns a body from which the first `base_values` values are restored approximately, and sets the number of those that have a
// change of their own beside the low-rank one. Not for float64.
std::vector<uint8_t> encode_coarse(const Shape& shape, const void* tensor, const void* base, const Factors& factors,
                                   const Coarse& coarse, int threads, size_t& numbers);

// Throws std::runtime_error if the body is not valid. Accesses no memory outside the buffers, whatever the body contains.
void decode(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, void* tensor, int threads);

// The low-rank change that a body holds.
struct StoredFactors {
    int rank = 0;
    int exponent = 0;
    std::vector<int32_t> rows;     // base rows × rank; 0 for untouched rows
    std::vector<int32_t> columns;  // rank × row length
};

// Returns the low-rank change of a body, with rank 0 if it holds none. Needs no base. Throws as `decode` does.
StoredFactors stored_factors(const Shape& shape, const uint8_t* body, size_t bytes);

// What a body holds beside its entropy-coded numbers, for decoders on other devices.
struct Layout {
    int plane = 0, exponent = 0;                       // the exponent of the low-rank change
    float step = 0;                                    // of coarse changes; 0 if values are exact
    bool wide = false;                                 // sums of the low-rank change are wide
    std::vector<uint32_t> rows;                        // the coded rows: those with a base, then those without
    std::vector<int16_t> row_scales, column_scales;    // one for each of `rows`; none, or one for each column
    std::vector<uint16_t> frequencies;                 // TABLES × SYMBOLS
    std::vector<int32_t> classes;                      // end, shift of gaps, shift of sizes and center of each
    std::vector<int32_t> row_factors, column_factors;  // coded rows with a base × rank; rank × row length
    std::vector<int32_t> counts;                       // changes of each class in each block, if there are classes
    // Of each block: whether it is alone, first of `rows`, first column, number of values, lanes (0 if verbatim), begin and end
    // of its data in the body, after the counts.
    std::vector<std::array<int64_t, 7>> blocks;
};

// Returns the layout of a body. Needs no base. Throws as `decode` does.
Layout layout(const Shape& shape, const uint8_t* body, size_t bytes);

// Values to store at places of a tensor, in the order of the places.
struct Replacements {
    std::vector<uint32_t> places;
    std::vector<uint16_t> values;
};

// Sets where a tensor differs from its base. Returns false, and sets nothing, if the body does not list these places: only
// bodies of 16-bit floats do, where few values changed. Throws as `decode` does.
bool list_changes(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, Replacements& changes, int threads);

// Exchanges the values at `count` places of a tensor with others, and marks the rows that have such places; done twice, it
// changes nothing. Throws std::invalid_argument, before anything has changed, if a place is not below `values`.
void exchange(uint16_t* tensor, size_t values, const uint32_t* places, uint16_t* others, size_t count, size_t row_length,
              uint8_t* rows);

// Returns how often each symbol occurs in each table: TABLES × SYMBOLS counts. The default tables are made from these.
std::vector<uint64_t> count_symbols(const Shape& shape, const void* tensor, const void* base);

// Computes tensor - base as float, or 0 where that is not finite, and the sum of the squares of each row.
void subtract(const Shape& shape, const void* tensor, const void* base, float* change, double* energies);

// Computes the weight of each value: 4 to the power of how far the exponent of its spacing is below `top`, from 0 to `most` (at
// most 60).
void weigh(int dtype, const void* tensor, size_t values, int top, int most, float* weights);

}  // namespace hf_ext::delta
