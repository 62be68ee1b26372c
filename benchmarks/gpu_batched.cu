// cub::DeviceMemcpy::Batched behind a C interface: what bench_gpu.py compares with. Built there when nvcc is
// at hand; no part of the package.

#include <cub/device/device_memcpy.cuh>

// With `temporary` null, sets `nbytes` to the memory that is needed there. Returns a cudaError_t.
extern "C" int batched_copy(void* temporary, size_t* nbytes, const void** src, void** dst,
                            const size_t* sizes, unsigned count, cudaStream_t stream) {
    return cub::DeviceMemcpy::Batched(temporary, *nbytes, src, dst, sizes, count, stream);
}
