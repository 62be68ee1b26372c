// The C boundary: nothing throws across it.

#include <algorithm>
#include <atomic>
#include <functional>
#include <new>

#include "cpu.h"
#include "crc32.h"
#include "digest.h"
#include "operations.h"
#include "table.h"

namespace {

template <typename Fn>
int32_t guarded(ze_error* error, const Fn& fn) {
    try {
        *error = ze_error{};
        return fn();
    } catch (const std::bad_alloc&) {
        error->code = ZE_NO_MEMORY;
    } catch (...) {
        error->code = ZE_INTERNAL;
    }
    return error->code;
}

}  // namespace

extern "C" {

int32_t ze_abi_version(void) {
    return ZE_ABI_VERSION;
}

const char* ze_build_info(void) {
#if defined(__clang__)
#define ZE_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define ZE_COMPILER "gcc " __VERSION__
#else
#define ZE_COMPILER "an unknown compiler"
#endif
#if ZE_X86
    return ZE_COMPILER ", x86-64: plain, AVX2, AVX-512";
#elif defined(__aarch64__)
    return ZE_COMPILER ", aarch64: plain";
#else
    return ZE_COMPILER ", plain";
#endif
}

int32_t ze_isa(void) {
    return zeroelastic::current_isa();
}

int32_t ze_best_isa(void) {
    return zeroelastic::best_isa();
}

int32_t ze_limit_isa(int32_t isa) {
    return zeroelastic::limit_isa(
        static_cast<ze_isa_level>(std::clamp<int32_t>(isa, ZE_ISA_PLAIN, ZE_ISA_AVX512)));
}

int32_t ze_read_segments(const ze_table* table, const ze_files* src, const ze_buffers* dst,
                         const ze_digest* digest, const ze_options* options, uint32_t* crc32,
                         int64_t* bytes_read, ze_error* error) {
    return guarded(error, [&] {
        return zeroelastic::read_segments(*table, *src, *dst, digest, *options, crc32, bytes_read, error);
    });
}

int32_t ze_copy_segments(const ze_table* table, const ze_buffers* src, const ze_buffers* dst,
                         const ze_digest* digest, const ze_options* options, uint32_t* crc32,
                         ze_error* error) {
    return guarded(error, [&] {
        return zeroelastic::copy_segments(*table, *src, *dst, digest, *options, crc32, error);
    });
}

int32_t ze_write_segments(const ze_table* table, const ze_buffers* src, const ze_files* dst,
                          const ze_digest* digest, const ze_options* options, uint32_t* crc32,
                          ze_error* error) {
    return guarded(error, [&] {
        return zeroelastic::write_segments(*table, *src, *dst, digest, *options, crc32, error);
    });
}

int32_t ze_move_segments(const ze_table* table, const ze_files* src, const ze_files* dst,
                         const ze_digest* digest, const ze_options* options, uint32_t* crc32,
                         ze_error* error) {
    return guarded(error, [&] {
        return zeroelastic::move_segments(*table, *src, *dst, digest, *options, crc32, error);
    });
}

int32_t ze_scan_segments(const ze_table* table, const ze_files* src, const ze_digest* digest,
                         const ze_options* options, uint32_t* crc32, ze_error* error) {
    return guarded(error,
                   [&] { return zeroelastic::scan_segments(*table, *src, digest, *options, crc32, error); });
}

int32_t ze_sum_segments(const ze_table* table, const ze_buffers* src, const ze_digest* digest,
                        const ze_options* options, uint32_t* crc32, ze_error* error) {
    return guarded(error,
                   [&] { return zeroelastic::sum_segments(*table, *src, digest, *options, crc32, error); });
}

uint64_t ze_digest_range(const void* data, int64_t count, int32_t itemsize, uint64_t seed, int64_t start,
                         int32_t threads) {
    constexpr int64_t kPart = 256 * zeroelastic::kDigestBlock;
    const int64_t lead = start % kPart;
    const int64_t parts = (lead + count + kPart - 1) / kPart;
    const char* bytes = static_cast<const char*>(data);
    std::atomic<uint64_t> total{0};
    std::atomic<int64_t> next{0};
    const auto work = [&](int) {
        uint64_t sum = 0;
        for (int64_t part = next.fetch_add(1); part < parts; part = next.fetch_add(1)) {
            const int64_t begin = std::max<int64_t>(part * kPart - lead, 0);
            const int64_t end = std::min((part + 1) * kPart - lead, count);
            sum += zeroelastic::digest_elements(bytes + begin * itemsize, end - begin, itemsize, seed,
                                                start + begin);
        }
        total.fetch_add(sum);
    };
    try {
        // Waking a thread takes as long as summing a few parts.
        zeroelastic::run_parallel(static_cast<int>(std::min<int64_t>(threads, parts / 2)), std::cref(work));
    } catch (...) {
        // No memory or no mutex for a pool, so no thread has begun: the caller's thread takes every part.
        work(0);
    }
    return total.load();
}

uint32_t ze_crc32_join(const uint32_t* crc32, const int64_t* nbytes, int64_t count) {
    uint32_t joined = 0;
    for (int64_t i = 0; i < count; ++i) joined = zeroelastic::crc32_join(joined, crc32[i], nbytes[i]);
    return joined;
}

}  // extern "C"
