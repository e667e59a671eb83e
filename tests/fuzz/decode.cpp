// What libFuzzer runs (make fuzz): any bytes as a tensor's type, sizes, base and body, through the calls that hf_ext's
// decode_raw makes. Sanitizers stop it at the first step outside a buffer or the language. What decodes must also survive a
// round trip.
//
//     offset  bytes  content (little-endian)
//     0       1      float type, modulo 4; the next two bits: the base's; the next: one thread or two
//     1       3      values
//     4       3      row length
//     7       3      base values
//     10             the base: so many values of its type, then the body
//
// tests/fm_delta/test_fuzz.py reads this layout too; tests/fuzz/seeds.py writes it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <vector>

#include "../../csrc/common/floats.h"
#include "../../csrc/delta/codec.h"

namespace {

constexpr size_t HEAD = 10;
constexpr size_t MAX_EXPANSION = 64;  // as in hf_ext/storage/delta/codec.py

size_t number(const uint8_t* data) { return size_t(data[0]) | size_t(data[1]) << 8 | size_t(data[2]) << 16; }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < HEAD) return 0;
    const hf_ext::delta::Shape shape{1 + data[0] % 4, number(data + 1), number(data + 4), number(data + 7)};
    const int base_dtype = 1 + data[0] / 4 % 4, threads = 1 + data[0] / 16 % 2;
    const size_t width = size_t(hf_ext::width(shape.dtype)), base_width = size_t(hf_ext::width(base_dtype));
    // What Python refuses before it decodes. A row is never longer than that either.
    if (shape.base_values > (size - HEAD) / base_width) return 0;
    const size_t body_size = size - HEAD - shape.base_values * base_width;
    if (shape.values == 0 || shape.values > shape.base_values + MAX_EXPANSION * body_size) return 0;
    if (shape.row_length > std::max<size_t>(shape.values, 1024)) return 0;

    // Buffers of exactly their sizes; the body at an odd address, as in a file.
    const std::vector<uint8_t> source(data + HEAD, data + HEAD + shape.base_values * base_width);
    std::vector<uint8_t> moved(1), base(shape.base_values * width), tensor(shape.values * width);
    moved.reserve(1 + body_size);
    moved.insert(moved.end(), data + size - body_size, data + size);
    try {
        hf_ext::delta::check(shape);
        hf_ext::cast(base_dtype, shape.dtype, source.data(), base.data(), shape.base_values);
        hf_ext::delta::decode(shape, moved.data() + 1, body_size, base.data(), tensor.data(), threads);
    } catch (const std::exception&) {
        return 0;
    }
    const std::vector<uint8_t> body = hf_ext::delta::encode(shape, tensor.data(), base.data(), {}, threads);
    std::vector<uint8_t> again(tensor.size());
    hf_ext::delta::decode(shape, body.data(), body.size(), base.data(), again.data(), threads);
    if (again != tensor) std::abort();
    return 0;
}
