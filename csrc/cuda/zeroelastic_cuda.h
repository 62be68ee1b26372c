// The C interface of the CUDA engine: the table of zeroelastic.h, run between device buffers in one launch,
// or between files and device buffers.
//
// A plan is made once: rows are checked, cut into tasks of one warp each, and uploaded. It holds addresses,
// so it is valid as long as the buffers are, and can be run any number of times, on any stream of its device.
// Rows must not overlap in their destinations, nor a destination a source.

#ifndef ZEROELASTIC_CUDA_H_
#define ZEROELASTIC_CUDA_H_

#include "../zeroelastic.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ze_cuda_plan ze_cuda_plan;

// The text of a failure: `errnum` of ze_error holds a cudaError_t where `code` is ZE_INTERNAL.
ZE_API const char* ze_cuda_error_text(int32_t errnum);

// Prepares a table for `device`. `dst` may be null: then the rows are only digested, and `digest` must not be
// null. With a conversion, elements must be aligned to their size, which is a digest's itemsize.
// `digest->totals` is a device address, or null: then the plan has totals of its own.
ZE_API int32_t ze_cuda_plan_create(const ze_table* table, const ze_buffers* src, const ze_buffers* dst,
                                   const ze_digest* digest, int32_t cast, int32_t device, ze_cuda_plan** plan,
                                   ze_error* error);

// Enqueues the plan on `stream`, a cudaStream_t, and returns. Digests are added to the totals; a plan's own
// begin at zero each time, so one run of it must have ended before the next begins.
ZE_API int32_t ze_cuda_plan_run(const ze_cuda_plan* plan, void* stream, ze_error* error);

// Waits for what is enqueued on `stream`, and adds the totals that are the plan's own to `totals`, host
// memory, which may be null where it has none.
ZE_API int32_t ze_cuda_plan_finish(const ze_cuda_plan* plan, void* stream, uint64_t* totals, ze_error* error);

// Waits for the device before it frees the plan. Null is allowed.
ZE_API void ze_cuda_plan_destroy(ze_cuda_plan* plan);

// device memory -> files that exist, through the pinned memory of ze_cuda_read_segments; with `sync`, on
// ext4 and XFS, past the page cache. Runs on `stream` of `device`, after what is enqueued there already,
// and returns when all is written, or when nothing uses the memory after a failure. `digest->totals` and
// `crc32`, which may be null, are host memory; a conversion is made on the host.
ZE_API int32_t ze_cuda_write_segments(const ze_table* table, const ze_buffers* src, const ze_files* dst,
                                      const ze_digest* digest, const ze_options* options, int32_t device,
                                      void* stream, uint32_t* crc32, ze_error* error);

// files -> device memory, through at most 48 MiB of pinned host memory that is kept for the next call. Runs
// on `stream` of `device`, after what is enqueued there already, and returns when the memory is filled, or
// when nothing uses it after a failure. `digest->totals` and `crc32`, which may be null, are host memory; a
// conversion is made on the host.
ZE_API int32_t ze_cuda_read_segments(const ze_table* table, const ze_files* src, const ze_buffers* dst,
                                     const ze_digest* digest, const ze_options* options, int32_t device,
                                     void* stream, uint32_t* crc32, int64_t* bytes_read, ze_error* error);

#ifdef __cplusplus
}
#endif

#endif  // ZEROELASTIC_CUDA_H_
