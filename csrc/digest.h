// The partition-invariant digest of zeroelastic/core/digest.py, bit for bit.

#ifndef ZEROELASTIC_DIGEST_H_
#define ZEROELASTIC_DIGEST_H_

#include <cstdint>

#include "digest_weights.h"

namespace zeroelastic {

// What an element adds to a digest: `seed` of its stream, `start` its position there.
struct DigestOf {
    int itemsize;
    uint64_t seed;
    int64_t start;
};

// The partial digest of `count` elements at `data`, the first of which is element `start` of the stream.
// `data` need not be aligned; `itemsize` is 1, 2, 4 or 8.
uint64_t digest_elements(const void* data, int64_t count, int itemsize, uint64_t seed, int64_t start);

// The same, and copies `nbytes` of them, whole lines of 64 bytes from element `lead` on, past the caches to
// `dst`, which is on a boundary of 64 bytes. `lead` and what is left at the end are less than a line. Needs
// AVX-512.
uint64_t digest_and_stream(const void* data, int64_t count, int itemsize, uint64_t seed, int64_t start,
                           void* dst, int64_t lead, int64_t nbytes);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_DIGEST_H_
