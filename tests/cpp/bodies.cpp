// Bodies that one processor encodes and another decodes: `make test-arm` builds this program for both.
//
//     bodies make FOLDER       writes random tensors, each in a file in the layout of tests/fuzz/decode.cpp
//     bodies decode FILE...    prints for each file a hash of what becomes of it and of damaged copies
//
// All instruction sets of a processor must decode the same.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>

#include "../../csrc/common/floats.h"
#include "../../csrc/delta/codec.h"
#include "random_tensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);  // aborts if two instruction sets disagree

namespace {

constexpr size_t HEAD = 10;

// Returns a tensor's type and sizes as the fuzzer reads them.
Bytes head_of(const Shape& shape) {
    Bytes head{uint8_t((shape.dtype - 1) * 5)};
    for (const size_t number : {shape.values, shape.row_length, shape.base_values})
        for (int shift = 0; shift < 24; shift += 8) head.push_back(uint8_t(number >> shift));
    return head;
}

Shape shape_of(const Bytes& input) {
    const auto number = [&](size_t at) { return size_t(input[at]) | size_t(input[at + 1]) << 8 | size_t(input[at + 2]) << 16; };
    return {1 + input[0] % 4, number(1), number(4), number(7)};
}

// Returns an FNV-1a hash of the tensor that an input decodes to, or 0 if it is refused.
uint64_t decoded(const Bytes& input) {
    LLVMFuzzerTestOneInput(input.data(), input.size());
    const Shape shape = shape_of(input);
    const size_t width = size_t(hf_ext::width(shape.dtype)), from = 1 + input[0] / 4 % 4;
    const uint8_t* body = input.data() + HEAD + shape.base_values * size_t(hf_ext::width(int(from)));
    Bytes base(shape.base_values * width), tensor(shape.values * width);
    hf_ext::cast(int(from), shape.dtype, input.data() + HEAD, base.data(), shape.base_values);
    try {
        hf_ext::delta::decode(shape, body, size_t(input.data() + input.size() - body), base.data(), tensor.data(), 1);
    } catch (const std::exception&) {
        return 0;
    }
    uint64_t hash = 0xcbf29ce484222325;
    for (const uint8_t byte : tensor) hash = (hash ^ byte) * 0x100000001b3;
    return hash;
}

void make_inputs(const std::string& folder) {
    for (int dtype = 1; dtype <= 4; ++dtype)
        for (const Shape& shape :
             {Shape{dtype, 503, 5, 250}, Shape{dtype, 4097, 1, 4097}, Shape{dtype, 20001, 200, 20001},
              Shape{dtype, 20001, 3, 19998}, Shape{dtype, 20001, 30000, 0}, Shape{dtype, 290'000, 500, 270'000}})
            for (int content = 0; content < CONTENTS; ++content) {
                if (shape.values > 100'000 && content != WILD_FINE_TUNE && content != SOME_VALUES && content != LOW_RANK)
                    continue;
                const Tensor tensor = make(shape, Content(content));
                const Bytes body =
                    hf_ext::delta::encode(shape, tensor.values.data(), tensor.base.data(), tensor.candidates(), 1);
                Bytes out(tensor.values.size()), input = head_of(shape);
                hf_ext::delta::decode(shape, body.data(), body.size(), tensor.base.data(), out.data(), 1);
                if (out != tensor.values) std::abort();
                for (const Bytes& part : {tensor.base, body}) input.insert(input.end(), part.begin(), part.end());
                const std::string name = std::to_string(dtype) + "-" + std::to_string(shape.values) + "-" +
                                         std::to_string(shape.row_length) + "-" + std::to_string(content);
                std::ofstream(folder + "/" + name, std::ios::binary)
                    .write(reinterpret_cast<const char*>(input.data()), std::streamsize(input.size()));
            }
}

void decode_input(const char* path) {
    std::ifstream file(path, std::ios::binary);
    Bytes input{std::istreambuf_iterator<char>(file), {}};
    const Shape shape = shape_of(input);
    std::printf("%s %016llx", path, static_cast<unsigned long long>(decoded(input)));
    const size_t body = HEAD + shape.base_values * size_t(hf_ext::width(1 + input[0] / 4 % 4));
    rng.seed(input.size());
    for (int i = 0; i < (shape.values > 100'000 ? 0 : 6); ++i) {
        const size_t at = body + (i % 2 ? below(input.size() - body) : below(std::min<size_t>(input.size() - body, 80)));
        const uint8_t before = input[at];
        input[at] ^= uint8_t(1 << below(8));
        std::printf(" %016llx", static_cast<unsigned long long>(decoded(input)));
        input[at] = before;
    }
    std::puts("");
}

}  // namespace

int main(int count, char** words) {
    const std::string command = count > 2 ? words[1] : "";
    if (command == "make") {
        make_inputs(words[2]);
    } else if (command == "decode") {
        for (int i = 2; i < count; ++i) decode_input(words[i]);
    } else {
        return 2;
    }
}
