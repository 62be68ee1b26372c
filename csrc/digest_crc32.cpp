#include "digest_crc32.h"

#include "cpu.h"
#include "crc32.h"
#include "crc32_wide.h"
#include "digest_avx512.h"

#if ZE_X86
#include <immintrin.h>

#define ZE_TARGET_BOTH \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,sse4.1,pclmul,vpclmulqdq")))
#endif

namespace zeroelastic {
namespace {

#if ZE_X86

constexpr int64_t kLine = 64;

// How far ahead memory is fetched. A line takes so many instructions that Zen 5 has few of them under way:
// from memory it sums 31 GB/s on a thread with this, 16 without.
constexpr int64_t kAhead = 2048;

// Whole groups of 256 bytes, at least one: both ask the same of the processor for half of their instructions,
// so that what is saved is the second pass over the bytes.
template <typename T>
ZE_TARGET_BOTH uint64_t digest_and_fold(const unsigned char* data, int64_t nbytes, const DigestOf& digest,
                                        uint32_t* crc) {
    constexpr int64_t kElements = kLine / static_cast<int64_t>(sizeof(T));
    const int64_t groups = nbytes / kWideFoldBytes;
    Sum512 sum{_mm512_setzero_si512(), _mm512_setzero_si512(), digest.start % kDigestBlock,
               digest.start / kDigestBlock, digest.seed};
    WideFold fold = begin_wide_fold(~*crc, data);
    const int64_t ahead = is_zen5() ? kAhead : 0;
    for (int64_t group = 0; group < groups;) {
        const int64_t here =
            sum.at + 4 * kElements > kDigestBlock ? 0 : (kDigestBlock - sum.at) / (4 * kElements);
        const int64_t last = group + here < groups ? group + here : groups;
        const uint64_t* weights = kWeights.data() + kNoWeights + sum.at;
        __m512i even = sum.sum;
        __m512i odd = _mm512_setzero_si512();
        const int64_t first = group;
        for (; group < last; ++group, weights += 4 * kElements) {
            const unsigned char* at = data + group * kWideFoldBytes;
            __m512i line[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                _mm_prefetch(reinterpret_cast<const char*>(at + kLine * i + ahead), _MM_HINT_T0);
                line[i] = _mm512_loadu_si512(at + kLine * i);
                __m512i& half = i % 2 == 0 ? even : odd;
                half = add_line<T>(half, line[i], weights + kElements * i);
            }
            if (group == 0) continue;  // the fold began with it
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) fold.part[i] = fold_wide(fold.part[i], fold.by, line[i]);
        }
        sum.sum = _mm512_add_epi64(even, odd);
        sum.at += (group - first) * 4 * kElements;
        if (sum.at == kDigestBlock) end_block(&sum);
        if (here > 0 || group == groups) continue;
        // A group in which a block ends.
        for (int i = 0; i < 4; ++i) {
            const __m512i line = _mm512_loadu_si512(data + group * kWideFoldBytes + kLine * i);
            add_some<T>(&sum, line, kElements);
            if (group > 0) fold.part[i] = fold_wide(fold.part[i], fold.by, line);
        }
        ++group;
    }
    const int64_t folded = groups * kWideFoldBytes;
    const int64_t lines = (nbytes - folded) / kLine;
    for (int64_t i = 0; i < lines; ++i) {
        add_some<T>(&sum, _mm512_loadu_si512(data + folded + kLine * i), kElements);
    }
    const int64_t done = folded + lines * kLine;
    add_rest<T>(&sum, data + done, (nbytes - done) / static_cast<int64_t>(sizeof(T)));
    *crc = crc32_of(~end_wide_fold(fold, data + folded, lines * kLine), data + done, nbytes - done);
    return end_sum(&sum);
}

#endif  // ZE_X86

}  // namespace

uint64_t digest_and_crc32(const void* data, int64_t nbytes, const DigestOf& digest, uint32_t* crc) {
#if ZE_X86
    if (nbytes >= kWideFoldBytes && can_fold_wide()) {
        const unsigned char* from = static_cast<const unsigned char*>(data);
        if (digest.itemsize == 4) return digest_and_fold<uint32_t>(from, nbytes, digest, crc);
        if (digest.itemsize == 2) return digest_and_fold<uint16_t>(from, nbytes, digest, crc);
    }
#endif
    *crc = crc32_of(*crc, data, nbytes);
    return digest_elements(data, nbytes / digest.itemsize, digest.itemsize, digest.seed, digest.start);
}

}  // namespace zeroelastic
