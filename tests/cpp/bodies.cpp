// Bodies that one processor encodes and another decodes: `make test-arm` builds this program for both.
//
//     bodies make FOLDER       writes random tensors and damaged copies, each in a file in the layout of tests/fuzz/decode.cpp
//     bodies decode FILE...    prints an FNV-1a hash of the tensor in each file, or 0 where the body is refused
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

void write(const std::string& path, const Bytes& bytes) {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
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
                std::string path = folder + "/" + std::to_string(dtype);
                for (const size_t number : {shape.values, shape.row_length, size_t(content)})
                    path += "-" + std::to_string(number);
                write(path, input);
                const size_t first = input.size() - body.size();
                for (int i = 0; i < (shape.values > 100'000 ? 1 : 4); ++i) {
                    Bytes damaged = input;
                    // Sizes and side information are among the first bytes.
                    damaged[first + below(i % 2 ? body.size() : std::min<size_t>(body.size(), 80))] ^= uint8_t(1 << below(8));
                    write(path + "-damaged-" + std::to_string(i), damaged);
                }
            }
}

void print_hash(const char* path) {
    std::ifstream file(path, std::ios::binary);
    const Bytes input{std::istreambuf_iterator<char>(file), {}};
    LLVMFuzzerTestOneInput(input.data(), input.size());
    const auto number = [&](size_t at) { return size_t(input[at]) | size_t(input[at + 1]) << 8 | size_t(input[at + 2]) << 16; };
    const Shape shape{1 + input[0] % 4, number(1), number(4), number(7)};
    const int from = 1 + input[0] / 4 % 4;
    const uint8_t *source = input.data() + HEAD, *body = source + shape.base_values * size_t(hf_ext::width(from));
    Bytes base(shape.base_values * size_t(hf_ext::width(shape.dtype)));
    Bytes tensor(shape.values * size_t(hf_ext::width(shape.dtype)));
    hf_ext::cast(from, shape.dtype, source, base.data(), shape.base_values);
    unsigned long long hash = 0;
    try {
        hf_ext::delta::decode(shape, body, size_t(input.data() + input.size() - body), base.data(), tensor.data(), 1);
        hash = 0xcbf29ce484222325;
        for (const uint8_t byte : tensor) hash = (hash ^ byte) * 0x100000001b3;
    } catch (const std::exception&) {
    }
    std::printf("%016llx %s\n", hash, path);
}

}  // namespace

int main(int count, char** words) {
    const std::string command = count > 2 ? words[1] : "";
    if (command == "make") {
        make_inputs(words[2]);
    } else if (command == "decode") {
        for (int i = 2; i < count; ++i) print_hash(words[i]);
    } else {
        return 2;
    }
}
