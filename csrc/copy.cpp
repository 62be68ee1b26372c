#include "copy.h"

#include <atomic>
#include <cstring>

#include "cpu.h"

#if ZE_X86
#include <immintrin.h>
#endif

namespace zeroelastic {
namespace {

#if ZE_X86

constexpr int64_t kPage = 4096;
constexpr int64_t kPages = 4;
constexpr int64_t kAhead = kPage * kPages;

// Four pages in turn, two cache lines of each: that keeps four streams of the memory controller busy, and
// stores that bypass the cache do not first read what they overwrite. `dst` is on a boundary of 64 bytes;
// returns what was copied.
ZE_TARGET_AVX512 int64_t four_pages_avx512(char* dst, const char* src, int64_t nbytes) {
    int64_t done = 0;
    for (; done + kPage * kPages <= nbytes; done += kPage * kPages) {
        for (int64_t line = 0; line < kPage; line += 128) {
#pragma GCC unroll 4
            for (int64_t page = 0; page < kPages; ++page) {
                const char* from = src + done + page * kPage + line;
                char* to = dst + done + page * kPage + line;
                _mm_prefetch(from + kAhead, _MM_HINT_T0);
                _mm_prefetch(from + kAhead + 64, _MM_HINT_T0);
                const __m512i first = _mm512_loadu_si512(from);
                const __m512i second = _mm512_loadu_si512(from + 64);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to), first);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64), second);
            }
        }
    }
    return done;
}

ZE_TARGET_AVX2 int64_t four_pages_avx2(char* dst, const char* src, int64_t nbytes) {
    int64_t done = 0;
    for (; done + kPage * kPages <= nbytes; done += kPage * kPages) {
        for (int64_t line = 0; line < kPage; line += 128) {
#pragma GCC unroll 4
            for (int64_t page = 0; page < kPages; ++page) {
                const char* from = src + done + page * kPage + line;
                char* to = dst + done + page * kPage + line;
                _mm_prefetch(from + kAhead, _MM_HINT_T0);
                _mm_prefetch(from + kAhead + 64, _MM_HINT_T0);
                __m256i part[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    part[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * i));
                }
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32 * i), part[i]);
                }
            }
        }
    }
    return done;
}

// Line by line, for a short run, or a source that the cache holds already.
ZE_TARGET_AVX512 int64_t lines_avx512(char* dst, const char* src, int64_t nbytes) {
    int64_t done = 0;
    for (; done + 128 <= nbytes; done += 128) {
        _mm_prefetch(src + done + kAhead, _MM_HINT_T0);
        _mm_prefetch(src + done + kAhead + 64, _MM_HINT_T0);
        const __m512i first = _mm512_loadu_si512(src + done);
        const __m512i second = _mm512_loadu_si512(src + done + 64);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + done), first);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + done + 64), second);
    }
    return done;
}

#endif  // ZE_X86

}  // namespace

void copy_bytes(void* dst, const void* src, int64_t nbytes, bool streaming) {
    char* to = static_cast<char*>(dst);
    const char* from = static_cast<const char*>(src);
#if ZE_X86
    const ze_isa_level isa = current_isa();
    // A short run is read ahead by the processor itself; a destination of a few lines is better left in the
    // cache.
    const bool short_run = nbytes < kPage * kPages + 64;
    if (streaming && nbytes >= kPage && (isa >= ZE_ISA_AVX512 || (isa >= ZE_ISA_AVX2 && !short_run))) {
        const int64_t head = static_cast<int64_t>((64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
        std::memcpy(to, from, static_cast<size_t>(head));
        to += head;
        from += head;
        nbytes -= head;
        const auto copy = isa < ZE_ISA_AVX512 ? four_pages_avx2
                          : short_run         ? lines_avx512
                                              : four_pages_avx512;
        const int64_t done = copy(to, from, nbytes);
        to += done;
        from += done;
        nbytes -= done;
    }
#else
    static_cast<void>(streaming);
#endif
    std::memcpy(to, from, static_cast<size_t>(nbytes));
}

void end_streaming() {
#if ZE_X86
    _mm_sfence();
#else
    std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace zeroelastic
