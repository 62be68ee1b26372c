// Writes that are flushed: whole blocks go past the page cache, whatever the place of the bytes in memory,
// and the system may refuse that at any time.

#include <stdlib.h>

#include <cstring>
#include <random>
#include <vector>

#include "../crc32.h"
#include "../operations.h"
#include "../table.h"
#include "direct_writes.h"
#include "rows.h"

namespace {

constexpr int64_t kGap = 192;

// Rows of a file, a gap between each and the next, from one buffer; what is in a gap is not written.
struct Payload : Rows {
    std::vector<uint8_t> memory, want;

    Payload(const std::vector<int64_t>& sizes, int64_t first) {
        int64_t from = 8, to = first;
        for (const int64_t size : sizes) {
            add(0, from, 0, to, size);
            from += size;
            to += size + kGap;
        }
        memory.resize(static_cast<size_t>(from));
        std::mt19937 random(5);
        for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random());
        want.assign(static_cast<size_t>(to + 100), 0xA5);
        for (size_t i = 0; i < sizes.size(); ++i) {
            std::memcpy(want.data() + dst_offset[i], memory.data() + src_offset[i],
                        static_cast<size_t>(nbytes[i]));
        }
    }
};

// Writes a payload, and compares the file and the checksums; the code, with the byte that failed in `error`.
int32_t written(const Payload& payload, int threads, bool direct, ze_error* error) {
    const char* parent = getenv("TMPDIR");
    std::string path = std::string(parent == nullptr ? "/tmp" : parent) + "/zeroelastic-XXXXXX";
    const int fd = mkstemp(path.data());
    const std::vector<uint8_t> before(payload.want.size(), 0xA5);
    CHECK(fd >= 0 && write(fd, before.data(), before.size()) == static_cast<ssize_t>(before.size()));
    void* data = const_cast<uint8_t*>(payload.memory.data());
    const int64_t size = static_cast<int64_t>(payload.memory.size());
    const char* name = path.c_str();
    std::vector<uint32_t> sums(payload.nbytes.size());
    const ze_table table = payload.table();
    const ze_files to{1, &name};
    const ze_options options{threads, ZE_CAST_NONE, 1, 0, nullptr, nullptr};
    zeroelastic::OpenFiles files(to, O_WRONLY, ZE_DESTINATION);
    if (direct) files.allow_direct();
    zeroelastic::Progress progress(options);
    const int32_t code = zeroelastic::write_open_segments(table, {1, &data, &size}, &files, 1, nullptr,
                                                          options, &progress, sums.data(), error);
    std::vector<uint8_t> found(payload.want.size() + 1);
    CHECK(pread(fd, found.data(), found.size(), 0) == static_cast<ssize_t>(payload.want.size()));
    found.pop_back();
    close(fd);
    unlink(name);
    if (code == ZE_OK) {
        CHECK(found == payload.want);
        for (size_t i = 0; i < sums.size(); ++i) {
            CHECK(sums[i] ==
                  zeroelastic::crc32_of(0, payload.memory.data() + payload.src_offset[i], payload.nbytes[i]));
        }
    }
    return code;
}

const std::vector<std::vector<int64_t>> kSizes{
    {9 << 20}, {(3 << 20) + 8, 100, 4096, 5000, (2 << 20) + 64, 64}, {1, 4095, 8190, 70'000}, {17}};

TEST(whole_blocks_go_past_the_page_cache) {
    for (const int threads : {1, 3}) {
        for (const int64_t first : {0, 64, 4096, 5003}) {
            for (const std::vector<int64_t>& sizes : kSizes) {
                const Payload payload(sizes, first);
                ze_error error;
                direct_writes::reset();
                CHECK(written(payload, threads, false, &error) == ZE_OK && direct_writes::calls == 0);
                CHECK(written(payload, threads, true, &error) == ZE_OK);
                // Not the blocks that a row shares with what is beside it, nor those in which a unit ends:
                // where elements may lie across the end of a block, it does not end there.
                const int64_t left = direct_writes::possible() ? payload.total() - direct_writes::bytes : 0;
                const int64_t cuts = first % 8 == 0 && sizes.size() == 1 ? 0 : payload.total() >> 18;
                CHECK(0 <= left && left <= 2 * 4096 * (static_cast<int64_t>(sizes.size()) + cuts));
            }
        }
    }
}

TEST(other_file_systems_get_ordinary_writes) {
    const Payload payload(kSizes[1], 64);
    ze_error error;
    direct_writes::reset();
    direct_writes::file_system = 0x6969;  // NFS
    CHECK(written(payload, 2, true, &error) == ZE_OK && direct_writes::calls == 0);
}

TEST(where_the_system_refuses_ordinary_writes_follow) {
    const Payload payload({12 << 20}, 64);
    for (const int code : {EINVAL, EOPNOTSUPP, EFAULT}) {
        for (const int64_t after : {0, 1, 3}) {
            ze_error error;
            direct_writes::reset();
            direct_writes::fails_with = code;
            direct_writes::after = after;
            CHECK(written(payload, 1, true, &error) == ZE_OK);
            CHECK(!direct_writes::possible() || direct_writes::calls == after + 1);
        }
    }
}

TEST(a_call_that_takes_less_is_gone_on_with) {
    for (const int64_t most : {4096, 100 * 4096, 5000}) {
        const Payload payload({5 << 20, 3 << 20}, 640);
        ze_error error;
        direct_writes::reset();
        direct_writes::at_most = most;
        CHECK(written(payload, 2, true, &error) == ZE_OK);
    }
}

TEST(what_the_disk_says_is_told_with_the_byte) {
    if (!direct_writes::possible()) return;
    const Payload payload({12 << 20}, 64);
    ze_error error;
    direct_writes::reset();
    direct_writes::fails_with = EIO;
    direct_writes::after = 1;
    CHECK(written(payload, 1, true, &error) == ZE_WRITE_FAILED);
    CHECK(error.errnum == EIO && error.side == ZE_DESTINATION && error.file == 0);
    CHECK(error.offset == 2 << 20);
    direct_writes::reset();
}

}  // namespace
