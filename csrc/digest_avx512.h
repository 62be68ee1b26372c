// The digest of zeroelastic/core/digest.py, a line of 64 bytes at a time.

#ifndef ZEROELASTIC_DIGEST_AVX512_H_
#define ZEROELASTIC_DIGEST_AVX512_H_

#include <array>
#include <cstdint>

#include "cpu.h"
#include "digest_weights.h"

#if ZE_X86
#include <immintrin.h>
#endif

namespace zeroelastic {

constexpr int kBlock = static_cast<int>(kDigestBlock);

// So many weights of zero are before and behind those of a block: what a line holds of its neighbours.
constexpr int kNoWeights = 64;

constexpr std::array<uint64_t, kBlock + 2 * kNoWeights> make_weights() {
    std::array<uint64_t, kBlock + 2 * kNoWeights> weights{};
    for (int j = 0; j < kBlock; ++j) {
        weights[static_cast<size_t>(kNoWeights + j)] = digest_weight(0, j);
    }
    return weights;
}

alignas(64) inline constexpr std::array<uint64_t, kBlock + 2 * kNoWeights> kWeights = make_weights();

#if ZE_X86

// Eight elements of 64 bytes, one per lane: those at position `part` of the line.
template <typename T>
ZE_TARGET_AVX512 inline __m512i widen512(__m512i line, int part) {
    if constexpr (sizeof(T) == 8) {
        return line;
    } else if constexpr (sizeof(T) == 4) {
        return _mm512_cvtepu32_epi64(part == 0 ? _mm512_castsi512_si256(line)
                                               : _mm512_extracti64x4_epi64(line, 1));
    } else if constexpr (sizeof(T) == 2) {
        const __m128i here = part == 0   ? _mm512_castsi512_si128(line)
                             : part == 1 ? _mm512_extracti64x2_epi64(line, 1)
                             : part == 2 ? _mm512_extracti64x2_epi64(line, 2)
                                         : _mm512_extracti64x2_epi64(line, 3);
        return _mm512_cvtepu16_epi64(here);
    } else {
        const __m128i here = part / 2 == 0   ? _mm512_castsi512_si128(line)
                             : part / 2 == 1 ? _mm512_extracti64x2_epi64(line, 1)
                             : part / 2 == 2 ? _mm512_extracti64x2_epi64(line, 2)
                                             : _mm512_extracti64x2_epi64(line, 3);
        return _mm512_cvtepu8_epi64(part % 2 == 0 ? here : _mm_srli_si128(here, 8));
    }
}

// Where a sum stands: `total` of the blocks that are done, `sum` of the one at hand, of which `at` elements
// have been passed.
struct Sum512 {
    __m512i total;
    __m512i sum;
    int64_t at;
    int64_t block;
    uint64_t seed;
};

template <typename T>
ZE_TARGET_AVX512 inline __m512i add_line(__m512i sum, __m512i line, const uint64_t* weights) {
    constexpr int kParts = 8 / static_cast<int>(sizeof(T));
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part) {
        const __m512i x = widen512<T>(line, part);
        sum = _mm512_add_epi64(sum, _mm512_mullo_epi64(x, _mm512_loadu_si512(weights + 8 * part)));
    }
    return sum;
}

ZE_TARGET_AVX512 inline void end_block(Sum512* to) {
    const __m512i weight = _mm512_set1_epi64(static_cast<int64_t>(digest_weight(to->seed, to->block++)));
    to->total = _mm512_add_epi64(to->total, _mm512_mullo_epi64(to->sum, weight));
    to->sum = _mm512_setzero_si512();
    to->at -= kDigestBlock;
}

// A line of which only the first `count` elements count, the others being zero; it may reach into the next
// block. The weights before and behind a block are zero.
template <typename T>
ZE_TARGET_AVX512 inline void add_some(Sum512* to, __m512i line, int64_t count) {
    to->sum = add_line<T>(to->sum, line, kWeights.data() + kNoWeights + to->at);
    to->at += count;
    if (to->at < kDigestBlock) return;
    end_block(to);
    if (to->at > 0) to->sum = add_line<T>(to->sum, line, kWeights.data() + kNoWeights + to->at - count);
}

template <typename T>
ZE_TARGET_AVX512 inline void add_rest(Sum512* to, const uint8_t* data, int64_t count) {
    if (count == 0) return;
    const __mmask64 lanes = (uint64_t{1} << (count * static_cast<int64_t>(sizeof(T)))) - 1;
    add_some<T>(to, _mm512_maskz_loadu_epi8(lanes, data), count);
}

ZE_TARGET_AVX512 inline uint64_t end_sum(Sum512* sum) {
    end_block(sum);
    alignas(64) std::array<uint64_t, 8> lanes;
    _mm512_store_si512(lanes.data(), sum->total);
    uint64_t total = 0;
    for (const uint64_t lane : lanes) total += lane;
    return total;
}

#endif  // ZE_X86

}  // namespace zeroelastic

#endif  // ZEROELASTIC_DIGEST_AVX512_H_
