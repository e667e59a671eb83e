#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "../common/threads.h"
#include "blocks.h"
#include "choose_scales.h"
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
constexpr size_t SCALE_VALUES = 1 << 16;  // values from which one scale for all is chosen
constexpr size_t CLASS_SHARE = 16, MOST_CLASS_VALUES = 1 << 16;  // share and number of values from which classes are chosen
constexpr size_t COUNT_CHUNKS = 40;                              // chunks on which tables are chosen

constexpr size_t COMPARED_VALUES = 1 << 14;  // on which low-rank changes are compared
constexpr size_t LEAST_ROWS = 32;            // of these

template <class F>
class TensorEncoder {
    using U = typename F::U;

   public:
    TensorEncoder(const Shape& shape, const void* tensor, const void* base, const Factors& factors, int threads)
        : tensor_(static_cast<const U*>(tensor)), base_(static_cast<const U*>(base)), threads_(threads) {
        plan_.shape = shape;
        untouched_.resize(plan_.base_rows());
        for (size_t row = 0; row < untouched_.size(); ++row) {
            const size_t at = row * shape.row_length;
            untouched_[row] = std::memcmp(tensor_ + at, base_ + at, plan_.row_values(row) * sizeof(U)) == 0;
        }
        plan_.set_rows(untouched_);
        if (factors.rank && plan_.parts[1].first_row) move_base(factors);  // of no use if no coded row has a base
        if constexpr (F::WIDTH == 16) {
            if (few_changed())
                choose_classes();
            else
                choose_number_of_scales();
        } else {
            choose_scales<F>(plan_, tensor_, base_, threads_);
            choose_plane<F>(plan_, base_);
            choose_tables();
        }
    }

    std::vector<uint8_t> encode() const {
        std::vector<EncodeTable> tables(plan_.tables.begin(), plan_.tables.end());
        std::vector<std::vector<uint8_t>> blocks(plan_.blocks());
        std::vector<uint32_t> entries(blocks.size());
        parallel_for(blocks.size(), threads_, [&](size_t i) {
            const Block block = block_at(plan_, i);
            Kind kind = block.size >= WIDE ? INTERLEAVED : NARROW;
            with_instructions([&](auto set) {
                if constexpr (F::WIDTH == 16)
                    if (plan_.few_changes(*block.part)) return void(blocks[i] = code_list<set()>(i, tables, kind));
                blocks[i] = kind == INTERLEAVED ? code<64, set()>(block, tables) : code<1, set()>(block, tables);
            });
            if (blocks[i].size() >= block.size * sizeof(U)) {
                kind = RAW;
                blocks[i].resize(block.size * sizeof(U));
                for_pieces(plan_, *block.part, block.begin, block.size,
                           [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                               std::memcpy(blocks[i].data() + at * sizeof(U), tensor_ + offset, count * sizeof(U));
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

    std::vector<uint64_t> count() const {
        std::vector<uint64_t> counts(TABLES * SYMBOLS);
        const std::unique_ptr<Work> work(new Work);
        for (size_t i = 0; i < plan_.blocks(); ++i)
            for (size_t done = 0; done < block_at(plan_, i).size; done += CHUNK)
                count_chunk(block_at(plan_, i), done, *work, counts);
        return counts;
    }

   private:
    bool any_untouched() const { return std::find(untouched_.begin(), untouched_.end(), true) != untouched_.end(); }

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
        change_.prepare(F::WIDTH == 64);
        moved_base_.resize(plan_.shape.base_values);
        parallel_for(plan_.blocks(part), threads_, [&](size_t i) {
            const Block block = block_at(plan_, i);
            change_.predict<F>(plan_, part, block.begin, block.size, base_, moved_base_.data());
        });
        base_ = moved_base_.data();
    }

    // A chunk ready for coding: contexts and predictions, high parts of the residuals, and their symbols.
    struct Work {
        Chunk<F> chunk;
        int32_t values[CHUNK];
        uint8_t ids[CHUNK];
    };

    void prepare(const Block& block, size_t done, size_t size, Work& work) const {
        work.chunk.fill(plan_, *block.part, block.begin + done, size, base_);
        for_pieces(plan_, *block.part, block.begin + done, size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
            const U* __restrict x = tensor_ + offset;
            const U* __restrict prediction = work.chunk.prediction + at;
            int32_t* __restrict value = work.values + at;
            const int plane = plan_.plane;
            if (block.part->alone)
                for (size_t i = 0; i < count; ++i) value[i] = high_part<F>(to_rotated<F>(x[i]), prediction[i], plane);
            else
                for (size_t i = 0; i < count; ++i) value[i] = high_part<F>(to_ordered<F>(x[i]), prediction[i], plane);
        });
        for (size_t i = 0; i < size; ++i) work.ids[i] = symbol_id(work.values[i] >> work.chunk.contexts[i].shift());
    }

    // Adds up the symbols of a chunk. Returns the number of raw bits that go with them.
    size_t count_chunk(const Block& block, size_t done, Work& work, std::vector<uint64_t>& counts) const {
        size_t raw = 0;
        const size_t size = std::min(CHUNK, block.size - done);
        prepare(block, done, size, work);
        for (size_t i = 0; i < size; ++i) {
            const Context context = work.chunk.contexts[i];
            raw += size_t(context.shift());
            ++counts[size_t(context.table()) * SYMBOLS + work.ids[i]];
        }
        return raw;
    }

    // Chooses scales for rows and columns, or one for all values that have a base where that makes less. Small tensors are not
    // worth the comparison.
    void choose_number_of_scales() {
        const Part& part = plan_.parts[0];
        choose_scales<F>(plan_, tensor_, base_, threads_);
        choose_tables();
        if (part.values < GLANCE) return;
        ResidualCounts<F> counts;
        sample(GLANCE, [&](U base, U value) { counts.add(base, value); });
        if (!counts.mostly_zeros()) return;
        sample(SCALE_VALUES, [&](U base, U value) { counts.add(base, value); });
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
                           for (size_t at = offset; at < offset + count; ++at) f(base_[at], tensor_[at]);
                       });
    }

    // Returns whether a sample of the rows that changed shows that few of their values did. Small tensors cost less with the
    // usual tables.
    bool few_changed() const {
        if (plan_.shape.base_values < GLANCE) return false;
        ChangeCounts<F> counts;
        sample(GLANCE, [&](U base, U value) { counts.add(base, value); });
        return counts.few();
    }

    // Chooses how the changes are coded where few values changed.
    void choose_classes() {
        ChangeCounts<F> counts;
        sample(std::clamp(plan_.parts[0].values / CLASS_SHARE, GLANCE, MOST_CLASS_VALUES),
               [&](U base, U value) { counts.add(base, value); });
        const Part& part = plan_.parts[0];
        if (!change_.rank && !counts.worth_a_bit_for_each_row(part.values, plan_.shape.base_values, plan_.base_rows())) {
            untouched_.assign(untouched_.size(), false);
            plan_.set_rows(untouched_);
        }
        const size_t blocks = plan_.blocks(part), sampled = std::min(blocks, SAMPLED_BLOCKS);
        plan_.classes = counts.classes(double(counts.values()) / double(part.values), blocks);
        choose_scales<F>(plan_, tensor_, base_, threads_);
        choose_tables();
        size_t values = 0;
        for (size_t i = 0; i < sampled; ++i) {
            found_.emplace_back(blocks * i / sampled, Changes());
            values += block_at(plan_, found_.back().first).size;
        }
        parallel_for(sampled, threads_, [&](size_t i) {
            with_instructions(
                [&](auto set) { found_[i].second = find_changes<F, set()>(plan_, found_[i].first, tensor_, base_); });
        });
        const double share = double(values) / double(part.values);
        coded_bits_ += choose_codes(found_, share, plan_) / share;
    }

    // Codes the list of changes of a block.
    template <Instructions SET>
    std::vector<uint8_t> code_list(size_t index, const std::vector<EncodeTable>& tables, Kind& kind) const {
        for (const auto& [known, changes] : found_)
            if (known == index) return code_changes<SET>(changes, plan_.classes, tables, kind);
        return code_changes<SET>(find_changes<F, SET>(plan_, index, tensor_, base_), plan_.classes, tables, kind);
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
            const std::unique_ptr<Work> work(new Work);
            for (size_t i = group; i < sampled; i += groups) {
                const auto& [block, done] = chunks[chunks.size() - 1 - i * chunks.size() / sampled];
                values[group] += std::min(CHUNK, block.size - done);
                with_instructions(
                    [&, block = block, done = done](auto) { raw[group] += count_chunk(block, done, *work, partial[group]); });
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

    template <int LANES, Instructions SET>
    std::vector<uint8_t> code(const Block& block, const std::vector<EncodeTable>& tables) const {
        std::vector<uint8_t> out(block.size * size_t(plan_.plane));
        Encoder<LANES, SET> encoder(block.size);
        const std::unique_ptr<Work> work(new Work);
        for (size_t done = (block.size - 1) / CHUNK * CHUNK + CHUNK; done > 0;) {
            done -= CHUNK;
            const size_t size = std::min(CHUNK, block.size - done);
            prepare(block, done, size, *work);
            encoder.encode(work->chunk.contexts, work->values, work->ids, size, tables.data());
            uint8_t* low = out.data() + done * size_t(plan_.plane);
            switch (plan_.plane) {
                case 1: put_low_bytes<1>(block, done, size, work->chunk, low); break;
                case 2: put_low_bytes<2>(block, done, size, work->chunk, low); break;
                case 5: put_low_bytes<5>(block, done, size, work->chunk, low); break;
                case 6: put_low_bytes<6>(block, done, size, work->chunk, low); break;
            }
        }
        encoder.finish(out);
        return out;
    }

    template <int PLANE>
    void put_low_bytes(const Block& block, size_t done, size_t size, const Chunk<F>& chunk, uint8_t* low) const {
        if constexpr (PLANE < int(sizeof(U))) {
            for_pieces(plan_, *block.part, block.begin + done, size,
                       [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                           const U* __restrict x = tensor_ + offset;
                           const U* __restrict prediction = chunk.prediction + at;
                           uint8_t* __restrict bytes = low + at * PLANE;
                           const bool alone = block.part->alone;
                           for (size_t i = 0; i < count; ++i) {
                               const U rest = U((alone ? to_rotated<F>(x[i]) : to_ordered<F>(x[i])) - prediction[i]);
                               if constexpr (PLANE == 1)
                                   bytes[i] = uint8_t(rest);
                               else
                                   std::memcpy(bytes + i * PLANE, &rest, PLANE);
                           }
                       });
        }
    }

    std::vector<uint8_t> side() const {
        BitWriter side;
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
                               (change_.rank ? LOW_RANK : 0) | (plan_.classes.empty() ? 0 : FEW_CHANGES)));
        append(&plan_.own_tables, 8);
        const uint32_t side_bytes = uint32_t(side.size());
        append(&side_bytes, 4);
        append(side.data(), side_bytes);
        append(entries.data(), 4 * entries.size());
        for (const auto& block : blocks) append(block.data(), block.size());
        return body;
    }

    const U* tensor_;
    const U* base_;
    int threads_;
    Plan plan_;
    std::vector<bool> untouched_;
    LowRank change_;
    std::vector<U> moved_base_;
    std::vector<std::pair<size_t, Changes>> found_;  // few changes of some blocks, by the index of the block
    double coded_bits_ = 0;                          // estimated size of the values without their low bytes
};

// Returns the candidate, or none, that is expected to give the smallest body. Of a large tensor, they are compared on a sample
// of the rows that changed.
template <class F>
Factors best_factors(const Shape& shape, const typename F::U* tensor, const typename F::U* base,
                     const std::vector<Factors>& candidates, int threads) {
    using U = typename F::U;
    if (candidates.empty()) return {};
    const size_t length = shape.row_length, wanted = std::max(LEAST_ROWS, COMPARED_VALUES / length);
    std::vector<size_t> rows;
    for (size_t row = 0; (row + 1) * length <= shape.base_values; ++row)
        if (std::memcmp(tensor + row * length, base + row * length, length * sizeof(U)) != 0) rows.push_back(row);
    if (rows.empty()) return {};
    const size_t sampled = rows.size() < 2 * wanted ? rows.size() : wanted;
    const double scale = double(rows.size()) / double(sampled);
    std::vector<U> values(sampled * length), predictions(sampled * length);
    for (size_t i = 0; i < sampled; ++i) {
        const size_t row = rows[i * rows.size() / sampled];
        std::copy_n(tensor + row * length, length, &values[i * length]);
        std::copy_n(base + row * length, length, &predictions[i * length]);
    }
    const Shape part{shape.dtype, values.size(), length, values.size()};
    const auto cost = [&](const Factors& factors) {
        const size_t rank = size_t(factors.rank);
        std::vector<int32_t> row_factors(sampled * rank);
        for (size_t i = 0; i < sampled; ++i)
            std::copy_n(factors.rows + rows[i * rows.size() / sampled] * rank, rank, row_factors.data() + i * rank);
        const Factors some{factors.rank, factors.exponent, row_factors.data(), factors.columns};
        const double once = rank ? column_factor_bits(factors, length) : 0;
        return once + scale * (TensorEncoder<F>(part, values.data(), predictions.data(), some, threads).cost() - once);
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
    std::vector<uint8_t> body;
    with_float(shape.dtype, [&](auto type) {
        using F = decltype(type);
        using U = typename F::U;
        const Factors factors =
            best_factors<F>(shape, static_cast<const U*>(tensor), static_cast<const U*>(base), candidates, threads);
        body = TensorEncoder<F>(shape, tensor, base, factors, threads).encode();
    });
    return body;
}

std::vector<uint64_t> count_symbols(const Shape& shape, const void* tensor, const void* base) {
    std::vector<uint64_t> counts;
    with_float(shape.dtype,
               [&](auto type) { counts = TensorEncoder<decltype(type)>(shape, tensor, base, Factors{}, 1).count(); });
    return counts;
}

}  // namespace hf_ext::delta
