#include "crc32.h"

#include <array>
#include <cstring>

#include "cpu.h"
#include "crc32_wide.h"

#if ZE_X86
#include <immintrin.h>
#define ZE_TARGET_CLMUL __attribute__((target("sse4.1,pclmul")))
#endif

namespace zeroelastic {
namespace {

// Polynomials over GF(2) are reflected: bit 31 is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0xEDB88320u;
constexpr uint32_t kOne = 1u << 31;

constexpr uint32_t times_x(uint32_t a) {
    return (a >> 1) ^ ((a & 1u) != 0 ? kPolynomial : 0u);
}

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = times_x(b);
    }
    return product;
}

// x^(2^k) for each k.
constexpr std::array<uint32_t, 64> squares() {
    std::array<uint32_t, 64> table{};
    table[0] = kOne >> 1;
    for (size_t k = 1; k < table.size(); ++k) table[k] = multiply(table[k - 1], table[k - 1]);
    return table;
}

constexpr std::array<uint32_t, 64> kSquares = squares();

constexpr uint32_t power_of_x(uint64_t exponent) {
    uint32_t result = kOne;
    for (size_t k = 0; exponent != 0; ++k, exponent >>= 1) {
        if ((exponent & 1) != 0) result = multiply(result, kSquares[k]);
    }
    return result;
}

// Row k: the effect of one byte on the register after k more bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> tables() {
    std::array<std::array<uint32_t, 256>, 8> made{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = times_x(value);
        made[0][byte] = value;
    }
    for (size_t k = 1; k < made.size(); ++k) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = made[k - 1][byte];
            made[k][byte] = (before >> 8) ^ made[0][before & 0xFF];
        }
    }
    return made;
}

constexpr std::array<std::array<uint32_t, 256>, 8> kTables = tables();

// Eight bytes at a time; `state` is the register, not inverted. The byte order is the one of the machines
// that we run on, little-endian.
uint32_t run_tables(uint32_t state, const unsigned char* data, int64_t nbytes) {
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        uint32_t low;
        uint32_t high;
        std::memcpy(&low, data, 4);
        std::memcpy(&high, data + 4, 4);
        low ^= state;
        state = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^
                kTables[4][low >> 24] ^ kTables[3][high & 0xFF] ^ kTables[2][(high >> 8) & 0xFF] ^
                kTables[1][(high >> 16) & 0xFF] ^ kTables[0][high >> 24];
    }
    for (; nbytes > 0; ++data, --nbytes) state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xFF];
    return state;
}

#if ZE_X86

// A fold moves 16 bytes `distance` bits ahead: its halves are multiplied by powers of x modulo the
// polynomial. A carry-less product of reflected factors comes out one bit too low, and the factor is 32 bits
// shorter than the register: hence the offsets.
constexpr uint64_t fold_factor(uint64_t exponent) {
    return uint64_t{power_of_x(exponent)} << 1;
}

constexpr uint64_t kFold256Low = fold_factor(16 * 128 + 32);
constexpr uint64_t kFold256High = fold_factor(16 * 128 - 32);
constexpr uint64_t kFold64Low = fold_factor(4 * 128 + 32);
constexpr uint64_t kFold64High = fold_factor(4 * 128 - 32);
constexpr uint64_t kFold16Low = fold_factor(128 + 32);
constexpr uint64_t kFold16High = fold_factor(128 - 32);

ZE_TARGET_CLMUL inline __m128i factors(uint64_t high, uint64_t low) {
    return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
}

ZE_TARGET_CLMUL inline __m128i fold(__m128i value, __m128i by, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(value, by, 0x00);
    const __m128i high = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Folds 64 bytes to 16 that stand for them; the last reduction is left to the tables.
ZE_TARGET_CLMUL uint32_t end_folding(const __m128i* part) {
    const __m128i by16 = factors(kFold16High, kFold16Low);
    __m128i last = part[0];
    for (int i = 1; i < 4; ++i) last = fold(last, by16, part[i]);
    unsigned char rest[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), last);
    return run_tables(0, rest, sizeof rest);
}

// Folds whole multiples of 64 bytes, at least one. The method is that of "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction" (Gopal et al., Intel, 2009).
ZE_TARGET_CLMUL uint32_t run_folding(uint32_t state, const unsigned char* data, int64_t nbytes) {
    const auto load = [](const unsigned char* from)
                          ZE_TARGET_CLMUL { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
    __m128i part[4];
    for (int i = 0; i < 4; ++i) part[i] = load(data + 16 * i);
    part[0] = _mm_xor_si128(part[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    const __m128i by64 = factors(kFold64High, kFold64Low);
    for (data += kFoldBytes, nbytes -= kFoldBytes; nbytes > 0; data += kFoldBytes, nbytes -= kFoldBytes) {
        for (int i = 0; i < 4; ++i) part[i] = fold(part[i], by64, load(data + 16 * i));
    }
    return end_folding(part);
}

// The same, four times as wide, of at least 256 bytes.
ZE_TARGET_VCLMUL uint32_t run_wide_folding(uint32_t state, const unsigned char* data, int64_t nbytes) {
    WideFold fold = begin_wide_fold(state, data);
    int64_t done = kWideFoldBytes;
    for (; done + kWideFoldBytes <= nbytes; done += kWideFoldBytes) {
        for (int i = 0; i < 4; ++i) {
            fold.part[i] = fold_wide(fold.part[i], fold.by, _mm512_loadu_si512(data + done + 64 * i));
        }
    }
    return end_wide_fold(fold, data + done, nbytes - done);
}

bool can_fold() {
    static const bool can = [] {
        __builtin_cpu_init();
        return __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
    }();
    return can && current_isa() > ZE_ISA_PLAIN;
}

#endif  // ZE_X86

}  // namespace

#if ZE_X86

bool can_fold_wide() {
    static const bool can = (__builtin_cpu_init(), __builtin_cpu_supports("vpclmulqdq") != 0);
    return can_fold() && can && current_isa() >= ZE_ISA_AVX512;
}

ZE_TARGET_VCLMUL WideFold begin_wide_fold(uint32_t state, const unsigned char* data) {
    WideFold fold;
    for (int i = 0; i < 4; ++i) fold.part[i] = _mm512_loadu_si512(data + 64 * i);
    const __m128i first = _mm_cvtsi32_si128(static_cast<int>(state));
    fold.part[0] = _mm512_xor_si512(fold.part[0], _mm512_zextsi128_si512(first));
    fold.by = _mm512_broadcast_i32x4(factors(kFold256High, kFold256Low));
    return fold;
}

ZE_TARGET_VCLMUL uint32_t end_wide_fold(const WideFold& fold, const unsigned char* data, int64_t nbytes) {
    const __m512i by64 = _mm512_broadcast_i32x4(factors(kFold64High, kFold64Low));
    __m512i last = fold.part[0];
    for (int i = 1; i < 4; ++i) last = fold_wide(last, by64, fold.part[i]);
    for (int64_t done = 0; done < nbytes; done += kFoldBytes) {
        last = fold_wide(last, by64, _mm512_loadu_si512(data + done));
    }
    __m128i lanes[4];
    _mm512_storeu_si512(lanes, last);
    return end_folding(lanes);
}

#endif  // ZE_X86

uint32_t crc32_of(uint32_t crc, const void* data, int64_t nbytes) {
    const unsigned char* from = static_cast<const unsigned char*>(data);
    uint32_t state = ~crc;
#if ZE_X86
    if (nbytes >= kFoldBytes && can_fold()) {
        const int64_t folded = nbytes / kFoldBytes * kFoldBytes;
        const bool wide = nbytes >= kWideFoldBytes && can_fold_wide();
        state = (wide ? run_wide_folding : run_folding)(state, from, folded);
        from += folded;
        nbytes -= folded;
    }
#endif
    return ~run_tables(state, from, nbytes);
}

uint32_t crc32_join(uint32_t first, uint32_t second, int64_t nbytes) {
    return multiply(power_of_x(static_cast<uint64_t>(nbytes) * 8), first) ^ second;
}

}  // namespace zeroelastic
