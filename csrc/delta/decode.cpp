#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "../common/threads.h"
#include "chunk.h"
#include "decode_changes.h"
#include "low_rank.h"
#include "rans.h"
#include "scales.h"

namespace hf_ext::delta {
namespace {

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

// Returns the default tables with some replaced by the tensor's own, valid until the thread's next call. Each thread keeps its
// copy, because building all tables takes longer than decoding a small tensor.
const std::vector<DecodeTable>& with_own_tables(const std::vector<std::pair<int, Frequencies>>& own) {
    thread_local std::vector<DecodeTable> tables = default_decode_tables();
    thread_local std::vector<int> replaced;
    for (const int id : replaced) tables[size_t(id)] = default_decode_tables()[size_t(id)];
    replaced.clear();
    for (const auto& [id, frequencies] : own) {
        replaced.push_back(id);
        tables[size_t(id)] = DecodeTable(frequencies);
    }
    return tables;
}

Frequencies read_table(BitReader& in, const Frequencies& usual) {
    const int k = int(in.get(3));
    Frequencies frequencies{};
    int sum = 0;
    get_rice(in, k, SYMBOLS - 1, 16, [&](size_t id, int difference) {
        const int frequency = usual[id] + difference;
        if (frequency < 0 || frequency > PROBABILITY_SUM) throw std::runtime_error("a table has an impossible frequency");
        frequencies[id] = uint16_t(frequency);
        sum += frequency;
    });
    if (sum != PROBABILITY_SUM) throw std::runtime_error("a table's frequencies do not add up");
    return frequencies;
}

class TensorDecoder {
   public:
    TensorDecoder(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, void* tensor)
        : type_(float_type(shape.dtype)),
          body_(body),
          base_(static_cast<const uint8_t*>(base)),
          tensor_(static_cast<uint8_t*>(tensor)) {
        Reader in(body, bytes);
        plan_.shape = shape;
        plan_.plane = in.get<uint8_t>();
        const bool plane_fits = type_.width == 2   ? plan_.plane == 0
                                : type_.width == 4 ? plan_.plane <= 2
                                                   : plan_.plane == 5 || plan_.plane == 6;
        const uint8_t flags = in.get<uint8_t>();
        plan_.own_tables = in.get<uint64_t>();
        const bool coarse = flags & COARSE, few = flags & FEW_CHANGES;
        const bool flags_fit =
            flags < 2 * COARSE && !(few && (coarse || type_.width != 2)) && !(coarse && (plan_.plane || type_.width == 8));
        if (!plane_fits || !flags_fit || plan_.own_tables >> TABLES)
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
            if (coded.kind == RAW) return copy_raw(block, coded);
            if (plan_.few_changes(*block.part)) return change_block(block, coded);
            if (coded.kind == MEDIUM) throw std::runtime_error("a block is of a kind this version does not know");
            decode_block(block, coded);
        });
    }

    bool lists_changes() const {
        return !plan_.classes.empty() && !change_.rank && plan_.parts[1].values == 0 && plan_.shape.values <= UINT32_MAX;
    }

    StoredFactors factors() const {
        const size_t rank = size_t(change_.rank);
        StoredFactors stored{change_.rank, change_.exponent, std::vector<int32_t>(plan_.base_rows() * rank), change_.columns};
        for (size_t i = 0; i < plan_.parts[1].first_row && rank; ++i)
            std::copy_n(&change_.rows[i * rank], rank, &stored.rows[plan_.rows[i] * rank]);
        return stored;
    }

    Layout layout() const {
        const size_t plane = size_t(plan_.plane), length = plan_.shape.row_length;
        Layout all{plan_.plane, change_.exponent, plan_.coarse.step, change_.rank && change_.wide(), plan_.rows};
        all.row_scales = plan_.row_scales, all.column_scales = plan_.column_scales;
        for (int id = 0; id < TABLES; ++id) {
            const auto own = std::find_if(own_.begin(), own_.end(), [id](const auto& one) { return one.first == id; });
            const Frequencies& table = own == own_.end() ? DEFAULT_TABLES[size_t(id)] : own->second;
            all.frequencies.insert(all.frequencies.end(), table.begin(), table.end());
        }
        for (const Class& one : plan_.classes)
            all.classes.insert(all.classes.end(), {one.end, one.gap.shift, one.size.shift, one.center});
        all.row_factors = change_.rows, all.column_factors = change_.columns;
        for (size_t i = 0; i < blocks_.size(); ++i) {
            const Block block = block_at(plan_, i);
            const Coded& coded = blocks_[i];
            const uint8_t *data = coded.data, *end = data + coded.bytes;
            const bool few = plan_.few_changes(*block.part);
            std::vector<size_t> counts(plan_.classes.size());
            if (coded.kind == RAW) {
                require_raw(block, coded);
            } else if (few) {
                counts = get_counts(plan_, block, data, end);
            } else if (coded.kind == MEDIUM) {
                throw std::runtime_error("a block is of a kind this version does not know");
            }
            const size_t lows = few ? 0 : plane * block.size, lanes = coded.kind == RAW ? 0 : lanes_of(coded.kind);
            if (lanes && data != end && (size_t(end - data) < lows + 4 * lanes || (size_t(end - data) - lows) % 2))
                throw std::runtime_error("an entropy-coded block has an impossible size");
            all.counts.insert(all.counts.end(), counts.begin(), counts.end());
            all.blocks.push_back({block.part->alone, int64_t(block.part->first_row + block.begin / length),
                                  int64_t(block.begin % length), int64_t(block.size), int64_t(lanes), data - body_,
                                  end - body_});
        }
        return all;
    }

    Replacements list_changes(int threads) const {
        std::vector<Replacements> lists(blocks_.size());
        parallel_for(blocks_.size(), threads, [&](size_t i) {
            const Block block = block_at(plan_, i);
            lists[i] = blocks_[i].kind == RAW ? list_raw(block, blocks_[i]) : decoded_changes(block, blocks_[i]).list(base16());
        });
        Replacements all;
        for (const Replacements& list : lists) {
            all.places.insert(all.places.end(), list.places.begin(), list.places.end());
            all.values.insert(all.values.end(), list.values.begin(), list.values.end());
        }
        return all;
    }

   private:
    struct Coded {
        const uint8_t* data;
        size_t bytes;
        Kind kind;
    };

    void read_side(BitReader in, uint8_t flags) {
        if (flags & COARSE) {
            plan_.coarse.step = bits_as<float>(uint32_t(in.get(32)));
            if (!(plan_.coarse.step >= LEAST_STEP && plan_.coarse.step <= MOST_STEP))
                throw std::runtime_error("the step of its changes is impossible");
        }
        std::vector<bool> untouched(plan_.base_rows());
        if (flags & UNTOUCHED_ROWS)
            for (size_t row = 0; row < untouched.size(); ++row) untouched[row] = in.get(1);
        plan_.set_rows(untouched);
        if (flags & FEW_CHANGES) plan_.classes = get_classes(in, type_.infinity);
        plan_.row_scales = get_scales(in, plan_.rows.size() - plan_.first_scaled());
        plan_.row_scales.insert(plan_.row_scales.begin(), plan_.first_scaled(), 0);
        if (flags & COLUMN_SCALES) plan_.column_scales = get_scales(in, plan_.shape.row_length);
        for (int id = 0; id < TABLES; ++id)
            if (plan_.own_tables >> id & 1)
                own_.emplace_back(id, read_table(in, plan_.usual(id)));
            else if (size_t(id) < 2 * plan_.classes.size())
                own_.emplace_back(id, plan_.usual(id));
        tables_ = own_.empty() ? &default_decode_tables() : &with_own_tables(own_);
        if (flags & LOW_RANK) change_ = get_low_rank(in, plan_.parts[1].first_row, plan_.shape.row_length, type_.width == 8);
    }

    size_t bytes(size_t values) const { return values * size_t(type_.width); }
    const uint16_t* base16() const { return reinterpret_cast<const uint16_t*>(base_); }

    void copy_untouched() {
        size_t next = 0;
        for (size_t row = 0; row < plan_.base_rows(); ++row) {
            if (next < plan_.rows.size() && plan_.rows[next] == row) {
                ++next;
            } else {
                const size_t at = bytes(row * plan_.shape.row_length);
                std::memcpy(tensor_ + at, base_ + at, bytes(plan_.row_values(row)));
            }
        }
    }

    void copy_raw(const Block& block, const Coded& coded) {
        require_raw(block, coded);
        for_pieces(plan_, *block.part, block.begin, block.size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
            std::memcpy(tensor_ + bytes(offset), coded.data + bytes(at), bytes(count));
        });
    }

    // The base of the values that are decoded: if moved, it is in the output, where they are then decoded in place.
    const uint8_t* start_from_base(const Block& block) {
        if (!change_.rank || block.part->alone) return base_;
        change_.predict(plan_, *block.part, block.begin, block.size, base_, tensor_);
        return tensor_;
    }

    // Copies the base's values and changes some of them.
    void change_block(const Block& block, const Coded& coded) {
        const uint8_t* base = start_from_base(block);
        if (base != tensor_)
            for (const auto& [begin, end] : stretches_of(plan_, block))
                std::memcpy(tensor_ + bytes(begin), base + bytes(begin), bytes(end - begin));
        decoded_changes(block, coded).apply(reinterpret_cast<uint16_t*>(tensor_));
    }

    DecodedChanges decoded_changes(const Block& block, const Coded& coded) const {
        return {plan_, block, coded.data, coded.bytes, coded.kind, tables_->data()};
    }

    Replacements list_raw(const Block& block, const Coded& coded) const {
        require_raw(block, coded);
        Replacements list;
        for_pieces(plan_, *block.part, block.begin, block.size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
            for (size_t i = 0; i < count; ++i) {
                uint16_t value;
                std::memcpy(&value, coded.data + bytes(at + i), sizeof value);
                if (value == base16()[offset + i]) continue;
                list.places.push_back(uint32_t(offset + i));
                list.values.push_back(value);
            }
        });
        return list;
    }

    void require_raw(const Block& block, const Coded& coded) const {
        if (coded.bytes != bytes(block.size)) throw std::runtime_error("a verbatim block has the wrong size");
    }

    void decode_block(const Block& block, const Coded& coded) {
        const size_t plane = size_t(plan_.plane), low_bytes = block.size * plane;
        if (coded.bytes < low_bytes) throw std::runtime_error("a block is smaller than its low bytes");
        Decoder decoder(lanes_of(coded.kind), coded.data + low_bytes, coded.bytes - low_bytes);
        const auto chunk = std::make_unique<Chunk>(plan_);
        const uint8_t* base = start_from_base(block);
        for (size_t done = 0; done < block.size; done += CHUNK) {
            chunk->predict(*block.part, block.begin + done, std::min(CHUNK, block.size - done), base);
            decoder.decode(chunk->contexts, chunk->highs, chunk->size(), tables_->data());
            chunk->join(coded.data + done * plane, tensor_);
        }
        decoder.finish();
    }

    Plan plan_;
    LowRank change_;
    const FloatType type_;
    const uint8_t* body_;
    const uint8_t* base_;
    uint8_t* tensor_;
    std::vector<std::pair<int, Frequencies>> own_;  // tables in place of the default ones
    const std::vector<DecodeTable>* tables_;
    std::vector<Coded> blocks_;
};

}  // namespace

void decode(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, void* tensor, int threads) {
    TensorDecoder(shape, body, bytes, base, tensor).decode(threads);
}

Layout layout(const Shape& shape, const uint8_t* body, size_t bytes) {
    return TensorDecoder(shape, body, bytes, nullptr, nullptr).layout();
}

StoredFactors stored_factors(const Shape& shape, const uint8_t* body, size_t bytes) {
    if (bytes < 2 || !(body[1] & LOW_RANK)) return {};
    // Each row takes a bit at least: as an untouched row, or for its factor. This bounds the memory that a forged size
    // requests.
    if (shape.base_values / shape.row_length > 8 * bytes) throw std::runtime_error("the compressed tensor ends too early");
    return TensorDecoder(shape, body, bytes, nullptr, nullptr).factors();
}

bool list_changes(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, Replacements& changes, int threads) {
    if (width(shape.dtype) != 2) return false;
    const TensorDecoder decoder(shape, body, bytes, base, nullptr);
    if (!decoder.lists_changes()) return false;
    changes = decoder.list_changes(threads);
    return true;
}

void exchange(uint16_t* tensor, size_t values, const uint32_t* places, uint16_t* others, size_t count, size_t row_length,
              uint8_t* rows) {
    if (std::any_of(places, places + count, [=](uint32_t place) { return place >= values; }))
        throw std::invalid_argument("a place is outside the tensor");
    size_t row = 0;
    for (size_t i = 0; i < count; ++i) {
        std::swap(tensor[places[i]], others[i]);
        if (places[i] - row * row_length >= row_length) row = places[i] / row_length;  // else the same row as before
        rows[row] = 1;
    }
}

}  // namespace hf_ext::delta
