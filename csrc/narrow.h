// fp32 to a 16-bit type, a vector at a time.

#ifndef ZEROELASTIC_NARROW_H_
#define ZEROELASTIC_NARROW_H_

#include <cstdint>

#include "cast.h"
#include "cpu.h"

#if ZE_X86
#include <immintrin.h>

namespace zeroelastic {

// The first `count` of 16 lanes.
ZE_TARGET_AVX512 inline __mmask16 first_lanes(int64_t count) {
    return static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1 << count) - 1);
}

ZE_TARGET_AVX512 inline __m256i narrow512(__m512i bits, bool to_bf16) {
    if (!to_bf16)
        return _mm512_cvtps_ph(_mm512_castsi512_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 nan =
        _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    rounded = _mm512_srli_epi32(rounded, 16);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(kBfloat16Nan)));
}

// Up to 32 elements, zeros behind them; nothing beyond them is read.
ZE_TARGET_AVX512 inline __m512i narrow_some(const char* src, int64_t count, bool to_bf16) {
    const __mmask32 lanes = count >= 32 ? ~uint32_t{0} : (uint32_t{1} << count) - 1;
    const __m512i first = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(lanes), src);
    const __m512i second = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(lanes >> 16), src + 64);
    const __m256i low = narrow512(first, to_bf16);
    const __m256i high = narrow512(second, to_bf16);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

}  // namespace zeroelastic

#endif  // ZE_X86

#endif  // ZEROELASTIC_NARROW_H_
