// bfloat16 of the fake: the one NaN that a GPU makes is 0x7FFF.

#ifndef ZEROELASTIC_TESTS_FAKE_CUDA_BF16_H_
#define ZEROELASTIC_TESTS_FAKE_CUDA_BF16_H_

#include <cstdint>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return {0x7FFF};
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) {
    return value.bits;
}

#endif  // ZEROELASTIC_TESTS_FAKE_CUDA_BF16_H_
