// What is looked at in the page cache: files in memory, whose pages can be made large, or taken away.

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../crc32.h"
#include "../mapped.h"
#include "check.h"
#include "rows.h"
#include "table.h"
#include "zeroelastic.h"

namespace {

using zeroelastic::kLargePage;
using zeroelastic::LargePages;
using zeroelastic::Mapped;

constexpr int kCollapse = 25;     // MADV_COLLAPSE, of Linux 6.1
constexpr long kCachestat = 451;  // of Linux 6.5

struct File {
    int fd;
    std::string path;
    std::vector<char> data;

    explicit File(int64_t nbytes)
        : fd(memfd_create("pages", MFD_CLOEXEC)), data(static_cast<size_t>(nbytes)) {
        CHECK(fd >= 0);
        path = "/proc/self/fd/" + std::to_string(fd);
        std::mt19937_64 random(7);
        for (char& byte : data) byte = static_cast<char>(random());
        CHECK(pwrite(fd, data.data(), data.size(), 0) == nbytes);
    }
    ~File() {
        close(fd);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Whether the system has made large pages of it, and says what is in memory: else there is nothing to
    // test.
    bool made_large() const {
        const size_t whole = data.size() / kLargePage * kLargePage;
        void* const room = mmap(nullptr, whole + kLargePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(room != MAP_FAILED);
        char* const at = static_cast<char*>(room) + -reinterpret_cast<uintptr_t>(room) % kLargePage;
        CHECK(mmap(at, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == at);
        const bool collapsed = madvise(at, whole, kCollapse) == 0;
        munmap(room, whole + kLargePage);
        uint64_t range[2] = {0, 4096};
        uint64_t found[5];
        const bool has_cachestat = syscall(kCachestat, fd, range, found, 0) == 0;
        if (!collapsed || !has_cachestat)
            std::printf("    this system has no large pages, or does not say what is cached\n");
        return collapsed && has_cachestat;
    }

    ze_files files(const char** name) const {
        *name = path.c_str();
        return {1, name};
    }
};

bool is_mapped(const File& file, int64_t begin, int64_t end) {
    LargePages pages;
    const Mapped mapped(file.fd, begin, end, &pages);
    if (!mapped) return false;
    for (const int64_t at : {begin, (begin + end) / 2, end - 1}) CHECK(*mapped.at(at) == file.data[at]);
    return true;
}

struct FileRows : Rows {
    std::vector<int64_t> stream, start, itemsize;

    // The file in rows of odd lengths of elements, the last ones first; what they are copied to has gaps.
    explicit FileRows(int64_t total) {
        int64_t at = 12;
        for (int64_t i = 0; at < total; ++i) {
            const int64_t size = std::min<int64_t>(4 * (1 + (i * 52631) % 700'001), (total - at) / 4 * 4);
            if (size == 0) break;
            src_offset.insert(src_offset.begin(), at);
            dst_offset.insert(dst_offset.begin(), at + 4 * i);
            nbytes.insert(nbytes.begin(), size);
            start.insert(start.begin(), at / 4);
            at += size + (i % 3) * 8;
        }
        src.assign(nbytes.size(), 0);
        dst = stream = src;
        itemsize.assign(nbytes.size(), 4);
    }
};

// What a read makes: the bytes, their 16-bit copies, the digest, and how many were looked at in place.
struct Outcome {
    std::vector<char> bytes;
    std::vector<char> narrow;
    uint64_t digest;
    std::vector<uint32_t> crc32;
    int64_t in_place;

    bool same_as(const Outcome& other) const {
        return bytes == other.bytes && narrow == other.narrow && digest == other.digest &&
               crc32 == other.crc32;
    }
};

Outcome read_all(const File& file, const FileRows& rows, int threads, bool digested, bool copied,
                 bool summed) {
    // The row that lies last in the file comes first, and ends last; copies are of half the size.
    const auto end = static_cast<size_t>(rows.dst_offset.front() + rows.nbytes.front());
    Outcome made{std::vector<char>(end), std::vector<char>(copied ? end / 2 : 0), 0,
                 std::vector<uint32_t>(summed ? rows.nbytes.size() : 0), 0};
    void* to = made.bytes.data();
    void* narrow = made.narrow.data();
    const int64_t room = static_cast<int64_t>(made.bytes.size());
    const int64_t narrow_room = static_cast<int64_t>(made.narrow.size());
    const ze_buffers dst{1, &to, &room};
    const ze_buffers copies{1, &narrow, &narrow_room};
    const uint64_t seed = 9;
    const ze_digest digest{
        1, &seed, &made.digest, rows.stream.data(), rows.start.data(), rows.itemsize.data()};
    const ze_options options{threads, ZE_CAST_NONE,
                             0,       copied ? ZE_CAST_F32_BF16 : ZE_CAST_NONE,
                             nullptr, copied ? &copies : nullptr};
    const ze_table table = rows.table();
    const char* name;
    const ze_files files = file.files(&name);
    ze_error error;
    int64_t got = 0;
    const int64_t before = ze_mapped_bytes();
    CHECK(ze_read_segments(&table, &files, &dst, digested ? &digest : nullptr, &options,
                           summed ? made.crc32.data() : nullptr, &got, &error) == ZE_OK);
    CHECK(got == rows.total());
    made.in_place = ze_mapped_bytes() - before;
    return made;
}

}  // namespace

TEST(large_pages_are_mapped_and_small_ones_are_not) {
    const File file(4 * kLargePage + 5000);
    CHECK(!is_mapped(file, 0, 4 * kLargePage));
    if (!file.made_large()) return;
    CHECK(is_mapped(file, 0, 4 * kLargePage));
    CHECK(is_mapped(file, 12345, 3 * kLargePage + 77));
    CHECK(is_mapped(file, kLargePage - 1, 4 * kLargePage + 5000));
    CHECK(!is_mapped(file, 1, kLargePage * 2 - 1));  // no whole page in it
    CHECK(!is_mapped(file, 0, 0));
}

TEST(nothing_is_mapped_beyond_the_end_or_where_a_page_is_missing) {
    const File file(6 * kLargePage);
    if (!file.made_large()) return;
    CHECK(is_mapped(file, 0, 6 * kLargePage));
    CHECK(!is_mapped(file, 0, 6 * kLargePage + 1));
    CHECK(!is_mapped(file, INT64_MAX - 5, INT64_MAX));
    CHECK(fallocate(file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4 * kLargePage + 8192, 4096) == 0);
    CHECK(!is_mapped(file, 0, 6 * kLargePage));
    CHECK(is_mapped(file, 0, 4 * kLargePage + 8192));
    CHECK(!is_mapped(file, 0, 4 * kLargePage + 8193));
}

TEST(a_file_that_is_cut_off_while_it_is_looked_at_is_an_error) {
    for (const int64_t size : {kLargePage + 100, 4 * kLargePage - 50}) {
        const File file(4 * kLargePage);
        if (!file.made_large()) return;
        LargePages pages;
        const Mapped mapped(file.fd, 5, 4 * kLargePage - 10, &pages);
        CHECK(mapped);
        ze_error error{};
        CHECK(mapped.intact(7, &error));
        CHECK(ftruncate(file.fd, static_cast<off_t>(size)) == 0);
        const volatile char* last = mapped.at(4 * kLargePage - 11);
        CHECK(*last == 0);  // beyond the last page there is nothing to look at
        CHECK(!mapped.intact(7, &error));
        CHECK(error.code == ZE_END_OF_FILE && error.file == 7 && error.offset == size);
        CHECK(ftruncate(file.fd, static_cast<off_t>(4 * kLargePage)) == 0);  // written again
        if (size > 2 * kLargePage) continue;
        CHECK(!mapped.intact(7, &error) && error.code == ZE_READ_FAILED && error.errnum == EIO);
    }
}

TEST(no_thread_of_the_pool_blocks_the_signal_of_a_page_that_is_not_there) {
    const ze_options options{3, ZE_CAST_NONE, 0, ZE_CAST_NONE, nullptr, nullptr};
    zeroelastic::Progress progress(options);
    ze_error error{};
    std::atomic<int> blocked{0}, others{0};
    const auto look = [&](int thread, size_t, ze_error*) {
        sigset_t mask;
        CHECK(sigprocmask(SIG_BLOCK, nullptr, &mask) == 0);
        blocked += sigismember(&mask, SIGBUS);
        others += thread > 0;
        for (int i = 0; i < 1000 && others == 0; ++i) usleep(1000);
        return true;
    };
    CHECK(zeroelastic::run_units(8, 3, &progress, &error, look) == ZE_OK);
    CHECK(blocked == 0);
}

TEST(what_others_map_is_not_made_up) {
    const File file(4 * kLargePage);
    if (!file.made_large()) return;
    CHECK(is_mapped(file, 0, 4 * kLargePage));  // from now on there is a handler
    const pid_t child = fork();
    if (child == 0) {
        LargePages pages;
        const Mapped mapped(file.fd, 0, 4 * kLargePage, &pages);
        const File other(4096);
        const void* const at = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, other.fd, 0);
        if (ftruncate(other.fd, 0) == 0) static_cast<void>(*static_cast<const volatile char*>(at));
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0);  // a sanitizer's handler exits
}

TEST(what_is_looked_at_in_place_is_what_would_be_read) {
    const File file(64 * (1 << 20) + 4321);
    const FileRows rows(static_cast<int64_t>(file.data.size()));
    std::vector<Outcome> read;
    for (int kind = 0; kind < 8; ++kind) {
        read.push_back(read_all(file, rows, 1, kind % 2 != 0, kind / 2 % 2 != 0, kind / 4 != 0));
        CHECK(read.back().in_place == 0);
    }
    for (size_t row = 0; row < rows.nbytes.size(); ++row) {
        CHECK(std::memcmp(read[0].bytes.data() + rows.dst_offset[row],
                          file.data.data() + rows.src_offset[row],
                          static_cast<size_t>(rows.nbytes[row])) == 0);
        CHECK(read[4].crc32[row] ==
              zeroelastic::crc32_of(0, file.data.data() + rows.src_offset[row], rows.nbytes[row]));
    }
    if (!file.made_large()) return;
    const int32_t best = ze_best_isa();
    for (int32_t isa = ZE_ISA_PLAIN; isa <= best; ++isa) {
        ze_limit_isa(isa);
        for (int threads = 1; threads <= 3; ++threads) {
            for (int kind = 0; kind < 8; ++kind) {
                const Outcome made =
                    read_all(file, rows, threads, kind % 2 != 0, kind / 2 % 2 != 0, kind / 4 != 0);
                CHECK(made.same_as(read[static_cast<size_t>(kind)]));
                CHECK(isa < ZE_ISA_AVX2 ? made.in_place == 0 : made.in_place > rows.total() / 2);
            }
        }
    }
    ze_limit_isa(best);
}

TEST(digests_add_up_where_only_some_units_are_in_large_pages) {
    File file(64 * (1 << 20) + 4321);
    const FileRows rows(static_cast<int64_t>(file.data.size()));
    if (!file.made_large()) return;
    for (int64_t at = 12 << 20; at < (int64_t{64} << 20); at += 16 << 20) {
        CHECK(fallocate(file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, 4096) == 0);
        std::memset(file.data.data() + at, 0, 4096);
    }
    uint64_t want = 0;
    for (size_t row = 0; row < rows.nbytes.size(); ++row) {
        want += ze_digest_range(file.data.data() + rows.src_offset[row], rows.nbytes[row] / 4, 4, 9,
                                rows.start[row], 1);
    }
    for (int round = 0; round < 20; ++round) {
        const Outcome made = read_all(file, rows, 4, true, false, false);
        CHECK(made.digest == want);
        if (round == 0 && ze_best_isa() >= ZE_ISA_AVX2) CHECK(made.in_place < rows.total());
    }
}

TEST(scans_and_moves_look_at_large_pages_in_place) {
    const File file(40 * (1 << 20) + 99);
    const FileRows rows(static_cast<int64_t>(file.data.size()));
    const ze_table table = rows.table();
    const char* name;
    const ze_files src = file.files(&name);
    const uint64_t seed = 5;
    const auto scan = [&](int threads, std::vector<uint32_t>* crc32) {
        uint64_t total = 0;
        const ze_digest digest{1, &seed, &total, rows.stream.data(), rows.start.data(), rows.itemsize.data()};
        const ze_options options{threads, ZE_CAST_NONE, 0, ZE_CAST_NONE, nullptr, nullptr};
        ze_error error;
        crc32->assign(rows.nbytes.size(), 0);
        CHECK(ze_scan_segments(&table, &src, &digest, &options, crc32->data(), &error) == ZE_OK);
        return total;
    };
    std::vector<uint32_t> crc32, again;
    const uint64_t total = scan(2, &crc32);
    if (!file.made_large()) return;
    const int64_t before = ze_mapped_bytes();
    for (int threads = 1; threads <= 3; ++threads) CHECK(scan(threads, &again) == total && again == crc32);
    CHECK(ze_mapped_bytes() - before > 3 * rows.total() / 2);

    const int to = memfd_create("copy", MFD_CLOEXEC);
    CHECK(to >= 0 && ftruncate(to, static_cast<off_t>(file.data.size()) * 2) == 0);
    const std::string path = "/proc/self/fd/" + std::to_string(to);
    const char* copy = path.c_str();
    const ze_files dst{1, &copy};
    const ze_options options{2, ZE_CAST_NONE, 0, ZE_CAST_NONE, nullptr, nullptr};
    ze_error error;
    again.assign(crc32.size(), 0);
    CHECK(ze_move_segments(&table, &src, &dst, nullptr, &options, again.data(), &error) == ZE_OK &&
          again == crc32);
    std::vector<char> got;
    for (size_t row = 0; row < rows.nbytes.size(); ++row) {
        const size_t size = static_cast<size_t>(rows.nbytes[row]);
        got.resize(size);
        CHECK(pread(to, got.data(), size, rows.dst_offset[row]) == static_cast<ssize_t>(size));
        CHECK(std::memcmp(got.data(), file.data.data() + rows.src_offset[row], size) == 0);
    }
    close(to);
}

TEST(ranges_that_cannot_be_mapped_make_the_next_ones_be_passed_over) {
    LargePages pages;
    const auto looked_at = [&](bool large, int ranges) {
        int count = 0;
        for (int i = 0; i < ranges; ++i) {
            if (!pages.expected()) continue;
            pages.found(large);
            ++count;
        }
        return count;
    };
    CHECK(looked_at(true, 50) == 50);
    CHECK(looked_at(false, 1000) < 80);
    CHECK(looked_at(true, 40) >= 24);  // found again soon
    CHECK(looked_at(true, 50) == 50);
}
