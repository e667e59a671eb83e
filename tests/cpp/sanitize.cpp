// Round trips and damaged bodies, to be compiled with sanitizers: they stop at the first step
// outside a buffer or the language. Every buffer has exactly the size that the codec is told.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <vector>

#include "../../csrc/common/floats.h"
#include "../../csrc/delta/codec.h"
#include "../../csrc/delta/encode_changes.h"
#include "../../csrc/emr/emr.h"
#include "random_tensors.h"

namespace {

// A body lies anywhere in a file: here one byte off any alignment, and still at the end of its memory.
void decode(const Tensor& tensor, const Bytes& body, Bytes& out, int threads) {
    Bytes moved(1);
    moved.reserve(body.size() + 1);
    moved.insert(moved.end(), body.begin(), body.end());
    hf_ext::delta::stored_factors(tensor.shape, moved.data() + 1, body.size());
    hf_ext::delta::decode(tensor.shape, moved.data() + 1, body.size(), tensor.base.data(), out.data(), threads);
}

Bytes round_trip(const Tensor& tensor) {
    const Bytes body = hf_ext::delta::encode(tensor.shape, tensor.values.data(), tensor.base.data(), tensor.candidates(), 1);
    if (body != hf_ext::delta::encode(tensor.shape, tensor.values.data(), tensor.base.data(), tensor.candidates(), 2)) {
        std::fprintf(stderr, "two threads make other bytes than one\n");
        std::exit(1);
    }
    for (int threads : {1, 2}) {
        Bytes out(tensor.values.size(), 0x5A);
        decode(tensor, body, out, threads);
        if (out == tensor.values) continue;
        std::fprintf(stderr, "%zu values of type %d do not come back\n", tensor.shape.values, tensor.shape.dtype);
        std::exit(1);
    }
    return body;
}

// Flips, overwrites, cuts or extends; half of the time in the first bytes, where sizes and side information are.
Bytes damage(Bytes body) {
    const size_t area = rng() % 2 ? std::min<size_t>(body.size(), 80) : body.size();
    switch (below(6)) {
        case 0: body[below(area)] ^= uint8_t(1) << below(8); break;
        case 1: body[below(area)] = uint8_t(rng()); break;
        case 2:
            for (size_t i = below(area), end = std::min(body.size(), i + 1 + below(32)); i < end; ++i) body[i] = uint8_t(rng());
            break;
        case 3:
            for (size_t i = below(area), end = std::min(body.size(), i + 1 + below(16)); i < end; ++i)
                body[i] = rng() % 2 ? 0xff : 0;
            break;
        case 4: body.resize(below(body.size() + 1)); break;
        case 5: body = random_bytes(below(200)); break;
    }
    body.shrink_to_fit();
    return body;
}

bool decodes(const Tensor& tensor, const Bytes& body, int threads) {
    Bytes out(tensor.values.size());
    try {
        decode(tensor, body, out, threads);
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

void require(bool holds, const char* what) {
    if (holds) return;
    std::puts(what);
    std::exit(1);
}

// Makes a body that lists changes of classes and places that no encoder chooses. Their gaps may lead behind the block.
Bytes forge_changes(size_t values) {
    using namespace hf_ext::delta;
    std::vector<Class> classes(1 + below(MAX_CLASSES));
    for (size_t k = 0; k < classes.size(); ++k) classes[k].end = int(100 + k);
    std::vector<EncodeTable> tables(DEFAULT_TABLES.begin(), DEFAULT_TABLES.end());
    Changes changes;
    size_t left = values + below(200);  // values up to the last change of each class, together
    for (size_t k = 0; k < classes.size(); ++k) {
        tables[size_t(gap_table(k))] = tables[size_t(size_table(k))] = EncodeTable(GEOMETRIC_TABLES[0]);
        if (below(3) == 0 || left == 0 || changes.count() == values) continue;
        const size_t used = 1 + (below(2) ? left - 1 : below(left));
        changes.gaps[k] = {int32_t(used - 1)};
        changes.changes[k] = {1};
        left -= used;
    }
    hf_ext::BitWriter side;
    put_classes(side, classes);
    Kind kind;
    const Bytes block = code_changes(changes, classes, tables, kind), about = side.bytes();
    Bytes body(14);
    body[1] = FEW_CHANGES;
    body[10] = uint8_t(about.size());
    body.insert(body.end(), about.begin(), about.end());
    for (size_t i = 0; i < 4; ++i) body.push_back(uint8_t((block.size() << 2 | kind) >> (8 * i)));
    body.insert(body.end(), block.begin(), block.end());
    body.shrink_to_fit();
    return body;
}

// Both ways to decode must agree on whether a body is sound.
void decode_forged(size_t& decoded, size_t& refused) {
    const size_t values = 1 + below(400);
    const Tensor tensor = make({3, values, 64, values}, BITS);
    const Bytes body = forge_changes(values);
    hf_ext::delta::Replacements changes;
    bool listed = true;
    try {
        hf_ext::delta::list_changes(tensor.shape, body.data(), body.size(), tensor.base.data(), changes, 1);
    } catch (const std::exception&) {
        listed = false;
    }
    require(decodes(tensor, body, 1) == listed, "a forged list is refused by one decoder only");
    ++(listed ? decoded : refused);
}

// Elects, and turns each task into the next; a changed value must be noticed and all left as it was.
void merge(int dtype, size_t values, size_t count) {
    const size_t size = values * size_t(hf_ext::width(dtype)), stride = (values + 7) / 8;
    std::vector<double> numbers(values);
    std::vector<Bytes> tasks;
    std::vector<const void*> pointers;
    for (double& number : numbers) number = double(below(1 << 20)) / (1 << 18) - 2;
    const Bytes base = as_floats(numbers, dtype);
    for (size_t task = 0; task < count; ++task) {
        for (double& number : numbers)
            if (below(3)) number += double(below(1 << 20)) / (1 << 22);
        tasks.push_back(as_floats(numbers, dtype));
    }
    for (const Bytes& task : tasks) pointers.push_back(task.data());
    Bytes elected(size), masks(count * stride), live(size);
    std::vector<hf_ext::emr::Sums> sums(count);
    hf_ext::emr::elect(dtype, values, base.data(), pointers.data(), count, elected.data(), masks.data(), sums.data(), 2);
    for (size_t task = 0; task < count; ++task) {
        const Bytes own(masks.begin() + task * stride, masks.begin() + (task + 1) * stride), next = random_bytes(stride);
        const hf_ext::emr::Modulator from{own.data(), task % 2 ? 0.75 : 1.0}, to{task ? next.data() : nullptr, 0.5};
        hf_ext::emr::modulate(dtype, values, base.data(), elected.data(), from, live.data(), 2);
        Bytes before = live;
        const hf_ext::emr::Target target{dtype, values, base.data(), elected.data(), from, to, live.data()};
        require(hf_ext::emr::retarget(&target, 1, 2) == 1, "a task is not recognized");
        live = before;
        if (!size) continue;
        live[below(size)] ^= 1;
        before = live;
        require(hf_ext::emr::retarget(&target, 1, 2) == 0 && live == before, "a change is not noticed, or not left alone");
    }
}

}  // namespace

int main() {
    for (int dtype = 1; dtype <= 4; ++dtype)
        for (size_t values : {0, 1, 7, 8, 63, 511, 512, 513, 70001})
            for (size_t count : {1, 2, 5}) merge(dtype, values, count);

    size_t round_trips = 0, refused = 0, decoded = 0;
    for (int i = 0; i < 3000; ++i) decode_forged(decoded, refused);
    for (int dtype = 1; dtype <= 4; ++dtype) {
        const Shape shapes[] = {
            {dtype, 0, 1, 0},         {dtype, 1, 1, 1},         {dtype, 63, 7, 63},          {dtype, 64, 64, 64},
            {dtype, 65, 100, 65},     {dtype, 500, 5, 500},     {dtype, 500, 5, 250},        {dtype, 503, 5, 0},
            {dtype, 4097, 1, 4097},   {dtype, 16383, 90, 900},  {dtype, 16384, 4096, 16384}, {dtype, 20001, 200, 20001},
            {dtype, 20001, 200, 400}, {dtype, 20001, 3, 19998}, {dtype, 20001, 30000, 0},    {dtype, 290'000, 500, 270'000},
        };
        for (const Shape& shape : shapes) {
            hf_ext::delta::check(shape);
            for (int content = 0; content < CONTENTS; ++content) {
                if (shape.values > 100'000 && content != WILD_FINE_TUNE && content != SOME_ROWS) continue;
                const Tensor tensor = make(shape, Content(content));
                const Bytes body = round_trip(tensor);
                ++round_trips;
                const int damages = shape.values > 100'000 ? 3 : shape.values > 10'000 ? 12 : 50;
                for (int i = 0; i < damages; ++i) ++(decodes(tensor, damage(body), 1 + i % 2) ? decoded : refused);
                // A sound body of another tensor: the sizes lie everywhere.
                const Tensor stranger = make(shapes[below(std::size(shapes) - 1)], FINE_TUNE);
                ++(decodes(stranger, body, 1) ? decoded : refused);
            }
        }
        for (int to = 1; to <= 4; ++to) {
            const Bytes source = random_bytes(100'000 * size_t(hf_ext::width(dtype)));
            Bytes target(100'000 * size_t(hf_ext::width(to)));
            hf_ext::cast(dtype, to, source.data(), target.data(), 100'000);
        }
    }
    std::printf("%zu round trips; of %zu damaged bodies %zu were refused\n", round_trips, refused + decoded, refused);
    return refused + decoded > 5000 && refused > decoded ? 0 : 1;
}
