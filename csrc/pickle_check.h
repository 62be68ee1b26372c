// The opcodes of pickle protocol 2, and the limits of a pickle: what zeroelastic/torch_file/safe_unpickler.py
// checks.

#ifndef ZEROELASTIC_PICKLE_CHECK_H_
#define ZEROELASTIC_PICKLE_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zeroelastic {

enum Opcode : uint8_t {
    kMark = '(',
    kStop = '.',
    kPop = '0',
    kPopMark = '1',
    kBinPersid = 'Q',
    kReduce = 'R',
    kAppend = 'a',
    kBuild = 'b',
    kGlobal = 'c',
    kAppends = 'e',
    kBinGet = 'h',
    kLongBinGet = 'j',
    kBinPut = 'q',
    kLongBinPut = 'r',
    kSetItem = 's',
    kTuple = 't',
    kSetItems = 'u',
    kEmptyList = ']',
    kEmptyTuple = ')',
    kEmptyDict = '}',
    kBinUnicode = 'X',
    kBinInt = 'J',
    kBinInt1 = 'K',
    kBinInt2 = 'M',
    kBinFloat = 'G',
    kNone = 'N',
    kProto = 0x80,
    kNewObj = 0x81,
    kTuple1 = 0x85,
    kTuple2 = 0x86,
    kTuple3 = 0x87,
    kTrue = 0x88,
    kFalse = 0x89,
    kLong1 = 0x8A,
};

// Little-endian; the caller knows that the bytes are there.
inline uint32_t load_u32(const uint8_t* at) {
    return static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8 |
           static_cast<uint32_t>(at[2]) << 16 | static_cast<uint32_t>(at[3]) << 24;
}

// The bytes of the opcode at `at` with its argument; 0 where it reaches behind the pickle or is none of
// these.
int64_t opcode_length(const uint8_t* data, int64_t at, int64_t nbytes);

// What was found out about a pickle that passed.
struct PickleFacts {
    int64_t end = 0;                // behind STOP
    std::vector<uint64_t> fetched;  // by slot, 64 in a word: whether something fetches it

    bool is_fetched(int64_t slot) const {
        const size_t word = static_cast<size_t>(slot) / 64;
        return word < fetched.size() && (fetched[word] >> (slot % 64) & 1) != 0;
    }
};

// Whether a pickle of protocol 2 is in proportion to its size, and makes its persistent ids in place.
bool check_pickle(const uint8_t* data, int64_t nbytes, PickleFacts* facts);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_PICKLE_CHECK_H_
