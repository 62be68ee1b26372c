// Digests of chunks on a GPU, by warps.

#ifndef ZEROELASTIC_DIGESTS_CUH_
#define ZEROELASTIC_DIGESTS_CUH_

#include "chunks.cuh"

namespace zeroelastic::gpu {

// Where the weights of elements lie in shared memory: four planes, so that lanes that read the weights of
// four elements each do not meet in a bank. The first of a plane is that of an element four places ahead of
// the block.
constexpr int kPlane = static_cast<int>(kBlock) / 4 + 4;
constexpr int kTable = 4 * kPlane;

__device__ __forceinline__ int place_of_weight(int element) {
    return element % 4 * kPlane + element / 4;
}

// Every table of weights begins one element further than the one before: in one of them the weights of four
// elements that follow one another are at the same place of the four planes, wherever the first of them is.
template <int kTables>
__device__ __forceinline__ void make_weights(uint64_t* tables) {
    for (int j = static_cast<int>(threadIdx.x); j < kBlock; j += kThreads) {
        const uint64_t weight = zeroelastic::digest_weight(0, j);
#pragma unroll
        for (int k = 0; k < kTables; ++k) tables[k * kTable + place_of_weight(j + 4 - k)] = weight;
    }
    __syncthreads();
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

// What a lane adds of a chunk; copies the chunk, too, where that is asked for.
template <typename T, bool kStore>
__device__ __forceinline__ uint64_t sum_chunk(const Chunk& chunk, const uint64_t* weights, int lane) {
    const int count = chunk.nbytes / static_cast<int>(sizeof(T));
    const int element = static_cast<int>(chunk.element % kBlock);
    if (chunk.src % sizeof(T) == 0 && (!kStore || chunk.dst % sizeof(T) == 0)) {
        return sum_aligned<T, kStore>(reinterpret_cast<T*>(chunk.dst), reinterpret_cast<const T*>(chunk.src),
                                      count, element, weights, lane);
    }
    if (kStore) copy_chunk(chunk, lane);
    return sum_unaligned<T>(reinterpret_cast<const char*>(chunk.src), count, element, weights, lane);
}

// Apart, so that the registers of the loops below are not taken up by what is rare.
__device__ __attribute__((noinline)) uint64_t sum_rare(Chunk chunk, uint32_t log_itemsize,
                                                       const uint64_t* weights, int lane) {
    if (log_itemsize == 0) return sum_chunk<uint8_t, false>(chunk, weights, lane);
    if (log_itemsize == 1) return sum_chunk<uint16_t, false>(chunk, weights, lane);
    if (log_itemsize == 2) return sum_chunk<uint32_t, false>(chunk, weights, lane);
    return sum_chunk<uint64_t, false>(chunk, weights, lane);
}

// The sum over the lanes of a warp, for each of them: of three parts, 32 of which fit 32 bits.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
    constexpr unsigned kBits = 27, kMask = (1u << kBits) - 1;
    const uint64_t low = __reduce_add_sync(kAllLanes, static_cast<unsigned>(value) & kMask);
    const uint64_t middle = __reduce_add_sync(kAllLanes, static_cast<unsigned>(value >> kBits) & kMask);
    const uint64_t high = __reduce_add_sync(kAllLanes, static_cast<unsigned>(value >> (2 * kBits)));
    return low + (middle << kBits) + (high << (2 * kBits));
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
        const uint64_t sum = warp_sum(sum_);
        if (lane == 0) atomicAdd(totals_ + stream_, static_cast<unsigned long long>(sum));
        sum_ = 0;
    }

  private:
    static constexpr uint32_t kNone = 0xFFFFFFFF;
    unsigned long long* totals_;
    uint64_t sum_ = 0;
    uint32_t stream_ = kNone;
};

// fp32, which is nearly all there is, is copied and summed in one pass; what is converted or of another size
// is written, and read again from the first-level cache.
template <int kCast>
__device__ __forceinline__ uint64_t convert_and_sum(const Chunk& chunk, const Row& row,
                                                    const uint64_t* weights, int lane) {
    uint64_t sum;
    if (kCast == ZE_CAST_NONE && row.log_itemsize == 2) {
        sum = sum_chunk<uint32_t, true>(chunk, weights, lane);
    } else {
        convert_chunk<kCast>(chunk, lane);
        sum = row.log_itemsize == 2 ? sum_chunk<uint32_t, false>(chunk, weights, lane)
                                    : sum_rare(chunk, row.log_itemsize, weights, lane);
    }
    return sum * zeroelastic::digest_weight(row.seed, chunk.element / kBlock);
}

// A chunk as the warp that sums it needs it, in registers of one lane.
struct Piece {
    uint64_t src;  // the aligned word that holds the first element
    uint32_t about;

    __device__ Piece(uint64_t from, uint32_t said) : src(from), about(said) {}

    // What is no fp32 at an address of its own has no words here.
    __device__ Piece(const Chunk& chunk, uint32_t log_itemsize) {
        const bool rare = log_itemsize != 2 || chunk.src % 4 != 0;
        const unsigned skipped = static_cast<unsigned>(chunk.src % 16 / 4);
        src = chunk.src - chunk.src % 16;
        about = (rare ? 0 : skipped + static_cast<unsigned>(chunk.nbytes) / 4) | skipped << 11 |
                (static_cast<unsigned>(chunk.element % kBlock) + 4 - skipped) << 13;
    }

    // That of another lane.
    __device__ __forceinline__ Piece of_lane(int lane) const {
        return {__shfl_sync(kAllLanes, src, lane), __shfl_sync(kAllLanes, about, lane)};
    }

    // In its words, elements from `skipped` on that are less than `end` are the piece's.
    __device__ __forceinline__ int skipped() const {
        return static_cast<int>(about >> 11 & 3);
    }

    __device__ __forceinline__ int end() const {
        return static_cast<int>(about & 0x7FF);
    }

    __device__ __forceinline__ int num_words() const {
        return (end() + 3) / 4;
    }

    // Those of its first word, in tables that begin four elements ahead of the block.
    __device__ __forceinline__ const uint64_t* weights(const uint64_t* tables) const {
        const unsigned first = about >> 13;
        return tables + first % 4 * kTable + first / 4;
    }
};

// Asks for words of a piece, each lane for every 32nd.
template <int kMany>
__device__ __forceinline__ void load_words(const Piece& piece, int from, int lane, uint4 (&words)[kMany]) {
    const uint4* src = reinterpret_cast<const uint4*>(piece.src) + from + lane;
#pragma unroll
    for (int k = 0; k < kMany; ++k) {
        const bool inside = from + lane + k * kWarp < piece.num_words();
        words[k] = inside ? src[k * kWarp] : make_uint4(0, 0, 0, 0);
    }
}

// What a lane adds of them; `weights` are those of the piece's first word.
template <int kMany>
__device__ __forceinline__ uint64_t sum_words(const uint4 (&words)[kMany], const Piece& piece, int from,
                                              const uint64_t* weights, int lane) {
    uint64_t sum = 0;
#pragma unroll
    for (int k = 0; k < kMany; ++k) {
        const int begin = from + k * kWarp;
        if (begin >= piece.num_words()) break;
        uint4 word = words[k];
        const int first = (begin + lane) * 4;
        if (first < piece.skipped() || first + 4 > piece.end()) {  // an end of the piece
            const unsigned from_first = static_cast<unsigned>(first - piece.skipped());
            const unsigned count = static_cast<unsigned>(piece.end() - piece.skipped());
            word.x = from_first < count ? word.x : 0;
            word.y = from_first + 1 < count ? word.y : 0;
            word.z = from_first + 2 < count ? word.z : 0;
            word.w = from_first + 3 < count ? word.w : 0;
        }
        const uint64_t* own = weights + begin + lane;
        sum += own[0] * word.x;
        sum += own[kPlane] * word.y;
        sum += own[2 * kPlane] * word.z;
        sum += own[3 * kPlane] * word.w;
    }
    return sum;
}

// Digests alone, of up to 32 chunks at a time: each lane finds out what is to be known of one of them. While
// a warp sums a piece, the first words of the next one are on their way.
__global__ void __launch_bounds__(kThreads, 4) sum_chunks(Launch launch) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const uint32_t begin = blockIdx.x * launch.spacing;
    const uint32_t end = min(begin + launch.span, launch.num_chunks);
    uint32_t number = begin + threadIdx.x / kWarp * launch.batch;
    __shared__ uint64_t tables[4 * kTable + kWarp];  // lanes whose words are beyond a piece look further
    const uint32_t own = number + static_cast<uint32_t>(lane);
    if (own < end) prefetch(launch.rows + row_of_chunk(launch, own));
    make_weights<4>(tables);
    for (; number < end; number += launch.step) {
        const int num_pieces = static_cast<int>(min(launch.batch, end - number));
        const uint32_t mine = number + static_cast<uint32_t>(lane < num_pieces ? lane : 0);
        const Row row = launch.rows[row_of_chunk(launch, mine)];
        const Chunk chunk = chunk_of<ZE_CAST_NONE, true>(row, mine);
        const Piece piece(chunk, row.log_itemsize);
        const uint64_t weight = zeroelastic::digest_weight(row.seed, chunk.element / kBlock);
        uint64_t total = 0;  // of the lane's own piece
        Piece next = piece.of_lane(0);
        uint4 words[kAhead];
        load_words(next, 0, lane, words);
#pragma unroll 1
        for (int i = 0; i < num_pieces; ++i) {
            const Piece now = next;
            uint4 here[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) here[k] = words[k];
            if (i + 1 < num_pieces) {
                next = piece.of_lane(i + 1);
                load_words(next, 0, lane, words);
            }
            const uint64_t* weights = now.weights(tables);
            uint64_t sum = sum_words(here, now, 0, weights, lane);
#pragma unroll 1
            for (int from = kAhead * kWarp; from < now.num_words(); from += kRest * kWarp) {
                uint4 rest[kRest];
                load_words(now, from, lane, rest);
                sum += sum_words(rest, now, from, weights, lane);
            }
            sum = warp_sum(sum);
            if (lane == i) total = sum;
        }
        unsigned rare = __ballot_sync(kAllLanes, lane < num_pieces && piece.num_words() == 0);
        for (; rare != 0; rare &= rare - 1) {
            const int i = __ffs(static_cast<int>(rare)) - 1;
            const uint32_t rare_number = number + static_cast<uint32_t>(i);
            const Row& of = launch.rows[row_of_chunk(launch, rare_number)];
            const uint64_t sum = warp_sum(
                sum_rare(chunk_of<ZE_CAST_NONE, true>(of, rare_number), of.log_itemsize, tables + 1, lane));
            if (lane == i) total = sum;
        }
        total *= weight;
        if (__all_sync(kAllLanes, row.stream == __shfl_sync(kAllLanes, row.stream, 0))) {
            total = warp_sum(total);
            if (lane == 0) atomicAdd(launch.totals + row.stream, static_cast<unsigned long long>(total));
        } else if (lane < num_pieces) {
            atomicAdd(launch.totals + row.stream, static_cast<unsigned long long>(total));
        }
    }
}

}  // namespace zeroelastic::gpu

#endif  // ZEROELASTIC_DIGESTS_CUH_
