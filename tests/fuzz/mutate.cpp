// The mutator of `make fuzz`. Half of the time it changes any bytes. Otherwise it splits an input (see decode.cpp) into its
// parts, changes one part, and joins them again. It recomputes all lengths, because a wrong length stops the decoder at once.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <vector>

#include "../../csrc/common/bits.h"
#include "../../csrc/common/floats.h"
#include "../../csrc/delta/blocks.h"
#include "../../csrc/delta/chunk.h"
#include "../../csrc/delta/codec.h"
#include "../../csrc/delta/encode_changes.h"
#include "../../csrc/delta/low_rank.h"
#include "../../csrc/delta/scales.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using namespace hf_ext::delta;
using hf_ext::BitReader;
using hf_ext::BitWriter;
using Bytes = std::vector<uint8_t>;

constexpr size_t HEAD = 10, NUMBERS = 3;  // see decode.cpp

void require(bool possible) {
    if (!possible) throw std::runtime_error("this input cannot be split, or becomes too large");
}

// Makes the bytes longer by repeating them, or shorter.
void resize(Bytes& bytes, size_t size) {
    const size_t before = bytes.size();
    bytes.resize(size);
    for (size_t i = before; before && i < size; ++i) bytes[i] = bytes[i - before];
}

void put(Bytes& bytes, uint64_t value, size_t count) {
    for (size_t i = 0; i < count; ++i) bytes.push_back(uint8_t(value >> (8 * i)));
}

void append(Bytes& bytes, const Bytes& more) { bytes.insert(bytes.end(), more.begin(), more.end()); }

void mutate(Bytes& bytes, size_t growth) {
    const size_t size = bytes.size();
    bytes.resize(size + growth + 1);
    bytes.resize(LLVMFuzzerMutate(bytes.data(), size, bytes.size()));
}

// A list of the side information: scales around a center, a table's differences, or factors.
struct List {
    uint32_t center = 0, k = 0;
    std::vector<int32_t> numbers;
};

// Reads the bits of the side information. Input::visit takes a Source or a Sink.
struct Source {
    BitReader in;

    size_t left() const { return in.left(); }
    void number(uint32_t& value, int bits) { value = uint32_t(in.get(bits)); }
    void numbers(List& list, int width) {
        hf_ext::get_rice(in, int(list.k), list.numbers.size(), width, [&](size_t i, int32_t x) { list.numbers[i] = x; });
    }
};

// Writes the bits of the side information.
struct Sink {
    BitWriter out;
    size_t bits;  // limit of a list's numbers

    size_t left() const { return bits; }
    void number(uint32_t& value, int count) { out.put(value, count); }
    void numbers(List& list, int width) {
        for (const int32_t x : list.numbers) hf_ext::put_rice(out, hf_ext::zigzag(x), int(list.k), width);
    }
};

struct EncodedBlock {
    uint32_t kind;
    Bytes bytes;
};

struct Input {
    uint8_t types;
    Shape shape;
    Bytes base;
    uint8_t plane, flags;
    uint64_t own_tables;
    std::vector<uint32_t> untouched;
    std::vector<Class> classes;
    List row_scales, column_scales, tables[TABLES];
    uint32_t rank = 0, exponent = 0;
    std::vector<List> factors;  // for each component, of the rows and of the columns
    std::vector<EncodedBlock> blocks;
    Plan plan;  // follows from the fields above

    Input(const uint8_t* data, size_t size) {
        require(size > HEAD);
        types = data[0];
        shape.dtype = 1 + types % 4;
        size_t* const fields[] = {&shape.values, &shape.row_length, &shape.base_values};
        for (size_t i = 0; i < 3; ++i) {
            *fields[i] = 0;
            std::memcpy(fields[i], data + 1 + NUMBERS * i, NUMBERS);
        }
        check(shape);
        data += HEAD, size -= HEAD;
        const auto take = [&](size_t count) {
            require(count <= size);
            data += count, size -= count;
            return data - count;
        };
        const auto get = [&](auto& value) { std::memcpy(&value, take(sizeof value), sizeof value); };
        const uint8_t* values = take(base_bytes());
        base.assign(values, values + base_bytes());
        uint32_t side_bytes;
        get(plane), get(flags), get(own_tables), get(side_bytes);
        Source side{BitReader(take(side_bytes), side_bytes)};
        visit(side);
        require(plan.blocks() <= size / 4);
        std::vector<uint32_t> entries(plan.blocks());
        for (uint32_t& entry : entries) get(entry);
        for (const uint32_t entry : entries) {
            const size_t count = std::min<size_t>(entry >> 2, size);
            const uint8_t* bytes = take(count);
            blocks.push_back({entry & 3, Bytes(bytes, bytes + count)});
        }
    }

    size_t width() const { return size_t(hf_ext::width(shape.dtype)); }
    size_t base_bytes() const { return shape.base_values * size_t(hf_ext::width(1 + types / 4 % 4)); }

    // Makes the fields of the shape agree with each other.
    void fit_shape() {
        shape.dtype = 1 + types % 4;
        shape.values = std::max<size_t>(shape.values, 1);
        shape.row_length = std::clamp<size_t>(shape.row_length, 1, std::max<size_t>(shape.values, 1024));
        shape.base_values = std::min(shape.base_values, shape.values);
        if (shape.base_values != shape.values) shape.base_values -= shape.base_values % shape.row_length;
    }

    // Gives the plan's number of blocks, and each block a size that its kind allows. Must follow `visit`.
    void fit_blocks(size_t max_size) {
        require(plan.blocks() <= max_size / 4);
        blocks.resize(plan.blocks(), blocks.empty() ? EncodedBlock{NARROW, Bytes{0, 0, 1, 0}} : blocks.back());
        for (size_t i = 0; i < blocks.size(); ++i) {
            Bytes& bytes = blocks[i].bytes;
            if (blocks[i].kind != RAW && plan.few_changes(*block_at(plan, i).part)) continue;
            const size_t values = block_at(plan, i).size, least = values * plane + (blocks[i].kind == NARROW ? 4 : 4 * 64);
            const size_t size = blocks[i].kind == RAW ? values * width() : std::max(bytes.size(), least);
            require(size < max_size);
            resize(bytes, blocks[i].kind == RAW ? size : size + (size - least) % 2);
        }
    }

    // Reads or writes the side information, and gives each list the length that follows from the other fields.
    template <class Side>
    void visit(Side& side) {
        const auto list = [&side](List& list, size_t count, int bits_of_k, int width) {
            require(count <= side.left());  // a number takes a bit or more
            list.numbers.resize(count);
            list.k &= (1u << bits_of_k) - 1;
            side.number(list.k, bits_of_k);
            side.numbers(list, width);
        };
        const auto scales = [&](List& scales, size_t count) {
            if (count) side.number(scales.center, 16), list(scales, count, 3, 16);
        };
        plan = Plan{};
        plan.shape = shape;
        require(plan.all_rows() <= side.left());
        untouched.resize(plan.base_rows());
        if (flags & UNTOUCHED_ROWS)
            for (uint32_t& row : untouched) side.number(row, 1);
        plan.set_rows((flags & UNTOUCHED_ROWS) ? std::vector<bool>(untouched.begin(), untouched.end())
                                               : std::vector<bool>(untouched.size()));
        if (flags & FEW_CHANGES) visit_classes(side);
        scales(row_scales, plan.rows.size() - plan.first_scaled());
        if (flags & COLUMN_SCALES) scales(column_scales, shape.row_length);
        for (int id = 0; id < TABLES; ++id)
            if (own_tables >> id & 1) list(tables[id], SYMBOLS - 1, 3, 16);
        if (!(flags & LOW_RANK)) return;
        side.number(rank, 16), side.number(exponent, 16);
        const size_t coded_base_rows = plan.parts[1].first_row;
        require(rank * (coded_base_rows + shape.row_length) <= side.left());
        factors.resize(2 * size_t(rank));
        for (size_t i = 0; i < factors.size(); ++i) list(factors[i], i % 2 ? shape.row_length : coded_base_rows, 5, 32);
    }

    template <class Side>
    void visit_classes(Side& side) {
        const auto number = [&side](int& field, int bits) {
            uint32_t value = uint32_t(field);
            side.number(value, bits);
            field = int(value);
        };
        int last = int(classes.size()) - 1;
        number(last, 4);
        classes.resize(size_t(last) + 1);
        for (Class& one : classes) {
            if (&one != &classes.back()) number(one.end, 8);
            for (NumberCode* code : {&one.gap, &one.size}) number(code->shift, 5), number(code->usual, 4);
            number(one.center, 16);
        }
        plan.classes = classes;
        for (Class& one : plan.classes)  // so that they can be used even if the decoder refuses them
            for (NumberCode* code : {&one.gap, &one.size}) {
                code->shift = std::min(code->shift, MAX_SHIFT);
                code->usual = std::min(code->usual, int(GEOMETRIC_TABLES.size()) - 1);
            }
    }

    Bytes side(size_t max_size) {
        Sink side{BitWriter(), 8 * max_size};
        visit(side);
        return side.out.bytes();
    }

    // The bytes before the body.
    Bytes head() const {
        Bytes all;
        put(all, types, 1), put(all, shape.values, NUMBERS), put(all, shape.row_length, NUMBERS);
        put(all, shape.base_values, NUMBERS);
        append(all, base);
        return all;
    }

    Bytes bytes(const Bytes& side) const {
        Bytes all = head();
        put(all, plane, 1), put(all, flags, 1), put(all, own_tables, 8), put(all, side.size(), 4);
        append(all, side);
        for (const EncodedBlock& block : blocks) put(all, block.bytes.size() << 2 | block.kind, 4);
        for (const EncodedBlock& block : blocks) append(all, block.bytes);
        return all;
    }
};

class Mutator {
   public:
    Mutator(unsigned seed, size_t max_size) : random_(seed), max_size_(max_size) {}

    bool once_in(size_t count) { return below(count) == 0; }

    // Throws an exception if the input cannot be split or becomes too large.
    Bytes run(const uint8_t* data, size_t size) {
        Input input(data, size);
        if (once_in(8)) return encode_another(input, data, size);
        const size_t part = below(12);
        switch (part) {
            case 0: change_shape(input); break;
            case 1: input.types = uint8_t(below(32)); break;
            case 2: mutate(input.base, 0); break;
            case 3: change_layout(input); break;
            case 4: change_untouched(input); break;
            case 5: change_list(input); break;
            case 6: change_low_rank(input); break;
            case 7:
            case 8: change_block(input); break;
            case 11: change_classes(input); break;
        }
        const bool fits = !once_in(8);
        if (fits) input.fit_shape();
        check(input.shape);
        require(input.base_bytes() < max_size_);
        resize(input.base, input.base_bytes());
        Bytes side = input.side(max_size_);
        if (part == 9) mutate(side, 16);
        if (fits) input.fit_blocks(max_size_);
        if (part == 10) change_number_of_blocks(input);
        return input.bytes(side);
    }

   private:
    size_t below(size_t count) { return count ? random_() % count : 0; }

    template <class T>
    T any(std::initializer_list<T> values) {
        return *(values.begin() + below(values.size()));
    }

    void change_shape(Input& input) {
        Shape& shape = input.shape;
        const size_t row = shape.row_length, rows = shape.values / row;
        size_t& field = *any({&shape.values, &shape.row_length, &shape.base_values});
        field =
            any({size_t(0), size_t(1), row - 1, row, row + 1, row * below(rows + 2), shape.values - 1, shape.values,
                 shape.values + 1, shape.base_values, field / 2, field * 2, below(200), CHUNK, CHUNK + 1, BLOCK, BLOCK + 1});
    }

    void change_layout(Input& input) {
        switch (below(4)) {
            case 0: input.plane = any<uint8_t>({0, 1, 2, 5, 6, uint8_t(below(256))}); break;
            case 1: input.flags = uint8_t(input.flags ^ (once_in(16) ? 1 << below(8) : 1 << below(4))); break;
            case 2: input.own_tables ^= uint64_t(1) << below(once_in(16) ? 64 : TABLES); break;
            case 3: move_frequency(input); break;
        }
    }

    // Gives the input a table of its own and keeps the sum of its frequencies.
    void move_frequency(Input& input) {
        const size_t id = once_in(2) ? below(TABLES) : TABLES - 1;
        input.own_tables |= uint64_t(1) << id;
        std::vector<int32_t>& numbers = input.tables[id].numbers;
        numbers.resize(SYMBOLS - 1);
        const size_t from = below(SYMBOLS - 1), to = below(SYMBOLS - 1);
        const uint32_t frequency = input.plan.usual(int(id))[from] + uint32_t(numbers[from]);
        const uint32_t change = any({1u, frequency, uint32_t(below(PROBABILITY_SUM))});
        numbers[from] = int16_t(uint32_t(numbers[from]) - change);
        numbers[to] = int16_t(uint32_t(numbers[to]) + change);
    }

    void change_untouched(Input& input) {
        input.flags |= UNTOUCHED_ROWS;
        const uint32_t all = uint32_t(below(3));
        for (uint32_t& row : input.untouched) row = all == 2 ? uint32_t(below(2)) : all;
        if (!input.untouched.empty()) input.untouched[below(input.untouched.size())] ^= 1;
    }

    void change_list(Input& input) {
        std::vector<List*> lists{&input.row_scales, &input.row_scales};
        if (input.flags & COLUMN_SCALES) lists.push_back(&input.column_scales);
        for (int id = 0; id < TABLES; ++id)
            if (input.own_tables >> id & 1) lists.push_back(&input.tables[id]);
        if (input.flags & LOW_RANK)
            for (List& factors : input.factors) lists.push_back(&factors);
        List& list = *lists[below(lists.size())];
        switch (below(4)) {
            case 0:
                list.center = uint32_t(any({0, 1, -1, SCALE_LIMIT, -SCALE_LIMIT, 0x7fff, -0x8000, int(below(65536))}));
                break;
            case 1: list.k = uint32_t(below(32)); break;
            default:
                if (list.numbers.empty()) return;
                list.numbers[below(list.numbers.size())] =
                    any({0, 1, -1, 63, -64, 0x7fff, -0x8000, 1 << 24, (1 << 24) - 1, -(1 << 24), INT32_MAX, INT32_MIN});
        }
    }

    void change_low_rank(Input& input) {
        const bool was_on = input.flags & LOW_RANK;
        input.flags |= LOW_RANK;
        switch (below(3)) {
            case 0: input.exponent = uint32_t(any({0, 1, -1, 24, 53, 100, -100, 101, -101, int(below(65536))})); return;
            case 1: input.rank = any<uint32_t>({0, 1, 2, 3, input.rank + 1, 1024, 1025}); break;
            case 2:  // no coded row has a base, so the components have no row factors
                input.rank = uint32_t(2 + below(3));
                if (once_in(2)) {
                    input.shape.base_values = 0;
                } else {
                    input.flags |= UNTOUCHED_ROWS;
                    std::fill(input.untouched.begin(), input.untouched.end(), 1u);
                }
        }
        if (was_on) return;
        const size_t counts[] = {input.plan.parts[1].first_row, input.shape.row_length};
        require(input.rank * (counts[0] + counts[1]) < 8 * max_size_);
        input.factors.resize(2 * size_t(input.rank));
        for (size_t i = 0; i < input.factors.size(); ++i) {
            input.factors[i].k = 3;
            input.factors[i].numbers.resize(counts[i % 2]);
            for (int32_t& factor : input.factors[i].numbers) factor = int32_t(below(16)) - 8;
        }
    }

    void change_classes(Input& input) {
        input.flags |= FEW_CHANGES;
        if (input.classes.empty() || once_in(4)) input.classes.resize(1 + below(MAX_CLASSES));
        Class& one = input.classes[below(input.classes.size())];
        int& field = *any({&one.end, &one.gap.shift, &one.gap.usual, &one.size.shift, &one.size.usual, &one.center});
        field = any({0, 1, 11, 16, int(below(32)), int(below(256)), int(below(1 << 16))});
    }

    // Replaces a list of changes by another, whose changes may lie anywhere.
    void change_list_of_changes(Input& input, size_t index) {
        Changes changes;
        const size_t size = block_at(input.plan, index).size;
        for (size_t k = 0; k < input.plan.classes.size(); ++k) {
            const size_t count = once_in(2) ? below(4) : below(any<size_t>({1, 64, 600}));
            for (size_t i = 0; i < count; ++i) {
                changes.gaps[k].push_back(any({0, 0, 1, int(below(64)), int(below(2 * size)), -1}));
                changes.changes[k].push_back(any({1, -1, 2, int(below(1 << 17)) - (1 << 16)}));
            }
        }
        std::vector<EncodeTable> tables;
        for (int id = 0; id < TABLES; ++id) tables.emplace_back(input.plan.usual(id));
        Kind kind;
        input.blocks[index].bytes = code_changes(changes, input.plan.classes, tables, kind);
        input.blocks[index].kind = kind;
    }

    void change_block(Input& input) {
        if (input.blocks.empty()) return;
        const size_t index = below(input.blocks.size());
        EncodedBlock& block = input.blocks[index];
        if (input.plan.few_changes(*block_at(input.plan, index).part) && once_in(2))
            return change_list_of_changes(input, index);
        switch (below(4)) {
            case 0: block.kind = uint32_t(below(4)); break;
            case 1: {  // a state at its limits
                const uint32_t state = any<uint32_t>({0xffff, 0x10000, 0x10001, 0x7fffffff, 0x80000000, 0xffffffff});
                const size_t lane = below(block.kind == INTERLEAVED ? 64 : 1);
                const size_t at = block_at(input.plan, index).size * input.plane + 4 * lane;
                if (at + 4 <= block.bytes.size()) std::memcpy(block.bytes.data() + at, &state, 4);
                break;
            }
            default: mutate(block.bytes, 64);
        }
    }

    void change_number_of_blocks(Input& input) {
        std::vector<EncodedBlock>& blocks = input.blocks;
        const auto at = blocks.begin() + ptrdiff_t(below(blocks.size()));
        switch (below(3)) {
            case 0: blocks.insert(at, EncodedBlock{uint32_t(below(3)), Bytes(2 * below(8))}); break;
            case 1:
                if (!blocks.empty()) blocks.insert(at, EncodedBlock(*at));
                break;
            case 2:
                if (!blocks.empty()) blocks.erase(at);
        }
    }

    // Decodes the input's tensor, changes it, its base or its shape, and encodes it. Without this, a coded block hardly ever
    // stays valid when its contexts change.
    Bytes encode_another(Input& input, const uint8_t* data, size_t size) {
        const size_t body = HEAD + input.base_bytes();
        require(input.shape.values < 16 * max_size_);
        Bytes tensor(input.shape.values * input.width()), base = cast_base(input);
        decode(input.shape, data + body, size - body, base.data(), tensor.data(), 1);
        switch (below(6)) {
            case 0: input.types = uint8_t(below(32)); break;
            case 1: mutate(input.base, 0); break;
            case 2: mutate(tensor, 0); break;
            default: change_shape(input);
        }
        input.fit_shape();
        require(input.base_bytes() < max_size_ && input.shape.values * input.width() < 16 * max_size_);
        resize(input.base, input.base_bytes());
        resize(tensor, input.shape.values * input.width());
        base = cast_base(input);
        LowRank change;
        std::vector<Factors> candidates;
        if (!base.empty() && once_in(2)) {
            change = move(input, base, tensor);
            candidates = {{change.rank, change.exponent, change.rows.data(), change.columns.data()}};
        }
        const Bytes encoded = encode(input.shape, tensor.data(), base.data(), candidates, 1);
        Bytes all = input.head();
        append(all, encoded);
        return all;
    }

    static Bytes cast_base(const Input& input) {
        Bytes base(input.shape.base_values * input.width());
        hf_ext::cast(1 + input.types / 4 % 4, input.shape.dtype, input.base.data(), base.data(), input.shape.base_values);
        return base;
    }

    // Overwrites the tensor's values that have a base with the base, moved by a low-rank change. Returns the change.
    LowRank move(const Input& input, const Bytes& base, Bytes& tensor) {
        Plan plan;
        plan.shape = input.shape;
        plan.set_rows(std::vector<bool>(plan.base_rows()));
        LowRank change;
        change.rank = int(1 + below(3));
        change.exponent = any({4, 12, 18, 46});
        const int most = any({2, 50, 1 << 20});
        change.rows.resize(plan.base_rows() * size_t(change.rank));
        change.columns.resize(plan.shape.row_length * size_t(change.rank));
        for (std::vector<int32_t>* factors : {&change.rows, &change.columns})
            for (int32_t& factor : *factors) factor = int32_t(below(size_t(2 * most))) - most;
        change.prepare(plan.shape.dtype == 4);
        change.predict(plan, plan.parts[0], 0, plan.parts[0].values, base.data(), tensor.data());
        return change;
    }

    std::mt19937 random_;
    size_t max_size_;
};

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    Mutator mutator(seed, max_size);
    if (mutator.once_in(2)) return LLVMFuzzerMutate(data, size, max_size);
    Bytes changed;
    try {
        changed = mutator.run(data, size);
    } catch (const std::exception&) {
    }
    if (changed.empty() || changed.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
    std::copy(changed.begin(), changed.end(), data);
    return changed.size();
}
