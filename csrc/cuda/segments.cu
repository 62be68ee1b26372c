// Device buffers to device buffers: copy, conversion and digest of many runs in one launch.
//
// Each task is at most kTaskBytes of one row and is done by one warp; a grid that fills the device once takes
// them in strides, so thousands of short rows cost no more launches than one long row. A destination is
// written 16 bytes at a time, aligned, whatever the source's alignment: each lane reads the two aligned
// 16-byte words that hold what it needs and shifts. An aligned word that holds one valid byte lies inside the
// allocation, so nothing is read beyond.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "../cast.h"
#include "../digest_weights.h"
#include "../table.h"
#include "on_device.h"
#include "zeroelastic_cuda.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kUnroll = 4;
constexpr int64_t kTaskBytes = 8192;
// Blocks of a digest that one task takes where nothing is copied: the fewer tasks, the sooner they are made.
constexpr int64_t kTaskBlocks = 16;
constexpr int64_t kBlock = zeroelastic::kDigestBlock;

struct Task {
    uint64_t src;
    uint64_t dst;  // 0: digest only
    uint64_t seed;
    int64_t block;  // of the digest, in which the first element is at `lead`
    uint32_t nbytes;
    uint32_t stream;
    uint32_t lead;
    uint32_t itemsize;
};

struct Launch {
    const Task* tasks;
    int64_t num_tasks;
    unsigned long long* totals;
};

__device__ __forceinline__ uint4 load_once(const uint4* from) {
    return __ldcs(from);
}

// 16 bytes that begin `kWords` words and `bits` bits into the 32 bytes of `low` and `high`.
template <int kWords>
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, unsigned bits) {
    const unsigned words[9] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w, 0};
    return make_uint4(__funnelshift_r(words[kWords], words[kWords + 1], bits),
                      __funnelshift_r(words[kWords + 1], words[kWords + 2], bits),
                      __funnelshift_r(words[kWords + 2], words[kWords + 3], bits),
                      __funnelshift_r(words[kWords + 3], words[kWords + 4], bits));
}

__device__ __forceinline__ void copy_aligned(uint4* dst, const uint4* src, int count, int lane) {
    int i = lane;
    for (; i + (kUnroll - 1) * kWarp < count; i += kUnroll * kWarp) {
        uint4 words[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) words[k] = load_once(src + i + k * kWarp);
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) __stcs(dst + i + k * kWarp, words[k]);
    }
    for (; i < count; i += kWarp) __stcs(dst + i, load_once(src + i));
}

// `src` is the aligned word that holds the first byte. The upper word of one lane is the lower of the next:
// it comes from the first-level cache.
template <int kWords>
__device__ __forceinline__ void copy_shifted(uint4* dst, const uint4* src, int count, unsigned bits,
                                             int lane) {
    constexpr int kHalf = kUnroll / 2;
    int i = lane;
    for (; i + (kHalf - 1) * kWarp < count; i += kHalf * kWarp) {
        uint4 low[kHalf];
        uint4 high[kHalf];
#pragma unroll
        for (int k = 0; k < kHalf; ++k) {
            low[k] = __ldg(src + i + k * kWarp);
            high[k] = __ldg(src + i + k * kWarp + 1);
        }
#pragma unroll
        for (int k = 0; k < kHalf; ++k) __stcs(dst + i + k * kWarp, shifted<kWords>(low[k], high[k], bits));
    }
    for (; i < count; i += kWarp) __stcs(dst + i, shifted<kWords>(__ldg(src + i), __ldg(src + i + 1), bits));
}

__device__ void copy_task(const Task& task, int lane) {
    const char* src = reinterpret_cast<const char*>(task.src);
    char* dst = reinterpret_cast<char*>(task.dst);
    int nbytes = static_cast<int>(task.nbytes);
    const int head = min(nbytes, static_cast<int>((16 - task.dst % 16) % 16));
    if (lane < head) dst[lane] = src[lane];
    src += head;
    dst += head;
    nbytes -= head;
    const int count = nbytes / 16;
    const unsigned shift = static_cast<unsigned>(reinterpret_cast<uint64_t>(src) % 16);
    const uint4* from = reinterpret_cast<const uint4*>(src - shift);
    uint4* to = reinterpret_cast<uint4*>(dst);
    const unsigned bits = shift % 4 * 8;
    if (shift == 0) {
        copy_aligned(to, from, count, lane);
    } else if (shift < 4) {
        copy_shifted<0>(to, from, count, bits, lane);
    } else if (shift < 8) {
        copy_shifted<1>(to, from, count, bits, lane);
    } else if (shift < 12) {
        copy_shifted<2>(to, from, count, bits, lane);
    } else {
        copy_shifted<3>(to, from, count, bits, lane);
    }
    const int tail = nbytes % 16;
    if (lane < tail) dst[count * 16 + lane] = src[count * 16 + lane];
}

__device__ __forceinline__ uint16_t narrow(float value, bool bfloat) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) {  // as on the host; the device's own conversions make 0x7FFF of it
        return static_cast<uint16_t>(bfloat ? zeroelastic::kBfloat16Nan
                                            : ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF));
    }
    return bfloat ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                  : __half_as_ushort(__float2half_rn(value));
}

__device__ __forceinline__ float widen(uint16_t bits, bool bfloat) {
    return bfloat ? __uint_as_float(static_cast<unsigned>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ unsigned narrow_two(float first, float second, bool bfloat) {
    return narrow(first, bfloat) | static_cast<unsigned>(narrow(second, bfloat)) << 16;
}

// Eight elements per lane, 16 bytes written at a time.
__device__ void narrow_task(const Task& task, bool bfloat, int lane) {
    const float* src = reinterpret_cast<const float*>(task.src);
    uint16_t* dst = reinterpret_cast<uint16_t*>(task.dst);
    int count = static_cast<int>(task.nbytes / 4);
    const int head = min(count, static_cast<int>((16 - task.dst % 16) % 16 / 2));
    if (lane < head) dst[lane] = narrow(src[lane], bfloat);
    src += head;
    dst += head;
    count -= head;
    const bool aligned = reinterpret_cast<uint64_t>(src) % 16 == 0;
    for (int i = lane * 8; i + 8 <= count; i += kWarp * 8) {
        float x[8];
        if (aligned) {
            const float4 low = __ldcs(reinterpret_cast<const float4*>(src + i));
            const float4 high = __ldcs(reinterpret_cast<const float4*>(src + i + 4));
            x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
            x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        } else {
#pragma unroll
            for (int k = 0; k < 8; ++k) x[k] = __ldg(src + i + k);
        }
        __stcs(reinterpret_cast<uint4*>(dst + i),
               make_uint4(narrow_two(x[0], x[1], bfloat), narrow_two(x[2], x[3], bfloat),
                          narrow_two(x[4], x[5], bfloat), narrow_two(x[6], x[7], bfloat)));
    }
    const int done = count / 8 * 8;
    if (lane < count - done) dst[done + lane] = narrow(src[done + lane], bfloat);
}

// Four elements per lane, 16 bytes written at a time.
__device__ void widen_task(const Task& task, bool bfloat, int lane) {
    const uint16_t* src = reinterpret_cast<const uint16_t*>(task.src);
    float* dst = reinterpret_cast<float*>(task.dst);
    int count = static_cast<int>(task.nbytes / 2);
    const int head = min(count, static_cast<int>((16 - task.dst % 16) % 16 / 4));
    if (lane < head) dst[lane] = widen(src[lane], bfloat);
    src += head;
    dst += head;
    count -= head;
    const bool aligned = reinterpret_cast<uint64_t>(src) % 8 == 0;
    for (int i = lane * 4; i + 4 <= count; i += kWarp * 4) {
        uint16_t x[4];
        if (aligned) {
            const uint2 both = __ldcs(reinterpret_cast<const uint2*>(src + i));
            x[0] = static_cast<uint16_t>(both.x), x[1] = static_cast<uint16_t>(both.x >> 16);
            x[2] = static_cast<uint16_t>(both.y), x[3] = static_cast<uint16_t>(both.y >> 16);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] = __ldg(src + i + k);
        }
        __stcs(reinterpret_cast<float4*>(dst + i), make_float4(widen(x[0], bfloat), widen(x[1], bfloat),
                                                               widen(x[2], bfloat), widen(x[3], bfloat)));
    }
    const int done = count / 4 * 4;
    if (lane < count - done) dst[done + lane] = widen(src[done + lane], bfloat);
}

template <typename T>
__device__ __forceinline__ uint64_t dot(const char* data, const uint64_t* weights, int count, int lane) {
    uint64_t sum = 0;
    if (reinterpret_cast<uint64_t>(data) % sizeof(T) == 0) {
        // So many loads of a lane are under way at once: 32 warps of 8 fill what the memory takes to answer.
        constexpr int kLoads = 8;
        const T* elements = reinterpret_cast<const T*>(data);
        int i = lane;
        for (; i + (kLoads - 1) * kWarp < count; i += kLoads * kWarp) {
            T x[kLoads];
#pragma unroll
            for (int k = 0; k < kLoads; ++k) x[k] = elements[i + k * kWarp];
#pragma unroll
            for (int k = 0; k < kLoads; ++k) sum += weights[i + k * kWarp] * static_cast<uint64_t>(x[k]);
        }
        for (; i < count; i += kWarp) sum += weights[i] * static_cast<uint64_t>(elements[i]);
    } else {
        for (int i = lane; i < count; i += kWarp) {
            uint64_t bits = 0;
            for (unsigned k = 0; k < sizeof(T); ++k) {
                const unsigned char byte =
                    static_cast<unsigned char>(data[i * static_cast<int>(sizeof(T)) + k]);
                bits |= static_cast<uint64_t>(byte) << (8 * k);
            }
            sum += weights[i] * bits;
        }
    }
    return sum;
}

// What a lane adds of the elements of a task, block by block.
template <typename T>
__device__ uint64_t dot_blocks(const Task& task, const uint64_t* weights, int lane) {
    const char* data = reinterpret_cast<const char*>(task.src);
    int count = static_cast<int>(task.nbytes / sizeof(T));
    int lead = static_cast<int>(task.lead);
    uint64_t sum = 0;
    for (int64_t block = task.block; count > 0; ++block) {
        const int here = min(count, static_cast<int>(kBlock) - lead);
        sum += dot<T>(data, weights + lead, here, lane) * zeroelastic::digest_weight(task.seed, block);
        data += here * static_cast<int>(sizeof(T));
        count -= here;
        lead = 0;
    }
    return sum;
}

__device__ void digest_task(const Task& task, const uint64_t* weights, unsigned long long* totals, int lane) {
    uint64_t sum = 0;
    switch (task.itemsize) {
        case 1:
            sum = dot_blocks<uint8_t>(task, weights, lane);
            break;
        case 2:
            sum = dot_blocks<uint16_t>(task, weights, lane);
            break;
        case 4:
            sum = dot_blocks<uint32_t>(task, weights, lane);
            break;
        default:
            sum = dot_blocks<uint64_t>(task, weights, lane);
    }
    for (int apart = kWarp / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, apart);
    if (lane == 0) atomicAdd(totals + task.stream, static_cast<unsigned long long>(sum));
}

template <int kCast, bool kDigest>
__global__ void __launch_bounds__(kThreads, 4) run_tasks(Launch launch) {
    __shared__ uint64_t weights[kDigest ? kBlock : 1];
    if (kDigest) {
        for (int j = static_cast<int>(threadIdx.x); j < kBlock; j += kThreads) {
            weights[j] = zeroelastic::digest_weight(0, j);
        }
        __syncthreads();
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
    int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
    for (; i < launch.num_tasks; i += stride) {
        const Task task = launch.tasks[i];
        if (task.dst != 0) {
            if (kCast == ZE_CAST_NONE) {
                copy_task(task, lane);
            } else if (kCast == ZE_CAST_F32_BF16 || kCast == ZE_CAST_F32_F16) {
                narrow_task(task, kCast == ZE_CAST_F32_BF16, lane);
            } else {
                widen_task(task, kCast == ZE_CAST_BF16_F32, lane);
            }
        }
        if (kDigest) digest_task(task, weights, launch.totals, lane);
    }
}

using Kernel = void (*)(Launch);

Kernel choose_kernel(int32_t cast, bool digest) {
    switch (cast) {
        case ZE_CAST_F32_BF16:
            return digest ? run_tasks<ZE_CAST_F32_BF16, true> : run_tasks<ZE_CAST_F32_BF16, false>;
        case ZE_CAST_F32_F16:
            return digest ? run_tasks<ZE_CAST_F32_F16, true> : run_tasks<ZE_CAST_F32_F16, false>;
        case ZE_CAST_BF16_F32:
            return digest ? run_tasks<ZE_CAST_BF16_F32, true> : run_tasks<ZE_CAST_BF16_F32, false>;
        case ZE_CAST_F16_F32:
            return digest ? run_tasks<ZE_CAST_F16_F32, true> : run_tasks<ZE_CAST_F16_F32, false>;
        default:
            return digest ? run_tasks<ZE_CAST_NONE, true> : run_tasks<ZE_CAST_NONE, false>;
    }
}

int32_t fail(ze_code code, int errnum, int64_t row, ze_error* error) {
    *error = {code, errnum, ZE_SOURCE, 0, -1, row};
    return code;
}

// Cuts a row into tasks: at kTaskBytes, at boundaries of the destination's lines where it can, and with a
// digest at the boundaries of its blocks: of each, where the row is copied, too, so that what is digested is
// still in the first-level cache.
void add_tasks(uint64_t src, uint64_t dst, int64_t nbytes, int64_t src_size, int64_t dst_size,
               const ze_digest* digest, int64_t row, std::vector<Task>* tasks) {
    for (int64_t done = 0; done < nbytes;) {
        Task task{};
        task.src = src + static_cast<uint64_t>(done);
        if (dst != 0) task.dst = dst + static_cast<uint64_t>(done / src_size * dst_size);
        int64_t most = kTaskBytes;
        if (digest != nullptr) {
            const int64_t itemsize = digest->itemsize[row];
            const int64_t start = digest->start[row] + done / itemsize;
            most = (kBlock * (dst != 0 ? 1 : kTaskBlocks) - start % kBlock) * itemsize;
            task.stream = static_cast<uint32_t>(digest->stream[row]);
            task.lead = static_cast<uint32_t>(start % kBlock);
            task.itemsize = static_cast<uint32_t>(itemsize);
            task.seed = digest->seeds[task.stream];
            task.block = start / kBlock;
        } else if (dst != 0) {
            // After the first, tasks begin on a boundary of the destination: no heads and tails inside a row.
            most -= static_cast<int64_t>(task.dst % 128) * src_size / dst_size / src_size * src_size;
        }
        task.nbytes = static_cast<uint32_t>(nbytes - done < most ? nbytes - done : most);
        done += task.nbytes;
        tasks->push_back(task);
    }
}

}  // namespace

struct ze_cuda_plan {
    int device = 0;
    int64_t num_tasks = 0;
    Task* tasks = nullptr;
    unsigned long long* totals = nullptr;
    Kernel kernel = nullptr;
    unsigned blocks = 0;

    ~ze_cuda_plan() {
        const zeroelastic::OnDevice on(device);
        cudaFree(tasks);
    }
};

namespace {

// Digests of one call on the device, from zero.
class DeviceTotals {
  public:
    DeviceTotals() = default;
    ~DeviceTotals() {
        cudaFree(data_);
    }
    DeviceTotals(const DeviceTotals&) = delete;
    DeviceTotals& operator=(const DeviceTotals&) = delete;

    cudaError_t make(int64_t count) {
        values_.assign(static_cast<size_t>(count), 0);
        if (count == 0) return cudaSuccess;
        const cudaError_t status = cudaMalloc(reinterpret_cast<void**>(&data_), bytes());
        return status == cudaSuccess ? cudaMemcpy(data_, values_.data(), bytes(), cudaMemcpyHostToDevice)
                                     : status;
    }

    cudaError_t add_to(uint64_t* totals) {
        if (values_.empty()) return cudaSuccess;
        const cudaError_t status = cudaMemcpy(values_.data(), data_, bytes(), cudaMemcpyDeviceToHost);
        if (status != cudaSuccess) return status;
        for (size_t i = 0; i < values_.size(); ++i) totals[i] += values_[i];
        return cudaSuccess;
    }

    uint64_t* data() const {
        return data_;
    }

  private:
    size_t bytes() const {
        return values_.size() * sizeof(uint64_t);
    }

    uint64_t* data_ = nullptr;
    std::vector<uint64_t> values_;
};

// A plan that is made, run and waited for; `digest->totals` is host memory.
int32_t run_once(const ze_table* table, const ze_buffers* src, const ze_buffers* dst, const ze_digest* digest,
                 int32_t cast, int32_t device, void* stream, ze_error* error) {
    *error = ze_error{};
    const zeroelastic::OnDevice on(device);
    if (on.status() != cudaSuccess) return fail(ZE_INTERNAL, on.status(), -1, error);
    try {
        DeviceTotals totals;
        ze_digest on_device{};
        if (digest != nullptr) {
            const cudaError_t status = totals.make(digest->num_streams);
            if (status != cudaSuccess) return fail(ZE_INTERNAL, status, -1, error);
            on_device = *digest;
            on_device.totals = totals.data();
        }
        ze_cuda_plan* made = nullptr;
        int32_t code = ze_cuda_plan_create(table, src, dst, digest == nullptr ? nullptr : &on_device, cast,
                                           device, &made, error);
        if (code != ZE_OK) return code;
        const std::unique_ptr<ze_cuda_plan> plan(made);
        code = ze_cuda_plan_run(plan.get(), stream, error);
        if (code != ZE_OK) return code;
        cudaError_t status = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
        if (status == cudaSuccess && digest != nullptr) status = totals.add_to(digest->totals);
        return status == cudaSuccess ? ZE_OK : fail(ZE_INTERNAL, status, -1, error);
    } catch (const std::bad_alloc&) {
        return fail(ZE_NO_MEMORY, 0, -1, error);
    }
}

}  // namespace

extern "C" {

int32_t ze_abi_version(void) {
    return ZE_ABI_VERSION;
}

#define ZE_TEXT_(x) #x
#define ZE_TEXT(x) ZE_TEXT_(x)

const char* ze_build_info(void) {
    return "nvcc " ZE_TEXT(__CUDACC_VER_MAJOR__) "." ZE_TEXT(__CUDACC_VER_MINOR__) ", sm_80, sm_90 and PTX";
}

const char* ze_cuda_error_text(int32_t errnum) {
    return cudaGetErrorString(static_cast<cudaError_t>(errnum));
}

int32_t ze_cuda_plan_create(const ze_table* table, const ze_buffers* src, const ze_buffers* dst,
                            const ze_digest* digest, int32_t cast, int32_t device, ze_cuda_plan** plan,
                            ze_error* error) {
    *error = ze_error{};
    *plan = nullptr;
    // What check_table does not know: a digest alone converts nothing, and tasks count streams in 32 bits.
    if ((dst == nullptr && (digest == nullptr || cast != ZE_CAST_NONE)) ||
        (digest != nullptr && digest->num_streams > std::numeric_limits<uint32_t>::max())) {
        return fail(ZE_BAD_TABLE, 0, -1, error);
    }
    ze_table checked = *table;
    if (dst == nullptr) checked.dst = nullptr;
    try {
        if (!zeroelastic::check_table(checked, src->count, src->nbytes, dst == nullptr ? 0 : dst->count,
                                      dst == nullptr ? nullptr : dst->nbytes, digest, cast, error)) {
            return error->code;
        }
        const int64_t src_size = zeroelastic::source_itemsize(cast);
        const int64_t dst_size = cast == ZE_CAST_NONE ? 1 : 6 - src_size;
        std::vector<Task> tasks;
        for (int64_t row = 0; row < table->num_rows; ++row) {
            const int64_t nbytes = table->nbytes[row];
            const uint64_t from = reinterpret_cast<uint64_t>(src->data[table->src[row]]) +
                                  static_cast<uint64_t>(table->src_offset[row]);
            uint64_t to = 0;
            if (dst != nullptr) {
                to = reinterpret_cast<uint64_t>(dst->data[table->dst[row]]) +
                     static_cast<uint64_t>(table->dst_offset[row]);
            }
            // Kernels take whole elements: of the conversion, and of the digest that goes with it.
            if (from % static_cast<uint64_t>(src_size) != 0 || to % static_cast<uint64_t>(dst_size) != 0 ||
                (digest != nullptr && digest->itemsize[row] % src_size != 0)) {
                return fail(ZE_BAD_TABLE, 0, row, error);
            }
            add_tasks(from, to, nbytes, src_size, dst_size, digest, row, &tasks);
        }
        std::unique_ptr<ze_cuda_plan> made(new ze_cuda_plan);
        made->device = device;
        made->num_tasks = static_cast<int64_t>(tasks.size());
        made->kernel = choose_kernel(cast, digest != nullptr);
        made->totals = digest == nullptr ? nullptr : reinterpret_cast<unsigned long long*>(digest->totals);
        const zeroelastic::OnDevice on(device);
        cudaError_t status = on.status();
        int processors = 0;
        int per_processor = 0;
        if (status == cudaSuccess) {
            status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        }
        if (status == cudaSuccess) {
            status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, made->kernel, kThreads, 0);
        }
        if (status == cudaSuccess && !tasks.empty()) {
            status = cudaMalloc(reinterpret_cast<void**>(&made->tasks), tasks.size() * sizeof(Task));
        }
        if (status == cudaSuccess && !tasks.empty()) {
            status =
                cudaMemcpy(made->tasks, tasks.data(), tasks.size() * sizeof(Task), cudaMemcpyHostToDevice);
            // That returns when the host's memory is free again. A stream of the caller's need not wait for
            // the default one, so the upload must have ended before there is a plan to run.
            if (status == cudaSuccess) status = cudaStreamSynchronize(nullptr);
        }
        if (status != cudaSuccess) return fail(ZE_INTERNAL, status, -1, error);
        const int64_t warps_per_block = kThreads / kWarp;
        const int64_t wanted = (made->num_tasks + warps_per_block - 1) / warps_per_block;
        const int64_t fitting = static_cast<int64_t>(processors) * (per_processor > 0 ? per_processor : 1);
        made->blocks = static_cast<unsigned>(wanted < fitting ? wanted : fitting);
        *plan = made.release();
        return ZE_OK;
    } catch (const std::bad_alloc&) {
        return fail(ZE_NO_MEMORY, 0, -1, error);
    }
}

int32_t ze_cuda_plan_run(const ze_cuda_plan* plan, void* stream, ze_error* error) {
    *error = ze_error{};
    if (plan->num_tasks == 0) return ZE_OK;
    const zeroelastic::OnDevice on(plan->device);
    cudaError_t status = on.status();
    if (status == cudaSuccess) {
        Launch launch{plan->tasks, plan->num_tasks, plan->totals};
        void* arguments[] = {&launch};
        status = cudaLaunchKernel(plan->kernel, dim3(plan->blocks), dim3(kThreads), arguments, 0,
                                  static_cast<cudaStream_t>(stream));
    }
    return status == cudaSuccess ? ZE_OK : fail(ZE_INTERNAL, status, -1, error);
}

void ze_cuda_plan_destroy(ze_cuda_plan* plan) {
    delete plan;
}

int32_t ze_cuda_copy_segments(const ze_table* table, const ze_buffers* src, const ze_buffers* dst,
                              const ze_digest* digest, const ze_options* options, int32_t device,
                              void* stream, ze_error* error) {
    return run_once(table, src, dst, digest, options->cast, device, stream, error);
}

int32_t ze_cuda_sum_segments(const ze_table* table, const ze_buffers* src, const ze_digest* digest,
                             int32_t device, void* stream, ze_error* error) {
    return run_once(table, src, nullptr, digest, ZE_CAST_NONE, device, stream, error);
}

}  // extern "C"
