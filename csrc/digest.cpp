// sum over blocks b of W(b) * (sum over j of w[j] * bits(x[1024 b + j])), modulo 2^64.
//
// AVX-512 multiplies 64-bit lanes modulo 2^64. AVX2 does not: there a product of a weight and a shorter
// element is cut in two, x * w = x * (w mod 2^32) + 2^32 * (x * (w / 2^32)). The upper sum is shifted once,
// at the end; what it loses at the top is lost modulo 2^64 anyway. Elements are read in one stream, which the
// processor fetches ahead by itself.

#include "digest.h"

#include <array>
#include <cstring>

#include "cpu.h"
#include "digest_avx512.h"
#include "load512.h"

#if ZE_X86
#include <immintrin.h>
#endif

namespace zeroelastic {
namespace {

// sum of w[j] * x[j] over `count` elements of type T that need not be aligned.
template <typename T>
inline uint64_t dot(const uint8_t* data, const uint64_t* weights, int64_t count) {
    uint64_t sum = 0;
    for (int64_t j = 0; j < count; ++j) {
        T element;
        std::memcpy(&element, data + j * static_cast<int64_t>(sizeof(T)), sizeof(T));
        sum += weights[j] * element;
    }
    return sum;
}

using Dot = uint64_t (*)(const uint8_t*, const uint64_t*, int64_t);

#if ZE_X86

// Four elements, one per lane.
template <typename T>
ZE_TARGET_AVX2 inline __m256i widen256(const uint8_t* data) {
    if constexpr (sizeof(T) == 4) {
        return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
    } else {
        return _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)));
    }
}

template <typename T>
ZE_TARGET_AVX2 uint64_t dot_avx2(const uint8_t* data, const uint64_t* weights, int64_t count) {
    __m256i low[2], high[2];
    for (int i = 0; i < 2; ++i) low[i] = high[i] = _mm256_setzero_si256();
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const int64_t at = j + 4 * i;
            const __m256i x = widen256<T>(data + at * static_cast<int64_t>(sizeof(T)));
            const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + at));
            low[i] = _mm256_add_epi64(low[i], _mm256_mul_epu32(x, w));
            high[i] = _mm256_add_epi64(high[i], _mm256_mul_epu32(x, _mm256_srli_epi64(w, 32)));
        }
    }
    const __m256i upper = _mm256_slli_epi64(_mm256_add_epi64(high[0], high[1]), 32);
    const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(low[0], low[1]), upper);
    alignas(32) std::array<uint64_t, 4> lanes;
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.data()), sum);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] +
           dot<T>(data + j * static_cast<int64_t>(sizeof(T)), weights + j, count - j);
}

// Lines, each of which is also written to `dst`, a boundary, where it is not null.
template <typename T, bool kStream>
ZE_TARGET_AVX512 inline void add_lines(Sum512* to, const uint8_t* data, int64_t lines, uint8_t* dst) {
    constexpr int64_t kElements = 64 / static_cast<int64_t>(sizeof(T));
    while (lines > 0) {
        const int64_t within = (kDigestBlock - to->at) / kElements;
        const int64_t here = lines < within ? lines : within;
        const uint64_t* weights = kWeights.data() + kNoWeights + to->at;
        __m512i even = to->sum;
        __m512i odd = _mm512_setzero_si512();
        int64_t line = 0;
        for (; line + 2 <= here; line += 2) {
            const __m512i first = load512(data + 64 * line);
            const __m512i second = load512(data + 64 * line + 64);
            if constexpr (kStream) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64 * line), first);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64 * line + 64), second);
            }
            even = add_line<T>(even, first, weights + kElements * line);
            odd = add_line<T>(odd, second, weights + kElements * (line + 1));
        }
        to->sum = _mm512_add_epi64(even, odd);
        to->at += kElements * line;
        // The last line of a block, be it odd or cut by the block's end.
        if (line < lines && (line < here || here == within)) {
            const __m512i last = _mm512_loadu_si512(data + 64 * line);
            if constexpr (kStream) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64 * line), last);
            add_some<T>(to, last, kElements);
            ++line;
        }
        if (to->at == kDigestBlock) end_block(to);
        data += 64 * line;
        if constexpr (kStream) dst += 64 * line;
        lines -= line;
    }
}

// The digest of `count` elements, of which `lines` whole lines from element `lead` on, itself less than a
// line from the first, are also written to `dst`.
template <typename T, bool kStream>
ZE_TARGET_AVX512 uint64_t digest_avx512(const uint8_t* data, int64_t count, uint64_t seed, int64_t start,
                                        uint8_t* dst, int64_t lead, int64_t lines) {
    constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
    Sum512 sum{_mm512_setzero_si512(), _mm512_setzero_si512(), start % kDigestBlock, start / kDigestBlock,
               seed};
    add_rest<T>(&sum, data, lead);
    add_lines<T, kStream>(&sum, data + lead * kSize, lines, dst);
    const int64_t done = lead + lines * (64 / kSize);
    add_rest<T>(&sum, data + done * kSize, count - done);
    return end_sum(&sum);
}

#endif  // ZE_X86

Dot choose_dot(int itemsize) {
#if ZE_X86
    if (current_isa() >= ZE_ISA_AVX2 && itemsize == 4) return dot_avx2<uint32_t>;
    if (current_isa() >= ZE_ISA_AVX2 && itemsize == 2) return dot_avx2<uint16_t>;
#endif
    switch (itemsize) {
        case 1:
            return dot<uint8_t>;
        case 2:
            return dot<uint16_t>;
        case 4:
            return dot<uint32_t>;
        default:
            return dot<uint64_t>;
    }
}

#if ZE_X86

template <bool kStream>
uint64_t digest_any_avx512(const void* data, int64_t count, int itemsize, uint64_t seed, int64_t start,
                           void* dst, int64_t lead, int64_t lines) {
    const uint8_t* from = static_cast<const uint8_t*>(data);
    uint8_t* to = static_cast<uint8_t*>(dst);
    switch (itemsize) {
        case 1:
            return digest_avx512<uint8_t, kStream>(from, count, seed, start, to, lead, lines);
        case 2:
            return digest_avx512<uint16_t, kStream>(from, count, seed, start, to, lead, lines);
        case 4:
            return digest_avx512<uint32_t, kStream>(from, count, seed, start, to, lead, lines);
        default:
            return digest_avx512<uint64_t, kStream>(from, count, seed, start, to, lead, lines);
    }
}

#endif  // ZE_X86

}  // namespace

uint64_t digest_elements(const void* data, int64_t count, int itemsize, uint64_t seed, int64_t start) {
#if ZE_X86
    if (current_isa() >= ZE_ISA_AVX512) {
        return digest_any_avx512<false>(data, count, itemsize, seed, start, nullptr, 0,
                                        count * itemsize / 64);
    }
#endif
    const Dot sum = choose_dot(itemsize);
    const uint8_t* at = static_cast<const uint8_t*>(data);
    uint64_t total = 0;
    int64_t block = start / kDigestBlock;
    int64_t lead = start % kDigestBlock;
    while (count > 0) {
        const int64_t here = count < kDigestBlock - lead ? count : kDigestBlock - lead;
        total += sum(at, kWeights.data() + kNoWeights + lead, here) * digest_weight(seed, block++);
        at += here * itemsize;
        count -= here;
        lead = 0;
    }
    return total;
}

uint64_t digest_and_stream(const void* data, int64_t count, int itemsize, uint64_t seed, int64_t start,
                           void* dst, int64_t lead, int64_t nbytes) {
#if ZE_X86
    return digest_any_avx512<true>(data, count, itemsize, seed, start, dst, lead, nbytes / 64);
#else
    std::memcpy(dst, static_cast<const char*>(data) + lead * itemsize, static_cast<size_t>(nbytes));
    return digest_elements(data, count, itemsize, seed, start);
#endif
}

}  // namespace zeroelastic
