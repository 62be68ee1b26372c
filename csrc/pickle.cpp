#include "pickle.h"

#include <algorithm>
#include <bitset>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "pickle_check.h"

namespace zeroelastic {

namespace {

constexpr size_t kMostShapes = 65536;  // tuples that are known by their bytes
constexpr int64_t kMostDimensions = 64;
constexpr size_t kMostMemoOps = 16;  // of a tensor: seven of its parts, six of tuples and calls
constexpr int64_t kNoSlot = -1;
constexpr int64_t kMostForms =
    65536;                        // values of a dictionary that differ in more than their storage and place
constexpr size_t kMostOps = 256;  // of an entry of a dictionary
constexpr size_t kMostSpans = 4096;  // objects on the stack: a batch has a thousand entries
constexpr int64_t kMostDigits = 18;

enum class Kind : int64_t { kIntegers, kTensors, kNamedTensors, kNamedObjects, kState };

// A tensor of one dimension without gaps, as torch.save writes it, and the memo slots of what it is made of.
struct Tensor {
    int64_t slots[7];  // rebuild function, "storage", storage type, key, location, number of elements, hooks
    int64_t offset;
    int64_t numel;
};

// The bytes of an object in the pickle.
struct Span {
    int64_t begin;
    int64_t end;
};

// An opcode, and the slot of a PUT behind it, if something fetches that.
struct Op {
    int64_t at;
    int64_t end;
    int64_t kept;
};

// A value of a dictionary. `form` has its opcodes, but for the key and the elements of its storage and the
// offset in it, and for PUTs.
struct Value {
    std::string form;
    int64_t key = -1;
    int64_t numel = 0;
    int64_t offset = 0;
    bool keeps = false;  // something fetches what it remembers, other than the key
    const Op* kept_key = nullptr;
};

// The entries of a dictionary that were written so far.
struct Entries {
    int64_t dict_slot = kNoSlot;
    Kind kind = Kind::kNamedTensors;  // kNamedObjects where the first value is no tensor
    int64_t num_rows = 0;
    int64_t num_forms = 0;
    std::map<std::string, int64_t> forms;
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
// of integers, and with persistent ids that are integers, the numbers of columns, in place of long lists and
// dictionaries (ze_packed).
class Packer {
  public:
    Packer(const uint8_t* data, const PickleFacts& facts, int64_t long_list, ze_packed* out)
        : data_(data), facts_(facts), long_list_(long_list), out_(out), before_(facts.fetched.size() + 1) {
        for (size_t word = 0; word < facts.fetched.size(); ++word)
            before_[word + 1] = before_[word] + count_bits(facts.fetched[word]);
        renamed_.resize(before_.back());
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
            if (is_atom(at) && long_list_ > 0) next = table(at);
            if (next == 0 && (op == kBinInt || op == kBinInt1 || op == kBinInt2 || op == kMark))
                next = shape(at);
            at = next == 0 ? copy(at) : next;
        }
    }

    // Write one opcode; returns where it ends.
    int64_t copy(int64_t at) {
        const int64_t next = at + opcode_length(data_, at, facts_.end);
        if (is(at, kBinPut) || is(at, kLongBinPut)) {
            keep(slot_of(at));
        } else if (is(at, kBinGet) || is(at, kLongBinGet)) {
            write_slot(kBinGet, renamed_[place_of(slot_of(at))]);
        } else {
            write(data_ + at, next - at);
        }
        return next;
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
        write_column(tensors ? Kind::kTensors : Kind::kIntegers);
        if (tensors) {  // the column is a function of its first tensor, which says what the storage is
            rewrite(first, first_end);
            write({kTuple1, kReduce});
        }
        if (list_slot != kNoSlot) keep(list_slot);
        return next;
    }

    // An OrderedDict, written as a call of its column with the dictionary without entries and a list that has
    // the name of each entry and, behind the first name of each form, the value. Rows are the form, the
    // storage's key and elements, and the offset. Returns where the dictionary ends, or 0.
    int64_t table(int64_t at) {
        const Position before = position();
        int64_t dict_slot = kNoSlot;
        int64_t next = empty_dict(at, &dict_slot);
        if (next == 0 || !is(next, kMark)) return 0;
        Entries entries;
        entries.dict_slot = dict_slot;
        next = call_column(&entries, at, next);
        if (next == 0 || entries.num_rows < long_list_) return restore(before);
        if (dict_slot != kNoSlot) keep(dict_slot);
        const int64_t end = state(next);
        return end == 0 ? next : end;
    }

    // The state of an OrderedDict, of which readers make nothing: versions of modules by their names. Its
    // names are not written, but for those that something fetches. Returns where it ends, or 0.
    int64_t state(int64_t at) {
        int64_t state_slot = kNoSlot, name_slot = kNoSlot, dict_slot = kNoSlot;
        if (!is(at, kEmptyDict)) return 0;
        const int64_t name = put(at + 1, &state_slot);
        if (!is(name, kBinUnicode) || is_kept(state_slot)) return 0;
        const int64_t dict = put(name + opcode_length(data_, name, facts_.end), &name_slot);
        int64_t next = empty_dict(dict, &dict_slot);
        if (next == 0 || is_kept(dict_slot)) return 0;
        const Position before = position();
        rewrite(name, dict);
        write({kPop});
        Entries entries;
        entries.dict_slot = dict_slot;
        entries.kind = Kind::kState;
        next = call_column(&entries, dict, next);
        if (next == 0 || !is(next, kSetItem) || !is(next + 1, kBuild)) return restore(before);
        write({kPop});
        return next + 2;
    }

    // What makes a dictionary without entries by a call; returns where it ends, or 0.
    int64_t empty_dict(int64_t at, int64_t* dict_slot) {
        if (!is_atom(at)) return 0;
        int64_t slot = kNoSlot;
        const int64_t next = put(at + opcode_length(data_, at, facts_.end), &slot);
        return is(next, kEmptyTuple) && is(next + 1, kReduce) ? put(next + 2, dict_slot) : 0;
    }

    int64_t call_column(Entries* entries, int64_t dict, int64_t first_entry) {
        write_column(entries->kind);
        for (int64_t next = dict; !is(next, kEmptyTuple);) next = copy(next);
        if (is_kept(entries->dict_slot)) highest_ = std::max(highest_, entries->dict_slot);
        write({kEmptyTuple, kReduce, kEmptyList});
        const int64_t end = write_entries(first_entry, entries);
        write({kTuple2, kReduce});
        bounds_.resize(bounds_.size() - 2);
        bounds_.push_back(static_cast<int64_t>(entries->kind));
        bounds_.push_back(static_cast<int64_t>(values_.size()));
        return end;
    }

    // Write the items of a column whose first batch is at `at`. Returns where the entries end, or 0.
    int64_t write_entries(int64_t at, Entries* entries) {
        for (bool single = false; !single && (is(at, kMark) || is_name(at));) {
            single = !is(at, kMark);  // a batch of one entry has no mark, and comes last
            const int64_t end = batch(single ? at : at + 1, entries->dict_slot, single);
            if (end == 0) break;
            if (spans_.size() % 2 != 0) return 0;
            write({kMark});
            for (size_t i = 0; i < spans_.size(); i += 2) {
                if (!write_entry(spans_[i], spans_[i + 1], entries)) return 0;
            }
            write({kAppends});
            at = end;
        }
        return at;
    }

    bool write_entry(Span name, Span object, Entries* entries) {
        const int64_t behind = name.begin + opcode_length(data_, name.begin, facts_.end);
        int64_t slot = kNoSlot;
        if (!is_name(name.begin) || put(behind, &slot) != name.end || !describe(object)) return false;
        if (entries->num_rows == 0 && entries->kind == Kind::kNamedTensors && value_.key < 0)
            entries->kind = Kind::kNamedObjects;
        if (entries->kind == Kind::kNamedObjects && value_.key >= 0) return false;
        const bool named = entries->kind != Kind::kState;
        if (named) {
            rewrite(name.begin, name.end);
        } else if (!is(name.begin, kBinUnicode) || !is_ascii(name.begin, behind)) {
            return false;
        } else if (is_kept(slot)) {
            rewrite(name.begin, name.end);
            write({kPop});
        }
        auto& forms = entries->forms;
        const auto found = forms.find(value_.form);
        int64_t form = entries->num_forms;
        if (found != forms.end() && !value_.keeps) {
            form = found->second;
            if (value_.kept_key != nullptr) {
                write(data_ + value_.kept_key->at, value_.kept_key->end - value_.kept_key->at);
                keep(value_.kept_key->kept);
                write({kPop});
            }
        } else {
            if (form == kMostForms) return false;
            forms.emplace(value_.form, form);
            ++entries->num_forms;
            rewrite(object.begin, object.end);
        }
        if (value_.kept_key != nullptr) keys_[value_.kept_key->kept] = value_.key;
        ++entries->num_rows;
        if (named) values_.push_back(form);
        if (entries->kind == Kind::kNamedTensors) {
            for (const int64_t column : {value_.key, value_.numel, value_.offset}) values_.push_back(column);
        }
        return true;
    }

    // Find the objects of a batch of entries, names and values in turn, by following it as the unpickler
    // does. Takes opcodes whose effect is the same wherever they stand: they change nothing that was there
    // before, and fill memo slots that were not filled. Returns where it ends, or 0.
    int64_t batch(int64_t at, int64_t dict_slot, bool single) {
        struct Mark {
            size_t floor;
            int64_t at;
        };
        std::vector<Mark> marks;
        spans_.clear();
        size_t num_ops = 0;
        for (int64_t next = at; at < facts_.end; at = next) {
            const uint8_t op = data_[at];
            next = at + opcode_length(data_, at, facts_.end);
            if (spans_.size() > kMostSpans || marks.size() > kMostSpans) return 0;
            if (single && ++num_ops > kMostOps) return 0;
            const size_t above = spans_.size() - (marks.empty() ? 0 : marks.back().floor);
            size_t taken = 0;  // besides the object that becomes longer
            switch (op) {
                case kBinGet:
                case kLongBinGet:
                    if (slot_of(at) == dict_slot) return 0;
                    [[fallthrough]];
                case kBinUnicode:
                case kGlobal:
                case kBinInt:
                case kBinInt1:
                case kBinInt2:
                case kLong1:
                case kNone:
                case kTrue:
                case kFalse:
                case kEmptyTuple:
                case kEmptyDict:
                    spans_.push_back({at, next});
                    continue;
                case kMark:
                    marks.push_back({spans_.size(), at});
                    continue;
                case kTuple:
                    if (marks.empty()) return 0;
                    spans_.resize(marks.back().floor);
                    spans_.push_back({marks.back().at, next});
                    marks.pop_back();
                    continue;
                case kBinPut:
                case kLongBinPut:
                    if (is_kept(slot_of(at)) && slot_of(at) <= highest_) return 0;
                    break;
                case kTuple1:
                case kBinPersid:
                    break;
                case kTuple2:
                case kReduce: {
                    int64_t slot = kNoSlot;
                    const bool is_dict = op == kReduce && data_[at - 1] == kEmptyTuple;
                    if (is_dict && is(put(next, &slot), kMark))
                        return 0;  // so that no batch is followed twice
                    taken = 1;
                    break;
                }
                case kTuple3:
                    taken = 2;
                    break;
                case kSetItem:
                    if (single && marks.empty() && above == 2) return next;
                    taken = 2;
                    if (above < 3 || data_[spans_[spans_.size() - 3].begin] != kEmptyDict) return 0;
                    break;
                case kSetItems:
                    if (!single && marks.empty()) return next;
                    return 0;
                default:
                    return 0;
            }
            if (above <= taken) return 0;
            spans_.resize(spans_.size() - taken);
            spans_.back().end = next;
            if ((op == kBinPut || op == kLongBinPut) && is_kept(slot_of(at))) highest_ = slot_of(at);
        }
        return 0;
    }

    // Describe a value: a tensor, as calls of functions of which the first one gets a storage and the offset
    // in it, an object of one call, or a dictionary. False for another.
    bool describe(Span object) {
        if (!read_ops(object)) return false;
        size_t persid = ops_.size(), calls = 0;
        for (size_t i = 0; i < ops_.size(); ++i) {
            calls += is(ops_[i].at, kReduce) && i > 0 && !is(ops_[i - 1].at, kEmptyTuple);
            if (!is(ops_[i].at, kBinPersid)) continue;
            if (persid != ops_.size()) return false;
            persid = i;
        }
        value_.form.clear();
        value_.key = -1;
        value_.numel = value_.offset = 0;
        value_.keeps = false;
        value_.kept_key = nullptr;
        const bool is_tensor = persid != ops_.size();
        if (is_tensor) {
            // Before the persistent id: the function that gets the storage, and one that gets what that
            // makes.
            const size_t head = persid < 9 ? 0 : persid - 7;
            size_t functions = 0;
            for (size_t i = 0; i < head; ++i) {
                functions += is_atom(ops_[i].at);
                if (!is_atom(ops_[i].at) && (i == 0 || !is(ops_[i].at, kMark) || !is_atom(ops_[i - 1].at)))
                    return false;
            }
            if (head == 0 || functions > 2 || calls != functions || persid + 1 == ops_.size()) return false;
            if (!is(ops_[head - 1].at, kMark)) return false;
            if (!is(ops_[head].at, kMark) || !is(ops_[persid - 1].at, kTuple)) return false;
            if (!key(ops_[persid - 4]) || integer(ops_[persid - 2].at, &value_.numel) == 0) return false;
            if (integer(ops_[persid + 1].at, &value_.offset) == 0) return false;
        } else if (is(ops_[0].at, kEmptyDict) ? calls != 0 : !is_atom(ops_[0].at) || calls != 1) {
            return false;
        }
        if (!is(ops_[0].at, kEmptyDict) && !is(ops_.back().at, kReduce)) return false;
        for (size_t i = 0; i < ops_.size(); ++i) {
            if (is_tensor && i + 4 == persid) {
                value_.kept_key = ops_[i].kept == kNoSlot ? nullptr : &ops_[i];
            } else {
                value_.keeps = value_.keeps || ops_[i].kept != kNoSlot;
                if (is_tensor && (i + 2 == persid || i == persid + 1)) continue;
                value_.form.append(reinterpret_cast<const char*>(data_ + ops_[i].at),
                                   static_cast<size_t>(ops_[i].end - ops_[i].at));
            }
        }
        return true;
    }

    bool read_ops(Span object) {
        ops_.clear();
        for (int64_t at = object.begin; at < object.end;) {
            if (is(at, kBinPut) || is(at, kLongBinPut)) {
                int64_t slot = kNoSlot;
                at = put(at, &slot);
                if (is_kept(slot)) ops_.back().kept = slot;
            } else {
                const int64_t end = at + opcode_length(data_, at, facts_.end);
                if (ops_.size() == kMostOps) return false;
                ops_.push_back({at, end, kNoSlot});
                at = end;
            }
        }
        return true;
    }

    // The key of a storage: a number as torch writes it, or one that was remembered.
    bool key(const Op& op) {
        if (is(op.at, kBinGet) || is(op.at, kLongBinGet)) {
            const auto found = keys_.find(slot_of(op.at));
            if (found == keys_.end()) return false;
            value_.key = found->second;
            return true;
        }
        const int64_t digits = op.end - op.at - 5;
        if (!is(op.at, kBinUnicode) || digits < 1 || digits > kMostDigits) return false;
        if (data_[op.at + 5] == '0' && digits > 1) return false;
        value_.key = 0;
        for (int64_t i = op.at + 5; i < op.end; ++i) {
            if (data_[i] < '0' || data_[i] > '9') return false;
            value_.key = value_.key * 10 + (data_[i] - '0');
        }
        return true;
    }

    bool is_name(int64_t at) {
        return is(at, kBinUnicode) || is(at, kBinGet) || is(at, kLongBinGet);
    }

    bool is_atom(int64_t at) {
        return is(at, kGlobal) || is(at, kBinGet) || is(at, kLongBinGet);
    }

    bool is_ascii(int64_t at, int64_t end) {
        return std::all_of(data_ + at + 5, data_ + end, [](uint8_t byte) { return byte < 0x80; });
    }

    bool is_kept(int64_t slot) {
        return slot != kNoSlot && facts_.is_fetched(slot);
    }

    // How far the pickle was written.
    struct Position {
        int64_t size;
        uint32_t num_slots;
        int64_t highest;
        size_t num_values;
        size_t num_bounds;
        size_t num_shapes;
    };

    Position position() const {
        return {size_, num_slots_, highest_, values_.size(), bounds_.size(), shape_order_.size()};
    }

    // Take back what was written since; returns 0.
    int64_t restore(const Position& before) {
        size_ = before.size;
        num_slots_ = before.num_slots;
        highest_ = before.highest;
        values_.resize(before.num_values);
        bounds_.resize(before.num_bounds);
        for (; shape_order_.size() > before.num_shapes; shape_order_.pop_back())
            shapes_.erase(shape_order_.back());
        return 0;
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
        return is_kept(slot) && !remembers ? 0 : end;
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
            shape_order_.push_back(shapes_.emplace(bytes, written).first);
        } else {
            return 0;
        }
        rename(slot, written);
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
        if (!is_kept(slot)) return;
        rename(slot, num_slots_);
        write_slot(kBinPut, num_slots_++);
    }

    static uint32_t count_bits(uint64_t word) {
        return static_cast<uint32_t>(std::bitset<64>(word).count());
    }

    // The place of a slot among those that something fetches.
    size_t place_of(int64_t slot) const {
        const size_t word = static_cast<size_t>(slot) / 64;
        const uint64_t below = (uint64_t{1} << (slot % 64)) - 1;
        return before_[word] + count_bits(facts_.fetched[word] & below);
    }

    void rename(int64_t slot, uint32_t written) {
        if (!is_kept(slot)) return;
        if (slot <= highest_) keys_.erase(slot);
        highest_ = std::max(highest_, slot);
        renamed_[place_of(slot)] = written;
    }

    void write_slot(Opcode narrow, uint32_t slot) {
        const bool is_put = narrow == kBinPut;
        uint8_t bytes[5] = {static_cast<uint8_t>(slot < 256 ? narrow : is_put ? kLongBinPut : kLongBinGet)};
        for (int i = 0; i < 4; ++i) bytes[i + 1] = static_cast<uint8_t>(slot >> (8 * i));
        write(bytes, slot < 256 ? 2 : 5);
    }

    // Write the column whose values end here.
    void write_column(Kind kind) {
        const uint8_t number = kBinInt;
        const uint32_t index = static_cast<uint32_t>(bounds_.size() / 2);
        write(&number, 1);
        write(reinterpret_cast<const uint8_t*>(&index), 4);
        write({kBinPersid});
        bounds_.push_back(static_cast<int64_t>(kind));
        bounds_.push_back(static_cast<int64_t>(values_.size()));
    }

    void write(std::initializer_list<uint8_t> bytes) {
        write(bytes.begin(), static_cast<int64_t>(bytes.size()));
    }

    void write(const uint8_t* bytes, int64_t nbytes) {
        full_ = full_ || nbytes > facts_.end - size_;
        if (full_) return;
        std::memcpy(out_->pickle + size_, bytes, static_cast<size_t>(nbytes));
        size_ += nbytes;
    }

    const uint8_t* data_;
    const PickleFacts& facts_;
    const int64_t long_list_;  // items from which a list becomes a column; 0: none does
    ze_packed* out_;
    std::vector<uint32_t> before_;   // by word of facts_.fetched: slots before it that something fetches
    std::vector<uint32_t> renamed_;  // the new slots of these
    std::map<std::string_view, uint32_t> shapes_;
    std::vector<std::map<std::string_view, uint32_t>::iterator> shape_order_;  // as they were written
    int64_t highest_ = kNoSlot;                                                // slot that a PUT has filled
    std::map<int64_t, int64_t> keys_;  // the keys of storages by their slots, where something fetches them
    std::vector<Span> spans_;
    std::vector<Op> ops_;
    Value value_;
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
