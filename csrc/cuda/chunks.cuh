// What a warp does at a time, a chunk of a row: where it lies, and its copy or conversion.
//
// A destination is written 16 bytes at a time, aligned, whatever the source's alignment: each lane reads the
// two aligned 16-byte words that hold what it needs and shifts. An aligned word that holds one valid byte
// lies inside the allocation, so nothing is read beyond.

#ifndef ZEROELASTIC_CHUNKS_CUH_
#define ZEROELASTIC_CHUNKS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../cast.h"
#include "../digest_weights.h"
#include "zeroelastic_cuda.h"

namespace zeroelastic::gpu {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnroll = 4;
constexpr unsigned kAllLanes = 0xFFFFFFFF;
// Bytes of a chunk that is only copied: few, so that the warps of a block read and write side by side. A
// chunk that is summed lies in one block of its digest.
constexpr int64_t kChunkBytes = 2048;
constexpr int64_t kBlock = zeroelastic::kDigestBlock;
// Chunks that a warp sums at a time, at most; 16-byte words of each of them that a lane asks for before the
// chunk's turn, and as many at a time as it asks for of the rest.
constexpr int64_t kMostChunks = kWarp;
constexpr int kAhead = 3;
constexpr int kRest = 4;

struct Row {
    uint64_t src;
    uint64_t dst;
    int64_t nbytes;
    int64_t start;  // of the first element in its digest
    uint64_t seed;
    uint32_t stream;
    uint32_t first_chunk;
    uint32_t first_bytes;   // of the first chunk, in the source
    uint32_t log_itemsize;  // the logarithm to base 2 of an element's bytes
};

// Chunks are numbered through all rows. A block takes those from `spacing` times its number on that are less
// than `span` further; each warp takes `batch` of them at a time and goes on by `step`.
struct Launch {
    const Row* rows;
    const uint32_t* row_of;  // the row of each chunk; null: chunk i is row i
    unsigned long long* totals;
    uint32_t num_chunks;
    uint32_t spacing;
    uint32_t span;
    uint32_t step;
    uint32_t batch;
};

// What one warp does at a time: bytes of one row.
struct Chunk {
    uint64_t src;
    uint64_t dst;
    int64_t element;  // of the digest
    int nbytes;       // of the source
};

__host__ __device__ constexpr int64_t source_bytes(int32_t cast) {
    return cast == ZE_CAST_NONE ? 1 : (cast == ZE_CAST_F32_BF16 || cast == ZE_CAST_F32_F16 ? 4 : 2);
}

__host__ __device__ constexpr int64_t destination_bytes(int32_t cast) {
    return cast == ZE_CAST_NONE ? 1 : 6 - source_bytes(cast);
}

// Bytes of a row's chunks behind its first one.
template <bool kSums>
__host__ __device__ __forceinline__ int64_t chunk_bytes(uint32_t log_itemsize) {
    return kSums ? kBlock << log_itemsize : kChunkBytes;
}

template <int kCast, bool kSums>
__device__ __forceinline__ Chunk chunk_of(const Row& row, uint32_t number) {
    const int64_t each = chunk_bytes<kSums>(row.log_itemsize);
    const uint32_t before = number - row.first_chunk;
    const int64_t first = row.first_bytes;
    const int64_t offset = before == 0 ? 0 : first + static_cast<int64_t>(before - 1) * each;
    Chunk chunk;
    chunk.src = row.src + static_cast<uint64_t>(offset);
    chunk.dst = row.dst + static_cast<uint64_t>(offset / source_bytes(kCast) * destination_bytes(kCast));
    chunk.element = kSums ? row.start + (offset >> row.log_itemsize) : 0;
    chunk.nbytes = static_cast<int>(min(before == 0 ? first : each, row.nbytes - offset));
    return chunk;
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

__device__ __forceinline__ uint32_t row_of_chunk(const Launch& launch, uint32_t number) {
    return launch.row_of == nullptr ? number : launch.row_of[number];
}

// Has a row brought to the first-level cache, without waiting.
__device__ __forceinline__ void prefetch(const Row* row) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L1 [%0];" ::"l"(row));
#else
    (void)row;
#endif
}

struct Nothing {
    __device__ __forceinline__ uint64_t dot(const uint4&, int) const {
        return 0;
    }
};

// Loads aligned words, stores them if asked to, and returns what the lane adds to a digest. A shift of
// `kWords` words and `bits` bits is none where kWords is -1. `src` is the aligned word that holds the first
// byte. The upper word of one lane is the lower of the next: it comes from the first-level cache.
template <int kWords, bool kStore, int kMany, typename Dot>
__device__ __forceinline__ uint64_t move_words(uint4* dst, const uint4* src, int count, unsigned bits,
                                               const Dot& digest, int lane) {
    constexpr int kShift = kWords < 0 ? 0 : kWords;
    uint64_t sum = 0;
#pragma unroll 1
    for (int i = lane; i < count; i += kMany * kWarp) {
        uint4 low[kMany];
        uint4 high[kMany];
#pragma unroll
        for (int k = 0; k < kMany; ++k) {
            const uint4* from = src + min(i + k * kWarp, count - 1);  // so that no load waits for another
            low[k] = from[0];
            if (kWords >= 0) high[k] = from[1];
        }
#pragma unroll
        for (int k = 0; k < kMany; ++k) {
            if (i + k * kWarp < count) {
                const uint4 value = kWords < 0 ? low[k] : shifted<kShift>(low[k], high[k], bits);
                if (kStore) __stcs(dst + i + k * kWarp, value);
                sum += digest.dot(value, i - lane + k * kWarp);
            }
        }
    }
    return sum;
}

// The same for a source that begins `shift` bytes into `src`.
template <typename Dot>
__device__ __forceinline__ uint64_t copy_words(uint4* dst, const uint4* src, int count, unsigned shift,
                                               const Dot& digest, int lane) {
    constexpr int kHalf = kUnroll / 2;
    const unsigned bits = shift % 4 * 8;
    if (shift == 0) return move_words<-1, true, kUnroll>(dst, src, count, bits, digest, lane);
    if (shift < 4) return move_words<0, true, kHalf>(dst, src, count, bits, digest, lane);
    if (shift < 8) return move_words<1, true, kHalf>(dst, src, count, bits, digest, lane);
    if (shift < 12) return move_words<2, true, kHalf>(dst, src, count, bits, digest, lane);
    return move_words<3, true, kHalf>(dst, src, count, bits, digest, lane);
}

__device__ __forceinline__ int to_aligned(uint64_t address) {
    return static_cast<int>((16 - address % 16) % 16);
}

// What a lane moves of the ends of a run that are no whole words: elements before the first aligned word, at
// most 16, by the lower half of the warp, and those behind the last one by the upper half.
struct Edge {
    int at;
    bool mine;

    __device__ Edge(int head, int tail, int behind, int lane) {
        constexpr int kHalf = kWarp / 2;
        at = lane < kHalf ? lane : behind + lane - kHalf;
        mine = lane < kHalf ? lane < head : lane - kHalf < tail;
    }
};

__device__ void copy_chunk(const Chunk& chunk, int lane) {
    const char* src = reinterpret_cast<const char*>(chunk.src);
    char* dst = reinterpret_cast<char*>(chunk.dst);
    const int head = min(chunk.nbytes, to_aligned(chunk.dst));
    const int count = (chunk.nbytes - head) / 16;
    const int behind = head + count * 16;
    const Edge edge(head, chunk.nbytes - behind, behind, lane);
    char byte = 0;
    if (edge.mine) byte = src[edge.at];
    const unsigned shift = static_cast<unsigned>((chunk.src + static_cast<unsigned>(head)) % 16);
    copy_words(reinterpret_cast<uint4*>(dst + head), reinterpret_cast<const uint4*>(src + head - shift),
               count, shift, Nothing{}, lane);
    if (edge.mine) dst[edge.at] = byte;
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
__device__ void narrow_chunk(const Chunk& chunk, bool bfloat, int lane) {
    const float* src = reinterpret_cast<const float*>(chunk.src);
    uint16_t* dst = reinterpret_cast<uint16_t*>(chunk.dst);
    int count = chunk.nbytes / 4;
    const int head = min(count, static_cast<int>((16 - chunk.dst % 16) % 16 / 2));
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
__device__ void widen_chunk(const Chunk& chunk, bool bfloat, int lane) {
    const uint16_t* src = reinterpret_cast<const uint16_t*>(chunk.src);
    float* dst = reinterpret_cast<float*>(chunk.dst);
    int count = chunk.nbytes / 2;
    const int head = min(count, static_cast<int>((16 - chunk.dst % 16) % 16 / 4));
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

template <int kCast>
__device__ __forceinline__ void convert_chunk(const Chunk& chunk, int lane) {
    if (kCast == ZE_CAST_F32_BF16 || kCast == ZE_CAST_F32_F16) {
        narrow_chunk(chunk, kCast == ZE_CAST_F32_BF16, lane);
    } else if (kCast == ZE_CAST_BF16_F32 || kCast == ZE_CAST_F16_F32) {
        widen_chunk(chunk, kCast == ZE_CAST_BF16_F32, lane);
    } else {
        copy_chunk(chunk, lane);
    }
}

}  // namespace zeroelastic::gpu

#endif  // ZEROELASTIC_CHUNKS_CUH_
