// Which instruction set the kernels use, decided when the program runs.

#ifndef ZEROELASTIC_CPU_H_
#define ZEROELASTIC_CPU_H_

#include <cstdint>

#include "zeroelastic.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define ZE_X86 1
#define ZE_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#if defined(__clang__)  // ignores the whole attribute where it does not know a part of it
#define ZE_TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define ZE_TARGET_AVX512 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
#define ZE_X86 0
#endif

namespace zeroelastic {

ze_isa_level current_isa();

// The best set of this processor, whatever has been asked for.
ze_isa_level best_isa();

ze_isa_level limit_isa(ze_isa_level limit);

bool is_intel();

// AMD's processors of family 26 and later ones.
bool is_zen5();

// Size of the last-level cache, or a guess where the system does not tell.
int64_t last_level_cache_bytes();

}  // namespace zeroelastic

#endif  // ZEROELASTIC_CPU_H_
