// The target of `make fuzz`: decodes any bytes as a tensor's type, sizes, base and body, with the calls that hf_ext's
// decode_raw makes. Sanitizers stop it at the first access outside a buffer and at undefined behavior. All instruction sets
// must give the same bytes or all must refuse the input. A list of changes must give the same tensor. A decoded tensor must
// also survive a round trip.
//
//     offset  bytes  content (little-endian)
//     0       1      float type, modulo 4; the next two bits: the base's; the next: one thread or two
//     1       3      values
//     4       3      row length
//     7       3      base values
//     10             the base: so many values of its type, then the body
//
// mutate.cpp and tests/storage/test_fuzz.py also read this layout; seeds.py writes it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <stdexcept>
#include <vector>

#include "../../csrc/common/floats.h"
#include "../../csrc/common/instruction_sets.h"
#include "../../csrc/delta/codec.h"

namespace {

constexpr size_t HEAD = 10;
constexpr size_t MAX_EXPANSION = 64;  // as in hf_ext/storage/delta/payload.py

using hf_ext::delta::Shape;
using Bytes = std::vector<uint8_t>;

size_t number(const uint8_t* data) { return size_t(data[0]) | size_t(data[1]) << 8 | size_t(data[2]) << 16; }

// Returns the tensor, or nothing if the body is refused.
std::optional<Bytes> decode(const Shape& shape, const uint8_t* body, size_t size, const Bytes& base, int threads,
                            hf_ext::Instructions set) {
    hf_ext::instructions() = set;
    // Each set starts from other bytes, which reveals values that the decoder does not write.
    Bytes tensor(shape.values * size_t(hf_ext::width(shape.dtype)), uint8_t(0x5a + int(set)));
    try {
        hf_ext::delta::decode(shape, body, size, base.data(), tensor.data(), threads);
    } catch (const std::exception&) {
        return std::nullopt;
    }
    return tensor;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < HEAD) return 0;
    const Shape shape{1 + data[0] % 4, number(data + 1), number(data + 4), number(data + 7)};
    const int base_dtype = 1 + data[0] / 4 % 4, threads = 1 + data[0] / 16 % 2;
    const size_t base_width = size_t(hf_ext::width(base_dtype));
    // What Python refuses before it decodes. A row is never longer than that either.
    if (shape.base_values > (size - HEAD) / base_width) return 0;
    const size_t body_size = size - HEAD - shape.base_values * base_width;
    if (shape.values == 0 || shape.values > shape.base_values + MAX_EXPANSION * body_size) return 0;
    if (shape.row_length > std::max<size_t>(shape.values, 1024)) return 0;
    try {
        hf_ext::delta::check(shape);
    } catch (const std::invalid_argument&) {
        return 0;
    }

    // Buffers of exactly their sizes; the body at an odd address, as in a file.
    const Bytes source(data + HEAD, data + size - body_size);
    Bytes moved(1), base(shape.base_values * size_t(hf_ext::width(shape.dtype)));
    moved.reserve(1 + body_size);
    moved.insert(moved.end(), data + size - body_size, data + size);
    hf_ext::cast(base_dtype, shape.dtype, source.data(), base.data(), shape.base_values);

    try {
        hf_ext::delta::stored_factors(shape, moved.data() + 1, body_size);
    } catch (const std::runtime_error&) {
    }
    std::vector<hf_ext::Instructions> others = hf_ext::supported_instructions();
    const hf_ext::Instructions best = others.back();
    others.pop_back();
    const std::optional<Bytes> tensor = decode(shape, moved.data() + 1, body_size, base, threads, best);
    for (const hf_ext::Instructions set : others) {
        if (decode(shape, moved.data() + 1, body_size, base, threads, set) == tensor) continue;
        std::fprintf(stderr, "%s and %s disagree\n", hf_ext::INSTRUCTIONS[int(set)], hf_ext::INSTRUCTIONS[int(best)]);
        std::abort();
    }
    if (!tensor) return 0;

    hf_ext::instructions() = best;
    hf_ext::delta::Replacements changes;
    if (shape.base_values == shape.values &&
        hf_ext::delta::list_changes(shape, moved.data() + 1, body_size, base.data(), changes, threads)) {
        Bytes listed = base, rows((shape.values + shape.row_length - 1) / shape.row_length);
        hf_ext::delta::exchange(reinterpret_cast<uint16_t*>(listed.data()), shape.values, changes.places.data(),
                                changes.values.data(), changes.places.size(), shape.row_length, rows.data());
        if (listed != tensor) std::abort();
    }
    const Bytes body = hf_ext::delta::encode(shape, tensor->data(), base.data(), {}, threads);
    if (decode(shape, body.data(), body.size(), base, threads, best) != tensor) std::abort();
    return 0;
}
