// Checksums: of any length and alignment, by every instruction set, joined from parts, and of what is
// written.

#include <cstdint>
#include <vector>

#include "../crc32.h"
#include "../zeroelastic.h"
#include "check.h"

namespace {

uint32_t bit_by_bit(const unsigned char* data, size_t nbytes) {
    uint32_t state = ~0u;
    for (size_t i = 0; i < nbytes; ++i) {
        state ^= data[i];
        for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1u) != 0 ? 0xEDB88320u : 0u);
    }
    return ~state;
}

std::vector<unsigned char> noise(size_t nbytes) {
    std::vector<unsigned char> made(nbytes);
    uint32_t state = 12345;
    for (unsigned char& byte : made) {
        state = state * 1664525u + 1013904223u;
        byte = static_cast<unsigned char>(state >> 24);
    }
    return made;
}

TEST(crc32_of_every_short_length_and_alignment) {
    const std::vector<unsigned char> data = noise(1000);
    CHECK(zeroelastic::crc32_of(0, "123456789", 9) == 0xCBF43926u);  // the check value of the standard
    for (const int32_t isa : {ZE_ISA_PLAIN, ZE_ISA_AVX2, ZE_ISA_AVX512}) {
        ze_limit_isa(isa);
        for (size_t begin = 0; begin < 17; ++begin) {
            for (size_t nbytes = 0; nbytes <= 900; ++nbytes) {
                CHECK(zeroelastic::crc32_of(0, data.data() + begin, static_cast<int64_t>(nbytes)) ==
                      bit_by_bit(data.data() + begin, nbytes));
            }
        }
    }
}

TEST(crc32_goes_on_and_joins) {
    const std::vector<unsigned char> data = noise(100003);
    const uint32_t whole = bit_by_bit(data.data(), data.size());
    for (const size_t cut : {size_t{0}, size_t{1}, size_t{64}, size_t{777}, size_t{65536}, data.size()}) {
        const int64_t left = static_cast<int64_t>(cut);
        const int64_t right = static_cast<int64_t>(data.size() - cut);
        const uint32_t first = zeroelastic::crc32_of(0, data.data(), left);
        CHECK(zeroelastic::crc32_of(first, data.data() + cut, right) == whole);
        const uint32_t parts[] = {first, zeroelastic::crc32_of(0, data.data() + cut, right)};
        const int64_t sizes[] = {left, right};
        CHECK(ze_crc32_join(parts, sizes, 2) == whole);
    }
    CHECK(ze_crc32_join(nullptr, nullptr, 0) == 0);
}

TEST(crc32_joins_runs_of_zeros_longer_than_4_gib) {
    const std::vector<unsigned char> zeros(1 << 20);
    const uint32_t mebibyte = bit_by_bit(zeros.data(), zeros.size());
    uint32_t doubled = mebibyte;
    for (int64_t nbytes = 1 << 20; nbytes < int64_t{8} << 30; nbytes *= 2) {
        doubled = zeroelastic::crc32_join(doubled, doubled, nbytes);
    }
    uint32_t stepwise = mebibyte;
    for (int i = 1; i < 8192; ++i) stepwise = zeroelastic::crc32_join(stepwise, mebibyte, 1 << 20);
    CHECK(doubled == stepwise);
}

}  // namespace
