// Runs written past the caches: every byte of theirs, no other, whatever the lengths, gaps and boundaries.

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "../cast.h"
#include "../copy.h"
#include "../crc32.h"
#include "../digest.h"
#include "../digest_crc32.h"
#include "../zeroelastic.h"
#include "check.h"

namespace {

using zeroelastic::DigestOf;
using zeroelastic::LineWriter;

struct Run {
    size_t to;
    size_t from;
    size_t nbytes;
};

// Runs of whole elements, most of which follow their predecessor in memory.
std::vector<Run> make_runs(std::mt19937_64* random, size_t count, size_t most, size_t itemsize,
                           size_t* nbytes) {
    const auto below = [&](size_t limit) { return static_cast<size_t>((*random)() % limit); };
    std::vector<Run> runs;
    size_t to = below(200), from = below(100);
    for (size_t i = 0; i < count; ++i) {
        const size_t length = below(most / itemsize) * itemsize;
        runs.push_back({to, from, length});
        to += length + (below(3) == 0 ? below(150) : 0);
        from += below(2) == 0 ? length : 1;
    }
    *nbytes = std::max(to, from + most) + 64;
    return runs;
}

template <typename Fn>
void for_each_set(const Fn& fn) {
    for (int32_t isa = ZE_ISA_PLAIN; isa <= ze_best_isa(); ++isa) {
        ze_limit_isa(isa);
        fn(isa);
    }
    ze_limit_isa(ze_best_isa());
}

}  // namespace

TEST(runs_written_past_the_caches_are_whole_and_alone) {
    for_each_set([](int32_t isa) {
        std::mt19937_64 random(7);
        for (int i = 0; i < 400; ++i) {
            const size_t itemsize = size_t{1} << (i % 4);
            const size_t most = i % 5 == 0 ? 40'000 : i % 2 == 0 ? 2000 : 100;
            size_t nbytes = 0;
            const std::vector<Run> runs = make_runs(&random, 1 + random() % 20, most, itemsize, &nbytes);
            std::vector<char> src(nbytes), dst(nbytes, 0x5A), want(nbytes, 0x5A);
            for (char& byte : src) byte = static_cast<char>(random());
            for (const Run& run : runs) std::memcpy(&want[run.to], &src[run.from], run.nbytes);
            const DigestOf digest{static_cast<int>(itemsize), random(),
                                  static_cast<int64_t>(random() % 5000)};
            {
                LineWriter writer;
                for (const Run& run : runs) {
                    const int64_t length = static_cast<int64_t>(run.nbytes);
                    if (i % 3 == 0) {
                        writer.put(&dst[run.to], &src[run.from], length);
                    } else {
                        const uint64_t got =
                            writer.put_digested(&dst[run.to], &src[run.from], length, digest);
                        ze_limit_isa(ZE_ISA_PLAIN);
                        CHECK(got == zeroelastic::digest_elements(
                                         &src[run.from], length / static_cast<int64_t>(itemsize),
                                         digest.itemsize, digest.seed, digest.start));
                        ze_limit_isa(isa);
                    }
                }
            }
            CHECK(dst == want);
        }
    });
}

TEST(runs_converted_on_the_way_are_whole_and_alone) {
    for_each_set([](int32_t isa) {
        std::mt19937_64 random(13);
        for (int i = 0; i < 400; ++i) {
            const int32_t cast = i % 2 == 0 ? ZE_CAST_F32_BF16 : ZE_CAST_F32_F16;
            const size_t most = i % 5 == 0 ? 40'000 : i % 3 == 0 ? 2000 : 100;
            size_t nbytes = 0;
            std::vector<Run> runs = make_runs(&random, 1 + random() % 20, most, 2, &nbytes);
            const size_t odd = i % 7 == 0 ? 1 : 0;  // where runs of this itemsize begin between two elements
            for (Run& run : runs) run.to = run.to / 2 * 2 + odd;
            // Runs may no longer follow each other exactly; none begins before its predecessor ends.
            for (size_t r = 1; r < runs.size(); ++r) {
                runs[r].to = std::max(runs[r].to, runs[r - 1].to + runs[r - 1].nbytes);
            }
            nbytes += 64 * runs.size();
            std::vector<char> src(2 * nbytes), dst(nbytes, 0x5A), want(nbytes, 0x5A);
            for (char& byte : src) byte = static_cast<char>(random());
            ze_limit_isa(ZE_ISA_PLAIN);
            for (const Run& run : runs) {
                zeroelastic::cast_elements(cast, &src[run.from], &want[run.to],
                                           static_cast<int64_t>(run.nbytes / 2), false);
            }
            ze_limit_isa(isa);
            bool all = true;
            {
                LineWriter writer;
                for (const Run& run : runs) {
                    const int64_t count = static_cast<int64_t>(run.nbytes / 2);
                    const bool is_done =
                        writer.put_narrowed(&dst[run.to], &src[run.from], count, cast == ZE_CAST_F32_BF16);
                    if (!is_done)
                        zeroelastic::cast_elements(cast, &src[run.from], &dst[run.to], count, false);
                    all = all && is_done;
                }
            }
            CHECK(dst == want);
            if (isa >= ZE_ISA_AVX512 && reinterpret_cast<uintptr_t>(dst.data()) % 2 == 0)
                CHECK(all == (odd == 0));
        }
    });
}

TEST(digests_are_the_same_with_every_instruction_set) {
    std::mt19937_64 random(11);
    std::vector<char> data(20'000);
    for (char& byte : data) byte = static_cast<char>(random());
    for (int i = 0; i < 3000; ++i) {
        const int itemsize = 1 << (i % 4);
        const int64_t count = static_cast<int64_t>(random() % (i % 3 == 0 ? 2400 : 90));
        const size_t skew = static_cast<size_t>(random() % 65);
        const int64_t start = static_cast<int64_t>(random() % 4096);
        const uint64_t seed = random();
        std::vector<uint64_t> totals;
        for_each_set([&](int32_t) {
            totals.push_back(zeroelastic::digest_elements(&data[skew], count, itemsize, seed, start));
        });
        for (const uint64_t total : totals) CHECK(total == totals[0]);
    }
}

TEST(a_digest_and_a_checksum_in_one_pass_are_those_of_two) {
    std::mt19937_64 random(17);
    std::vector<char> data(40'000);
    for (char& byte : data) byte = static_cast<char>(random());
    for (int i = 0; i < 4000; ++i) {
        const int itemsize = 1 << (i % 4);
        const int64_t most = i % 3 == 0 ? 39'000 : 900;
        const int64_t nbytes =
            static_cast<int64_t>(random() % static_cast<uint64_t>(most)) / itemsize * itemsize;
        const size_t skew = static_cast<size_t>(random() % 65);
        // Blocks end within a line, between two lines, between two groups of them.
        const int64_t start =
            static_cast<int64_t>(random() % 4096) / (i % 5 == 0 ? 64 : 1) * (i % 5 == 0 ? 64 : 1);
        const DigestOf digest{itemsize, random(), start};
        const uint32_t before = static_cast<uint32_t>(random());
        for_each_set([&](int32_t) {
            uint32_t crc = before;
            const uint64_t got = zeroelastic::digest_and_crc32(&data[skew], nbytes, digest, &crc);
            CHECK(got == zeroelastic::digest_elements(&data[skew], nbytes / itemsize, itemsize, digest.seed,
                                                      digest.start));
            CHECK(crc == zeroelastic::crc32_of(before, &data[skew], nbytes));
        });
    }
}
