// What reading to a device and writing from one share: tables cut into windows of one slot of the ring each.

#ifndef ZEROELASTIC_CUDA_DEVICE_WINDOWS_H_
#define ZEROELASTIC_CUDA_DEVICE_WINDOWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "../table.h"
#include "device_files.h"

namespace zeroelastic {

enum class Direction { kToDevice, kToFiles };

// Bytes that lie side by side in a slot and on the device: one copy.
struct Run {
    int64_t buffer;
    uint64_t address;
    int64_t at;  // in the slot
    int64_t nbytes;
};

// What one slot holds: pieces of rows, each at its place in a file and in the slot, and the copies between
// the slot and the device.
struct Window {
    std::vector<int64_t> row, file, file_offset, slot, at, nbytes;  // `slot` is the one buffer, number 0
    std::vector<int64_t> stream, start, itemsize;
    std::vector<Run> runs;
    std::vector<int64_t> ended;  // rows, all of whose bytes are in this window and those before
    int64_t used = 0;

    void clear();

    // Between the files and the slot.
    ze_table table(Direction direction) const;

    // `digest` with what the window's pieces add to it.
    ze_digest digests(const ze_digest& digest) const;

    // Joins the checksums of the window's pieces, as they are in the file, to those of their rows.
    void join(const std::vector<uint32_t>& pieces, int32_t cast, uint32_t* crc32) const;
};

// Cuts a table into windows. Reads go in the order of the destinations, so that what is contiguous on the
// device is so in the slot, and goes there in one copy; writes in the order of the files.
class Windows {
  public:
    // `device` are the buffers on the device's side, `slot_bytes` the size of a slot.
    Windows(Direction direction, const ze_table& table, const ze_buffers& device, const ze_digest* digest,
            int32_t cast, int64_t slot_bytes);

    // The next window; false at the end.
    bool next(Window* window);

  private:
    int64_t add(int64_t row, int64_t rest, Window* window);
    int64_t in_slot(int64_t nbytes) const;
    int64_t most_in(int64_t room) const;

    const Direction direction_;
    const ze_table& table_;
    const ze_buffers& device_;
    const ze_digest* digest_;
    const int32_t cast_;
    const int64_t slot_bytes_;
    const std::vector<int64_t> order_;
    int64_t position_ = 0;
    int64_t within_ = 0;
};

// An event per slot: that what its copies were asked for is done.
class Events {
  public:
    explicit Events(int count) : events_(static_cast<size_t>(count)) {}
    ~Events();
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;

    cudaError_t record(int slot, cudaStream_t stream);
    cudaError_t wait(int slot);

  private:
    std::vector<cudaEvent_t> events_;
};

// Keeps each file of a table open from its first window to its last.
class FilesInUse {
  public:
    // `file` names the file of each row.
    FilesInUse(OpenFiles* files, int64_t num_files, const ze_table& table, const int64_t* file);

    // Closes the files that no later window has a row of, flushed to their devices with `sync`; false with
    // `error` filled where that fails.
    bool end(const Window& window, bool sync, ze_error* error);

  private:
    OpenFiles* files_;
    const int64_t* file_;
    std::vector<int64_t> rows_left_;
};

int32_t cuda_failure(cudaError_t status, ze_error* error);

// Calls `work` with `device` current and the ring for itself, and waits for `stream` also after a failure:
// the next call may have the ring, and the caller its buffers, when nothing uses them.
int32_t with_ring(PinnedRing* ring, int device, cudaStream_t stream, const std::function<int32_t()>& work,
                  ze_error* error);

// The ring of the library itself. With the 16 MiB that a load stages, it is the 64 MiB that a load may need
// besides what it fills. It is never destroyed: CUDA may be gone by the time the process ends.
PinnedRing* library_ring();

}  // namespace zeroelastic

#endif  // ZEROELASTIC_CUDA_DEVICE_WINDOWS_H_
