// Loads of 64 bytes from any address.

#ifndef ZEROELASTIC_LOAD512_H_
#define ZEROELASTIC_LOAD512_H_

#include "cpu.h"

#if ZE_X86
#include <immintrin.h>

namespace zeroelastic {

// In two halves, of which at most one crosses a line. One load of 64 bytes crosses a line wherever it is not
// on a boundary, and Zen 5 then converts from memory at little more than half the speed.
ZE_TARGET_AVX512 inline __m512i load512(const void* from) {
    const __m256i* halves = static_cast<const __m256i*>(from);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(halves)),
                              _mm256_loadu_si256(halves + 1), 1);
}

}  // namespace zeroelastic

#endif  // ZE_X86

#endif  // ZEROELASTIC_LOAD512_H_
