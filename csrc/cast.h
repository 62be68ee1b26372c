// Conversions between fp32 and the 16-bit types, as torch's Tensor.copy_ does them.

#ifndef ZEROELASTIC_CAST_H_
#define ZEROELASTIC_CAST_H_

#include <cstdint>

#include "zeroelastic.h"

namespace zeroelastic {

// Converts `count` elements; neither side need be aligned. Rounds to nearest even. A NaN becomes, in
// bfloat16, what torch makes of it on this processor (0xFFFF with AVX2, else 0x7FC0); in float16, a quiet NaN
// with the upper bits of the payload. With `streaming`, the destination, which is then on a boundary of 64
// bytes, is written past the caches.
void cast_elements(int32_t cast, const void* src, void* dst, int64_t count, bool streaming);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_CAST_H_
