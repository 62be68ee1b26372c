// Pickles that are packed: what comes of honest ones, and that no bytes make the engine leave its buffers.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../zeroelastic.h"
#include "check.h"

namespace {

struct Packed {
    bool taken = false;
    std::string pickle;
    std::vector<int64_t> values;
    std::vector<int64_t> bounds;
};

// Buffers are exactly as long as the pickle, so that a sanitizer sees every byte beyond.
Packed pack(const std::string& pickle, int64_t long_list) {
    const size_t nbytes = pickle.size();
    const std::unique_ptr<uint8_t[]> data(new uint8_t[nbytes]), room(new uint8_t[nbytes]);
    std::memcpy(data.get(), pickle.data(), nbytes);
    ze_packed out{};
    out.pickle = room.get();
    ze_error error{};
    const int32_t code = ze_pack_pickle(data.get(), static_cast<int64_t>(nbytes), long_list, &out, &error);
    CHECK(code == ZE_OK || code == ZE_BAD_TABLE);
    Packed packed;
    packed.taken = code == ZE_OK;
    if (packed.taken) {
        CHECK(out.num_bytes > 0 && out.num_bytes <= static_cast<int64_t>(nbytes));
        packed.pickle.assign(reinterpret_cast<char*>(out.pickle), static_cast<size_t>(out.num_bytes));
        packed.values.assign(out.values, out.values + out.num_values);
        packed.bounds.assign(out.bounds, out.bounds + out.num_bounds);
    }
    ze_free_packed(&out);
    return packed;
}

std::string bytes(std::initializer_list<int> values) {
    std::string made;
    for (const int value : values) made.push_back(static_cast<char>(value));
    return made;
}

std::string text(const std::string& value, int slot) {
    return "X" + bytes({static_cast<int>(value.size()), 0, 0, 0}) + value + "q" + bytes({slot});
}

// Tensors whose parts are in the memo slots behind `base`.
std::string first_tensor(int base = 0) {
    const auto put = [base](int slot) { return "q" + bytes({base + slot}); };
    return "ctorch._utils\n_rebuild_tensor_v2\n" + put(1) + "((" + text("storage", base + 2) +
           "ctorch\nFloatStorage\n" + put(3) + text("0", base + 4) + text("cpu", base + 5) + "K\x28tQ" +
           bytes({'K', 0, 'K', 2, 0x85, 'K', 1, 0x85, 0x89}) + "ccollections\nOrderedDict\n" + put(6) +
           ")RtR";
}

std::string next_tensor(int offset, int base = 0) {
    const auto get = [base](int slot) { return "h" + bytes({base + slot}); };
    return get(1) + "((" + get(2) + get(3) + get(4) + get(5) + "K\x28tQ" +
           bytes({'K', offset, 'K', 2, 0x85, 'K', 1, 0x85, 0x89}) + get(6) + ")RtR";
}

// Shapes by name, and tensors by name with the versions of modules.
std::string dictionaries() {
    const std::string size = "ctorch\nSize\nq\x22", dict = "ccollections\nOrderedDict\nq\x20)R";
    std::string shapes, tensors, versions;
    for (int i = 0; i < 5; ++i) {
        const std::string name = "X" + bytes({1, 0, 0, 0, 'a' + i});
        shapes += name + (i == 0 ? size : "h\x22") + bytes({'K', i % 2, 0x85, 0x85, 'R'});
        tensors += name + (i == 0 ? first_tensor(0x30) : next_tensor(i, 0x30));
        versions += name + "}" + (i == 0 ? text("version", 0x40) : "h\x40") + "K\1s";
    }
    return dict + "q\x21(" + shapes + "u" + dict + "(" + tensors + "u}" + text("_metadata", 0x39) + dict +
           "(" + versions + "usb";
}

std::string honest() {
    std::string tensors = "](" + first_tensor();
    for (int i = 1; i < 6; ++i) tensors += next_tensor(i);
    const std::string shape = bytes({'K', 4, 'K', 7, 0x86, 'q', 7});
    return bytes({0x80, 2}) + "}q\x0a(" + text("names", 9) + "](K\1M\2\1J\xff\xff\xff\xff" +
           bytes({0x8A, 1, 0xFF}) + "e" + text("shapes", 8) + "](" + shape + shape + "h\7e" +
           text("tensors", 9) + tensors + "e" + text("dictionaries", 9) + "(" + dictionaries() + "t" +
           text("cell", 9) + "}K\1G" + std::string(8, 'x') + "su.";
}

}  // namespace

TEST(long_lists_of_a_pickle_are_columns) {
    const Packed packed = pack(honest(), 4);
    CHECK(packed.taken);
    const std::vector<int64_t> lists{1, 258, -1, -1, 0, 2, 1, 2, 2, 2, 3, 2, 4, 2, 5, 2};
    CHECK(packed.values.size() == 41 && std::equal(lists.begin(), lists.end(), packed.values.begin()));
    CHECK((packed.bounds == std::vector<int64_t>{0, 4, 1, 16, 3, 21, 2, 41, 4, 41}));
    const std::string call = bytes({'J', 1, 0, 0, 0, 'Q'});
    CHECK(packed.pickle.find(bytes({'J', 0, 0, 0, 0, 'Q'})) != std::string::npos);
    CHECK(packed.pickle.find(call) != std::string::npos);
    CHECK(packed.pickle.size() < honest().size());
    const Packed plain = pack(honest(), 0);
    CHECK(plain.taken && plain.values.empty() && plain.bounds.empty());
}

TEST(long_dictionaries_of_a_pickle_are_columns) {
    const std::string pickle = bytes({0x80, 2}) + "(" + dictionaries() + "h\x40h\x21t.";
    const Packed packed = pack(pickle, 4);
    CHECK(packed.taken && packed.pickle.size() < pickle.size());
    CHECK((packed.bounds == std::vector<int64_t>{3, 5, 2, 25, 4, 25}));
    CHECK(std::equal(packed.values.begin(), packed.values.begin() + 5,
                     std::vector<int64_t>{0, 1, 2, 1, 2}.begin()));
    for (int64_t i = 0; i < 5; ++i) {
        const std::vector<int64_t> row{i == 0 ? 0 : 1, 0, 40,
                                       i};  // the first tensor names what the others fetch
        CHECK(std::equal(row.begin(), row.end(), packed.values.begin() + 5 + 4 * i));
    }
    CHECK(pack(pickle, 6).bounds.empty());
}

TEST(a_pickle_that_ends_anywhere_is_not_taken) {
    const std::string pickle = honest();
    for (size_t size = 0; size < pickle.size(); ++size) CHECK(!pack(pickle.substr(0, size), 4).taken);
    CHECK(!pack("", 0).taken);
}

TEST(a_pickle_of_any_bytes_stays_in_its_buffers) {
    const std::string good = honest(), ops = "(01NR])}abetsuQ.qrhjXJKMGc\x80\x81\x85\x86\x87\x88\x89\x8A";
    uint64_t state = 1;
    const auto random = [&state](size_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<size_t>(state >> 33) % below;
    };
    int64_t taken = 0;
    for (int i = 0; i < 30000; ++i) {
        std::string pickle = good;
        for (size_t changes = 1 + random(4); changes > 0; --changes) {
            const size_t at = random(pickle.size());
            const size_t what = random(4);
            if (what == 0) {
                pickle[at] = static_cast<char>(random(256));
            } else if (what == 1) {
                pickle[at] = ops[random(ops.size())];
            } else if (what == 2) {
                pickle.erase(at, 1 + random(6));
            } else {
                pickle.insert(at, good, random(good.size()), random(40));
            }
            if (pickle.empty()) pickle = ".";
        }
        taken += pack(pickle, static_cast<int64_t>(random(6))).taken;
    }
    CHECK(taken > 1000);
}

TEST(lists_in_lists_and_marks_without_end_take_neither_stack_nor_time) {
    const std::string start = bytes({0x80, 2});
    CHECK(pack(start + std::string(100000, ']') + std::string(99999, 'a') + ".", 4).taken);
    CHECK(!pack(start + std::string(1000000, '('), 4).taken);
    CHECK(pack(start + "](" + std::string(200000, 'N') + "e.", 4).taken);
    std::string integers = start;
    for (int i = 0; i < 100000; ++i) integers += "](K\1";  // each list begins in the one before
    CHECK(pack(integers + std::string(100000, 'e') + ".", 2).taken);
}
