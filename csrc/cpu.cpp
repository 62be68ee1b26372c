#include "cpu.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace zeroelastic {
namespace {

ze_isa_level detect() {
#if ZE_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c")) {
        return ZE_ISA_PLAIN;
    }
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
        return ZE_ISA_AVX2;
    }
    return ZE_ISA_AVX512;
#else
    return ZE_ISA_PLAIN;
#endif
}

std::atomic<int32_t>& limit() {
    static std::atomic<int32_t> value{ZE_ISA_AVX512};
    return value;
}

}  // namespace

ze_isa_level best_isa() {
    static const ze_isa_level best = detect();
    return best;
}

ze_isa_level current_isa() {
    return static_cast<ze_isa_level>(std::min<int32_t>(best_isa(), limit().load(std::memory_order_relaxed)));
}

ze_isa_level limit_isa(ze_isa_level isa) {
    limit().store(std::max<int32_t>(isa, ZE_ISA_PLAIN), std::memory_order_relaxed);
    return current_isa();
}

int64_t last_level_cache_bytes() {
    static const int64_t size = [] {
        long found = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
        found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
        return found > 0 ? static_cast<int64_t>(found) : int64_t{32} << 20;
    }();
    return size;
}

}  // namespace zeroelastic
