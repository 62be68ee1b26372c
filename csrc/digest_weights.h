// The weights of the digest in zeroelastic/core/digest.py, for the host and for kernels.

#ifndef ZEROELASTIC_DIGEST_WEIGHTS_H_
#define ZEROELASTIC_DIGEST_WEIGHTS_H_

#include <cstdint>

#ifdef __CUDACC__
#define ZE_HOST_DEVICE __host__ __device__
#else
#define ZE_HOST_DEVICE
#endif

namespace zeroelastic {

// Elements that share one block weight.
constexpr int64_t kDigestBlock = 1024;

// Output `n` of splitmix64 from `seed`, made odd.
ZE_HOST_DEVICE constexpr uint64_t digest_weight(uint64_t seed, int64_t n) {
    uint64_t value = seed + (static_cast<uint64_t>(n) + 1) * 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return (value ^ (value >> 31)) | 1;
}

}  // namespace zeroelastic

#undef ZE_HOST_DEVICE

#endif  // ZEROELASTIC_DIGEST_WEIGHTS_H_
