#include "copy.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "cpu.h"
#include "digest.h"
#include "load512.h"
#include "narrow.h"

#if ZE_X86
#include <immintrin.h>
#endif

namespace zeroelastic {
namespace {

constexpr int64_t kLine = 64;

int64_t to_boundary(const char* at) {
    return (kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) % kLine)) % kLine;
}

#if ZE_X86

constexpr int64_t kPage = 4096;
constexpr int64_t kPages = 4;
constexpr int64_t kAhead = kPage * kPages;

// How far ahead a run is fetched line by line. Zen 5 copies a tenth more without it.
constexpr int64_t kNextLines = 512;

// In the following four, `dst` is on a boundary of 64 bytes and `nbytes` whole lines.

// Four pages in turn, two cache lines of each, as far as that goes; returns how far. It keeps four streams of
// the memory controller busy. Intel's processors are faster with it (Cascade Lake by an eighth), AMD's slower
// (Zen 4 by a tenth).
ZE_TARGET_AVX512 int64_t copy_pages_avx512(char* dst, const char* src, int64_t nbytes) {
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

ZE_TARGET_AVX512 void copy_lines_avx512(char* dst, const char* src, int64_t nbytes) {
    int64_t done = nbytes >= kPage * kPages && is_intel() ? copy_pages_avx512(dst, src, nbytes) : 0;
    const bool ahead = !is_zen5();
    for (; done + 128 <= nbytes; done += 128) {
        if (ahead) {
            _mm_prefetch(src + done + kNextLines, _MM_HINT_T0);
            _mm_prefetch(src + done + kNextLines + 64, _MM_HINT_T0);
        }
        const __m512i first = load512(src + done);
        const __m512i second = load512(src + done + 64);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + done), first);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + done + 64), second);
    }
    if (done < nbytes) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + done), load512(src + done));
    }
}

ZE_TARGET_AVX2 inline void copy_line_avx2(char* dst, const char* src) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), first);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), second);
}

ZE_TARGET_AVX2 int64_t copy_pages_avx2(char* dst, const char* src, int64_t nbytes) {
    int64_t done = 0;
    for (; done + kPage * kPages <= nbytes; done += kPage * kPages) {
        for (int64_t line = 0; line < kPage; line += 128) {
#pragma GCC unroll 4
            for (int64_t page = 0; page < kPages; ++page) {
                const int64_t at = done + page * kPage + line;
                _mm_prefetch(src + at + kAhead, _MM_HINT_T0);
                _mm_prefetch(src + at + kAhead + 64, _MM_HINT_T0);
                copy_line_avx2(dst + at, src + at);
                copy_line_avx2(dst + at + 64, src + at + 64);
            }
        }
    }
    return done;
}

ZE_TARGET_AVX2 void copy_lines_avx2(char* dst, const char* src, int64_t nbytes) {
    int64_t done = nbytes >= kPage * kPages && is_intel() ? copy_pages_avx2(dst, src, nbytes) : 0;
    for (; done < nbytes; done += 64) {
        _mm_prefetch(src + done + kNextLines, _MM_HINT_T0);
        copy_line_avx2(dst + done, src + done);
    }
}

// The first `count` of 64 lanes.
ZE_TARGET_AVX512 inline __mmask64 first_bytes(int64_t count) {
    return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

ZE_TARGET_AVX512 inline void copy_part_avx512(char* dst, const char* src, int64_t nbytes) {
    const __mmask64 lanes = first_bytes(nbytes);
    _mm512_mask_storeu_epi8(dst, lanes, _mm512_maskz_loadu_epi8(lanes, src));
}

#endif  // ZE_X86

// Less than a line. Lengths of all kinds follow each other, which no branch predictor foresees.
inline void copy_part(ze_isa_level isa, char* dst, const char* src, int64_t nbytes) {
#if ZE_X86
    if (isa >= ZE_ISA_AVX512) {
        copy_part_avx512(dst, src, nbytes);
        return;
    }
#endif
    static_cast<void>(isa);
    std::memcpy(dst, src, static_cast<size_t>(nbytes));
}

void copy_lines(ze_isa_level isa, char* dst, const char* src, int64_t nbytes) {
#if ZE_X86
    if (isa >= ZE_ISA_AVX512) {
        copy_lines_avx512(dst, src, nbytes);
        return;
    }
    if (isa >= ZE_ISA_AVX2) {
        copy_lines_avx2(dst, src, nbytes);
        return;
    }
#endif
    static_cast<void>(isa);
    std::memcpy(dst, src, static_cast<size_t>(nbytes));
}

}  // namespace

LineWriter::LineWriter() : isa_(current_isa()) {}

void LineWriter::put(char* to, const char* from, int64_t nbytes) {
    if (isa_ < ZE_ISA_AVX2) {
        std::memcpy(to, from, static_cast<size_t>(nbytes));
        return;
    }
    const int64_t head = fill(to, from, nbytes);
    const int64_t lines = (nbytes - head) / kLine * kLine;
    if (lines > 0) copy_lines(isa_, to + head, from + head, lines);
    keep(to + head + lines, from + head + lines, nbytes - head - lines);
}

uint64_t LineWriter::put_digested(char* to, const char* from, int64_t nbytes, const DigestOf& digest) {
    const int64_t lead = to_boundary(to);
    if (isa_ >= ZE_ISA_AVX512 && nbytes >= lead + kLine && lead % digest.itemsize == 0) {
        fill(to, from, nbytes);
        const int64_t lines = (nbytes - lead) / kLine * kLine;
        const uint64_t part = digest_and_stream(from, nbytes / digest.itemsize, digest.itemsize, digest.seed,
                                                digest.start, to + lead, lead / digest.itemsize, lines);
        keep(to + lead + lines, from + lead + lines, nbytes - lead - lines);
        return part;
    }
    // What is summed comes to the first-level cache in pieces of this size, and is copied from there.
    constexpr int64_t kCachedBytes = int64_t{16} << 10;
    uint64_t total = 0;
    for (int64_t done = 0; done < nbytes; done += kCachedBytes) {
        const int64_t here = std::min(kCachedBytes, nbytes - done);
        total += digest_elements(from + done, here / digest.itemsize, digest.itemsize, digest.seed,
                                 digest.start + done / digest.itemsize);
        put(to + done, from + done, here);
    }
    return total;
}

bool LineWriter::put_narrowed(char* to, const char* from, int64_t count, bool to_bf16) {
#if ZE_X86
    if (isa_ >= ZE_ISA_AVX512 && reinterpret_cast<uintptr_t>(to) % 2 == 0) {
        narrow_avx512(to, from, count, to_bf16);
        return true;
    }
#endif
    static_cast<void>(to);
    static_cast<void>(from);
    static_cast<void>(count);
    static_cast<void>(to_bf16);
    return false;
}

#if ZE_X86

// What waits is stored and loaded as a whole line: a load of what two stores have made waits for both.
ZE_TARGET_AVX512 void LineWriter::narrow_avx512(char* to, const char* from, int64_t count, bool to_bf16) {
    constexpr int64_t kElements = kLine / 2;
    if (line_ != nullptr && line_ + end_ != to) write_kept();
    const int64_t lead = to_boundary(to) / 2;
    int64_t done = std::min(lead, count);
    if (done > 0) {
        if (line_ == nullptr) {
            begin_ = end_ = kLine - lead * 2;
            line_ = to - begin_;
        }
        const int64_t before = end_ / 2;
        alignas(64) static constexpr std::array<uint16_t, 32> kLanes = {
            0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
            16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
        const __m512i index = _mm512_sub_epi16(_mm512_load_si512(kLanes.data()),
                                               _mm512_set1_epi16(static_cast<int16_t>(before)));
        const __m512i behind = _mm512_permutexvar_epi16(index, narrow_some(from, done, to_bf16));
        const __mmask32 lanes = ~uint32_t{0} << before;
        const __m512i line = _mm512_mask_mov_epi16(_mm512_load_si512(kept_), lanes, behind);
        end_ += done * 2;
        if (begin_ == 0 && end_ == kLine) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(line_), line);
            line_ = nullptr;
        } else {
            _mm512_store_si512(kept_, line);
            if (end_ == kLine) write_kept();
        }
    }
    for (; done + kElements <= count; done += kElements) {
        const __m256i low = narrow512(load512(from + done * 4), to_bf16);
        const __m256i high = narrow512(load512(from + done * 4 + 64), to_bf16);
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done * 2), both);
    }
    if (done < count) {
        _mm512_store_si512(kept_, narrow_some(from + done * 4, count - done, to_bf16));
        line_ = to + done * 2;
        begin_ = 0;
        end_ = (count - done) * 2;
    }
}

#endif  // ZE_X86

// Completes the line that waits, or begins one; returns how much of the run that took: up to a boundary, or
// all.
int64_t LineWriter::fill(char* to, const char* from, int64_t nbytes) {
    const int64_t lead = to_boundary(to);
    if (line_ != nullptr && line_ + end_ != to) write_kept();
    if (lead == 0) return 0;
    const int64_t part = std::min(lead, nbytes);
    if (line_ == nullptr) {
        if (part == lead) {
            copy_part(isa_, to, from, part);
            return part;
        }
        begin_ = end_ = kLine - lead;
        line_ = to - begin_;
    }
    copy_part(isa_, kept_ + end_, from, part);
    end_ += part;
    if (end_ == kLine) write_kept();
    return part;
}

void LineWriter::keep(char* to, const char* from, int64_t nbytes) {
    if (nbytes == 0) return;
    copy_part(isa_, kept_, from, nbytes);
    line_ = to;
    begin_ = 0;
    end_ = nbytes;
}

void LineWriter::write_kept() {
    if (begin_ == 0 && end_ == kLine) {
        copy_lines(isa_, line_, kept_, kLine);
    } else {
        copy_part(isa_, line_ + begin_, kept_ + begin_, end_ - begin_);
    }
    line_ = nullptr;
}

void LineWriter::expect(const char* to, int64_t nbytes) {
    __builtin_prefetch(to, 1);
    __builtin_prefetch(to + nbytes - 1, 1);
}

void LineWriter::flush() {
    if (line_ != nullptr) write_kept();
    end_streaming();
}

void end_streaming() {
#if ZE_X86
    _mm_sfence();
#else
    std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace zeroelastic
