// files -> device memory. The destinations are walked in the order of their addresses and cut into windows of
// one slot each. All rows of a window are read, by all threads, to where they belong relative to each other,
// so the bytes of a window that are contiguous in the destination are so in the slot, and go to the device in
// one copy. While the copy engine sends one slot, the threads read into the next.
//
// There is no kernel that scatters, and no staging on the device: the flat buffers that a load fills have no
// holes but the padding of a few parameters, so a window of many short rows is one copy or a handful. A
// kernel would spend device memory, and a launch per window, to do what choosing the order of the reads does
// for nothing. Where every row is an island, each costs a copy of a few microseconds.

#include <fcntl.h>

#include <algorithm>
#include <new>
#include <vector>

#include "../operations.h"
#include "../table.h"
#include "device_files.h"
#include "device_windows.h"
#include "zeroelastic_cuda.h"

namespace zeroelastic {
namespace {

// A return before the end leaves copies under way that still read the ring; with_ring() waits for them.
int32_t read_windows(const ze_table& table, const ze_files& src, const ze_buffers& dst,
                     const ze_digest* digest, const ze_options& options, cudaStream_t stream,
                     PinnedRing* ring, uint32_t* crc32, int64_t* bytes_read, ze_error* error) {
    OpenFiles files(src, O_RDONLY, ZE_SOURCE);
    FilesInUse in_use(&files, src.count, table, table.src);
    Windows windows(Direction::kToDevice, table, dst, digest, options.cast, ring->slot_bytes());
    Events sent(ring->num_slots());
    Progress progress(options);
    Window window;
    std::vector<uint32_t> sums;
    int slot = 0;
    while (windows.next(&window)) {
        char* data = nullptr;
        cudaError_t status = ring->get(slot, &data);
        if (status == cudaSuccess) status = sent.wait(slot);
        if (status != cudaSuccess) return cuda_failure(status, error);
        void* pointer = data;
        const int64_t slot_bytes = ring->slot_bytes();
        const ze_buffers to{1, &pointer, &slot_bytes};
        ze_digest digests{};
        if (digest != nullptr) digests = window.digests(*digest);
        if (crc32 != nullptr) sums.resize(window.row.size());
        int64_t got = 0;
        const int32_t code = read_open_segments(window.table(Direction::kToDevice), &files, src.count, to,
                                                digest == nullptr ? nullptr : &digests, options, &progress,
                                                crc32 == nullptr ? nullptr : sums.data(), &got, error);
        *bytes_read += got;
        if (code != ZE_OK) return code;
        if (crc32 != nullptr) window.join(sums, ZE_CAST_NONE, crc32);
        if (!in_use.end(window, false, error)) return error->code;
        for (const Run& run : window.runs) {
            status = cudaMemcpyAsync(reinterpret_cast<void*>(run.address), data + run.at,
                                     static_cast<size_t>(run.nbytes), cudaMemcpyHostToDevice, stream);
            if (status != cudaSuccess) return cuda_failure(status, error);
        }
        status = sent.record(slot, stream);
        if (status != cudaSuccess) return cuda_failure(status, error);
        slot = (slot + 1) % ring->num_slots();
    }
    return progress.finish(error) ? ZE_OK : error->code;
}

}  // namespace

int32_t read_to_device(const ze_table& table, const ze_files& src, const ze_buffers& dst,
                       const ze_digest* digest, const ze_options& options, int device, cudaStream_t stream,
                       PinnedRing* ring, uint32_t* crc32, int64_t* bytes_read, ze_error* error) {
    *bytes_read = 0;
    if (!check_table(table, src.count, nullptr, dst.count, dst.nbytes, digest, options.cast, error)) {
        return error->code;
    }
    if (crc32 != nullptr) std::fill(crc32, crc32 + table.num_rows, 0);
    if (table.num_rows == 0) return ZE_OK;
    return with_ring(
        ring, device, stream,
        [&] {
            return read_windows(table, src, dst, digest, options, stream, ring, crc32, bytes_read, error);
        },
        error);
}

}  // namespace zeroelastic

extern "C" int32_t ze_cuda_read_segments(const ze_table* table, const ze_files* src, const ze_buffers* dst,
                                         const ze_digest* digest, const ze_options* options, int32_t device,
                                         void* stream, uint32_t* crc32, int64_t* bytes_read,
                                         ze_error* error) {
    *error = ze_error{};
    try {
        return zeroelastic::read_to_device(*table, *src, *dst, digest, *options, device,
                                           static_cast<cudaStream_t>(stream), zeroelastic::library_ring(),
                                           crc32, bytes_read, error);
    } catch (const std::bad_alloc&) {
        error->code = ZE_NO_MEMORY;
    } catch (...) {
        error->code = ZE_INTERNAL;
    }
    return error->code;
}
