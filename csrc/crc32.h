// CRC-32 as zip archives have it: reflected polynomial 0xEDB88320, inverted before and after, as zlib's
// crc32().

#ifndef ZEROELASTIC_CRC32_H_
#define ZEROELASTIC_CRC32_H_

#include <cstdint>

namespace zeroelastic {

// The checksum of what `crc` covers (0: nothing) followed by `nbytes` more bytes.
uint32_t crc32_of(uint32_t crc, const void* data, int64_t nbytes);

// The checksum of two runs, one behind the other, from theirs; `nbytes` is the length of the second.
uint32_t crc32_join(uint32_t first, uint32_t second, int64_t nbytes);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_CRC32_H_
