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

#if ZE_X86
#include <immintrin.h>
#endif

namespace zeroelastic {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr int kBlock = static_cast<int>(kDigestBlock);

// The output function of splitmix64.
constexpr uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

constexpr uint64_t block_weight(uint64_t seed, int64_t block) {
    return mix(seed + (static_cast<uint64_t>(block) + 1) * kGolden) | 1;
}

constexpr std::array<uint64_t, kBlock> make_weights() {
    std::array<uint64_t, kBlock> weights{};
    for (int j = 0; j < kBlock; ++j) {
        weights[static_cast<size_t>(j)] = mix((static_cast<uint64_t>(j) + 1) * kGolden) | 1;
    }
    return weights;
}

alignas(64) constexpr std::array<uint64_t, kBlock> kWeights = make_weights();

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

// Eight elements, one per lane.
template <typename T>
ZE_TARGET_AVX512 inline __m512i widen512(const uint8_t* data) {
    if constexpr (sizeof(T) == 8) {
        return _mm512_loadu_si512(data);
    } else if constexpr (sizeof(T) == 4) {
        return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)));
    } else if constexpr (sizeof(T) == 2) {
        return _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
    } else {
        return _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)));
    }
}

template <typename T>
ZE_TARGET_AVX512 uint64_t dot_avx512(const uint8_t* data, const uint64_t* weights, int64_t count) {
    __m512i sums[4];
    for (__m512i& sum : sums) sum = _mm512_setzero_si512();
    int64_t j = 0;
    for (; j + 32 <= count; j += 32) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const int64_t at = j + 8 * i;
            const __m512i x = widen512<T>(data + at * static_cast<int64_t>(sizeof(T)));
            sums[i] = _mm512_add_epi64(sums[i], _mm512_mullo_epi64(x, _mm512_loadu_si512(weights + at)));
        }
    }
    const __m512i sum =
        _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
    alignas(64) std::array<uint64_t, 8> lanes;
    _mm512_store_si512(lanes.data(), sum);
    uint64_t total = 0;
    for (const uint64_t lane : lanes) total += lane;
    return total + dot<T>(data + j * static_cast<int64_t>(sizeof(T)), weights + j, count - j);
}

#endif  // ZE_X86

Dot choose_dot(int itemsize) {
#if ZE_X86
    if (current_isa() >= ZE_ISA_AVX512) {
        switch (itemsize) {
            case 1:
                return dot_avx512<uint8_t>;
            case 2:
                return dot_avx512<uint16_t>;
            case 4:
                return dot_avx512<uint32_t>;
            default:
                return dot_avx512<uint64_t>;
        }
    }
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

}  // namespace

uint64_t digest_elements(const void* data, int64_t count, int itemsize, uint64_t seed, int64_t start) {
    const Dot sum = choose_dot(itemsize);
    const uint8_t* at = static_cast<const uint8_t*>(data);
    uint64_t total = 0;
    int64_t block = start / kDigestBlock;
    int64_t lead = start % kDigestBlock;
    while (count > 0) {
        const int64_t here = count < kDigestBlock - lead ? count : kDigestBlock - lead;
        total += sum(at, kWeights.data() + lead, here) * block_weight(seed, block++);
        at += here * itemsize;
        count -= here;
        lead = 0;
    }
    return total;
}

}  // namespace zeroelastic
