// float16 of the fake, by the engine's own conversions; the one NaN that a GPU makes is 0x7FFF.

#ifndef ZEROELASTIC_TESTS_FAKE_CUDA_FP16_H_
#define ZEROELASTIC_TESTS_FAKE_CUDA_FP16_H_

#include <cstdint>

#include "../../../cast.h"
#include "cuda_runtime.h"

struct __half {
    uint16_t bits;
};

inline __half __float2half_rn(float value) {
    if ((__float_as_uint(value) & 0x7FFFFFFF) > 0x7F800000) return {0x7FFF};
    __half made;
    zeroelastic::cast_elements(ZE_CAST_F32_F16, &value, &made, 1, false);
    return made;
}
inline float __half2float(__half value) {
    float made;
    zeroelastic::cast_elements(ZE_CAST_F16_F32, &value, &made, 1, false);
    return made;
}
inline uint16_t __half_as_ushort(__half value) {
    return value.bits;
}
inline __half __ushort_as_half(uint16_t bits) {
    return {bits};
}

#endif  // ZEROELASTIC_TESTS_FAKE_CUDA_FP16_H_
