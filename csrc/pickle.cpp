#include "pickle.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string_view>

#include "pickle_check.h"

namespace zeroelastic {

namespace {

constexpr size_t kMostShapes = 65536;  // tuples that are known by their bytes
constexpr int64_t kMostDimensions = 64;
constexpr size_t kMostMemoOps = 16;  // of a tensor: seven of its parts, six of tuples and calls
constexpr int64_t kNoSlot = -1;

// A tensor of one dimension without gaps, as torch.save writes it, and the memo slots of what it is made of.
struct Tensor {
    int64_t slots[7];  // rebuild function, "storage", storage type, key, location, number of elements, hooks
    int64_t offset;
    int64_t numel;
};

// Integers that C can own.
class Values {
  public:
    ~Values() {
        std::free(values_);
    }

    void push_back(int64_t value) {
        if (size_ == capacity_) grow();
        values_[size_++] = value;
    }

    size_t size() const {
        return size_;
    }

    void resize(size_t size) {
        size_ = size;
    }

    int64_t* release(int64_t* size) {
        *size = static_cast<int64_t>(size_);
        int64_t* values = values_;
        values_ = nullptr;
        return values;
    }

  private:
    void grow() {
        const size_t capacity = capacity_ == 0 ? 1024 : capacity_ * 2;
        void* values = std::realloc(values_, capacity * sizeof(int64_t));  // moves pages, not bytes
        if (values == nullptr) throw std::bad_alloc();
        values_ = static_cast<int64_t*>(values);
        capacity_ = capacity;
    }

    int64_t* values_ = nullptr;
    size_t size_ = 0;
    size_t capacity_ = 0;
};

// Writes a checked pickle again: without memo slots that nothing fetches, with one tuple for all equal tuples
// of integers, and with persistent ids that are integers, the numbers of columns, in place of long lists.
class Packer {
  public:
    Packer(const uint8_t* data, const PickleFacts& facts, int64_t long_list, ze_packed* out)
        : data_(data),
          facts_(facts),
          long_list_(long_list),
          out_(out),
          renamed_(static_cast<uint32_t*>(std::calloc(static_cast<size_t>(facts.num_slots) + 1, 4))) {
        if (renamed_ == nullptr) throw std::bad_alloc();
    }

    // False if the pickle would become longer.
    bool run() {
        rewrite(0, facts_.end);
        if (full_) return false;
        out_->num_bytes = size_;
        out_->values = values_.release(&out_->num_values);
        out_->bounds = bounds_.release(&out_->num_bounds);
        return true;
    }

  private:
    void rewrite(int64_t at, int64_t end) {
        while (at < end && !full_) {
            const uint8_t op = data_[at];
            int64_t next = 0;
            if (op == kEmptyList && long_list_ > 0) next = column(at);
            if (next == 0 && (op == kBinInt || op == kBinInt1 || op == kBinInt2 || op == kMark))
                next = shape(at);
            if (next == 0) {
                next = at + opcode_length(data_, at, facts_.end);
                if (op == kBinPut || op == kLongBinPut) {
                    keep(slot_of(at));
                } else if (op == kBinGet || op == kLongBinGet) {
                    write_slot(kBinGet, renamed_.get()[slot_of(at)]);
                } else {
                    write(data_ + at, next - at);
                }
            }
            at = next;
        }
    }

    // A list of integers or of parts of one storage, written as a column; returns where it ends, or 0.
    int64_t column(int64_t at) {
        int64_t list_slot = kNoSlot;
        int64_t next = put(at + 1, &list_slot), first = 0, first_end = 0, count = 0;
        const size_t known = values_.size();
        Tensor tensor{};
        bool tensors = false;
        while (is(next, kMark)) {
            int64_t item = next + 1;
            for (; !is(item, kAppends); ++count) {
                int64_t value = 0, end = 0;
                if (count == 0 && (end = first_part(item, list_slot, &tensor)) != 0) {
                    tensors = true;
                    first_end = end;
                    first = item;
                } else if (tensors) {
                    end = part(item, &tensor, &tensor);
                } else {
                    end = integer(item, &value);
                }
                if (end == 0) return forget(known);
                if (tensors) {
                    values_.push_back(tensor.offset);
                    values_.push_back(tensor.numel);
                } else {
                    values_.push_back(value);
                }
                item = end;
            }
            next = item + 1;
        }
        if (count < long_list_) return forget(known);
        // A batch of one item has no mark, and comes last.
        int64_t value = 0;
        const int64_t last = tensors ? part(next, &tensor, &tensor) : integer(next, &value);
        if (last != 0 && is(last, kAppend)) {
            values_.push_back(tensors ? tensor.offset : value);
            if (tensors) values_.push_back(tensor.numel);
            next = last + 1;
        }
        const uint8_t number = kBinInt, id = kBinPersid;
        const uint32_t index = static_cast<uint32_t>(bounds_.size() / 2);
        write(&number, 1);
        write(reinterpret_cast<const uint8_t*>(&index), 4);
        write(&id, 1);
        if (tensors) {  // the column is a function of its first tensor, which says what the storage is
            const uint8_t call[] = {kTuple1, kReduce};
            rewrite(first, first_end);
            write(call, 2);
        }
        bounds_.push_back(static_cast<int64_t>(tensors));
        bounds_.push_back(static_cast<int64_t>(values_.size()));
        if (list_slot != kNoSlot) keep(list_slot);
        return next;
    }

    int64_t forget(size_t known) {
        values_.resize(known);
        return 0;
    }

    // The tensor of a list that the others are compared with, by the slots that they fetch: behind it, these
    // must still hold what it is made of.
    int64_t first_part(int64_t at, int64_t list_slot, Tensor* tensor) {
        const int64_t end = part(at, tensor, nullptr);
        int64_t seen[kMostMemoOps] = {list_slot};
        size_t num_seen = 1;
        for (int64_t next = at; next < end; next += opcode_length(data_, next, facts_.end)) {
            const bool puts = is(next, kBinPut) || is(next, kLongBinPut);
            if (!puts && !is(next, kBinGet) && !is(next, kLongBinGet)) continue;
            const int64_t slot = slot_of(next);
            if (slot == list_slot || num_seen == kMostMemoOps) return 0;
            if (puts && std::find(seen, seen + num_seen, slot) != seen + num_seen) return 0;
            seen[num_seen++] = slot;
        }
        return end;
    }

    // A tensor that is a part of a storage; returns where it ends, or 0. One that is `like` another is of the
    // same storage, by the same memo slots, and remembers nothing that is fetched.
    int64_t part(int64_t at, Tensor* tensor, const Tensor* like) {
        const bool remembers = like == nullptr;
        Tensor found{};
        int64_t one = 0;
        at = atom(at, &found.slots[0], remembers);
        at = at != 0 && is(at, kMark) && is(at + 1, kMark) ? at + 2 : 0;
        for (int i = 1; i < 5 && at != 0; ++i) at = atom(at, &found.slots[i], remembers);
        at = integer(at, &found.slots[5]);
        at = then(at, kTuple, remembers);
        at = at != 0 && is(at, kBinPersid) ? integer(at + 1, &found.offset) : 0;
        at = then(integer(at, &found.numel), kTuple1, remembers);
        at = then(integer(at, &one), kTuple1, remembers);
        at = at != 0 && one == 1 && found.offset >= 0 && found.numel >= 0 && is(at, kFalse) ? at + 1 : 0;
        at = atom(at, &found.slots[6], remembers);
        at = at != 0 && is(at, kEmptyTuple) ? then(at + 1, kReduce, remembers) : 0;
        at = then(then(at, kTuple, remembers), kReduce, remembers);
        if (at == 0) return 0;
        if (like != nullptr && std::memcmp(found.slots, like->slots, sizeof(found.slots)) != 0) return 0;
        *tensor = found;
        return at;
    }

    // An object that is fetched from the memo, or text or a global that is remembered in it.
    int64_t atom(int64_t at, int64_t* slot, bool remembers) {
        if (at == 0) return 0;
        if (is(at, kBinGet) || is(at, kLongBinGet)) {
            *slot = slot_of(at);
            return at + opcode_length(data_, at, facts_.end);
        }
        if (!remembers || !(is(at, kBinUnicode) || is(at, kGlobal))) return 0;
        *slot = kNoSlot;
        at = put(at + opcode_length(data_, at, facts_.end), slot);
        return *slot == kNoSlot ? 0 : at;
    }

    int64_t then(int64_t at, Opcode op, bool remembers) {
        if (at == 0 || !is(at, op)) return 0;
        int64_t slot = kNoSlot;
        const int64_t end = put(at + 1, &slot);
        const bool lost = slot != kNoSlot && facts_.fetched[static_cast<size_t>(slot)];
        return lost && !remembers ? 0 : end;
    }

    int64_t integer(int64_t at, int64_t* value) {
        if (at == 0 || at >= facts_.end) return 0;
        switch (data_[at]) {
            case kBinInt1:
                *value = data_[at + 1];
                break;
            case kBinInt2:
                *value = data_[at + 1] | data_[at + 2] << 8;
                break;
            case kBinInt:
                *value = static_cast<int32_t>(load_u32(data_ + at + 1));
                break;
            case kLong1: {
                if (data_[at + 1] > 8) return 0;
                uint64_t bits = 0;
                int width = data_[at + 1];
                for (int i = 0; i < width; ++i) bits |= static_cast<uint64_t>(data_[at + 2 + i]) << (8 * i);
                if (width > 0 && width < 8 && data_[at + 1 + width] >= 0x80)
                    bits |= ~uint64_t{0} << (8 * width);
                *value = static_cast<int64_t>(bits);
                break;
            }
            default:
                return 0;
        }
        return at + opcode_length(data_, at, facts_.end);
    }

    // A tuple of integers that is remembered, written once for all that are equal; returns where it ends, or
    // 0.
    int64_t shape(int64_t at) {
        const bool marked = is(at, kMark);
        int64_t end = marked ? at + 1 : at, value = 0, size = 0;
        while (size < (marked ? kMostDimensions : 3)) {
            const int64_t next = integer(end, &value);
            if (next == 0) break;
            end = next;
            ++size;
        }
        const uint8_t tuple = marked ? uint8_t{kTuple} : static_cast<uint8_t>(kTuple1 - 1 + size);
        if (size == 0 || end >= facts_.end || data_[end] != tuple) return 0;
        int64_t slot = kNoSlot;
        const int64_t next = put(++end, &slot);
        if (slot == kNoSlot) return 0;
        const std::string_view bytes(reinterpret_cast<const char*>(data_ + at),
                                     static_cast<size_t>(end - at));
        const auto known = shapes_.find(bytes);
        uint32_t written = 0;
        if (known != shapes_.end()) {
            written = known->second;
            write_slot(kBinGet, written);
        } else if (shapes_.size() < kMostShapes) {
            write(data_ + at, end - at);
            written = num_slots_++;
            write_slot(kBinPut, written);
            shapes_.emplace(bytes, written);
        } else {
            return 0;
        }
        renamed_.get()[slot] = written;
        return next;
    }

    // The slot of a PUT at `at`, if there is one; returns where it ends.
    int64_t put(int64_t at, int64_t* slot) {
        if (!is(at, kBinPut) && !is(at, kLongBinPut)) return at;
        *slot = slot_of(at);
        return at + opcode_length(data_, at, facts_.end);
    }

    bool is(int64_t at, Opcode op) {
        return at < facts_.end && data_[at] == op;
    }

    int64_t slot_of(int64_t at) {
        return data_[at] == kBinGet || data_[at] == kBinPut ? data_[at + 1] : load_u32(data_ + at + 1);
    }

    // Remember the object on top of the stack, if something fetches it.
    void keep(int64_t slot) {
        if (!facts_.fetched[static_cast<size_t>(slot)]) return;
        renamed_.get()[slot] = num_slots_;
        write_slot(kBinPut, num_slots_++);
    }

    void write_slot(Opcode narrow, uint32_t slot) {
        const bool is_put = narrow == kBinPut;
        uint8_t bytes[5] = {static_cast<uint8_t>(slot < 256 ? narrow : is_put ? kLongBinPut : kLongBinGet)};
        for (int i = 0; i < 4; ++i) bytes[i + 1] = static_cast<uint8_t>(slot >> (8 * i));
        write(bytes, slot < 256 ? 2 : 5);
    }

    void write(const uint8_t* bytes, int64_t nbytes) {
        full_ = full_ || nbytes > facts_.end - size_;
        if (full_) return;
        std::memcpy(out_->pickle + size_, bytes, static_cast<size_t>(nbytes));
        size_ += nbytes;
    }

    struct Free {
        void operator()(void* memory) const {
            std::free(memory);
        }
    };

    const uint8_t* data_;
    const PickleFacts& facts_;
    const int64_t long_list_;  // items from which a list becomes a column; 0: none does
    ze_packed* out_;
    std::unique_ptr<uint32_t, Free> renamed_;  // new slot by old one
    std::map<std::string_view, uint32_t> shapes_;
    uint32_t num_slots_ = 0;
    int64_t size_ = 0;
    bool full_ = false;
    Values values_;
    Values bounds_;  // whether a column is of tensors, and where its values end
};

}  // namespace

bool pack_pickle(const uint8_t* data, int64_t nbytes, int64_t long_list, ze_packed* out) {
    PickleFacts facts;
    if (!check_pickle(data, nbytes, &facts)) return false;
    return Packer(data, facts, long_list, out).run();
}

}  // namespace zeroelastic
