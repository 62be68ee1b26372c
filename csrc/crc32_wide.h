// CRC-32 of 256 bytes at a time, for loops that do something else with them, too.

#ifndef ZEROELASTIC_CRC32_WIDE_H_
#define ZEROELASTIC_CRC32_WIDE_H_

#include <cstdint>

#include "cpu.h"

#if ZE_X86
#include <immintrin.h>

#define ZE_TARGET_VCLMUL __attribute__((target("sse4.1,pclmul,avx512f,vpclmulqdq")))

namespace zeroelastic {

constexpr int64_t kFoldBytes = 64;
constexpr int64_t kWideFoldBytes = 256;

// 256 bytes that stand for all that came before, and what moves them 256 bytes ahead.
struct WideFold {
    __m512i part[4];
    __m512i by;
};

bool can_fold_wide();

// Of the register, not inverted, and the first 256 bytes.
WideFold begin_wide_fold(uint32_t state, const unsigned char* data);

// The register behind `nbytes` more bytes, whole multiples of 64.
uint32_t end_wide_fold(const WideFold& fold, const unsigned char* data, int64_t nbytes);

ZE_TARGET_VCLMUL inline __m512i fold_wide(__m512i value, __m512i by, __m512i next) {
    const __m512i low = _mm512_clmulepi64_epi128(value, by, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(value, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // all three, exclusive or
}

}  // namespace zeroelastic

#endif  // ZE_X86

#endif  // ZEROELASTIC_CRC32_WIDE_H_
