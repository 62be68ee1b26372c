#include "fake.h"

#include <pthread.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

struct CUstream_st {
    int device;
};
struct CUevent_st {
    int device;
    bool recorded = false;
    int64_t number = 0;  // of the operation in its stream's queue
    CUstream_st* stream = nullptr;
};

namespace {

struct Operation {
    int64_t number;
    void* dst;
    const void* src;
    size_t nbytes;  // 0: an event
};

struct Failure {
    int after;
    cudaError_t status;
};

// A mutex guards all of it: calls come from several threads.
struct State {
    std::mutex mutex;
    fake::Copies copies = fake::Copies::kAtOnce;
    std::map<std::string, Failure> failures;
    std::map<char*, size_t> device_memory, pinned_memory;
    std::map<CUstream_st*, std::deque<Operation>> queues;
    int64_t next_number = 1;
    fake::Counts counts{};
};

State& state() {
    static State one;
    return one;
}

thread_local int current_device = 0;

bool holds(const std::map<char*, size_t>& memory, const void* data, size_t nbytes) {
    char* at = static_cast<char*>(const_cast<void*>(data));
    auto found = memory.upper_bound(at);
    if (found == memory.begin()) return false;
    --found;
    return at + nbytes <= found->first + found->second;
}

// The failure that a test asked for; with the lock held.
cudaError_t asked(const char* function) {
    auto found = state().failures.find(function);
    if (found == state().failures.end() || found->second.after-- > 0) return cudaSuccess;
    found->second.after = 0;
    return found->second.status;
}

// Does what a stream was asked for up to an operation; with the lock held.
void run_until(CUstream_st* stream, int64_t number) {
    std::deque<Operation>& queue = state().queues[stream];
    while (!queue.empty() && queue.front().number <= number) {
        const Operation& next = queue.front();
        if (next.nbytes > 0) std::memcpy(next.dst, next.src, next.nbytes);
        queue.pop_front();
    }
}

int64_t enqueue(CUstream_st* stream, void* dst, const void* src, size_t nbytes) {
    const int64_t number = state().next_number++;
    state().queues[stream].push_back({number, dst, src, nbytes});
    return number;
}

bool foreign(CUstream_st* stream) {
    return stream != nullptr && stream->device != current_device;
}

cudaError_t allocate(std::map<char*, size_t>* memory, void** data, size_t nbytes, int64_t* counted,
                     size_t alignment) {
    void* made = std::aligned_alloc(alignment, (nbytes + alignment - 1) / alignment * alignment);
    if (made == nullptr) return cudaErrorMemoryAllocation;
    (*memory)[static_cast<char*>(made)] = nbytes;
    *counted += static_cast<int64_t>(nbytes);
    *data = made;
    return cudaSuccess;
}

cudaError_t release(std::map<char*, size_t>* memory, void* data, int64_t* counted) {
    if (data == nullptr) return cudaSuccess;
    auto found = memory->find(static_cast<char*>(data));
    if (found == memory->end()) return cudaErrorInvalidValue;
    *counted -= static_cast<int64_t>(found->second);
    memory->erase(found);
    std::free(data);
    return cudaSuccess;
}

constexpr unsigned kWarp = 32;

struct Warp {
    pthread_barrier_t barrier;
    std::array<uint64_t, kWarp> values;
};

pthread_barrier_t block_barrier;
std::vector<std::unique_ptr<Warp>> warps;

}  // namespace

thread_local dim3 threadIdx, blockIdx;
dim3 gridDim, blockDim;

void __syncthreads() {
    pthread_barrier_wait(&block_barrier);
}

namespace {

// What every lane of the warp gives, to each of them.
std::array<uint64_t, kWarp> of_all_lanes(uint64_t value) {
    Warp& warp = *warps[threadIdx.x / kWarp];
    warp.values[threadIdx.x % kWarp] = value;
    pthread_barrier_wait(&warp.barrier);
    const std::array<uint64_t, kWarp> values = warp.values;
    pthread_barrier_wait(&warp.barrier);
    return values;
}

}  // namespace

uint64_t __shfl_xor_sync(unsigned, uint64_t value, int lanes) {
    return of_all_lanes(value)[threadIdx.x % kWarp ^ static_cast<unsigned>(lanes)];
}

uint64_t __shfl_sync(unsigned, uint64_t value, int lane) {
    return of_all_lanes(value)[static_cast<unsigned>(lane) % kWarp];
}

unsigned __ballot_sync(unsigned, bool value) {
    unsigned found = 0;
    const std::array<uint64_t, kWarp> values = of_all_lanes(value);
    for (unsigned i = 0; i < kWarp; ++i) found |= static_cast<unsigned>(values[i]) << i;
    return found;
}

unsigned __reduce_add_sync(unsigned, unsigned value) {
    uint64_t sum = 0;
    for (const uint64_t each : of_all_lanes(value)) sum += each;
    return static_cast<unsigned>(sum);
}

namespace fake {

void reset(Copies copies) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().copies = copies;
    state().failures.clear();
    const Counts before = state().counts;
    state().counts = Counts{};
    state().counts.pinned_bytes = state().counts.most_pinned_bytes = before.pinned_bytes;
    state().counts.device_bytes = before.device_bytes;
    state().counts.events = before.events;
}

void fail(const char* function, int after, cudaError_t status) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().failures[function] = {after, status};
}

Counts counts() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    Counts now = state().counts;
    for (const auto& [stream, queue] : state().queues) now.in_flight += static_cast<int64_t>(queue.size());
    return now;
}

cudaError_t launch(dim3 blocks, dim3 threads, cudaStream_t stream, const std::function<void()>& kernel) {
    {
        const std::lock_guard<std::mutex> lock(state().mutex);
        const cudaError_t status = asked("cudaLaunchKernel");
        if (status != cudaSuccess) return status;
        if (foreign(stream)) return cudaErrorInvalidResourceHandle;
        if (blocks.x == 0 || threads.x % kWarp != 0) return cudaErrorInvalidValue;
        run_until(stream, state().next_number);
        ++state().counts.launches;
    }
    gridDim = blocks;
    blockDim = threads;
    // Not the block's own: a thread that returns without the others' last __syncthreads() has to show.
    pthread_barrier_t end_of_block;
    pthread_barrier_init(&block_barrier, nullptr, threads.x);
    pthread_barrier_init(&end_of_block, nullptr, threads.x);
    for (unsigned i = 0; i < threads.x / kWarp; ++i) {
        warps.emplace_back(new Warp);
        pthread_barrier_init(&warps.back()->barrier, nullptr, kWarp);
    }
    std::vector<std::thread> running;
    for (unsigned i = 0; i < threads.x; ++i) {
        running.emplace_back([&, i] {
            threadIdx = dim3(i);
            threadIdx.y = threadIdx.z = 0;
            for (unsigned block = 0; block < blocks.x; ++block) {
                blockIdx = dim3(block);
                blockIdx.y = blockIdx.z = 0;
                kernel();
                pthread_barrier_wait(&end_of_block);  // the next one has the same shared memory
            }
        });
    }
    for (std::thread& thread : running) thread.join();
    for (const auto& warp : warps) pthread_barrier_destroy(&warp->barrier);
    pthread_barrier_destroy(&block_barrier);
    pthread_barrier_destroy(&end_of_block);
    warps.clear();
    return cudaSuccess;
}

}  // namespace fake

const char* cudaGetErrorString(cudaError_t status) {
    return status == cudaErrorMemoryAllocation ? "out of memory" : "a failure of the fake";
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= fake::kNumDevices) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 2;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t nbytes) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const cudaError_t status = asked("cudaMalloc");
    if (status != cudaSuccess) return status;
    return allocate(&state().device_memory, data, nbytes, &state().counts.device_bytes, 256);
}

cudaError_t cudaFree(void* data) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    return release(&state().device_memory, data, &state().counts.device_bytes);
}

cudaError_t cudaHostAlloc(void** data, size_t nbytes, unsigned) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    cudaError_t status = asked("cudaHostAlloc");
    if (status != cudaSuccess) return status;
    fake::Counts& counts = state().counts;
    status = allocate(&state().pinned_memory, data, nbytes, &counts.pinned_bytes, 4096);
    ++counts.host_allocations;
    counts.most_pinned_bytes = std::max(counts.most_pinned_bytes, counts.pinned_bytes);
    return status;
}

cudaError_t cudaFreeHost(void* data) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    return release(&state().pinned_memory, data, &state().counts.pinned_bytes);
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t nbytes, cudaMemcpyKind kind) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const cudaError_t status = asked("cudaMemcpy");
    if (status != cudaSuccess) return status;
    if (!holds(state().device_memory, kind == cudaMemcpyHostToDevice ? dst : src, nbytes)) {
        return cudaErrorInvalidValue;
    }
    std::memcpy(dst, src, nbytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const cudaError_t status = asked("cudaMemcpyAsync");
    if (status != cudaSuccess) return status;
    if (foreign(stream)) return cudaErrorInvalidResourceHandle;
    const bool to_device = kind == cudaMemcpyHostToDevice;
    if ((!to_device && kind != cudaMemcpyDeviceToHost) ||
        !holds(state().device_memory, to_device ? dst : src, nbytes) ||
        !holds(state().pinned_memory, to_device ? src : dst, nbytes)) {
        return cudaErrorInvalidValue;
    }
    ++state().counts.async_copies;
    const int64_t number = enqueue(stream, dst, src, nbytes);
    if (state().copies == fake::Copies::kAtOnce) run_until(stream, number);
    return cudaSuccess;
}

// Done at once, with what was put off before it.
cudaError_t cudaMemsetAsync(void* data, int value, size_t nbytes, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const cudaError_t status = asked("cudaMemsetAsync");
    if (status != cudaSuccess) return status;
    if (foreign(stream)) return cudaErrorInvalidResourceHandle;
    if (!holds(state().device_memory, data, nbytes)) return cudaErrorInvalidValue;
    run_until(stream, state().next_number);
    std::memset(data, value, nbytes);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = new CUstream_st{current_device};
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    run_until(stream, state().next_number);
    state().queues.erase(stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    run_until(stream, state().next_number);
    return asked("cudaStreamSynchronize");
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const cudaError_t status = asked("cudaEventCreateWithFlags");
    if (status != cudaSuccess) return status;
    *event = new CUevent_st{current_device};
    ++state().counts.events;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const cudaError_t status = asked("cudaEventRecord");
    if (status != cudaSuccess) return status;
    if (foreign(stream) || event->device != current_device) return cudaErrorInvalidResourceHandle;
    event->recorded = true;
    event->stream = stream;
    event->number = enqueue(stream, nullptr, nullptr, 0);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const cudaError_t status = asked("cudaEventSynchronize");
    if (status != cudaSuccess) return status;
    if (event->recorded) run_until(event->stream, event->number);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    --state().counts.events;
    delete event;
    return cudaSuccess;
}

extern "C" {

__attribute__((visibility("default"))) void* fake_cuda_malloc(size_t nbytes) {
    void* data = nullptr;
    return cudaMalloc(&data, nbytes) == cudaSuccess ? data : nullptr;
}

__attribute__((visibility("default"))) void fake_cuda_free(void* data) {
    cudaFree(data);
}

__attribute__((visibility("default"))) void fake_cuda_put_copies_off(void) {
    fake::reset(fake::Copies::kWhenWaited);
}
}
