#include "device_windows.h"

#include <new>

#include "../crc32.h"
#include "on_device.h"

namespace zeroelastic {
namespace {

// Two slots would do while copies are faster than files; the third takes up jitter.
constexpr int kSlots = 3;
constexpr int64_t kSlotBytes = int64_t{16} << 20;
// The copy engine is at its best where both sides begin at the same place of a line.
constexpr uint64_t kLine = 64;
// A long run begins at the same place of a block in the slot and in its file, so that it can be written past
// the page cache from where it is.
constexpr int64_t kBlock = 4096;
constexpr int64_t kLongRun = int64_t{64} << 10;
// A window's table is bounded as its bytes are.
constexpr size_t kMostRows = 65536;

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

void Window::clear() {
    for (auto* column : {&row, &file, &file_offset, &slot, &at, &nbytes, &stream, &start, &itemsize}) {
        column->clear();
    }
    runs.clear();
    ended.clear();
    used = 0;
}

ze_table Window::table(Direction direction) const {
    const int64_t num_rows = static_cast<int64_t>(nbytes.size());
    if (direction == Direction::kToDevice) {
        return {num_rows, file.data(), file_offset.data(), slot.data(), at.data(), nbytes.data()};
    }
    return {num_rows, slot.data(), at.data(), file.data(), file_offset.data(), nbytes.data()};
}

ze_digest Window::digests(const ze_digest& digest) const {
    return {digest.num_streams, digest.seeds, digest.totals, stream.data(), start.data(), itemsize.data()};
}

void Window::join(const std::vector<uint32_t>& pieces, int32_t cast, uint32_t* crc32) const {
    for (size_t i = 0; i < row.size(); ++i) {
        uint32_t& sum = crc32[row[i]];
        sum = crc32_join(sum, pieces[i], converted_bytes(nbytes[i], cast));
    }
}

Windows::Windows(Direction direction, const ze_table& table, const ze_buffers& device,
                 const ze_digest* digest, int32_t cast, int64_t slot_bytes)
    : direction_(direction),
      table_(table),
      device_(device),
      digest_(digest),
      cast_(cast),
      slot_bytes_(slot_bytes),
      order_(file_order(table, table.dst, table.dst_offset)) {}

bool Windows::next(Window* window) {
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

// What bytes of a source take of a slot: conversions are made between the files and the slot.
int64_t Windows::in_slot(int64_t nbytes) const {
    return direction_ == Direction::kToDevice ? converted_bytes(nbytes, cast_) : nbytes;
}

// As many bytes of a source as fit; cut at a multiple of kCut, so never inside an element of either side.
int64_t Windows::most_in(int64_t room) const {
    if (room <= 0) return 0;
    const int64_t itemsize = source_itemsize(cast_);
    return room * itemsize / in_slot(itemsize) / kCut * kCut;
}

// Adds as much of a row's rest as fits, and says how much that is; -1 if nothing does.
int64_t Windows::add(int64_t row, int64_t rest, Window* window) {
    const bool to_device = direction_ == Direction::kToDevice;
    const int64_t converted = converted_bytes(within_, cast_);
    const int64_t buffer = to_device ? table_.dst[row] : table_.src[row];
    const int64_t offset = to_device ? table_.dst_offset[row] + converted : table_.src_offset[row] + within_;
    const uint64_t address = reinterpret_cast<uint64_t>(device_.data[buffer]) + static_cast<uint64_t>(offset);
    int64_t at = window->used;
    bool joins = false;
    if (!window->runs.empty()) {
        const Run& last = window->runs.back();
        joins = last.buffer == buffer && last.address + static_cast<uint64_t>(last.nbytes) == address;
    }
    if (!joins && !to_device && rest >= kLongRun) {
        at += ((table_.dst_offset[row] + converted - at) % kBlock + kBlock) % kBlock;
    } else if (!joins) {
        at += static_cast<int64_t>((address - static_cast<uint64_t>(at)) % kLine);
    }
    int64_t taken = rest;
    if (in_slot(rest) > slot_bytes_ - at) {
        taken = most_in(slot_bytes_ - at);
        if (taken == 0) return -1;
    }
    window->row.push_back(row);
    window->file.push_back(to_device ? table_.src[row] : table_.dst[row]);
    window->file_offset.push_back(to_device ? table_.src_offset[row] + within_
                                            : table_.dst_offset[row] + converted);
    window->slot.push_back(0);
    window->at.push_back(taken > 0 ? at : 0);
    window->nbytes.push_back(taken);
    if (digest_ != nullptr) {
        window->stream.push_back(digest_->stream[row]);
        window->start.push_back(digest_->start[row] + within_ / digest_->itemsize[row]);
        window->itemsize.push_back(digest_->itemsize[row]);
    }
    const int64_t used = in_slot(taken);
    if (used == 0) return taken;
    if (joins) {
        window->runs.back().nbytes += used;
    } else {
        window->runs.push_back({buffer, address, at, used});
    }
    window->used = at + used;
    return taken;
}

Events::~Events() {
    for (cudaEvent_t event : events_) {
        if (event != nullptr) cudaEventDestroy(event);
    }
}

cudaError_t Events::record(int slot, cudaStream_t stream) {
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

cudaError_t Events::wait(int slot) {
    cudaEvent_t event = events_[static_cast<size_t>(slot)];
    return event == nullptr ? cudaSuccess : cudaEventSynchronize(event);
}

FilesInUse::FilesInUse(OpenFiles* files, int64_t num_files, const ze_table& table, const int64_t* file)
    : files_(files), file_(file), rows_left_(static_cast<size_t>(num_files)) {
    for (int64_t row = 0; row < table.num_rows; ++row) {
        if (rows_left_[static_cast<size_t>(file[row])]++ == 0) files->expect(file[row]);
    }
}

bool FilesInUse::end(const Window& window, bool sync, ze_error* error) {
    for (const int64_t row : window.ended) {
        if (--rows_left_[static_cast<size_t>(file_[row])] > 0) continue;
        if (!files_->release(file_[row], sync, error)) return false;
    }
    return true;
}

int32_t cuda_failure(cudaError_t status, ze_error* error) {
    *error = failure(ZE_INTERNAL, static_cast<int>(status), ZE_DESTINATION, -1, -1);
    return error->code;
}

int32_t with_ring(PinnedRing* ring, int device, cudaStream_t stream, const std::function<int32_t()>& work,
                  ze_error* error) {
    const OnDevice on(device);
    if (on.status() != cudaSuccess) return cuda_failure(on.status(), error);
    const std::lock_guard<std::mutex> lock(ring->mutex);
    int32_t code = ZE_NO_MEMORY;
    try {
        code = work();
    } catch (const std::bad_alloc&) {
        *error = failure(ZE_NO_MEMORY, 0, ZE_SOURCE, -1, -1);
    }
    const cudaError_t status = cudaStreamSynchronize(stream);
    if (code == ZE_OK && status != cudaSuccess) return cuda_failure(status, error);
    return code;
}

PinnedRing* library_ring() {
    static auto* ring = new PinnedRing(kSlots, kSlotBytes);
    return ring;
}

}  // namespace zeroelastic
