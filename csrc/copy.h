// Copying one run of bytes at the speed of memory.

#ifndef ZEROELASTIC_COPY_H_
#define ZEROELASTIC_COPY_H_

#include <cstdint>

namespace zeroelastic {

// memcpy. With `streaming`, long runs are written past the caches; the caller calls end_streaming() before
// another thread may look at them.
void copy_bytes(void* dst, const void* src, int64_t nbytes, bool streaming);

void end_streaming();

}  // namespace zeroelastic

#endif  // ZEROELASTIC_COPY_H_
