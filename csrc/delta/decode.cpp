#include <cstring>
#include <memory>
#include <stdexcept>

#include "../common/threads.h"
#include "blocks.h"
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

template <class F>
class TensorDecoder {
    using U = typename F::U;

   public:
    TensorDecoder(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, void* tensor)
        : base_(static_cast<const U*>(base)), tensor_(static_cast<U*>(tensor)) {
        Reader in(body, bytes);
        plan_.shape = shape;
        plan_.plane = in.get<uint8_t>();
        const bool plane_fits = F::WIDTH == 16   ? plan_.plane == 0
                                : F::WIDTH == 32 ? plan_.plane <= 2
                                                 : plan_.plane == 5 || plan_.plane == 6;
        const uint8_t flags = in.get<uint8_t>();
        plan_.own_tables = in.get<uint64_t>();
        if (!plane_fits || flags > (F::WIDTH == 16 ? ALL_FLAGS : FEW_CHANGES - 1) || plan_.own_tables >> TABLES)
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
            if constexpr (F::WIDTH == 16)
                if (coded.kind != RAW && plan_.few_changes(*block.part)) return change_block(block, coded);
            switch (coded.kind) {
                case INTERLEAVED:
                    return with_instructions([&](auto set) { decode_block<64, set()>(block, coded.data, coded.bytes); });
                case NARROW:
                    return with_instructions([&](auto set) { decode_block<1, set()>(block, coded.data, coded.bytes); });
                case RAW: return copy_raw(block, coded.data, coded.bytes);
                default: throw std::runtime_error("a block is of a kind this version does not know");
            }
        });
    }

    bool lists_changes() const {
        return !plan_.classes.empty() && !change_.rank && plan_.parts[1].values == 0 && plan_.shape.values <= UINT32_MAX;
    }

    Replacements list_changes(int threads) const {
        std::vector<Replacements> lists(blocks_.size());
        parallel_for(blocks_.size(), threads, [&](size_t i) {
            const Block block = block_at(plan_, i);
            Replacements& list = lists[i];
            if (blocks_[i].kind == RAW) return list_raw(block, blocks_[i], list);
            with_instructions([&](auto set) {
                const auto changes = decoded_changes<set()>(block, blocks_[i]);
                list.places.resize(changes.count());
                list.values.resize(changes.count());
                changes.visit(base_,
                              [places = list.places.data(), values = list.values.data()](size_t at, size_t offset, U value) {
                                  places[at] = uint32_t(offset);
                                  values[at] = value;
                              });
            });
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
        std::vector<bool> untouched(plan_.base_rows());
        if (flags & UNTOUCHED_ROWS)
            for (size_t row = 0; row < untouched.size(); ++row) untouched[row] = in.get(1);
        plan_.set_rows(untouched);
        if (flags & FEW_CHANGES) plan_.classes = get_classes(in, int(F::INFINITY_BITS >> F::MANTISSA));
        plan_.row_scales = get_scales(in, plan_.rows.size() - plan_.first_scaled());
        plan_.row_scales.insert(plan_.row_scales.begin(), plan_.first_scaled(), 0);
        if (flags & COLUMN_SCALES) plan_.column_scales = get_scales(in, plan_.shape.row_length);
        std::vector<std::pair<int, Frequencies>> own;
        for (int id = 0; id < TABLES; ++id)
            if (plan_.own_tables >> id & 1)
                own.emplace_back(id, read_table(in, plan_.usual(id)));
            else if (size_t(id) < 2 * plan_.classes.size())
                own.emplace_back(id, plan_.usual(id));
        tables_ = own.empty() ? &default_decode_tables() : &with_own_tables(own);
        if (flags & LOW_RANK) change_ = get_low_rank(in, plan_.parts[1].first_row, plan_.shape.row_length, F::WIDTH == 64);
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
        require_raw(block, bytes);
        for_pieces(plan_, *block.part, block.begin, block.size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
            std::memcpy(tensor_ + offset, data + at * sizeof(U), count * sizeof(U));
        });
    }

    // The base of the values that are decoded: if moved, it is in the output, where they are then decoded in place.
    const U* start_from_base(const Block& block) {
        if (!change_.rank || block.part->alone) return base_;
        change_.predict<F>(plan_, *block.part, block.begin, block.size, base_, tensor_);
        return tensor_;
    }

    // Copies the base's values and changes some of them.
    void change_block(const Block& block, const Coded& coded) {
        const U* base = start_from_base(block);
        for_stretches(plan_, block, [&](size_t offset, size_t count) {
            if (base != tensor_) std::memcpy(tensor_ + offset, base + offset, count * sizeof(U));
        });
        with_instructions([&](auto set) {
            decoded_changes<set()>(block, coded).visit(tensor_, [tensor = tensor_](size_t, size_t offset, U value) {
                tensor[offset] = value;
            });
        });
    }

    template <Instructions SET>
    DecodedChanges<F, SET> decoded_changes(const Block& block, const Coded& coded) const {
        return {plan_, block, coded.data, coded.bytes, coded.kind, tables_->data()};
    }

    void list_raw(const Block& block, const Coded& coded, Replacements& list) const {
        require_raw(block, coded.bytes);
        for_pieces(plan_, *block.part, block.begin, block.size, [&](size_t offset, size_t at, size_t count, size_t, size_t) {
            for (size_t i = 0; i < count; ++i) {
                U value;
                std::memcpy(&value, coded.data + (at + i) * sizeof(U), sizeof(U));
                if (value == base_[offset + i]) continue;
                list.places.push_back(uint32_t(offset + i));
                list.values.push_back(value);
            }
        });
    }

    static void require_raw(const Block& block, size_t bytes) {
        if (bytes != block.size * sizeof(U)) throw std::runtime_error("a verbatim block has the wrong size");
    }

    template <int LANES, Instructions SET>
    void decode_block(const Block& block, const uint8_t* data, size_t bytes) {
        const size_t plane = size_t(plan_.plane), low_bytes = block.size * plane;
        if (bytes < low_bytes) throw std::runtime_error("a block is smaller than its low bytes");
        Decoder<LANES, SET> decoder(data + low_bytes, bytes - low_bytes);
        const std::unique_ptr<Chunk<F>> chunk(new Chunk<F>);
        const std::unique_ptr<int32_t[]> values(new int32_t[CHUNK]);
        const U* base = start_from_base(block);
        for (size_t done = 0; done < block.size; done += CHUNK) {
            const size_t size = std::min(CHUNK, block.size - done);
            chunk->fill(plan_, *block.part, block.begin + done, size, base);
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
    void restore(const Block& block, size_t done, size_t size, const Chunk<F>& chunk, const int32_t* values,
                 const uint8_t* low) {
        if constexpr (PLANE < int(sizeof(U))) {
            for_pieces(plan_, *block.part, block.begin + done, size,
                       [&](size_t offset, size_t at, size_t count, size_t, size_t) {
                           // The buffers don't overlap. The compiler vectorizes the loops only if it knows that.
                           U* __restrict out = tensor_ + offset;
                           const U* __restrict prediction = chunk.prediction + at;
                           const int32_t* __restrict high = values + at;
                           const uint8_t* __restrict bytes = low + at * PLANE;
                           const auto value = [=](size_t i) {
                               std::conditional_t<PLANE == 1, uint8_t, std::conditional_t<PLANE == 2, uint16_t, U>> rest = 0;
                               std::memcpy(&rest, bytes + i * PLANE, PLANE);
                               return U(prediction[i] + (U(U(high[i]) << (8 * PLANE)) | rest));
                           };
                           if (block.part->alone)
                               for (size_t i = 0; i < count; ++i) out[i] = from_rotated<F>(value(i));
                           else
                               for (size_t i = 0; i < count; ++i) out[i] = from_ordered<F>(value(i));
                       });
        }
    }

    Plan plan_;
    LowRank change_;
    const U* base_;
    U* tensor_;
    const std::vector<DecodeTable>* tables_;
    std::vector<Coded> blocks_;
};

}  // namespace

void decode(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, void* tensor, int threads) {
    with_float(shape.dtype,
               [&](auto type) { TensorDecoder<decltype(type)>(shape, body, bytes, base, tensor).decode(threads); });
}

bool list_changes(const Shape& shape, const uint8_t* body, size_t bytes, const void* base, Replacements& changes, int threads) {
    bool listed = false;
    with_float(shape.dtype, [&](auto type) {
        using F = decltype(type);
        if constexpr (F::WIDTH == 16) {
            const TensorDecoder<F> decoder(shape, body, bytes, base, nullptr);
            if ((listed = decoder.lists_changes())) changes = decoder.list_changes(threads);
        }
    });
    return listed;
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
