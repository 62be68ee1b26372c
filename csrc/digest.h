// The partition-invariant digest of zeroelastic/digest.py, bit for bit.

#ifndef ZEROELASTIC_DIGEST_H_
#define ZEROELASTIC_DIGEST_H_

#include <cstdint>

namespace zeroelastic {

// Elements that share one block weight.
constexpr int64_t kDigestBlock = 1024;

// The partial digest of `count` elements at `data`, the first of which is element `start` of the stream.
// `data` need not be aligned; `itemsize` is 1, 2, 4 or 8.
uint64_t digest_elements(const void* data, int64_t count, int itemsize, uint64_t seed, int64_t start);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_DIGEST_H_
