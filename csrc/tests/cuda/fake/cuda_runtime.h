// The device side of the fake: a kernel is an ordinary function that as many threads call as a block has.

#ifndef ZEROELASTIC_TESTS_FAKE_CUDA_RUNTIME_H_
#define ZEROELASTIC_TESTS_FAKE_CUDA_RUNTIME_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Blocks run one after the other, so they can share what the threads of each share.
#define __shared__ static

#define __CUDACC_VER_MAJOR__ 0
#define __CUDACC_VER_MINOR__ 0

using std::min;

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3() = default;
    explicit dim3(unsigned count) : x(count) {}
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

extern thread_local dim3 threadIdx, blockIdx;
extern dim3 gridDim, blockDim;

void __syncthreads();
uint64_t __shfl_xor_sync(unsigned mask, uint64_t value, int lanes);
uint64_t __shfl_sync(unsigned mask, uint64_t value, int lane);
unsigned __ballot_sync(unsigned mask, bool value);
unsigned __reduce_add_sync(unsigned mask, unsigned value);

inline uint32_t __shfl_sync(unsigned mask, uint32_t value, int lane) {
    return static_cast<uint32_t>(__shfl_sync(mask, uint64_t{value}, lane));
}
inline bool __all_sync(unsigned mask, bool value) {
    return __ballot_sync(mask, value) == 0xFFFFFFFF;
}
inline int __ffs(int value) {
    return __builtin_ffs(value);
}

template <typename T>
T __ldcs(const T* from) {
    return *from;
}
template <typename T>
T __ldg(const T* from) {
    return *from;
}
template <typename T>
void __stcs(T* to, const T& value) {
    *to = value;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

namespace fake {
cudaError_t launch(dim3 blocks, dim3 threads, cudaStream_t stream, const std::function<void()>& kernel);
}

template <typename Argument>
cudaError_t cudaLaunchKernel(void (*kernel)(Argument), dim3 blocks, dim3 threads, void** arguments, size_t,
                             cudaStream_t stream) {
    return fake::launch(blocks, threads, stream,
                        [&] { kernel(*static_cast<const Argument*>(arguments[0])); });
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
    *blocks = 1;
    return cudaSuccess;
}

#endif  // ZEROELASTIC_TESTS_FAKE_CUDA_RUNTIME_H_
