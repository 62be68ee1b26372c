#include "cast.h"

#include <cstring>

#include "cpu.h"
#include "load512.h"
#include "narrow.h"

#if ZE_X86
#include <immintrin.h>
#endif

namespace zeroelastic {
namespace {

constexpr uint32_t kInfinity = 0x7F800000;

inline uint16_t to_bfloat16(uint32_t bits) {
    if ((bits & 0x7FFFFFFF) > kInfinity) return kBfloat16Nan;
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t to_float16(uint32_t bits) {
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > kInfinity) return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);  // 65536 and more
    if (magnitude < 0x33000000) return sign;  // less than half of the smallest
    const int exponent = static_cast<int>(magnitude >> 23);
    uint32_t significand = magnitude;
    int shift = 13;
    if (exponent < 113) {  // becomes subnormal
        significand = (magnitude & 0x7FFFFF) | 0x800000;
        shift = 126 - exponent;
    } else {
        significand -= uint32_t{112} << 23;
    }
    const uint32_t half = uint32_t{1} << (shift - 1);
    const uint32_t rounded = significand + half - 1 + ((significand >> shift) & 1);
    return static_cast<uint16_t>(sign | (rounded >> shift));
}

inline uint32_t from_float16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31;
    uint32_t significand = half & 0x3FF;
    if (exponent == 31) {
        const uint32_t quiet = significand == 0 ? 0 : 0x400000;
        return sign | kInfinity | quiet | (significand << 13);
    }
    if (exponent != 0) return sign | ((exponent + 112) << 23) | (significand << 13);
    if (significand == 0) return sign;
    uint32_t shifted = 113;
    while ((significand & 0x400) == 0) {
        significand <<= 1;
        --shifted;
    }
    return sign | (shifted << 23) | ((significand & 0x3FF) << 13);
}

template <typename From, typename To, typename Convert>
inline void convert_each(const char* src, char* dst, int64_t count, Convert convert) {
    for (int64_t i = 0; i < count; ++i) {
        From from;
        std::memcpy(&from, src + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
        const To to = convert(from);
        std::memcpy(dst + i * static_cast<int64_t>(sizeof(To)), &to, sizeof(To));
    }
}

void plain(int32_t cast, const char* src, char* dst, int64_t count) {
    switch (cast) {
        case ZE_CAST_F32_BF16:
            convert_each<uint32_t, uint16_t>(src, dst, count, to_bfloat16);
            break;
        case ZE_CAST_F32_F16:
            convert_each<uint32_t, uint16_t>(src, dst, count, to_float16);
            break;
        case ZE_CAST_BF16_F32:
            convert_each<uint16_t, uint32_t>(src, dst, count, [](uint16_t x) { return uint32_t{x} << 16; });
            break;
        default:
            convert_each<uint16_t, uint32_t>(src, dst, count, from_float16);
    }
}

#if ZE_X86

// How many elements ahead a run is fetched. Intel's processors are faster with it, AMD's slower.
constexpr int64_t kAhead = 1024;

bool fetch_ahead(int64_t count) {
    return count > kAhead && is_intel();
}

ZE_TARGET_AVX512 inline __m512i widen512(__m256i half, bool from_bf16) {
    return from_bf16 ? _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)
                     : _mm512_castps_si512(_mm512_cvtph_ps(half));
}

ZE_TARGET_AVX512 int64_t narrow_avx512(const char* src, char* dst, int64_t count, bool to_bf16,
                                       bool streaming) {
    const bool ahead = fetch_ahead(count);
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i low = narrow512(load512(src + i * 4), to_bf16);
        const __m256i high = narrow512(load512(src + i * 4 + 64), to_bf16);
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        if (ahead) {
            _mm_prefetch(src + (i + kAhead) * 4 - 128, _MM_HINT_T0);
            _mm_prefetch(src + (i + kAhead) * 4 - 64, _MM_HINT_T0);
        }
        if (streaming) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i * 2), both);
        } else {
            _mm512_storeu_si512(dst + i * 2, both);
        }
    }
    for (; i < count; i += 16) {
        const __mmask16 lanes = first_lanes(count - i);
        const __m256i some = narrow512(_mm512_maskz_loadu_epi32(lanes, src + i * 4), to_bf16);
        _mm256_mask_storeu_epi16(dst + i * 2, lanes, some);
    }
    return count;
}

ZE_TARGET_AVX512 int64_t widen_avx512(const char* src, char* dst, int64_t count, bool from_bf16,
                                      bool streaming) {
    const bool ahead = fetch_ahead(count);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512i wide =
            widen512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i * 2)), from_bf16);
        if (ahead) _mm_prefetch(src + (i + kAhead) * 2 - 64, _MM_HINT_T0);
        if (streaming) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i * 4), wide);
        } else {
            _mm512_storeu_si512(dst + i * 4, wide);
        }
    }
    if (i < count) {
        const __mmask16 lanes = first_lanes(count - i);
        const __m512i some = widen512(_mm256_maskz_loadu_epi16(lanes, src + i * 2), from_bf16);
        _mm512_mask_storeu_epi32(dst + i * 4, lanes, some);
    }
    return count;
}

ZE_TARGET_AVX2 inline __m128i narrow256(__m256i bits, bool to_bf16) {
    if (!to_bf16)
        return _mm256_cvtps_ph(_mm256_castsi256_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 floats = _mm256_castsi256_ps(bits);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(floats, floats, _CMP_UNORD_Q));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    rounded = _mm256_srli_epi32(rounded, 16);
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(kBfloat16Nan), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

ZE_TARGET_AVX2 int64_t narrow_avx2(const char* src, char* dst, int64_t count, bool to_bf16, bool streaming) {
    const bool ahead = fetch_ahead(count);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m128i low =
            narrow256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i * 4)), to_bf16);
        const __m128i high =
            narrow256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i * 4 + 32)), to_bf16);
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
        if (ahead) _mm_prefetch(src + (i + kAhead) * 4 - 64, _MM_HINT_T0);
        if (streaming) {
            _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i * 2), both);
        } else {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i * 2), both);
        }
    }
    return i;
}

ZE_TARGET_AVX2 int64_t widen_avx2(const char* src, char* dst, int64_t count, bool from_bf16, bool streaming) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i * 2));
        const __m256i wide = from_bf16 ? _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)
                                       : _mm256_castps_si256(_mm256_cvtph_ps(half));
        if (streaming) {
            _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i * 4), wide);
        } else {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i * 4), wide);
        }
    }
    return i;
}

#endif  // ZE_X86

}  // namespace

void cast_elements(int32_t cast, const void* src, void* dst, int64_t count, bool streaming) {
    const char* from = static_cast<const char*>(src);
    char* to = static_cast<char*>(dst);
#if ZE_X86
    const ze_isa_level isa = current_isa();
    if (isa >= ZE_ISA_AVX2) {
        const bool narrow = cast == ZE_CAST_F32_BF16 || cast == ZE_CAST_F32_F16;
        const bool bfloat = cast == ZE_CAST_F32_BF16 || cast == ZE_CAST_BF16_F32;
        const int64_t from_size = narrow ? 4 : 2;
        const int64_t to_size = 6 - from_size;
        const auto convert = narrow ? (isa >= ZE_ISA_AVX512 ? narrow_avx512 : narrow_avx2)
                                    : (isa >= ZE_ISA_AVX512 ? widen_avx512 : widen_avx2);
        const int64_t done = convert(from, to, count, bfloat, streaming);
        from += done * from_size;
        to += done * to_size;
        count -= done;
    }
#else
    static_cast<void>(streaming);
#endif
    plain(cast, from, to, count);
}

}  // namespace zeroelastic
