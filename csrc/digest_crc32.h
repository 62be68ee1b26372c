// A digest and a checksum of the same bytes, in one pass over them.

#ifndef ZEROELASTIC_DIGEST_CRC32_H_
#define ZEROELASTIC_DIGEST_CRC32_H_

#include <cstdint>

#include "digest.h"

namespace zeroelastic {

// The partial digest of `nbytes` bytes of whole elements. `crc` becomes the checksum of what it covered
// before and these bytes.
uint64_t digest_and_crc32(const void* data, int64_t nbytes, const DigestOf& digest, uint32_t* crc);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_DIGEST_CRC32_H_
