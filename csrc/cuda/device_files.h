// Between files and device memory, through a bounded ring of pinned host memory.

#ifndef ZEROELASTIC_CUDA_DEVICE_FILES_H_
#define ZEROELASTIC_CUDA_DEVICE_FILES_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "../zeroelastic.h"

namespace zeroelastic {

// Slots of pinned memory, each made when it is first needed and kept: pinning is as slow as reading.
class PinnedRing {
  public:
    // A slot holds at least 64 KiB.
    PinnedRing(int num_slots, int64_t slot_bytes);
    ~PinnedRing();
    PinnedRing(const PinnedRing&) = delete;
    PinnedRing& operator=(const PinnedRing&) = delete;

    int num_slots() const {
        return static_cast<int>(slots_.size());
    }
    int64_t slot_bytes() const {
        return slot_bytes_;
    }

    cudaError_t get(int slot, char** data);

    // One call at a time has the ring.
    std::mutex mutex;

  private:
    int64_t slot_bytes_;
    std::vector<char*> slots_;
};

// Fills device memory on `stream` of `device` and waits until it is filled. `crc32` may be null. May throw
// std::bad_alloc.
int32_t read_to_device(const ze_table& table, const ze_files& src, const ze_buffers& dst,
                       const ze_digest* digest, const ze_options& options, int device, cudaStream_t stream,
                       PinnedRing* ring, uint32_t* crc32, int64_t* bytes_read, ze_error* error);

// Writes device memory, as it is after what is enqueued on `stream` of `device`, into files that exist, and
// returns when all is written. `crc32` may be null. May throw std::bad_alloc.
int32_t write_from_device(const ze_table& table, const ze_buffers& src, const ze_files& dst,
                          const ze_digest* digest, const ze_options& options, int device, cudaStream_t stream,
                          PinnedRing* ring, uint32_t* crc32, ze_error* error);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_CUDA_DEVICE_FILES_H_
