// Device buffers to device buffers: copy, conversion and digest of many rows in one launch.
//
// A row is cut into chunks of a few KiB, and a chunk is done by one warp. The plan on the device is the table
// of the rows and the row of each chunk; where a chunk lies in its row is arithmetic. A grid that fills the
// device once takes the chunks in strides, so thousands of short rows cost no more launches than one long
// row. A destination is written 16 bytes at a time, aligned, whatever the source's alignment: each lane reads
// the two aligned 16-byte words that hold what it needs and shifts. An aligned word that holds one valid byte
// lies inside the allocation, so nothing is read beyond.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
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
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnroll = 4;
// Bytes of a chunk that is only copied: few, so that the warps of a block read and write side by side.
constexpr int64_t kChunkBytes = 2048;
// Blocks of a digest in one chunk, where elements are only summed and where they are copied, too.
constexpr int64_t kBlock = zeroelastic::kDigestBlock;
constexpr int64_t kSummedBlocks = 16;
constexpr int64_t kCopiedBlocks = 1;

enum class Mode { kCopy, kCopyAndSum, kSum };

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
// than `span` further; each warp begins at its own number in the block, and goes on by `step`.
struct Launch {
    const Row* rows;
    const uint32_t* row_of;  // the row of each chunk; null: chunk i is row i
    unsigned long long* totals;
    uint32_t num_chunks;
    uint32_t spacing;
    uint32_t span;
    uint32_t step;
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
template <Mode kMode>
__host__ __device__ __forceinline__ int64_t chunk_bytes(uint32_t log_itemsize) {
    if (kMode == Mode::kCopy) return kChunkBytes;
    return ((kMode == Mode::kSum ? kSummedBlocks : kCopiedBlocks) * kBlock) << log_itemsize;
}

template <int kCast, Mode kMode>
__device__ __forceinline__ Chunk chunk_of(const Row& row, uint32_t number) {
    const int64_t each = chunk_bytes<kMode>(row.log_itemsize);
    const uint32_t before = number - row.first_chunk;
    const int64_t first = row.first_bytes;
    const int64_t offset = before == 0 ? 0 : first + static_cast<int64_t>(before - 1) * each;
    Chunk chunk;
    chunk.src = row.src + static_cast<uint64_t>(offset);
    chunk.dst = row.dst + static_cast<uint64_t>(offset / source_bytes(kCast) * destination_bytes(kCast));
    chunk.element = kMode == Mode::kCopy ? 0 : row.start + (offset >> row.log_itemsize);
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

// Where the weights of elements lie in shared memory: four planes, so that lanes that read the weights of
// four elements each do not meet in a bank.
constexpr int kPlane = static_cast<int>(kBlock) / 4 + 4;

__device__ __forceinline__ int place_of_weight(int element) {
    return element % 4 * kPlane + element / 4;
}

// The weights of 16 bytes of elements of type T, the first of which is `element` of its block.
template <typename T>
struct Weights {
    static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
    const uint64_t* weights;
    int planes[4];

    __device__ Weights(const uint64_t* all, int element) : weights(all) {
#pragma unroll
        for (int k = 0; k < 4; ++k) planes[k] = place_of_weight(element + k);
    }

    // The part of the digest of a word that is `words` words further, a multiple of 2.
    __device__ __forceinline__ uint64_t dot(const uint4& word, int words) const {
        const unsigned parts[4] = {word.x, word.y, word.z, word.w};
        const int further = words * kElements / 4;
        uint64_t sum = 0;
#pragma unroll
        for (int k = 0; k < kElements; ++k) {
            uint64_t bits;
            if (sizeof(T) == 8) {
                bits = parts[k * 2 % 4] | static_cast<uint64_t>(parts[k * 2 % 4 + 1]) << 32;
            } else {
                const int at = k * static_cast<int>(sizeof(T));
                bits = static_cast<T>(parts[at / 4] >> (at % 4 * 8));
            }
            sum += weights[planes[k % 4] + k / 4 + further] * bits;
        }
        return sum;
    }
};

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

// Adds up elements of one block of a digest, from `element` of it on, and copies them to `dst` if asked to.
// Both sides are aligned to an element.
template <typename T, bool kStore>
__device__ uint64_t sum_aligned(T* dst, const T* src, int count, int element, const uint64_t* weights,
                                int lane) {
    constexpr int kElements = 16 / static_cast<int>(sizeof(T));
    const uint64_t from = reinterpret_cast<uint64_t>(src);
    const uint64_t aligned = kStore ? reinterpret_cast<uint64_t>(dst) : from;
    const int head = min(count, to_aligned(aligned) / static_cast<int>(sizeof(T)));
    const int words = (count - head) / kElements;
    const int behind = head + words * kElements;
    const Edge edge(head, count - behind, behind, lane);
    T value = 0;
    if (edge.mine) value = src[edge.at];
    const Weights<T> digest(weights, element + head + lane * kElements);
    const unsigned shift = static_cast<unsigned>((from + static_cast<uint64_t>(head) * sizeof(T)) % 16);
    const uint4* first = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(src + head) - shift);
    uint64_t sum;
    if (kStore) {
        sum = copy_words(reinterpret_cast<uint4*>(dst + head), first, words, shift, digest, lane);
    } else {
        sum = move_words<-1, false, kUnroll>(nullptr, first, words, 0, digest, lane);
    }
    if (edge.mine) {
        if (kStore) dst[edge.at] = value;
        sum += weights[place_of_weight(element + edge.at)] * static_cast<uint64_t>(value);
    }
    return sum;
}

// The same of elements at any address.
template <typename T>
__device__ uint64_t sum_unaligned(const char* src, int count, int element, const uint64_t* weights,
                                  int lane) {
    uint64_t sum = 0;
    for (int i = lane; i < count; i += kWarp) {
        uint64_t bits = 0;
        for (int k = 0; k < static_cast<int>(sizeof(T)); ++k) {
            const uint64_t byte = static_cast<unsigned char>(src[i * static_cast<int>(sizeof(T)) + k]);
            bits |= byte << (8 * k);
        }
        sum += weights[place_of_weight(element + i)] * bits;
    }
    return sum;
}

// What a lane adds of the elements of a chunk, block by block; copies them, too, where that is the mode and
// nothing else has done it.
template <typename T, bool kStore>
__device__ __forceinline__ uint64_t sum_blocks(const Chunk& chunk, uint64_t seed, const uint64_t* weights,
                                               int lane) {
    constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
    uint64_t src = chunk.src, dst = chunk.dst;
    int count = chunk.nbytes / static_cast<int>(kSize);
    int lead = static_cast<int>(chunk.element % kBlock);
    uint64_t sum = 0;
    for (int64_t block = chunk.element / kBlock; count > 0; ++block) {
        const int here = min(count, static_cast<int>(kBlock) - lead);
        uint64_t part;
        if (src % kSize == 0 && (!kStore || dst % kSize == 0)) {
            part = sum_aligned<T, kStore>(reinterpret_cast<T*>(dst), reinterpret_cast<const T*>(src), here,
                                          lead, weights, lane);
        } else {
            if (kStore) copy_chunk({src, dst, 0, here * static_cast<int>(kSize)}, lane);
            part = sum_unaligned<T>(reinterpret_cast<const char*>(src), here, lead, weights, lane);
        }
        sum += part * zeroelastic::digest_weight(seed, block);
        src += static_cast<uint64_t>(here * kSize);
        dst += static_cast<uint64_t>(here * kSize);
        count -= here;
        lead = 0;
    }
    return sum;
}

// A warp's part of a digest, kept over the chunks of one stream: one atomic addition for all of them.
class RunningSum {
  public:
    __device__ explicit RunningSum(unsigned long long* totals) : totals_(totals) {}

    __device__ __forceinline__ void add(uint32_t stream, uint64_t part, int lane) {
        if (stream != stream_) {
            flush(lane);
            stream_ = stream;
        }
        sum_ += part;
    }

    __device__ __forceinline__ void flush(int lane) {
        if (stream_ == kNone) return;
        uint64_t sum = sum_;
        for (int apart = kWarp / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, apart);
        if (lane == 0) atomicAdd(totals_ + stream_, static_cast<unsigned long long>(sum));
        sum_ = 0;
    }

  private:
    static constexpr uint32_t kNone = 0xFFFFFFFF;
    unsigned long long* totals_;
    uint64_t sum_ = 0;
    uint32_t stream_ = kNone;
};

template <int kCast, Mode kMode>
__device__ __forceinline__ void convert_chunk(const Chunk& chunk, int lane) {
    if (kCast == ZE_CAST_F32_BF16 || kCast == ZE_CAST_F32_F16) {
        narrow_chunk(chunk, kCast == ZE_CAST_F32_BF16, lane);
    } else if (kCast == ZE_CAST_BF16_F32 || kCast == ZE_CAST_F16_F32) {
        widen_chunk(chunk, kCast == ZE_CAST_BF16_F32, lane);
    } else if (kMode == Mode::kCopy) {
        copy_chunk(chunk, lane);
    }
}

// Apart, so that the registers of the loops below are not taken up by what is rare.
template <typename T>
__device__ __attribute__((noinline)) uint64_t sum_rare(Chunk chunk, uint64_t seed, const uint64_t* weights,
                                                       int lane) {
    return sum_blocks<T, false>(chunk, seed, weights, lane);
}

// fp32, which is nearly all there is, is copied and summed in one pass; other sizes are copied, and read
// again from the first-level cache.
template <int kCast, Mode kMode>
__device__ __forceinline__ uint64_t sum_chunk(const Chunk& chunk, const Row& row, const uint64_t* weights,
                                              int lane) {
    constexpr bool kCopies = kMode == Mode::kCopyAndSum && kCast == ZE_CAST_NONE;
    if (row.log_itemsize == 2) return sum_blocks<uint32_t, kCopies>(chunk, row.seed, weights, lane);
    if (kCopies) copy_chunk(chunk, lane);
    if (row.log_itemsize == 1) return sum_rare<uint16_t>(chunk, row.seed, weights, lane);
    if (row.log_itemsize == 0) return sum_rare<uint8_t>(chunk, row.seed, weights, lane);
    return sum_rare<uint64_t>(chunk, row.seed, weights, lane);
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

// As many blocks fit a multiprocessor as have no registers spilled.
template <int kCast, Mode kMode>
__global__ void __launch_bounds__(kThreads, kMode == Mode::kCopy ? 6 : 4) run_chunks(Launch launch) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const uint32_t begin = blockIdx.x * launch.spacing;
    const uint32_t end = min(begin + launch.span, launch.num_chunks);
    uint32_t number = begin + threadIdx.x / kWarp;
    uint32_t row_number = number < end ? row_of_chunk(launch, number) : 0;
    __shared__ uint64_t weights[kMode == Mode::kCopy ? 1 : 4 * kPlane];
    if (kMode != Mode::kCopy) {
        prefetch(launch.rows + row_number);
        for (int j = static_cast<int>(threadIdx.x); j < kBlock; j += kThreads) {
            weights[place_of_weight(j)] = zeroelastic::digest_weight(0, j);
        }
        __syncthreads();
    }
    RunningSum sum(launch.totals);
    while (number < end) {
        const Row row = launch.rows[row_number];
        const Chunk chunk = chunk_of<kCast, kMode>(row, number);
        const uint32_t next = number + launch.step;
        row_number = next < end ? row_of_chunk(launch, next) : row_number;
        if (kMode != Mode::kSum) convert_chunk<kCast, kMode>(chunk, lane);
        if (kMode != Mode::kCopy) {
            if (launch.row_of == nullptr) prefetch(launch.rows + row_number);
            sum.add(row.stream, sum_chunk<kCast, kMode>(chunk, row, weights, lane), lane);
        }
        number = next;
    }
    if (kMode != Mode::kCopy) sum.flush(lane);
}

using Kernel = void (*)(Launch);

template <Mode kMode>
Kernel kernel_of(int32_t cast) {
    switch (cast) {
        case ZE_CAST_F32_BF16:
            return run_chunks<ZE_CAST_F32_BF16, kMode>;
        case ZE_CAST_F32_F16:
            return run_chunks<ZE_CAST_F32_F16, kMode>;
        case ZE_CAST_BF16_F32:
            return run_chunks<ZE_CAST_BF16_F32, kMode>;
        case ZE_CAST_F16_F32:
            return run_chunks<ZE_CAST_F16_F32, kMode>;
        default:
            return run_chunks<ZE_CAST_NONE, kMode>;
    }
}

int32_t fail(ze_code code, int errnum, int64_t row, ze_error* error) {
    *error = {code, errnum, ZE_SOURCE, 0, -1, row};
    return code;
}

// Adds a row as kernels take it, and its chunks. Copies are cut where a line of the destination begins, and
// with a digest where a block of it does.
template <Mode kMode>
void add_chunks(Row row, int32_t cast, std::vector<Row>* rows, std::vector<uint32_t>* row_of) {
    const int64_t each = chunk_bytes<kMode>(row.log_itemsize);
    int64_t first = each;
    if (kMode == Mode::kCopy) {
        const int64_t over = static_cast<int64_t>(row.dst % 128) / destination_bytes(cast);
        first -= over * source_bytes(cast);
    } else if (kMode == Mode::kCopyAndSum) {
        first -= (row.start % kBlock) << row.log_itemsize;
    }
    if (row.nbytes == 0) return;
    row.first_bytes = static_cast<uint32_t>(first);
    row.first_chunk = static_cast<uint32_t>(row_of->size());
    const int64_t behind = std::max<int64_t>(row.nbytes - first, 0);
    const int64_t chunks = 1 + (behind + each - 1) / each;
    row_of->insert(row_of->end(), static_cast<size_t>(chunks), static_cast<uint32_t>(rows->size()));
    rows->push_back(row);
}

}  // namespace

struct ze_cuda_plan {
    int device = 0;
    int64_t num_streams = 0;
    char* memory = nullptr;                 // rows, the row of each chunk, and totals that are the plan's own
    unsigned long long* totals = nullptr;   // on the device
    unsigned long long* results = nullptr;  // pinned, where the totals are the plan's own
    Kernel kernel = nullptr;
    unsigned blocks = 0;
    Launch launch{};

    ~ze_cuda_plan() {
        const zeroelastic::OnDevice on(device);
        cudaFree(memory);
        cudaFreeHost(results);
    }
};

namespace {

template <Mode kMode>
int32_t cut_rows(const ze_table& table, const ze_buffers& src, const ze_buffers* dst, const ze_digest* digest,
                 int32_t cast, std::vector<Row>* rows, std::vector<uint32_t>* row_of, ze_error* error) {
    const uint64_t src_size = static_cast<uint64_t>(source_bytes(cast));
    const uint64_t dst_size = static_cast<uint64_t>(destination_bytes(cast));
    rows->reserve(static_cast<size_t>(table.num_rows));
    for (int64_t i = 0; i < table.num_rows; ++i) {
        Row row{};
        row.nbytes = table.nbytes[i];
        row.src =
            reinterpret_cast<uint64_t>(src.data[table.src[i]]) + static_cast<uint64_t>(table.src_offset[i]);
        if (dst != nullptr) {
            row.dst = reinterpret_cast<uint64_t>(dst->data[table.dst[i]]) +
                      static_cast<uint64_t>(table.dst_offset[i]);
        }
        if (digest != nullptr) {
            while (int64_t{1} << row.log_itemsize < digest->itemsize[i]) ++row.log_itemsize;
            row.start = digest->start[i];
            row.stream = static_cast<uint32_t>(digest->stream[i]);
            row.seed = digest->seeds[row.stream];
        }
        // Kernels take whole elements: of the conversion, and of the digest that goes with it.
        if (row.src % src_size != 0 || row.dst % dst_size != 0 ||
            (digest != nullptr && digest->itemsize[i] % static_cast<int64_t>(src_size) != 0)) {
            return fail(ZE_BAD_TABLE, 0, i, error);
        }
        add_chunks<kMode>(row, cast, rows, row_of);
    }
    return ZE_OK;
}

// How blocks share the chunks of a plan. Where only copies are made, a block takes a few chunks of each warp
// that lie side by side, and the device starts the next block where one has ended. With a digest, a block
// makes its weights first, so it takes more; of what is too little for that, a grid that fills the device
// takes strides.
void share_chunks(int64_t num_chunks, int64_t fitting, ze_cuda_plan* plan) {
    const bool sums = plan->num_streams > 0;
    const int64_t rounds =
        num_chunks / (kWarps * fitting * (sums ? 4 : 8));  // so that each place has 4 or 8 blocks
    Launch& launch = plan->launch;
    launch.num_chunks = static_cast<uint32_t>(num_chunks);
    if (sums && rounds < 8) {
        plan->blocks = static_cast<unsigned>(std::min((num_chunks + kWarps - 1) / kWarps, fitting));
        launch.spacing = kWarps;
        launch.span = launch.num_chunks;
        launch.step = plan->blocks * kWarps;
        return;
    }
    launch.spacing = launch.span =
        static_cast<uint32_t>(kWarps * std::max<int64_t>(1, std::min<int64_t>(rounds, sums ? 8 : 4)));
    launch.step = kWarps;
    plan->blocks = static_cast<unsigned>((num_chunks + launch.span - 1) / launch.span);
}

size_t rounded(size_t nbytes) {
    return (nbytes + 255) / 256 * 256;
}

// Puts a plan on its device: one allocation, and one upload of each of its tables.
cudaError_t upload(const std::vector<Row>& rows, const std::vector<uint32_t>& row_of, bool own_totals,
                   ze_cuda_plan* plan) {
    const zeroelastic::OnDevice on(plan->device);
    int processors = 0;
    int per_processor = 0;
    cudaError_t status = on.status();
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, plan->device);
    }
    if (status == cudaSuccess) {
        status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, plan->kernel, kThreads, 0);
    }
    const int64_t num_chunks = static_cast<int64_t>(row_of.size());
    const bool one_chunk_each = rows.size() == row_of.size();
    const size_t rows_bytes = rounded(rows.size() * sizeof(Row));
    const size_t row_of_bytes = one_chunk_each ? 0 : rounded(row_of.size() * sizeof(uint32_t));
    const size_t totals_bytes = own_totals ? static_cast<size_t>(plan->num_streams) * sizeof(uint64_t) : 0;
    if (status == cudaSuccess && rows_bytes + row_of_bytes + totals_bytes > 0) {
        status =
            cudaMalloc(reinterpret_cast<void**>(&plan->memory), rows_bytes + row_of_bytes + totals_bytes);
    }
    if (status == cudaSuccess && totals_bytes > 0) {
        status = cudaHostAlloc(reinterpret_cast<void**>(&plan->results), totals_bytes, cudaHostAllocPortable);
        plan->totals = reinterpret_cast<unsigned long long*>(plan->memory + rows_bytes + row_of_bytes);
    }
    if (status == cudaSuccess && num_chunks > 0) {
        status = cudaMemcpy(plan->memory, rows.data(), rows.size() * sizeof(Row), cudaMemcpyHostToDevice);
        if (status == cudaSuccess && row_of_bytes > 0) {
            status = cudaMemcpy(plan->memory + rows_bytes, row_of.data(), row_of.size() * sizeof(uint32_t),
                                cudaMemcpyHostToDevice);
        }
        // That returns when the host's memory is free again. A stream of the caller's need not wait for the
        // default one, so the upload must have ended before there is a plan to run.
        if (status == cudaSuccess) status = cudaStreamSynchronize(nullptr);
    }
    if (status != cudaSuccess) return status;
    plan->launch.rows = reinterpret_cast<const Row*>(plan->memory);
    if (row_of_bytes > 0) plan->launch.row_of = reinterpret_cast<const uint32_t*>(plan->memory + rows_bytes);
    plan->launch.totals = plan->totals;
    share_chunks(num_chunks, processors * std::max(per_processor, 1), plan);
    return cudaSuccess;
}

int32_t make_plan(const ze_table& table, const ze_buffers& src, const ze_buffers* dst,
                  const ze_digest* digest, int32_t cast, int32_t device, std::unique_ptr<ze_cuda_plan>* plan,
                  ze_error* error) {
    constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
    // What check_table does not know: a digest alone converts nothing; streams and rows are counted in 32
    // bits.
    if ((dst == nullptr && (digest == nullptr || cast != ZE_CAST_NONE)) || table.num_rows > kMost ||
        (digest != nullptr && digest->num_streams >= kMost)) {
        return fail(ZE_BAD_TABLE, 0, -1, error);
    }
    ze_table checked = table;
    if (dst == nullptr) checked.dst = nullptr;
    if (!zeroelastic::check_table(checked, src.count, src.nbytes, dst == nullptr ? 0 : dst->count,
                                  dst == nullptr ? nullptr : dst->nbytes, digest, cast, error)) {
        return error->code;
    }
    // Chunks are counted in 32 bits, with room for a number that is a stride behind the last one.
    if (zeroelastic::total_bytes(table) / kChunkBytes + 2 * table.num_rows > (int64_t{1} << 31)) {
        return fail(ZE_BAD_TABLE, 0, -1, error);
    }
    std::unique_ptr<ze_cuda_plan> made(new ze_cuda_plan);
    made->device = device;
    std::vector<Row> rows;
    std::vector<uint32_t> row_of;
    int32_t code;
    if (digest == nullptr) {
        made->kernel = kernel_of<Mode::kCopy>(cast);
        code = cut_rows<Mode::kCopy>(table, src, dst, digest, cast, &rows, &row_of, error);
    } else if (dst == nullptr) {
        made->kernel = run_chunks<ZE_CAST_NONE, Mode::kSum>;
        code = cut_rows<Mode::kSum>(table, src, dst, digest, cast, &rows, &row_of, error);
    } else {
        made->kernel = kernel_of<Mode::kCopyAndSum>(cast);
        code = cut_rows<Mode::kCopyAndSum>(table, src, dst, digest, cast, &rows, &row_of, error);
    }
    if (code != ZE_OK) return code;
    if (digest != nullptr) {
        made->num_streams = digest->num_streams;
        made->totals = reinterpret_cast<unsigned long long*>(digest->totals);
    }
    const cudaError_t status =
        upload(rows, row_of, digest != nullptr && digest->totals == nullptr, made.get());
    if (status != cudaSuccess) return fail(ZE_INTERNAL, status, -1, error);
    *plan = std::move(made);
    return ZE_OK;
}

// Enqueues a plan; its own totals begin at zero each time.
cudaError_t run_plan(const ze_cuda_plan& plan, cudaStream_t stream) {
    if (plan.results != nullptr) {
        const cudaError_t status =
            cudaMemsetAsync(plan.totals, 0, static_cast<size_t>(plan.num_streams) * sizeof(uint64_t), stream);
        if (status != cudaSuccess) return status;
    }
    if (plan.launch.num_chunks == 0) return cudaSuccess;
    Launch launch = plan.launch;
    void* arguments[] = {&launch};
    return cudaLaunchKernel(plan.kernel, dim3(plan.blocks), dim3(kThreads), arguments, 0, stream);
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
    try {
        std::unique_ptr<ze_cuda_plan> made;
        const int32_t code = make_plan(*table, *src, dst, digest, cast, device, &made, error);
        *plan = made.release();
        return code;
    } catch (const std::bad_alloc&) {
        return fail(ZE_NO_MEMORY, 0, -1, error);
    }
}

int32_t ze_cuda_plan_run(const ze_cuda_plan* plan, void* stream, ze_error* error) {
    *error = ze_error{};
    const zeroelastic::OnDevice on(plan->device);
    cudaError_t status = on.status();
    if (status == cudaSuccess) status = run_plan(*plan, static_cast<cudaStream_t>(stream));
    return status == cudaSuccess ? ZE_OK : fail(ZE_INTERNAL, status, -1, error);
}

int32_t ze_cuda_plan_finish(const ze_cuda_plan* plan, void* stream, uint64_t* totals, ze_error* error) {
    *error = ze_error{};
    const zeroelastic::OnDevice on(plan->device);
    const size_t count = plan->results == nullptr ? 0 : static_cast<size_t>(plan->num_streams);
    cudaError_t status = on.status();
    if (status == cudaSuccess && count > 0) {
        status = cudaMemcpyAsync(plan->results, plan->totals, count * sizeof(uint64_t),
                                 cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream));
    }
    if (status == cudaSuccess) status = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) return fail(ZE_INTERNAL, status, -1, error);
    for (size_t i = 0; i < count; ++i) totals[i] += plan->results[i];
    return ZE_OK;
}

void ze_cuda_plan_destroy(ze_cuda_plan* plan) {
    delete plan;
}

}  // extern "C"
