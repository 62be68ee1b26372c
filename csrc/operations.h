// The operations behind the C interface; see zeroelastic.h. They may throw std::bad_alloc.

#ifndef ZEROELASTIC_OPERATIONS_H_
#define ZEROELASTIC_OPERATIONS_H_

#include <cstdint>

#include "zeroelastic.h"

namespace zeroelastic {

class OpenFiles;
class Progress;

int32_t read_segments(const ze_table& table, const ze_files& src, const ze_buffers& dst,
                      const ze_digest* digest, const ze_options& options, uint32_t* crc32,
                      int64_t* bytes_read, ze_error* error);

// As read_segments, of files that a caller with several tables keeps open by announcing a use of its own, and
// with one progress for all tables, which the caller finishes.
int32_t read_open_segments(const ze_table& table, OpenFiles* files, int64_t num_files, const ze_buffers& dst,
                           const ze_digest* digest, const ze_options& options, Progress* progress,
                           uint32_t* crc32, int64_t* bytes_read, ze_error* error);

int32_t copy_segments(const ze_table& table, const ze_buffers& src, const ze_buffers& dst,
                      const ze_digest* digest, const ze_options& options, uint32_t* crc32, ze_error* error);

int32_t write_segments(const ze_table& table, const ze_buffers& src, const ze_files& dst,
                       const ze_digest* digest, const ze_options& options, uint32_t* crc32, ze_error* error);

// As write_segments, of files that a caller with several tables keeps open by announcing a use of its own:
// then they are flushed when that ends. One progress for all tables, which the caller finishes.
int32_t write_open_segments(const ze_table& table, const ze_buffers& src, OpenFiles* files, int64_t num_files,
                            const ze_digest* digest, const ze_options& options, Progress* progress,
                            uint32_t* crc32, ze_error* error);

int32_t move_segments(const ze_table& table, const ze_files& src, const ze_files& dst,
                      const ze_digest* digest, const ze_options& options, uint32_t* crc32, ze_error* error);

int32_t sum_segments(const ze_table& table, const ze_buffers& src, const ze_digest* digest,
                     const ze_options& options, uint32_t* crc32, ze_error* error);

int32_t scan_segments(const ze_table& table, const ze_files& src, const ze_digest* digest,
                      const ze_options& options, uint32_t* crc32, ze_error* error);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_OPERATIONS_H_
