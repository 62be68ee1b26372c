// device memory -> files. Rows are walked in the order of the files and cut into windows of one slot each.
// While the threads write what one slot holds, with its digests and checksums in the same pass, the copy
// engine fills the next ones. What is flushed goes past the page cache: as much as a node's GPUs hold would
// push everything else out of it.

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

// Asks for the copies of a window into its slot.
cudaError_t fetch(const Window& window, int slot, PinnedRing* ring, Events* arrived, cudaStream_t stream) {
    char* data = nullptr;
    cudaError_t status = ring->get(slot, &data);
    for (const Run& run : window.runs) {
        if (status != cudaSuccess) return status;
        status = cudaMemcpyAsync(data + run.at, reinterpret_cast<const void*>(run.address),
                                 static_cast<size_t>(run.nbytes), cudaMemcpyDeviceToHost, stream);
    }
    return status == cudaSuccess ? arrived->record(slot, stream) : status;
}

// A return before the end leaves copies under way that still write to the ring; with_ring() waits for them.
int32_t write_windows(const ze_table& table, const ze_buffers& src, const ze_files& dst,
                      const ze_digest* digest, const ze_options& options, cudaStream_t stream,
                      PinnedRing* ring, uint32_t* crc32, ze_error* error) {
    OpenFiles files(dst, O_WRONLY, ZE_DESTINATION);
    if (options.sync != 0) files.allow_direct();
    FilesInUse in_use(&files, dst.count, table, table.dst);
    Windows windows(Direction::kToFiles, table, src, digest, options.cast, ring->slot_bytes());
    Events arrived(ring->num_slots());
    Progress progress(options);
    const size_t num_slots = static_cast<size_t>(ring->num_slots());
    std::vector<Window> held(num_slots);
    std::vector<uint32_t> sums;
    size_t fetched = 0;  // windows, counted from the first
    bool more = true;
    for (size_t written = 0; more || written < fetched; ++written) {
        while (more && fetched - written < num_slots) {
            Window& window = held[fetched % num_slots];
            more = windows.next(&window);
            if (!more) break;
            const int slot = static_cast<int>(fetched % num_slots);
            const cudaError_t status = fetch(window, slot, ring, &arrived, stream);
            if (status != cudaSuccess) return cuda_failure(status, error);
            ++fetched;
        }
        if (written == fetched) break;
        const Window& window = held[written % num_slots];
        const int slot = static_cast<int>(written % num_slots);
        char* data = nullptr;
        cudaError_t status = arrived.wait(slot);
        if (status == cudaSuccess) status = ring->get(slot, &data);
        if (status != cudaSuccess) return cuda_failure(status, error);
        void* pointer = data;
        const int64_t slot_bytes = ring->slot_bytes();
        const ze_buffers from{1, &pointer, &slot_bytes};
        ze_digest digests{};
        if (digest != nullptr) digests = window.digests(*digest);
        if (crc32 != nullptr) sums.resize(window.row.size());
        const int32_t code = write_open_segments(window.table(Direction::kToFiles), from, &files, dst.count,
                                                 digest == nullptr ? nullptr : &digests, options, &progress,
                                                 crc32 == nullptr ? nullptr : sums.data(), error);
        if (code != ZE_OK) return code;
        if (crc32 != nullptr) window.join(sums, options.cast, crc32);
        if (!in_use.end(window, options.sync != 0, error)) return error->code;
    }
    return progress.finish(error) ? ZE_OK : error->code;
}

}  // namespace

int32_t write_from_device(const ze_table& table, const ze_buffers& src, const ze_files& dst,
                          const ze_digest* digest, const ze_options& options, int device, cudaStream_t stream,
                          PinnedRing* ring, uint32_t* crc32, ze_error* error) {
    if (!check_table(table, src.count, src.nbytes, dst.count, nullptr, digest, options.cast, error)) {
        return error->code;
    }
    if (crc32 != nullptr) std::fill(crc32, crc32 + table.num_rows, 0);
    if (table.num_rows == 0) return ZE_OK;
    return with_ring(
        ring, device, stream,
        [&] { return write_windows(table, src, dst, digest, options, stream, ring, crc32, error); }, error);
}

}  // namespace zeroelastic

extern "C" int32_t ze_cuda_write_segments(const ze_table* table, const ze_buffers* src, const ze_files* dst,
                                          const ze_digest* digest, const ze_options* options, int32_t device,
                                          void* stream, uint32_t* crc32, ze_error* error) {
    *error = ze_error{};
    try {
        return zeroelastic::write_from_device(*table, *src, *dst, digest, *options, device,
                                              static_cast<cudaStream_t>(stream), zeroelastic::library_ring(),
                                              crc32, error);
    } catch (const std::bad_alloc&) {
        error->code = ZE_NO_MEMORY;
    } catch (...) {
        error->code = ZE_INTERNAL;
    }
    return error->code;
}
