#include "pickle_check.h"

#include <algorithm>
#include <cstring>

namespace zeroelastic {

namespace {

// As in safe_unpickler.py.
constexpr int64_t kMaxWeight = int64_t{1} << 62;
constexpr int64_t kMaxLongInts = 4096;
constexpr int kLongIntBytes = 9;
constexpr int64_t kFreeObjects = 1 << 17;
constexpr int64_t kBytesPerObject = 6;
constexpr int64_t kFreeHashes = 1 << 20;
constexpr int64_t kHashesPerByte = 16;

enum class Leaves { kNothing, kBelow, kPush, kTop };

struct Effect {
    int taken = 0;  // values, or all down to the last mark
    Leaves leaves = Leaves::kNothing;
    bool sums = false;         // the value that it leaves has the weight of what was taken, and 1
    bool hashes_keys = false;  // of the pairs that were taken
    int objects = 0;
};

constexpr int kToMark = -1;

bool effect_of(uint8_t op, Effect* effect) {
    switch (op) {
        case kTuple1:
            *effect = {1, Leaves::kPush, true, false, 0};
            return true;
        case kTuple2:
            *effect = {2, Leaves::kPush, true, false, 0};
            return true;
        case kTuple3:
            *effect = {3, Leaves::kPush, true, false, 0};
            return true;
        case kTuple:
            *effect = {kToMark, Leaves::kPush, true, false, 0};
            return true;
        case kReduce:
        case kNewObj:
            *effect = {1, Leaves::kTop, true, false, 1};
            return true;
        case kBinPersid:
            *effect = {0, Leaves::kTop, false, false, 1};
            return true;
        case kEmptyList:
        case kEmptyDict:
            *effect = {0, Leaves::kPush, false, false, 1};
            return true;
        case kAppend:
        case kBuild:
            *effect = {1, Leaves::kBelow, false, false, 0};
            return true;
        case kAppends:
            *effect = {kToMark, Leaves::kBelow, false, false, 0};
            return true;
        case kSetItem:
            *effect = {2, Leaves::kBelow, false, true, 0};
            return true;
        case kSetItems:
            *effect = {kToMark, Leaves::kBelow, false, true, 0};
            return true;
        case kPopMark:
            *effect = {kToMark, Leaves::kNothing, false, false, 0};
            return true;
        default:
            return false;
    }
}

int64_t plus(int64_t a, int64_t b) {
    return std::min(a + b, kMaxWeight);  // both are at most kMaxWeight
}

// Follows a pickle; an object is represented by the number of values that its hash would visit.
class Checker {
  public:
    Checker(const uint8_t* data, int64_t nbytes, PickleFacts* facts)
        : data_(data), nbytes_(nbytes), facts_(facts) {}

    bool run() {
        uint8_t before = 0;  // the last opcode but PUTs
        for (int64_t at = 0; at < nbytes_;) {
            const uint8_t op = data_[at];
            if (op == kStop) {
                facts_->end = at + 1;
                facts_->fetched.resize(memo_.size() / 64 + 1);
                return hashed_ <= kFreeHashes + kHashesPerByte * nbytes_ &&
                       objects_ <= kFreeObjects + nbytes_ / kBytesPerObject;
            }
            const int64_t length = opcode_length(data_, at, nbytes_);
            if (length == 0 || (op == kBinPersid && before != kTuple) || !step(op, at)) return false;
            if (op != kBinPut && op != kLongBinPut) before = op;
            at += length;
        }
        return false;
    }

  private:
    bool step(uint8_t op, int64_t at) {
        switch (op) {
            case kBinPut:
                return put(data_[at + 1]);
            case kLongBinPut: {
                const int64_t slot = load_u32(data_ + at + 1);
                return slot <= at && put(slot);
            }
            case kBinGet:
                return get(data_[at + 1]);
            case kLongBinGet:
                return get(load_u32(data_ + at + 1));
            case kMark:
                marks_.push_back(stack_.size());
                return true;
            case kPop:
                if (!marks_.empty() && marks_.back() == stack_.size()) {
                    marks_.pop_back();
                } else if (stack_.empty()) {
                    return false;
                } else {
                    stack_.pop_back();
                }
                return true;
            case kProto:
                return data_[at + 1] <= 3;
            case kLong1:
                if (data_[at + 1] > kLongIntBytes && ++long_ints_ > kMaxLongInts) return false;
                break;
            default:
                break;
        }
        Effect effect;
        if (effect_of(op, &effect)) return apply(effect);
        stack_.push_back(1);
        return true;
    }

    bool apply(const Effect& effect) {
        size_t begin = stack_.size();
        if (effect.taken == kToMark) {
            if (marks_.empty() || marks_.back() > stack_.size()) return false;
            begin = marks_.back();
            marks_.pop_back();
        } else if (static_cast<size_t>(effect.taken) > stack_.size()) {
            return false;
        } else {
            begin -= static_cast<size_t>(effect.taken);
        }
        int64_t weight = 1;
        if (effect.sums) {
            for (size_t i = begin; i < stack_.size(); ++i) weight = plus(weight, stack_[i]);
        }
        if (effect.hashes_keys) {
            for (size_t i = begin; i < stack_.size(); i += 2) hashed_ = plus(hashed_, stack_[i]);
        }
        stack_.resize(begin);
        objects_ += effect.objects;
        if (effect.leaves == Leaves::kPush) stack_.push_back(weight);
        if (effect.leaves == Leaves::kNothing || effect.leaves == Leaves::kPush) return true;
        if (stack_.empty()) return false;
        if (effect.leaves == Leaves::kTop) stack_.back() = weight;
        return true;
    }

    bool put(int64_t slot) {
        // What is below a mark cannot be remembered; the unpickler says so, unless the PUT is left out.
        if (stack_.empty() || (!marks_.empty() && marks_.back() >= stack_.size())) return false;
        const size_t index = static_cast<size_t>(slot);
        if (index >= memo_.size()) memo_.resize(index + 1);
        const int64_t weight = stack_.back();
        if (weight > UINT8_MAX) return false;  // tuples of hundreds of values, which Python counts
        memo_[index] = static_cast<uint8_t>(weight);
        return true;
    }

    bool get(int64_t slot) {
        const size_t index = static_cast<size_t>(slot);
        if (index >= memo_.size() || memo_[index] == 0) return false;
        if (index / 64 >= facts_->fetched.size()) facts_->fetched.resize(memo_.size() / 64 + 1);
        facts_->fetched[index / 64] |= uint64_t{1} << (index % 64);
        stack_.push_back(memo_[index]);
        return true;
    }

    const uint8_t* data_;
    int64_t nbytes_;
    PickleFacts* facts_;
    std::vector<int64_t> stack_;
    std::vector<size_t> marks_;
    std::vector<uint8_t> memo_;  // by slot: a weight, 0 for none
    int64_t hashed_ = 0;
    int64_t objects_ = 0;
    int64_t long_ints_ = 0;
};

}  // namespace

int64_t opcode_length(const uint8_t* data, int64_t at, int64_t nbytes) {
    const int64_t left = nbytes - at;
    int64_t length = 0;
    switch (data[at]) {
        case kMark:
        case kStop:
        case kPop:
        case kPopMark:
        case kBinPersid:
        case kReduce:
        case kAppend:
        case kBuild:
        case kAppends:
        case kSetItem:
        case kTuple:
        case kSetItems:
        case kEmptyList:
        case kEmptyTuple:
        case kEmptyDict:
        case kNone:
        case kNewObj:
        case kTuple1:
        case kTuple2:
        case kTuple3:
        case kTrue:
        case kFalse:
            length = 1;
            break;
        case kBinGet:
        case kBinPut:
        case kBinInt1:
        case kProto:
            length = 2;
            break;
        case kBinInt2:
            length = 3;
            break;
        case kBinInt:
        case kLongBinGet:
        case kLongBinPut:
            length = 5;
            break;
        case kBinFloat:
            length = 9;
            break;
        case kBinUnicode:
            length = left < 5 ? 0 : 5 + static_cast<int64_t>(load_u32(data + at + 1));
            break;
        case kLong1:
            length = left < 2 ? 0 : 2 + data[at + 1];
            break;
        case kGlobal: {
            const uint8_t* end = data + nbytes;
            const uint8_t* module_end = std::find(data + at, end, '\n');
            const uint8_t* name_end = module_end == end ? end : std::find(module_end + 1, end, '\n');
            length = name_end == end ? 0 : name_end + 1 - (data + at);
            break;
        }
        default:
            break;
    }
    return length <= left ? length : 0;
}

bool check_pickle(const uint8_t* data, int64_t nbytes, PickleFacts* facts) {
    return Checker(data, nbytes, facts).run();
}

}  // namespace zeroelastic
