// Conversions between fp32 and the 16-bit types, as torch's Tensor.copy_ does them but for which NaN is made.

#ifndef ZEROELASTIC_CAST_H_
#define ZEROELASTIC_CAST_H_

#include <cstdint>

#include "zeroelastic.h"

namespace zeroelastic {

// What every NaN becomes in bfloat16: torch's rule for one element. Its vector units make other ones.
constexpr uint16_t kBfloat16Nan = 0x7FC0;

// Converts `count` elements; neither side need be aligned. Rounds to nearest even. A NaN becomes kBfloat16Nan
// in bfloat16, and in float16 a quiet NaN with its sign and the upper bits of its payload. With `streaming`,
// the destination is written past the caches; it must then be on a boundary of 64 bytes.
void cast_elements(int32_t cast, const void* src, void* dst, int64_t count, bool streaming);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_CAST_H_
