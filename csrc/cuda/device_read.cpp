// The destinations are walked in the order of their addresses and cut into windows of one slot each. All
// rows of a window are read, by all threads, to where they belong relative to each other, so the bytes of a
// window that are contiguous in the destination are so in the slot, and go to the device in one copy. While
// the copy engine sends one slot, the threads read into the next.
//
// There is no kernel that scatters, and no staging on the device: the flat buffers that a load fills have no
// holes but the padding of a few parameters, so a window of many short rows is one copy or a handful. A
// kernel would spend device memory, and a launch per window, to do what choosing the order of the reads does
// for nothing. Where every row is an island, each costs a copy of a few microseconds.

#include "device_read.h"

#include <fcntl.h>

#include <new>

#include "../operations.h"
#include "../table.h"
#include "on_device.h"
#include "zeroelastic_cuda.h"

namespace zeroelastic {
namespace {

// With the 16 MiB that a load stages itself, this is the 64 MiB that it may need besides what it fills. Two
// slots would do while copies are faster than reads; the third takes up jitter.
constexpr int kSlots = 3;
constexpr int64_t kSlotBytes = int64_t{16} << 20;
// The copy engine is at its best where both sides begin at the same place of a line.
constexpr uint64_t kLine = 64;
// A window's table is bounded as its bytes are.
constexpr size_t kMostRows = 65536;

// Bytes that go to the device in one copy.
struct Run {
    int64_t buffer;
    uint64_t address;
    int64_t at;  // in the slot
    int64_t nbytes;
};

// What one slot holds: a table from the files to the slot, and the copies from there.
struct Window {
    std::vector<int64_t> src, src_offset, dst, dst_offset, nbytes;
    std::vector<int64_t> stream, start, itemsize;
    std::vector<Run> runs;
    std::vector<int64_t> ended;  // rows, all of whose bytes have been read after this window
    int64_t used = 0;

    void clear() {
        for (auto* column : {&src, &src_offset, &dst, &dst_offset, &nbytes, &stream, &start, &itemsize}) {
            column->clear();
        }
        runs.clear();
        ended.clear();
        used = 0;
    }

    ze_table table() const {
        return {static_cast<int64_t>(nbytes.size()),
                src.data(),
                src_offset.data(),
                dst.data(),
                dst_offset.data(),
                nbytes.data()};
    }
};

// Cuts a table into windows, in the order of the destinations.
class Windows {
  public:
    Windows(const ze_table& table, const ze_buffers& dst, const ze_digest* digest, int32_t cast,
            int64_t slot_bytes)
        : table_(table),
          dst_(dst),
          digest_(digest),
          cast_(cast),
          slot_bytes_(slot_bytes),
          order_(file_order(table, table.dst, table.dst_offset)) {}

    // The next window; false at the end.
    bool next(Window* window) {
        window->clear();
        while (position_ < table_.num_rows && window->nbytes.size() < kMostRows) {
            const int64_t row = order_.empty() ? position_ : order_[static_cast<size_t>(position_)];
            const int64_t rest = table_.nbytes[row] - within_;
            const int64_t taken = add(row, rest, window);
            if (taken < 0) break;
            within_ += taken;
            if (taken < rest) break;
            window->ended.push_back(row);
            ++position_;
            within_ = 0;
        }
        return !window->nbytes.empty();
    }

  private:
    // Adds as much of a row's rest as fits, and says how much that is; -1 if nothing does.
    int64_t add(int64_t row, int64_t rest, Window* window) {
        const int64_t buffer = table_.dst[row];
        const uint64_t address =
            reinterpret_cast<uint64_t>(dst_.data[buffer]) +
            static_cast<uint64_t>(table_.dst_offset[row] + converted_bytes(within_, cast_));
        int64_t at = window->used;
        bool joins = false;
        if (!window->runs.empty()) {
            const Run& last = window->runs.back();
            joins = last.buffer == buffer && last.address + static_cast<uint64_t>(last.nbytes) == address;
        }
        if (!joins) at += static_cast<int64_t>((address - static_cast<uint64_t>(at)) % kLine);
        const int64_t room = slot_bytes_ - at;
        int64_t taken = rest;
        if (converted_bytes(rest, cast_) > room) {
            // A cut is at a multiple of kCut of the source, so never inside an element of either side.
            taken = room <= 0 ? 0 : room * source_itemsize(cast_) / converted_itemsize() / kCut * kCut;
            if (taken == 0) return -1;
        }
        const int64_t made = converted_bytes(taken, cast_);
        window->src.push_back(table_.src[row]);
        window->src_offset.push_back(table_.src_offset[row] + within_);
        window->dst.push_back(0);
        window->dst_offset.push_back(taken > 0 ? at : 0);
        window->nbytes.push_back(taken);
        if (digest_ != nullptr) {
            window->stream.push_back(digest_->stream[row]);
            window->start.push_back(digest_->start[row] + within_ / digest_->itemsize[row]);
            window->itemsize.push_back(digest_->itemsize[row]);
        }
        if (made == 0) return taken;
        if (joins) {
            window->runs.back().nbytes += made;
        } else {
            window->runs.push_back({buffer, address, at, made});
        }
        window->used = at + made;
        return taken;
    }

    int64_t converted_itemsize() const {
        return converted_bytes(source_itemsize(cast_), cast_);
    }

    const ze_table& table_;
    const ze_buffers& dst_;
    const ze_digest* digest_;
    int32_t cast_;
    int64_t slot_bytes_;
    std::vector<int64_t> order_;
    int64_t position_ = 0;
    int64_t within_ = 0;
};

// An event per slot: that what the slot holds has been sent.
class Events {
  public:
    explicit Events(int count) : events_(static_cast<size_t>(count)) {}
    ~Events() {
        for (cudaEvent_t event : events_) {
            if (event != nullptr) cudaEventDestroy(event);
        }
    }
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;

    cudaError_t record(int slot, cudaStream_t stream) {
        cudaEvent_t& event = events_[static_cast<size_t>(slot)];
        if (event == nullptr) {
            const cudaError_t status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
            if (status != cudaSuccess) {
                event = nullptr;
                return status;
            }
        }
        return cudaEventRecord(event, stream);
    }

    cudaError_t wait(int slot) {
        cudaEvent_t event = events_[static_cast<size_t>(slot)];
        return event == nullptr ? cudaSuccess : cudaEventSynchronize(event);
    }

  private:
    std::vector<cudaEvent_t> events_;
};

int32_t cuda_failure(cudaError_t status, ze_error* error) {
    *error = failure(ZE_INTERNAL, static_cast<int>(status), ZE_DESTINATION, -1, -1);
    return error->code;
}

// Whoever leaves this early leaves copies behind that still read the ring.
int32_t read_windows(const ze_table& table, const ze_files& src, const ze_buffers& dst,
                     const ze_digest* digest, const ze_options& options, cudaStream_t stream,
                     PinnedRing* ring, int64_t* bytes_read, ze_error* error) {
    // Each file stays open from its first window to its last.
    OpenFiles files(src, O_RDONLY, ZE_SOURCE);
    std::vector<int64_t> rows_left(static_cast<size_t>(src.count));
    for (int64_t row = 0; row < table.num_rows; ++row) {
        if (rows_left[static_cast<size_t>(table.src[row])]++ == 0) files.expect(table.src[row]);
    }
    Windows windows(table, dst, digest, options.cast, ring->slot_bytes());
    Events sent(ring->num_slots());
    Progress progress(options);
    Window window;
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
        if (digest != nullptr) {
            digests = {digest->num_streams,  digest->seeds,       digest->totals,
                       window.stream.data(), window.start.data(), window.itemsize.data()};
        }
        int64_t got = 0;
        const int32_t code =
            read_open_segments(window.table(), &files, src.count, to, digest == nullptr ? nullptr : &digests,
                               options, &progress, &got, error);
        *bytes_read += got;
        if (code != ZE_OK) return code;
        for (const int64_t row : window.ended) {
            if (--rows_left[static_cast<size_t>(table.src[row])] > 0) continue;
            if (!files.release(table.src[row], false, error)) return error->code;
        }
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

PinnedRing::PinnedRing(int num_slots, int64_t slot_bytes)
    : slot_bytes_(slot_bytes), slots_(static_cast<size_t>(num_slots)) {}

PinnedRing::~PinnedRing() {
    for (char* slot : slots_) {
        if (slot != nullptr) cudaFreeHost(slot);
    }
}

cudaError_t PinnedRing::get(int slot, char** data) {
    char*& found = slots_[static_cast<size_t>(slot)];
    if (found == nullptr) {
        void* made = nullptr;
        // Portable: pinned for every device of the process. Not write-combined: digests read it.
        const cudaError_t status =
            cudaHostAlloc(&made, static_cast<size_t>(slot_bytes_), cudaHostAllocPortable);
        if (status != cudaSuccess) return status;
        found = static_cast<char*>(made);
    }
    *data = found;
    return cudaSuccess;
}

int32_t read_to_device(const ze_table& table, const ze_files& src, const ze_buffers& dst,
                       const ze_digest* digest, const ze_options& options, int device, cudaStream_t stream,
                       PinnedRing* ring, int64_t* bytes_read, ze_error* error) {
    *bytes_read = 0;
    if (!check_table(table, src.count, nullptr, dst.count, dst.nbytes, digest, options.cast, error)) {
        return error->code;
    }
    if (table.num_rows == 0) return ZE_OK;
    const OnDevice on(device);
    if (on.status() != cudaSuccess) return cuda_failure(on.status(), error);
    const std::lock_guard<std::mutex> lock(ring->mutex);
    int32_t code = ZE_NO_MEMORY;
    try {
        code = read_windows(table, src, dst, digest, options, stream, ring, bytes_read, error);
    } catch (const std::bad_alloc&) {
        *error = failure(ZE_NO_MEMORY, 0, ZE_SOURCE, -1, -1);
    }
    // Also after a failure: the next call may have the ring, and the caller its buffers, when nothing uses
    // them.
    const cudaError_t status = cudaStreamSynchronize(stream);
    if (code == ZE_OK && status != cudaSuccess) return cuda_failure(status, error);
    return code;
}

}  // namespace zeroelastic

extern "C" int32_t ze_cuda_read_segments(const ze_table* table, const ze_files* src, const ze_buffers* dst,
                                         const ze_digest* digest, const ze_options* options, int32_t device,
                                         void* stream, int64_t* bytes_read, ze_error* error) {
    *error = ze_error{};
    try {
        // Never destroyed: CUDA may be gone by the time the process ends.
        static auto* ring = new zeroelastic::PinnedRing(zeroelastic::kSlots, zeroelastic::kSlotBytes);
        return zeroelastic::read_to_device(*table, *src, *dst, digest, *options, device,
                                           static_cast<cudaStream_t>(stream), ring, bytes_read, error);
    } catch (const std::bad_alloc&) {
        error->code = ZE_NO_MEMORY;
    } catch (...) {
        error->code = ZE_INTERNAL;
    }
    return error->code;
}
