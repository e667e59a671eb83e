#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>

#include "../common/instruction_sets.h"
#include "../common/threads.h"
#include "choose_scales.h"
#include "chunk.h"
#include "encode_changes.h"
#include "low_rank.h"
#include "one_scale.h"
#include "rans.h"
#include "scales.h"
#include "table_choice.h"

namespace hf_ext::delta {
namespace {

constexpr size_t WIDE = 16384;            // blocks of at least this size have 64 lanes, smaller ones have one
constexpr size_t PIECE = 512;             // neighboring values of a sample
constexpr size_t GLANCE = 8192;           // values that show whether most did not change
constexpr size_t SAMPLED_ROWS = 64;       // that show how many did not change
constexpr size_t SCALE_VALUES = 1 << 16;  // values from which one scale for all is chosen
constexpr size_t CLASS_SHARE = 16, MOST_CLASS_VALUES = 1 << 15;  // share and number of values from which classes are chosen
constexpr size_t COUNT_CHUNKS = 40;                              // chunks on which tables are chosen

constexpr size_t COMPARED_VALUES = 1 << 14;  // on which low-rank changes are compared
constexpr size_t LEAST_ROWS = 32;            // of these

class TensorEncoder {
   public:
    TensorEncoder(const Shape& shape, const void* tensor, const void* base, const Factors& factors, int threads,
                  const Coarse& coarse = {})
        : type_(float_type(shape.dtype)),
          tensor_(static_cast<const uint8_t*>(tensor)),
          base_(static_cast<const uint8_t*>(base)),
          threads_(threads) {
        plan_.shape = shape;
        plan_.coarse = coarse;
        untouched_.resize(plan_.base_rows());
        plan_.set_rows(untouched_);
        const bool few = !coarse && !factors.rank && few_changed(true);
        if (!few) compare_rows(factors.rank);
        if (factors.rank && plan_.parts[1].first_row) move_base(factors);  // of no use if no coded row has a base
        if (coarse) {
            choose_scales(plan_, tensor_, base_, threads_);
            choose_tables();
        } else if (type_.width == 2) {
            if (few || few_changed())
                choose_classes();
            else
                choose_number_of_scales();
        } else {
            choose_scales(plan_, tensor_, base_, threads_);
            choose_plane(plan_, base_);
            choose_tables();
        }
    }

    std::vector<uint8_t> encode() const {
        const std::vector<EncodeTable> tables(plan_.tables.begin(), plan_.tables.end());
        std::vector<std::vector<uint8_t>> blocks(plan_.blocks());
        std::vector<uint32_t> entries(blocks.size());
        parallel_for(blocks.size(), threads_, [&](size_t i) {
            const Block block = block_at(plan_, i);
            Kind kind = block.size >= WIDE ? INTERLEAVED : NARROW;
            blocks[i] = plan_.few_changes(*block.part) ? code_list(i, tables, kind) : code(block, kind, tables);
            if (blocks[i].size() >= bytes(block.size)) {
                kind = RAW;
                blocks[i].resize(bytes(block.size));
                for_pieces(plan_, *block.part, block.begin, block.size,
                           [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                               std::memcpy(blocks[i].data() + bytes(at), tensor_ + bytes(offset), bytes(count));
                           });
            }
            entries[i] = uint32_t(blocks[i].size() << 2 | kind);
        });
        return assemble(entries, blocks);
    }

    // Returns about how many bits `encode` makes, estimated from a sample of the blocks.
    double cost() const {
        const size_t values = plan_.parts[0].values + plan_.parts[1].values;
        return coded_bits_ + 8.0 * double(plan_.plane) * double(values) + 8.0 * double(side().size());
    }

    size_t numbers() const { return numbers_; }

    std::vector<uint64_t> count() const {
        std::vector<uint64_t> counts(TABLES * SYMBOLS);
        const auto chunk = std::make_unique<Chunk>(plan_);
        for (size_t i = 0; i < plan_.blocks(); ++i)
            for (size_t done = 0; done < block_at(plan_, i).size; done += CHUNK) {
                prepare(block_at(plan_, i), done, *chunk);
                count_symbols_of(*chunk, counts);
            }
        return counts;
    }

   private:
    size_t bytes(size_t values) const { return values * size_t(type_.width); }
    const uint16_t* tensor16() const { return reinterpret_cast<const uint16_t*>(tensor_); }
    const uint16_t* base16() const { return reinterpret_cast<const uint16_t*>(base_); }

    bool any_untouched() const { return std::find(untouched_.begin(), untouched_.end(), true) != untouched_.end(); }

    bool is_untouched(size_t row) const {
        const size_t at = bytes(row * plan_.shape.row_length);
        return std::memcmp(tensor_ + at, base_ + at, bytes(plan_.row_values(row))) == 0;
    }

    // Returns whether a coarse change of any value in a row is not 0.
    bool any_numbers(size_t row) const {
        const size_t begin = row * plan_.shape.row_length, end = begin + plan_.row_values(row);
        int32_t any = 0;
        with_float(plan_.shape.dtype, [&](auto type) {
            using F = decltype(type);
            const auto *x = reinterpret_cast<const typename F::U*>(tensor_), *b = reinterpret_cast<const typename F::U*>(base_);
            with_instructions([&](auto) {
                for (size_t i = begin; i < end; ++i) any |= number_of<F>(x[i], b[i], plan_.coarse);
            });
        });
        return any != 0;
    }

    // Returns the share of rows that changed, in a sample.
    double touched_rows() const {
        const size_t rows = plan_.base_rows(), sampled = std::min(rows, SAMPLED_ROWS);
        size_t touched = 0;
        for (size_t i = 0; i < sampled; ++i) touched += !is_untouched(rows * i / sampled);
        return double(touched) / double(sampled);
    }

    // Finds the rows that stay as the base has them.
    void compare_rows(int rank) {
        for (size_t row = 0; row < untouched_.size(); ++row)
            untouched_[row] = is_untouched(row) || (plan_.coarse && !rank && !any_numbers(row));
        plan_.set_rows(untouched_);
    }

    // Replaces the base by the base moved by the factors.
    void move_base(const Factors& factors) {
        const Part& part = plan_.parts[0];
        const size_t rank = size_t(factors.rank), length = plan_.shape.row_length;
        change_.rank = factors.rank;
        change_.exponent = factors.exponent;
        for (size_t row = 0; row < plan_.parts[1].first_row; ++row) {
            const int32_t* begin = factors.rows + plan_.rows[row] * rank;
            change_.rows.insert(change_.rows.end(), begin, begin + rank);
        }
        change_.columns.assign(factors.columns, factors.columns + rank * length);
        change_.prepare(type_.width == 8);
        moved_base_.resize(bytes(plan_.shape.base_values));
        parallel_for(plan_.blocks(part), threads_, [&](size_t i) {
            const Block block = block_at(plan_, i);
            change_.predict(plan_, part, block.begin, block.size, base_, moved_base_.data());
        });
        base_ = moved_base_.data();
    }

    // Fills a chunk of a block.
    void prepare(const Block& block, size_t done, Chunk& chunk) const {
        chunk.predict(*block.part, block.begin + done, std::min(CHUNK, block.size - done), base_);
        chunk.split(tensor_);
    }

    // Adds up the symbols of a chunk. Returns the number of raw bits that go with them.
    static size_t count_symbols_of(const Chunk& chunk, std::vector<uint64_t>& counts) {
        size_t raw = 0;
        for (size_t i = 0; i < chunk.size(); ++i) {
            const Context context = chunk.contexts[i];
            raw += size_t(context.shift());
            ++counts[size_t(context.table()) * SYMBOLS + chunk.ids[i]];
        }
        return raw;
    }

    // Chooses scales for rows and columns, or one for all values that have a base where that makes less. Small tensors are not
    // worth the comparison.
    void choose_number_of_scales() {
        const Part& part = plan_.parts[0];
        choose_scales(plan_, tensor_, base_, threads_);
        choose_tables();
        if (part.values < GLANCE) return;
        ResidualCounts counts(type_);
        sample(GLANCE, [&](uint16_t base, uint16_t value) { counts.add(base, value); });
        if (!counts.mostly_zeros()) return;
        sample(SCALE_VALUES, [&](uint16_t base, uint16_t value) { counts.add(base, value); });
        const Plan scaled = plan_;
        const double coded_bits = coded_bits_, most = cost();
        std::fill_n(plan_.row_scales.begin(), plan_.parts[1].first_row,
                    counts.best_scale(double(counts.values()) / double(part.values)));
        if (plan_.parts[1].values == 0) plan_.column_scales.clear();
        choose_tables();
        if (cost() < most) return;
        plan_ = scaled;
        coded_bits_ = coded_bits;
    }

    // Calls f(base, value) for values in pieces all over those that have a base.
    template <class Function>
    void sample(size_t values, Function&& f) const {
        const Part& part = plan_.parts[0];
        const size_t pieces = std::min(values, part.values) / PIECE;
        for (size_t i = 0; i < pieces; ++i)
            for_pieces(plan_, part, (part.values - PIECE) * i / pieces, PIECE,
                       [&](size_t offset, size_t, size_t count, size_t, size_t) {
                           for (size_t at = offset; at < offset + count; ++at) f(base16()[at], tensor16()[at]);
                       });
    }

    // Returns whether a sample of the coded rows shows that few of their values changed. Small tensors cost less with the usual
    // tables. With `everywhere`, also whether leaving out untouched rows does not pay: then no pass over all rows is needed.
    bool few_changed(bool everywhere = false) const {
        if (type_.width != 2 || plan_.shape.base_values < GLANCE) return false;
        const double values = double(plan_.shape.base_values);
        ChangeCounts counts(type_);
        sample(GLANCE, [&](uint16_t base, uint16_t value) { counts.add(base, value); });
        return counts.few() && !(everywhere && flags_pay(counts, values, touched_rows() * values));
    }

    // Returns whether leaving out untouched rows saves more than a bit for each row, if a sample of so many values shows the
    // changes, and the other rows have `touched` values.
    bool flags_pay(const ChangeCounts& counts, double sampled, double touched) const {
        return counts.saved_bits(sampled, touched, double(plan_.shape.base_values)) > double(plan_.base_rows());
    }

    // Chooses how the changes are coded where few values changed.
    void choose_classes() {
        ChangeCounts counts(type_);
        sample(std::clamp(plan_.parts[0].values / CLASS_SHARE, GLANCE, MOST_CLASS_VALUES),
               [&](uint16_t base, uint16_t value) { counts.add(base, value); });
        const Part& part = plan_.parts[0];
        if (!change_.rank && !flags_pay(counts, double(part.values), double(part.values))) {
            untouched_.assign(untouched_.size(), false);
            plan_.set_rows(untouched_);
        }
        const size_t blocks = plan_.blocks(part), sampled = std::min(blocks, SAMPLED_BLOCKS);
        plan_.classes = counts.classes(double(counts.values()) / double(part.values), blocks);
        choose_scales(plan_, tensor_, base_, threads_);
        choose_tables();
        size_t values = 0;
        for (size_t i = 0; i < sampled; ++i) {
            found_.emplace_back(blocks * i / sampled, Changes());
            values += block_at(plan_, found_.back().first).size;
        }
        parallel_for(sampled, threads_,
                     [&](size_t i) { found_[i].second = find_changes(plan_, found_[i].first, tensor16(), base16()); });
        const double share = double(values) / double(part.values);
        coded_bits_ += choose_codes(found_, share, plan_) / share;
    }

    // Codes the list of changes of a block.
    std::vector<uint8_t> code_list(size_t index, const std::vector<EncodeTable>& tables, Kind& kind) const {
        for (const auto& [known, changes] : found_)
            if (known == index) return code_changes(changes, plan_.classes, tables, kind);
        return code_changes(find_changes(plan_, index, tensor16(), base16()), plan_.classes, tables, kind);
    }

    // Chooses the tables of all values but those that are coded as few changes.
    void choose_tables() {
        plan_.tables.assign(DEFAULT_TABLES.begin(), DEFAULT_TABLES.end());
        plan_.own_tables = 0;
        coded_bits_ = 0;
        std::vector<std::pair<Block, size_t>> chunks;
        size_t all = 0;
        for (size_t i = 0; i < plan_.blocks(); ++i) {
            const Block block = block_at(plan_, i);
            if (plan_.few_changes(*block.part)) continue;
            for (size_t done = 0; done < block.size; done += CHUNK) chunks.emplace_back(block, done);
            all += block.size;
        }
        if (chunks.empty()) return;
        const size_t sampled = std::min(chunks.size(), COUNT_CHUNKS), groups = std::min(sampled, size_t(std::max(threads_, 1)));
        std::vector<std::vector<uint64_t>> partial(groups, std::vector<uint64_t>(TABLES * SYMBOLS));
        std::vector<size_t> raw(groups), values(groups);
        // The last chunk is among them: where some rows have no base it is one of those.
        parallel_for(groups, threads_, [&](size_t group) {
            const auto chunk = std::make_unique<Chunk>(plan_);
            for (size_t i = group; i < sampled; i += groups) {
                const auto& [block, done] = chunks[chunks.size() - 1 - i * chunks.size() / sampled];
                prepare(block, done, *chunk);
                values[group] += chunk->size();
                raw[group] += count_symbols_of(*chunk, partial[group]);
            }
        });
        const double share = double(std::accumulate(values.begin(), values.end(), size_t(0))) / double(all);
        double bits = double(std::accumulate(raw.begin(), raw.end(), size_t(0)));
        for (int id = 0; id < TABLES; ++id) {
            Counts counts{};
            for (const auto& part : partial)
                for (int symbol = 0; symbol < SYMBOLS; ++symbol) counts[symbol] += part[id * SYMBOLS + symbol];
            if (std::any_of(counts.begin(), counts.end(), [](uint64_t count) { return count != 0; }))
                bits += choose_table(counts, id, share, plan_);
        }
        coded_bits_ = bits / share;
    }

    std::vector<uint8_t> code(const Block& block, Kind kind, const std::vector<EncodeTable>& tables) const {
        const size_t plane = size_t(plan_.plane);
        std::vector<uint8_t> out(block.size * plane);
        Encoder encoder(lanes_of(kind), block.size);
        const auto chunk = std::make_unique<Chunk>(plan_);
        for (size_t done = (block.size - 1) / CHUNK * CHUNK + CHUNK; done > 0;) {
            done -= CHUNK;
            prepare(block, done, *chunk);
            if (plan_.coarse && !block.part->alone)
                numbers_ += chunk->size() - size_t(std::count(chunk->highs, chunk->highs + chunk->size(), 0));
            encoder.encode(chunk->contexts, chunk->highs, chunk->ids, chunk->size(), tables.data());
            chunk->put_lows(tensor_, out.data() + done * plane);
        }
        encoder.finish(out);
        return out;
    }

    std::vector<uint8_t> side() const {
        BitWriter side;
        if (plan_.coarse) side.put(bits_as<uint32_t>(plan_.coarse.step), 32);
        if (any_untouched())
            for (const bool untouched : untouched_) side.put(untouched, 1);
        if (!plan_.classes.empty()) put_classes(side, plan_.classes);
        put_scales(side, {plan_.row_scales.begin() + ptrdiff_t(plan_.first_scaled()), plan_.row_scales.end()});
        put_scales(side, plan_.column_scales);
        for (int id = 0; id < TABLES; ++id) {
            if (!(plan_.own_tables >> id & 1)) continue;
            const std::vector<uint32_t> codes = differences(plan_.tables[id], plan_.usual(id));
            const int k = best_rice(codes);
            side.put(uint64_t(k), 3);
            for (const uint32_t code : codes) put_rice(side, code, k);
        }
        if (change_.rank) put_low_rank(side, change_, plan_.parts[1].first_row, plan_.shape.row_length);
        return side.bytes();
    }

    std::vector<uint8_t> assemble(const std::vector<uint32_t>& entries, const std::vector<std::vector<uint8_t>>& blocks) const {
        const std::vector<uint8_t> side = this->side();
        std::vector<uint8_t> body;
        body.reserve(14 + side.size() + 4 * entries.size() +
                     std::accumulate(blocks.begin(), blocks.end(), size_t(0),
                                     [](size_t sum, const auto& block) { return sum + block.size(); }));
        const auto append = [&body](const void* data, size_t bytes) {
            const auto* begin = static_cast<const uint8_t*>(data);
            body.insert(body.end(), begin, begin + bytes);
        };
        body.push_back(uint8_t(plan_.plane));
        body.push_back(uint8_t((any_untouched() ? UNTOUCHED_ROWS : 0) | (plan_.column_scales.empty() ? 0 : COLUMN_SCALES) |
                               (change_.rank ? LOW_RANK : 0) | (plan_.classes.empty() ? 0 : FEW_CHANGES) |
                               (plan_.coarse ? COARSE : 0)));
        append(&plan_.own_tables, 8);
        const uint32_t side_bytes = uint32_t(side.size());
        append(&side_bytes, 4);
        append(side.data(), side_bytes);
        append(entries.data(), 4 * entries.size());
        for (const auto& block : blocks) append(block.data(), block.size());
        return body;
    }

    const FloatType type_;
    const uint8_t* tensor_;
    const uint8_t* base_;
    int threads_;
    Plan plan_;
    std::vector<bool> untouched_;
    LowRank change_;
    std::vector<uint8_t> moved_base_;
    std::vector<std::pair<size_t, Changes>> found_;  // few changes of some blocks, by the index of the block
    double coded_bits_ = 0;                          // estimated size of the values without their low bytes
    mutable std::atomic<size_t> numbers_ = 0;        // of coarse changes that are not 0, in the blocks that are encoded
};

// Returns the candidate, or none, that is expected to give the smallest body. Of a large tensor, they are compared on a sample
// of the rows that changed.
Factors best_factors(const Shape& shape, const void* tensor, const void* base, const std::vector<Factors>& candidates,
                     int threads) {
    if (candidates.empty()) return {};
    const size_t length = shape.row_length, wanted = std::max(LEAST_ROWS, COMPARED_VALUES / length);
    const size_t row_bytes = length * size_t(width(shape.dtype));
    const auto row_of = [row_bytes](const void* values, size_t row) {
        return static_cast<const uint8_t*>(values) + row * row_bytes;
    };
    std::vector<size_t> rows;
    for (size_t row = 0; (row + 1) * length <= shape.base_values; ++row)
        if (std::memcmp(row_of(tensor, row), row_of(base, row), row_bytes) != 0) rows.push_back(row);
    if (rows.empty()) return {};
    const size_t sampled = rows.size() < 2 * wanted ? rows.size() : wanted;
    const double scale = double(rows.size()) / double(sampled);
    std::vector<uint8_t> values(sampled * row_bytes), predictions(sampled * row_bytes);
    for (size_t i = 0; i < sampled; ++i) {
        const size_t row = rows[i * rows.size() / sampled];
        std::copy_n(row_of(tensor, row), row_bytes, &values[i * row_bytes]);
        std::copy_n(row_of(base, row), row_bytes, &predictions[i * row_bytes]);
    }
    const Shape part{shape.dtype, sampled * length, length, sampled * length};
    const auto cost = [&](const Factors& factors) {
        const size_t rank = size_t(factors.rank);
        std::vector<int32_t> row_factors(sampled * rank);
        for (size_t i = 0; i < sampled; ++i)
            std::copy_n(factors.rows + rows[i * rows.size() / sampled] * rank, rank, row_factors.data() + i * rank);
        const Factors some{factors.rank, factors.exponent, row_factors.data(), factors.columns};
        const double once = rank ? column_factor_bits(factors, length) : 0;
        return once + scale * (TensorEncoder(part, values.data(), predictions.data(), some, threads).cost() - once);
    };
    Factors best;
    double least = cost(best);
    for (const Factors& factors : candidates)
        if (const double bits = cost(factors); bits < least) least = bits, best = factors;
    return best;
}

}  // namespace

std::vector<uint8_t> encode(const Shape& shape, const void* tensor, const void* base, const std::vector<Factors>& candidates,
                            int threads) {
    return TensorEncoder(shape, tensor, base, best_factors(shape, tensor, base, candidates, threads), threads).encode();
}

std::vector<uint8_t> encode_coarse(const Shape& shape, const void* tensor, const void* base, const Factors& factors,
                                   const Coarse& coarse, int threads, size_t& numbers) {
    if (!(coarse.step >= LEAST_STEP && coarse.step <= MOST_STEP) || !(coarse.threshold >= 0 && coarse.threshold <= 2) ||
        width(shape.dtype) == 8)
        throw std::invalid_argument("coarse changes need a step of normal size, a threshold from 0 to 2, and at most 32 bits");
    const TensorEncoder encoder(shape, tensor, base, factors, threads, coarse);
    std::vector<uint8_t> body = encoder.encode();
    numbers = encoder.numbers();
    return body;
}

std::vector<uint64_t> count_symbols(const Shape& shape, const void* tensor, const void* base) {
    return TensorEncoder(shape, tensor, base, Factors{}, 1).count();
}

}  // namespace hf_ext::delta
