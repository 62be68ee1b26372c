#include "cpu.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

#if ZE_X86
#include <cpuid.h>
#endif

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

// The size of the first processor's third-level cache as Linux knows it, or 0.
int64_t cache_bytes_of_kernel() {
    std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re");
    if (file == nullptr) return 0;
    long long kib = 0;
    const bool good = std::fscanf(file, "%lldK", &kib) == 1 && kib > 0 && kib < (1LL << 40);
    std::fclose(file);
    return good ? static_cast<int64_t>(kib) * 1024 : 0;
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

bool is_intel() {
#if ZE_X86
    static const bool intel = (__builtin_cpu_init(), __builtin_cpu_is("intel") != 0);
    return intel;
#else
    return false;
#endif
}

bool is_zen5() {
#if ZE_X86
    static const bool zen5 = [] {
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        __builtin_cpu_init();
        if (__builtin_cpu_is("amd") == 0 || __get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
        // The base family is 15 wherever the extended one counts.
        return ((eax >> 8) & 15) + ((eax >> 20) & 255) >= 26;
    }();
    return zen5;
#else
    return false;
#endif
}

int64_t last_level_cache_bytes() {
    static const int64_t size = [] {
        // sysconf() may count the caches of a whole socket, of which a thread sees one: ask the kernel first.
        const int64_t told = cache_bytes_of_kernel();
        if (told > 0) return told;
        long found = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
        found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
        return found > 0 ? static_cast<int64_t>(found) : int64_t{32} << 20;
    }();
    return size;
}

}  // namespace zeroelastic
