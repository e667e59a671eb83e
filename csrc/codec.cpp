#include "codec.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "float_map.h"
#include "rans.h"
#include "scales.h"
#include "symbol_model.h"
#include "threads.h"

namespace fm_delta {
namespace {

constexpr size_t BLOCK = 256 * 1024;   // values of a block: 64 states cost 0.008 bits each
constexpr size_t CHUNK = 4096;         // values handled at a time, so that they stay in the first-level cache
constexpr size_t WIDE = 16384;         // from here on a block has 64 lanes, below one
constexpr size_t FIT_VALUES = 1 << 18;  // column scales are fitted on so many values
constexpr size_t FIT_ROWS = 64;        // with fewer rows, column scales cost more than they save
constexpr size_t COUNT_BLOCKS = 8;     // tables are chosen on so many blocks
constexpr size_t ROWS_AT_ONCE = 64;    // row scales are measured in such groups

enum Flags : uint8_t { UNTOUCHED_ROWS = 1, COLUMN_SCALES = 2 };
enum Kind : uint32_t { RAW = 0, NARROW = 1, INTERLEAVED = 2 };  // low two bits of a block's entry; the rest is its size

// A run of rows with or without a base, seen as one sequence of values from which untouched rows are left out.
struct Part {
    bool alone;
    size_t first_row;  // index into Plan::rows
    size_t values;
};

// Everything about a tensor that its blocks share.
struct Plan {
    Shape shape;
    int plane = 0;
    std::vector<uint32_t> rows;  // the rows that are coded
    std::vector<int16_t> row_scales, column_scales;
    std::vector<Frequencies> tables;
    uint64_t own_tables = 0;
    Part parts[2] = {{false, 0, 0}, {true, 0, 0}};  // with a base, then without

    size_t blocks(const Part& part) const { return (part.values + BLOCK - 1) / BLOCK; }
    size_t blocks() const { return blocks(parts[0]) + blocks(parts[1]); }
    size_t row_values(size_t row) const { return std::min(shape.row_length, shape.values - row * shape.row_length); }
    size_t all_rows() const { return shape.values ? (shape.values - 1) / shape.row_length + 1 : 0; }
    size_t base_rows() const { return shape.base_values ? (shape.base_values - 1) / shape.row_length + 1 : 0; }

    // Fills rows and parts from a list of flags, one for every row that has a base.
    void set_rows(const std::vector<bool>& untouched) {
        for (size_t row = 0; row < all_rows(); ++row) {
            if (row == base_rows()) parts[1].first_row = rows.size();
            if (row < base_rows() && untouched[row]) continue;
            rows.push_back(uint32_t(row));
            parts[row >= base_rows()].values += row_values(row);
        }
        if (all_rows() == base_rows()) parts[1].first_row = rows.size();
    }
};

struct Block {
    const Part* part;
    size_t begin, size;
};

Block block_at(const Plan& plan, size_t index) {
    const size_t first = plan.blocks(plan.parts[0]);
    const Part& part = plan.parts[index >= first];
    const size_t begin = (index >= first ? index - first : index) * BLOCK;
    return {&part, begin, std::min(BLOCK, part.values - begin)};
}

// Calls f(offset into the tensor, position in the range, length, row's index in plan.rows, column) for each piece of a row.
template <class Function>
void for_pieces(const Plan& plan, const Part& part, size_t begin, size_t size, Function&& f) {
    const size_t length = plan.shape.row_length;
    for (size_t done = 0; done < size;) {
        const size_t row = part.first_row + (begin + done) / length, column = (begin + done) % length;
        const size_t piece = std::min(size - done, length - column);
        f(plan.rows[row] * length + column, done, piece, row, column);
        done += piece;
    }
}

// What the decoder knows of a chunk before it reads a bit: for each value a prediction (ordered, or rotated where there is
// no base) and a context.
template <class F>
struct Chunk {
    typename F::U prediction[CHUNK];
    Context contexts[CHUNK];
    const ContextTable lookup;

    explicit Chunk(const Plan& plan) : lookup(mantissa_above<F>(plan.plane)) {}

    void fill(const Plan& plan, const Part& part, size_t begin, size_t size, const typename F::U* base) {
        const Context alone = alone_context<F>(plan.plane);
        for_pieces(plan, part, begin, size, [&](size_t offset, size_t at, size_t count, size_t row, size_t column) {
            const int scale = plan.row_scales[row];
            const int16_t* columns = plan.column_scales.empty() ? nullptr : plan.column_scales.data() + column;
            if (part.alone) {
                for (size_t i = 0; i < count; ++i) {
                    prediction[at + i] = expected_magnitude(scale + (columns ? columns[i] : 0));
                    contexts[at + i] = alone;
                }
                return;
            }
            const int from = scale - 4 * F::ULP_BIAS - 32 * plan.plane;
            int16_t sizes[CHUNK];
            for (size_t i = 0; i < count; ++i) {
                const typename F::U bits = base[offset + i];
                prediction[at + i] = to_ordered<F>(bits);
                sizes[i] = int16_t(from - 4 * grid_exponent<F>(bits));
            }
            if (columns)
                for (size_t i = 0; i < count; ++i) sizes[i] = int16_t(sizes[i] + columns[i]);
            for (size_t i = 0; i < count; ++i) sizes[i] = ContextTable::index(sizes[i]);
            for (size_t i = 0; i < count; ++i) contexts[at + i] = lookup[sizes[i]];
        });
    }

    // A float of about 2^(scale / 4), rotated.
    static typename F::U expected_magnitude(int scale) {
        const int field = std::clamp((scale >> 2) - F::ULP_BIAS - F::MANTISSA, 0, int(F::INFINITY_BITS >> F::MANTISSA) - 1);
        using U = typename F::U;
        return to_rotated<F>(U(U(field) << F::MANTISSA | U(scale & 3) << (F::MANTISSA - 2)));
    }
};

// Residuals wrap around; their low `plane` bytes travel apart and the rest fits 32 bits.
template <class F>
int32_t high_part(typename F::U mapped, typename F::U prediction, int plane) {
    if constexpr (F::WIDTH == 16) {
        return int32_t(mapped) - int32_t(prediction);
    } else {
        return int32_t(std::make_signed_t<typename F::U>(mapped - prediction) >> (8 * plane));
    }
}

// ---- encoding ----------------------------------------------------------------------------------------------------------

template <class F>
class TensorEncoder {
    using U = typename F::U;

   public:
    TensorEncoder(const Shape& shape, const void* tensor, const void* base, int threads)
        : tensor_(static_cast<const U*>(tensor)), base_(static_cast<const U*>(base)), threads_(threads) {
        plan_.shape = shape;
        untouched_.resize(plan_.base_rows());
        for (size_t row = 0; row < untouched_.size(); ++row) {
            const size_t at = row * shape.row_length;
            untouched_[row] = std::memcmp(tensor_ + at, base_ + at, plan_.row_values(row) * sizeof(U)) == 0;
        }
        plan_.set_rows(untouched_);
        choose_scales();
        choose_plane();
        plan_.tables.assign(DEFAULT_TABLES.begin(), DEFAULT_TABLES.end());
    }

    std::vector<uint8_t> encode() {
        choose_tables();
        std::vector<EncodeTable> tables(plan_.tables.begin(), plan_.tables.end());
        std::vector<std::vector<uint8_t>> blocks(plan_.blocks());
        std::vector<uint32_t> entries(blocks.size());
        parallel_for(blocks.size(), threads_, [&](size_t i) {
            const Block block = block_at(plan_, i);
            Kind kind = block.size >= WIDE ? INTERLEAVED : NARROW;
            blocks[i] = kind == INTERLEAVED ? code<64>(block, tables) : code<1>(block, tables);
            if (blocks[i].size() >= block.size * sizeof(U)) {
                kind = RAW;
                blocks[i].resize(block.size * sizeof(U));
                for_pieces(plan_, *block.part, block.begin, block.size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                    std::memcpy(blocks[i].data() + at * sizeof(U), tensor_ + offset, count * sizeof(U));
                });
            }
            entries[i] = uint32_t(blocks[i].size() << 2 | kind);
        });
        return assemble(entries, blocks);
    }

    std::vector<uint64_t> count() const {
        std::vector<uint64_t> counts(TABLES * SYMBOLS);
        for (size_t i = 0; i < plan_.blocks(); ++i) count_block(block_at(plan_, i), counts);
        return counts;
    }

   private:
    bool any_untouched() const { return std::find(untouched_.begin(), untouched_.end(), true) != untouched_.end(); }

    // What a scale has to explain: the square of the change and the variance of its grid, or of the value where it is alone.
    // Bounded, because a single infinite square would make every scale of its column and row meaningless.
    void squares(size_t at, size_t count, Real<F>* out) const {
        constexpr Real<F> MOST = F::WIDTH == 64 ? Real<F>(1e300) : Real<F>(1e37f);
        const U* x = tensor_ + at;
        if (at >= plan_.shape.base_values) {
            for (size_t i = 0; i < count; ++i) out[i] = std::min(finite_value<F>(x[i]) * finite_value<F>(x[i]), MOST);
            return;
        }
        const U* b = base_ + at;
        for (size_t i = 0; i < count; ++i) {
            const Real<F> change = finite_value<F>(x[i]) - finite_value<F>(b[i]);
            out[i] = std::min(change * change + grid_variance<F>(b[i]), MOST);
        }
    }

    void choose_scales() {
        const size_t length = plan_.shape.row_length, rows = plan_.rows.size();
        std::vector<Real<F>> weights(std::min(length, plan_.shape.values), 1);
        // Rows with a base come first; the columns are theirs unless there are hardly any. A short last row has no say.
        const size_t with_base = plan_.parts[1].first_row;
        const size_t first = with_base >= FIT_ROWS ? 0 : with_base;
        const size_t usable = (with_base >= FIT_ROWS ? with_base : rows) - first - (rows && plan_.row_values(plan_.rows.back()) < length);
        if (usable >= FIT_ROWS && usable <= rows && length > 1) {
            const size_t sampled = std::min(usable, std::max<size_t>(1, FIT_VALUES / length));
            std::vector<Real<F>> sample(sampled * length);
            parallel_for(sampled, threads_, [&](size_t i) { squares(plan_.rows[first + i * usable / sampled] * length, length, &sample[i * length]); });
            plan_.column_scales = fit_columns(sample, sampled, length);
            for (size_t j = 0; j < length; ++j) weights[j] = Real<F>(std::exp2(-0.5 * plan_.column_scales[j]));
        }
        plan_.row_scales.resize(rows);
        parallel_for((rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, threads_, [&](size_t group) {
            std::vector<Real<F>> row(weights.size());
            for (size_t i = group * ROWS_AT_ONCE; i < std::min(rows, (group + 1) * ROWS_AT_ONCE); ++i) {
                const size_t count = plan_.row_values(plan_.rows[i]);
                squares(plan_.rows[i] * length, count, row.data());
                plan_.row_scales[i] = quarter_octaves(double(weighted_sum(row.data(), weights.data(), count)) / double(count));
            }
        });
    }

    // As many low bytes travel verbatim as are random in all but one value of a thousand.
    void choose_plane() {
        if constexpr (F::WIDTH == 16) return;
        constexpr int least = F::WIDTH == 64 ? 5 : 0, most = F::WIDTH == 64 ? 6 : 2;
        plan_.plane = most;
        const Part& part = plan_.parts[0];
        if (part.values == 0) return;
        std::array<size_t, 64> octaves{};  // of the expected residual, in steps
        const size_t stride = std::max<size_t>(1, (plan_.parts[1].first_row * plan_.shape.row_length) >> 16);
        size_t sampled = 0;
        for (size_t i = 0; i < part.values; i += stride, ++sampled) {
            for_pieces(plan_, part, i, 1, [&](size_t offset, size_t, size_t, size_t row, size_t column) {
                const int scale = plan_.row_scales[row] + (plan_.column_scales.empty() ? 0 : plan_.column_scales[column]);
                const int octave = (scale >> 2) - F::ULP_BIAS - grid_exponent<F>(base_[offset]);
                ++octaves[size_t(std::clamp(octave, 0, 63))];
            });
        }
        for (; plan_.plane > least; --plan_.plane) {
            size_t small = 0;
            for (int octave = 0; octave < 8 * plan_.plane + 2; ++octave) small += octaves[size_t(octave)];
            if (small * 1000 <= sampled) return;
        }
    }

    // Calls f(position in the block, size, chunk, values) for each chunk of a block, values being the high parts.
    template <class Function>
    void for_chunks(const Block& block, Function&& f) const {
        const auto chunk = std::make_unique<Chunk<F>>(plan_);
        const auto values = std::make_unique<int32_t[]>(CHUNK);
        for (size_t done = 0; done < block.size; done += CHUNK) {
            const size_t size = std::min(CHUNK, block.size - done);
            chunk->fill(plan_, *block.part, block.begin + done, size, base_);
            for_pieces(plan_, *block.part, block.begin + done, size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                const U* prediction = chunk->prediction + at;
                int32_t* value = values.get() + at;
                if (block.part->alone)
                    for (size_t i = 0; i < count; ++i) value[i] = high_part<F>(to_rotated<F>(tensor_[offset + i]), prediction[i], plan_.plane);
                else
                    for (size_t i = 0; i < count; ++i) value[i] = high_part<F>(to_ordered<F>(tensor_[offset + i]), prediction[i], plan_.plane);
            });
            f(done, size, *chunk, values.get());
        }
    }

    void count_block(const Block& block, std::vector<uint64_t>& counts) const {
        for_chunks(block, [&](size_t, size_t size, const Chunk<F>& chunk, const int32_t* values) {
            for (size_t i = 0; i < size; ++i) {
                const Context context = chunk.contexts[i];
                ++counts[context.table * SYMBOLS + symbol_of(values[i] >> context.shift).id];
            }
        });
    }

    // A table of the tensor's own pays when it saves more than its description costs.
    void choose_tables() {
        const size_t blocks = plan_.blocks(), sampled = std::min(blocks, COUNT_BLOCKS);
        if (blocks == 0) return;
        std::vector<std::vector<uint64_t>> partial(sampled, std::vector<uint64_t>(TABLES * SYMBOLS));
        // The last block is among them: where some rows have no base it is one of those.
        parallel_for(sampled, threads_, [&](size_t i) { count_block(block_at(plan_, blocks - 1 - i * blocks / sampled), partial[i]); });
        for (int id = 0; id < TABLES; ++id) {
            std::array<uint64_t, SYMBOLS> counts{};
            for (const auto& part : partial)
                for (int symbol = 0; symbol < SYMBOLS; ++symbol) counts[symbol] += part[id * SYMBOLS + symbol];
            const Frequencies own = normalise(counts);
            size_t description = 0;
            best_rice(differences(own, DEFAULT_TABLES[id]), &description);
            const double saved = (cost(counts, DEFAULT_TABLES[id]) - cost(counts, own)) * double(blocks) / double(sampled);
            if (saved > double(description + 3)) {
                plan_.tables[id] = own;
                plan_.own_tables |= uint64_t(1) << id;
            }
        }
    }

    static double cost(const std::array<uint64_t, SYMBOLS>& counts, const Frequencies& frequencies) {
        double bits = 0;
        for (int id = 0; id < SYMBOLS; ++id) {
            const bool coded = frequencies[id] != 0;
            const double extra = coded ? 0 : 32 - extra_bits_of(id);
            bits += double(counts[id]) * (extra + PROBABILITY_BITS - std::log2(double(frequencies[coded ? id : ESCAPE])));
        }
        return bits;
    }

    static std::vector<uint32_t> differences(const Frequencies& own, const Frequencies& usual) {
        std::vector<uint32_t> codes;
        for (int id = 0; id < SYMBOLS - 1; ++id) codes.push_back(zigzag(int(own[id]) - int(usual[id])));
        return codes;
    }

    template <int LANES>
    std::vector<uint8_t> code(const Block& block, const std::vector<EncodeTable>& tables) const {
        std::vector<Element> elements(block.size);
        std::vector<uint8_t> out(block.size * size_t(plan_.plane));
        for_chunks(block, [&](size_t done, size_t size, const Chunk<F>& chunk, const int32_t* values) {
            for (size_t i = 0; i < size; ++i) elements[done + i] = {values[i], chunk.contexts[i]};
            if (plan_.plane == 0) return;
            for_pieces(plan_, *block.part, block.begin + done, size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                for (size_t i = 0; i < count; ++i) {
                    const U bits = tensor_[offset + i];
                    const U rest = U((block.part->alone ? to_rotated<F>(bits) : to_ordered<F>(bits)) - chunk.prediction[at + i]);
                    for (int byte = 0; byte < plan_.plane; ++byte) out[(done + at + i) * size_t(plan_.plane) + size_t(byte)] = uint8_t(rest >> (8 * byte));
                }
            });
        });
        Encoder<LANES> encoder(block.size);
        encoder.encode(elements.data(), elements.size(), tables);
        encoder.finish(out);
        return out;
    }

    std::vector<uint8_t> assemble(const std::vector<uint32_t>& entries, const std::vector<std::vector<uint8_t>>& blocks) const {
        BitWriter side;
        if (any_untouched())
            for (const bool untouched : untouched_) side.put(untouched, 1);
        put_scales(side, plan_.row_scales);
        put_scales(side, plan_.column_scales);
        for (int id = 0; id < TABLES; ++id) {
            if (!(plan_.own_tables >> id & 1)) continue;
            const std::vector<uint32_t> codes = differences(plan_.tables[id], DEFAULT_TABLES[id]);
            const int k = best_rice(codes);
            side.put(uint64_t(k), 3);
            for (const uint32_t code : codes) put_rice(side, code, k);
        }
        std::vector<uint8_t> body;
        const auto append = [&body](const void* data, size_t bytes) {
            const auto* begin = static_cast<const uint8_t*>(data);
            body.insert(body.end(), begin, begin + bytes);
        };
        body.push_back(uint8_t(plan_.plane));
        body.push_back(uint8_t((any_untouched() ? UNTOUCHED_ROWS : 0) | (plan_.column_scales.empty() ? 0 : COLUMN_SCALES)));
        append(&plan_.own_tables, 8);
        const uint32_t side_bytes = uint32_t(side.bytes().size());
        append(&side_bytes, 4);
        append(side.bytes().data(), side_bytes);
        append(entries.data(), 4 * entries.size());
        for (const auto& block : blocks) append(block.data(), block.size());
        return body;
    }

    const U* tensor_;
    const U* base_;
    int threads_;
    Plan plan_;
    std::vector<bool> untouched_;
};

// ---- decoding ----------------------------------------------------------------------------------------------------------

class Reader {
   public:
    Reader(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}

    const uint8_t* take(size_t bytes) {
        if (bytes > left_) throw std::runtime_error("the compressed tensor ends too early");
        const uint8_t* taken = data_;
        data_ += bytes;
        left_ -= bytes;
        return taken;
    }

    template <class T>
    T get() {
        T value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }

    size_t left() const { return left_; }

   private:
    const uint8_t* data_;
    size_t left_;
};

const std::vector<DecodeTable>& default_decode_tables() {
    static const std::vector<DecodeTable> tables(DEFAULT_TABLES.begin(), DEFAULT_TABLES.end());
    return tables;
}

Frequencies read_table(BitReader& in, const Frequencies& usual) {
    const int k = int(in.get(3));
    Frequencies frequencies{};
    int sum = 0;
    for (int id = 0; id < SYMBOLS - 1; ++id) {
        const int frequency = usual[id] + unzigzag(get_rice(in, k));
        if (frequency < 0 || frequency > PROBABILITY_SUM) throw std::runtime_error("a table has an impossible frequency");
        frequencies[id] = uint16_t(frequency);
        sum += frequency;
    }
    if (sum != PROBABILITY_SUM) throw std::runtime_error("a table's frequencies do not add up");
    return frequencies;
}

template <class F>
class TensorDecoder {
    using U = typename F::U;

   public:
    TensorDecoder(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, void* tensor)
        : base_(static_cast<const U*>(base)), tensor_(static_cast<U*>(tensor)) {
        Reader in(body, bytes);
        plan_.shape = shape;
        plan_.plane = in.get<uint8_t>();
        const bool plane_fits = F::WIDTH == 16 ? plan_.plane == 0 : F::WIDTH == 32 ? plan_.plane <= 2 : plan_.plane == 5 || plan_.plane == 6;
        const uint8_t flags = in.get<uint8_t>();
        plan_.own_tables = in.get<uint64_t>();
        if (!plane_fits || flags > (UNTOUCHED_ROWS | COLUMN_SCALES) || plan_.own_tables >> TABLES)
            throw std::runtime_error("the compressed tensor uses a feature this version does not know");
        const size_t side_bytes = in.get<uint32_t>();
        read_side(BitReader(in.take(side_bytes), side_bytes), flags);
        const uint8_t* entries = in.take(4 * plan_.blocks());
        for (size_t i = 0; i < plan_.blocks(); ++i) {
            uint32_t entry;
            std::memcpy(&entry, entries + 4 * i, 4);
            blocks_.push_back({in.take(entry >> 2), entry >> 2, Kind(entry & 3)});
        }
        if (in.left()) throw std::runtime_error("the compressed tensor has bytes left over");
    }

    void decode(int threads) {
        copy_untouched();
        parallel_for(blocks_.size(), threads, [&](size_t i) {
            const Block block = block_at(plan_, i);
            const Coded& coded = blocks_[i];
            switch (coded.kind) {
                case INTERLEAVED: return decode_block<64>(block, coded.data, coded.bytes);
                case NARROW: return decode_block<1>(block, coded.data, coded.bytes);
                case RAW: return copy_raw(block, coded.data, coded.bytes);
                default: throw std::runtime_error("a block is of a kind this version does not know");
            }
        });
    }

   private:
    struct Coded {
        const uint8_t* data;
        size_t bytes;
        Kind kind;
    };

    void read_side(BitReader in, uint8_t flags) {
        std::vector<bool> untouched(plan_.base_rows());
        if (flags & UNTOUCHED_ROWS)
            for (size_t row = 0; row < untouched.size(); ++row) untouched[row] = in.get(1);
        plan_.set_rows(untouched);
        plan_.row_scales = get_scales(in, plan_.rows.size());
        if (flags & COLUMN_SCALES) plan_.column_scales = get_scales(in, plan_.shape.row_length);
        tables_ = &default_decode_tables();
        if (!plan_.own_tables) return;
        own_tables_ = default_decode_tables();
        tables_ = &own_tables_;
        for (int id = 0; id < TABLES; ++id)
            if (plan_.own_tables >> id & 1) own_tables_[id] = DecodeTable(read_table(in, DEFAULT_TABLES[id]));
    }

    void copy_untouched() {
        size_t next = 0;
        for (size_t row = 0; row < plan_.base_rows(); ++row) {
            if (next < plan_.rows.size() && plan_.rows[next] == row) {
                ++next;
            } else {
                const size_t at = row * plan_.shape.row_length;
                std::memcpy(tensor_ + at, base_ + at, plan_.row_values(row) * sizeof(U));
            }
        }
    }

    void copy_raw(const Block& block, const uint8_t* data, size_t bytes) {
        if (bytes != block.size * sizeof(U)) throw std::runtime_error("a verbatim block has the wrong size");
        for_pieces(plan_, *block.part, block.begin, block.size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
            std::memcpy(tensor_ + offset, data + at * sizeof(U), count * sizeof(U));
        });
    }

    template <int LANES>
    void decode_block(const Block& block, const uint8_t* data, size_t bytes) {
        const size_t plane = size_t(plan_.plane), low_bytes = block.size * plane;
        if (bytes < low_bytes) throw std::runtime_error("a block is smaller than its low bytes");
        Decoder<LANES> decoder(data + low_bytes, bytes - low_bytes);
        const auto chunk = std::make_unique<Chunk<F>>(plan_);
        const auto values = std::make_unique<int32_t[]>(CHUNK);
        for (size_t done = 0; done < block.size; done += CHUNK) {
            const size_t size = std::min(CHUNK, block.size - done);
            chunk->fill(plan_, *block.part, block.begin + done, size, base_);
            decoder.decode(chunk->contexts, values.get(), size, tables_->data());
            const uint8_t* low = data + done * plane;
            switch (plan_.plane) {
                case 0: restore<0>(block, done, size, *chunk, values.get(), low); break;
                case 1: restore<1>(block, done, size, *chunk, values.get(), low); break;
                case 2: restore<2>(block, done, size, *chunk, values.get(), low); break;
                case 5: restore<5>(block, done, size, *chunk, values.get(), low); break;
                case 6: restore<6>(block, done, size, *chunk, values.get(), low); break;
            }
        }
        decoder.finish();
    }

    template <int PLANE>
    void restore(const Block& block, size_t done, size_t size, const Chunk<F>& chunk, const int32_t* values, const uint8_t* low) {
        if constexpr (PLANE < int(sizeof(U))) {
            for_pieces(plan_, *block.part, block.begin + done, size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                const U* prediction = chunk.prediction + at;
                const auto value = [&](size_t i) {
                    U rest = 0;
                    std::memcpy(&rest, low + (at + i) * PLANE, PLANE);
                    return U(prediction[i] + U(U(values[at + i]) << (8 * PLANE) | rest));
                };
                if (block.part->alone)
                    for (size_t i = 0; i < count; ++i) tensor_[offset + i] = from_rotated<F>(value(i));
                else
                    for (size_t i = 0; i < count; ++i) tensor_[offset + i] = from_ordered<F>(value(i));
            });
        }
    }

    Plan plan_;
    const U* base_;
    U* tensor_;
    const std::vector<DecodeTable>* tables_;
    std::vector<DecodeTable> own_tables_;
    std::vector<Coded> blocks_;
};

template <class Function>
void with_known_float(int dtype, Function&& f) {
    if (!with_float(dtype, f)) throw std::invalid_argument("unknown float type code");
}

}  // namespace

int width(int dtype) {
    int bytes = 0;
    with_float(dtype, [&](auto type) { bytes = sizeof(typename decltype(type)::U); });
    return bytes;
}

void check(const Shape& shape) {
    const bool whole_rows = shape.base_values == shape.values || (shape.row_length && shape.base_values % shape.row_length == 0);
    if (!width(shape.dtype)) throw std::invalid_argument("unknown float type code");
    if (shape.row_length == 0 || shape.base_values > shape.values || !whole_rows || shape.values / shape.row_length >= UINT32_MAX)
        throw std::invalid_argument("the sizes of the tensor contradict each other");
}

std::vector<uint8_t> encode(const Shape& shape, const void* tensor, const void* base, int threads) {
    std::vector<uint8_t> body;
    with_known_float(shape.dtype, [&](auto type) { body = TensorEncoder<decltype(type)>(shape, tensor, base, threads).encode(); });
    return body;
}

void decode(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, void* tensor, int threads) {
    with_known_float(shape.dtype, [&](auto type) { TensorDecoder<decltype(type)>(shape, body, bytes, base, tensor).decode(threads); });
}

std::vector<uint64_t> count_symbols(const Shape& shape, const void* tensor, const void* base) {
    std::vector<uint64_t> counts;
    with_known_float(shape.dtype, [&](auto type) { counts = TensorEncoder<decltype(type)>(shape, tensor, base, 1).count(); });
    return counts;
}

void cast(int from, int to, const void* source, void* target, size_t values) {
    with_known_float(from, [&](auto from_type) {
        with_known_float(to, [&](auto to_type) {
            using From = decltype(from_type);
            using To = decltype(to_type);
            const auto* in = static_cast<const typename From::U*>(source);
            auto* out = static_cast<typename To::U*>(target);
            for (size_t i = 0; i < values; ++i) out[i] = cast<From, To>(in[i]);
        });
    });
}

}  // namespace fm_delta
