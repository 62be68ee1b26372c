// The engine through its C interface, against loops that are obviously right. Buffers are exactly as long as
// what they hold, each on the heap of its own, so that a sanitizer sees any access beyond.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../crc32.h"
#include "../table.h"
#include "check.h"
#include "rows.h"
#include "zeroelastic.h"

namespace {

using Bytes = std::unique_ptr<uint8_t[]>;

std::mt19937_64 random_engine(1);

int64_t between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_engine);
}

struct Side {
    std::vector<Bytes> data;
    std::vector<void*> pointers;
    std::vector<int64_t> sizes;

    void add(int64_t size, int fill) {
        data.emplace_back(new uint8_t[static_cast<size_t>(size)]);
        for (int64_t i = 0; i < size; i += 8) {
            const uint64_t word =
                fill < 0 ? random_engine() : static_cast<uint64_t>(fill) * 0x0101010101010101u;
            std::memcpy(data.back().get() + i, &word, static_cast<size_t>(std::min(size - i, int64_t{8})));
        }
        pointers.push_back(data.back().get());
        sizes.push_back(size);
    }

    ze_buffers buffers() const {
        return {static_cast<int64_t>(data.size()), pointers.data(), sizes.data()};
    }
};

struct Digests {
    std::vector<uint64_t> seeds{3, 0xFFFFFFFFFFFFFFFFu};
    std::vector<uint64_t> totals{0, 0};
    std::vector<int64_t> stream, start, itemsize;

    ze_digest digest() {
        return {2, seeds.data(), totals.data(), stream.data(), start.data(), itemsize.data()};
    }
};

uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

// Element by element, as the definition reads.
uint64_t reference_digest(const uint8_t* data, int64_t count, int64_t itemsize, uint64_t seed,
                          int64_t start) {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
    uint64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t bits = 0;
        std::memcpy(&bits, data + i * itemsize, static_cast<size_t>(itemsize));
        const uint64_t position = static_cast<uint64_t>(start + i);
        const uint64_t weight = mix((position % 1024 + 1) * kGolden) | 1;
        const uint64_t block = mix(seed + (position / 1024 + 1) * kGolden) | 1;
        total += bits * weight * block;
    }
    return total;
}

ze_options options(int threads, int cast = ZE_CAST_NONE, int sync = 0) {
    return {threads, cast, sync, ZE_CAST_NONE, nullptr, nullptr};
}

// Random rows from `num_src` sources to `num_dst` destinations that are just long enough.
struct Case {
    Side src;
    Side dst;
    Side want;
    Rows rows;
    Digests digests;
    std::vector<uint64_t> totals{0, 0};
    std::vector<uint32_t> crc32;
};

Case make_case(int num_rows, int64_t longest) {
    Case made;
    const int64_t num_src = between(1, 3), num_dst = between(1, 3);
    for (int64_t i = 0; i < num_src; ++i) made.src.add(between(0, 2 * longest), -1);
    std::vector<int64_t> filled(static_cast<size_t>(num_dst), 0);
    for (int i = 0; i < num_rows; ++i) {
        const int64_t itemsize = int64_t{1} << between(0, 3);
        const int64_t s = between(0, num_src - 1), d = between(0, num_dst - 1);
        const int64_t size = made.src.sizes[static_cast<size_t>(s)];
        const int64_t offset = between(0, size);
        const int64_t most = std::min(size - offset, between(0, 9) < 5 ? int64_t{100} : longest);
        const int64_t nbytes = between(0, most) / itemsize * itemsize;
        int64_t& end = filled[static_cast<size_t>(d)];
        end += between(0, 5);
        made.rows.add(s, offset, d, end, nbytes);
        end += nbytes;
        made.digests.stream.push_back(between(0, 1));
        made.digests.start.push_back(between(0, 1) ? between(0, 5000) : between(0, int64_t{1} << 45));
        made.digests.itemsize.push_back(itemsize);
    }
    for (const int64_t end : filled) {
        made.dst.add(end, 0xA5);
        made.want.add(end, 0xA5);
    }
    for (size_t i = 0; i < made.rows.nbytes.size(); ++i) {
        const uint8_t* from =
            made.src.data[static_cast<size_t>(made.rows.src[i])].get() + made.rows.src_offset[i];
        uint8_t* to = made.want.data[static_cast<size_t>(made.rows.dst[i])].get() + made.rows.dst_offset[i];
        if (made.rows.nbytes[i] > 0) std::memcpy(to, from, static_cast<size_t>(made.rows.nbytes[i]));
        made.crc32.push_back(zeroelastic::crc32_of(0, from, made.rows.nbytes[i]));
        const size_t stream = static_cast<size_t>(made.digests.stream[i]);
        made.totals[stream] +=
            reference_digest(from, made.rows.nbytes[i] / made.digests.itemsize[i], made.digests.itemsize[i],
                             made.digests.seeds[stream], made.digests.start[i]);
    }
    return made;
}

void check_equal(const Side& got, const Side& want) {
    for (size_t i = 0; i < want.sizes.size(); ++i) {
        CHECK(want.sizes[i] == 0 ||
              std::memcmp(got.data[i].get(), want.data[i].get(), static_cast<size_t>(want.sizes[i])) == 0);
    }
}

// Files in a folder that goes with the object.
class Files {
  public:
    Files() {
        char name[] = "/tmp/zeroelastic-test-XXXXXX";
        CHECK(mkdtemp(name) != nullptr);
        folder_ = name;
    }

    ~Files() {
        for (const std::string& path : paths_) unlink(path.c_str());
        rmdir(folder_.c_str());
    }

    void add(const uint8_t* data, int64_t size) {
        paths_.push_back(folder_ + "/" + std::to_string(paths_.size()));
        const int fd = open(paths_.back().c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        CHECK(fd >= 0);
        for (int64_t done = 0; done < size;) {
            const ssize_t put = write(fd, data + done, static_cast<size_t>(size - done));
            CHECK(put > 0);
            done += put;
        }
        close(fd);
    }

    void add(const Side& side) {
        for (size_t i = 0; i < side.sizes.size(); ++i) add(side.data[i].get(), side.sizes[i]);
    }

    // The contents must be what `want` holds.
    void check(const Side& want) const {
        for (size_t i = 0; i < want.sizes.size(); ++i) {
            const int fd = open(paths_[i].c_str(), O_RDONLY | O_CLOEXEC);
            CHECK(fd >= 0 && lseek(fd, 0, SEEK_END) == want.sizes[i]);
            std::vector<uint8_t> got(static_cast<size_t>(want.sizes[i]));
            CHECK(pread(fd, got.data(), got.size(), 0) == want.sizes[i]);
            CHECK(got.empty() || std::memcmp(got.data(), want.data[i].get(), got.size()) == 0);
            close(fd);
        }
    }

    ze_files files() {
        names_.clear();
        for (const std::string& path : paths_) names_.push_back(path.c_str());
        return {static_cast<int64_t>(names_.size()), names_.data()};
    }

  private:
    std::string folder_;
    std::vector<std::string> paths_;
    std::vector<const char*> names_;
};

void for_each_isa(void (*run)()) {
    for (int isa = ZE_ISA_PLAIN; isa <= ze_best_isa(); ++isa) {
        CHECK(ze_limit_isa(isa) == isa);
        run();
    }
}

}  // namespace

TEST(digests_follow_the_definition) {
    for_each_isa([] {
        for (int i = 0; i < 300; ++i) {
            const int64_t itemsize = int64_t{1} << between(0, 3);
            const int64_t count = between(0, 1) ? between(0, 100) : between(0, 6000);
            const int64_t start = between(0, 1) ? between(0, 3000) : between(0, int64_t{1} << 45);
            Side side;
            side.add(count * itemsize, -1);
            const uint64_t seed = random_engine();
            CHECK(ze_digest_range(side.pointers[0], count, static_cast<int32_t>(itemsize), seed, start, 1) ==
                  reference_digest(side.data[0].get(), count, itemsize, seed, start));
        }
        Side side;
        side.add(3'000'001, -1);
        CHECK(ze_digest_range(side.pointers[0], 3'000'001, 1, 9, 77, 3) ==
              reference_digest(side.data[0].get(), 3'000'001, 1, 9, 77));
    });
}

TEST(copies_fill_what_the_rows_say) {
    for_each_isa([] {
        for (int i = 0; i < 60; ++i) {
            Case made = make_case(static_cast<int>(between(0, 40)), i < 54 ? 9000 : 1 << 20);
            const ze_table table = made.rows.table();
            const ze_buffers src = made.src.buffers(), dst = made.dst.buffers();
            const ze_options opts = options(static_cast<int>(between(1, 4)));
            ze_digest digest = made.digests.digest();
            std::vector<uint32_t> sums(made.crc32.size(), 1);
            uint32_t* const crc32 = i % 4 < 2 ? sums.data() : nullptr;
            ze_error error;
            CHECK(ze_copy_segments(&table, &src, &dst, i % 2 ? &digest : nullptr, &opts, crc32, &error) ==
                  ZE_OK);
            check_equal(made.dst, made.want);
            if (crc32 != nullptr) CHECK(sums == made.crc32);
            if (i % 2) CHECK(made.digests.totals == made.totals);
        }
    });
}

// Larger than the last-level cache, where the kernels that write past it run.
TEST(large_copies_and_conversions_stay_inside) {
    for_each_isa([] {
        const int64_t count = (int64_t{36} << 20) / 4 + 13;
        Side src, dst;
        src.add(count * 4, 0x41);
        dst.add(count * 4 + 1, 0xA5);
        Rows rows;
        rows.add(0, 0, 0, 1, 20'000'004);
        rows.add(0, 20'000'004, 0, 20'000'005, count * 4 - 20'000'004);
        ze_table table = rows.table();
        const ze_buffers from = src.buffers(), to = dst.buffers();
        ze_options opts = options(2);
        ze_error error;
        std::vector<uint32_t> sums(2);
        CHECK(ze_copy_segments(&table, &from, &to, nullptr, &opts, sums.data(), &error) == ZE_OK);
        for (const size_t i : {0, 1}) {
            const unsigned char* row = src.data[0].get() + rows.src_offset[i];
            CHECK(sums[i] == zeroelastic::crc32_of(0, row, rows.nbytes[i]));
        }
        CHECK(dst.data[0][0] == 0xA5);
        CHECK(std::memcmp(dst.data[0].get() + 1, src.data[0].get(), static_cast<size_t>(count * 4)) == 0);
        Side half;
        half.add(count * 2 + 2, 0xA5);
        rows.dst_offset = {2, 10'000'004};
        table = rows.table();
        const ze_buffers narrow = half.buffers();
        opts.cast = ZE_CAST_F32_BF16;
        CHECK(ze_copy_segments(&table, &from, &narrow, nullptr, &opts, nullptr, &error) == ZE_OK);
        for (int64_t i = 2; i < count * 2 + 2; i += 2) CHECK(half.data[0][static_cast<size_t>(i)] == 0x41);
        opts.cast = ZE_CAST_BF16_F32;
        rows = Rows();
        rows.add(0, 0, 0, 1, count * 2);
        table = rows.table();
        CHECK(ze_copy_segments(&table, &narrow, &to, nullptr, &opts, nullptr, &error) == ZE_OK);
        CHECK(dst.data[0][1] == 0 && dst.data[0][5] == 0);
    });
}

TEST(reads_fill_what_the_rows_say) {
    for (int i = 0; i < 60; ++i) {
        Case made = make_case(static_cast<int>(between(0, 60)), i < 54 ? 9000 : 1 << 20);
        Files files;
        files.add(made.src);
        const ze_table table = made.rows.table();
        const ze_files src = files.files();
        const ze_buffers dst = made.dst.buffers();
        const ze_options opts = options(static_cast<int>(between(1, 4)));
        ze_digest digest = made.digests.digest();
        std::vector<uint32_t> sums(made.crc32.size(), 1);
        uint32_t* const crc32 = i % 4 < 2 ? sums.data() : nullptr;
        ze_error error;
        int64_t bytes_read = -1;
        CHECK(ze_read_segments(&table, &src, &dst, i % 2 ? &digest : nullptr, &opts, crc32, &bytes_read,
                               &error) == ZE_OK);
        check_equal(made.dst, made.want);
        if (crc32 != nullptr) CHECK(sums == made.crc32);
        CHECK(bytes_read == std::accumulate(made.rows.nbytes.begin(), made.rows.nbytes.end(), int64_t{0}));
        if (i % 2) CHECK(made.digests.totals == made.totals);
    }
}

TEST(what_is_read_is_converted_beside_it) {
    Side src, dst, half;
    src.add(3'000'000, 0x41);
    for (const int64_t size : {2'000'000, 1'000'004}) dst.add(size, 0xA5);
    half.add(1'000'000, 0xA5);
    half.pointers.push_back(nullptr);  // of the second destination there is no copy
    half.sizes.push_back(0);
    Files files;
    files.add(src);
    Rows rows;
    rows.add(0, 1, 0, 4, 1'200'000);
    rows.add(0, 1'200'001, 0, 1'200'004, 799'992);
    rows.add(0, 2'000'000, 1, 3, 1'000'000);
    ze_table table = rows.table();
    const ze_files from = files.files();
    const ze_buffers to = dst.buffers();
    ze_buffers copies = half.buffers();
    copies.count = 2;
    ze_options opts = options(4);
    opts.copies = &copies;
    ze_error error;
    int64_t bytes_read = 0;
    const auto read = [&] {
        return ze_read_segments(&table, &from, &to, nullptr, &opts, nullptr, &bytes_read, &error);
    };
    CHECK(read() == ZE_BAD_TABLE);  // no conversion is named
    opts.copies_cast = ZE_CAST_F32_BF16;
    CHECK(read() == ZE_OK);
    for (int64_t i = 0; i < 1'000'000; i += 2) {
        const bool read_there = i >= 2 && i < 999'998;
        CHECK(half.data[0][static_cast<size_t>(i)] == (read_there ? 0x41 : 0xA5));
    }
    copies.count = 1;
    CHECK(read() == ZE_BAD_TABLE);
    copies.count = 2;
    half.sizes[0] = 999'996;
    CHECK(read() == ZE_BAD_TABLE && error.offset == 1);
    half.sizes[0] = 1'000'000;
    rows.nbytes[0] = 6;
    CHECK(read() == ZE_BAD_TABLE && error.offset == 0);
}

TEST(writes_and_moves_fill_what_the_rows_say) {
    for (int i = 0; i < 60; ++i) {
        Case made = make_case(static_cast<int>(between(0, 60)), i < 54 ? 9000 : 1 << 20);
        Files sources, written, moved;
        sources.add(made.src);
        written.add(made.dst);
        moved.add(made.dst);
        const ze_table table = made.rows.table();
        const ze_buffers from = made.src.buffers();
        const ze_files from_files = sources.files(), to = written.files(), other = moved.files();
        const ze_options opts = options(static_cast<int>(between(1, 4)), ZE_CAST_NONE, i % 3 == 0);
        ze_digest digest = made.digests.digest();
        ze_error error;
        std::vector<uint32_t> sums(made.crc32.size(), 1);
        uint32_t* const crc32 = i % 4 < 2 ? sums.data() : nullptr;
        CHECK(ze_write_segments(&table, &from, &to, i % 2 ? &digest : nullptr, &opts, crc32, &error) ==
              ZE_OK);
        written.check(made.want);
        if (crc32 != nullptr) CHECK(sums == made.crc32);
        if (i % 2) CHECK(made.digests.totals == made.totals);
        made.digests.totals = {0, 0};
        std::fill(sums.begin(), sums.end(), 1);
        CHECK(ze_move_segments(&table, &from_files, &other, i % 2 ? &digest : nullptr, &opts, crc32,
                               &error) == ZE_OK);
        moved.check(made.want);
        if (i % 2) CHECK(made.digests.totals == made.totals);
        if (crc32 != nullptr) CHECK(sums == made.crc32);
    }
}

TEST(long_rows_are_written_as_large_pages_from_wherever_they_begin) {
    for (const int64_t first : {1088, 13, 4, (1 << 21) - 8, 1 << 21}) {
        for (int threads = 1; threads <= 3; ++threads) {
            Side src, dst, want;
            Rows rows;
            Digests digests;
            src.add(40'000'000, -1);
            dst.add(40'100'000, 0xA5);
            want.add(40'100'000, 0xA5);
            std::vector<uint32_t> crc32;
            std::vector<uint64_t> totals{0, 0};
            int64_t from = 0, at = first;
            for (const int64_t nbytes : {9'000'000, 24, 4'194'304, 65'536, 21'234'568, 1'000'008}) {
                rows.add(0, from, 0, at, nbytes);
                digests.stream.push_back(nbytes % 2);
                digests.start.push_back(from / 8);
                digests.itemsize.push_back(8);
                const uint8_t* data = src.data[0].get() + from;
                std::memcpy(want.data[0].get() + at, data, static_cast<size_t>(nbytes));
                crc32.push_back(zeroelastic::crc32_of(0, data, nbytes));
                totals[0] += ze_digest_range(data, nbytes / 8, 8, digests.seeds[0], from / 8, 1);
                from += nbytes;
                at += nbytes + (nbytes == 65'536 ? 8192 : 0);
            }
            Files written;
            written.add(dst);
            const ze_table table = rows.table();
            const ze_buffers buffers = src.buffers();
            const ze_files to = written.files();
            const ze_options opts = options(threads);
            ze_digest digest = digests.digest();
            std::vector<uint32_t> sums(crc32.size(), 1);
            ze_error error;
            CHECK(ze_write_segments(&table, &buffers, &to, &digest, &opts, sums.data(), &error) == ZE_OK);
            written.check(want);
            CHECK(sums == crc32 && digests.totals == totals);
        }
    }
}

TEST(units_end_where_large_pages_do) {
    using zeroelastic::kLargePage;
    const int64_t file[] = {0, 0, 0, 1};
    const int64_t offset[] = {1088, 30'001'088, 30'001'152, 64};
    const int64_t nbytes[] = {30'000'000, 64, 20'000'000, 9'000'000};
    const ze_table table{4, nullptr, nullptr, file, offset, nbytes};
    const std::vector<zeroelastic::Unit> units =
        zeroelastic::make_units(table, {}, file, int64_t{4} << 20, offset);
    int64_t total = 0;
    size_t cut = 0;
    for (size_t i = 0; i + 1 < units.size(); ++i) {
        total += units[i].nbytes;
        CHECK(units[i].nbytes < (int64_t{7} << 20));
        if (units[i + 1].file != units[i].file) continue;
        ++cut;
        CHECK((offset[units[i + 1].first] + units[i + 1].within) % kLargePage == 0);
    }
    CHECK(total + units.back().nbytes == 59'000'064 && cut >= 10);
}

TEST(scans_digest_and_sum_what_the_rows_say) {
    for_each_isa([] {
        for (int i = 0; i < 60; ++i) {
            Case made = make_case(static_cast<int>(between(0, 60)), i < 54 ? 9000 : 1 << 20);
            Files sources;
            sources.add(made.src);
            ze_table table = made.rows.table();
            table.dst = table.dst_offset = nullptr;
            const ze_files src = sources.files();
            const ze_options opts = options(static_cast<int>(between(1, 4)));
            ze_digest digest = made.digests.digest();
            std::vector<uint32_t> sums(made.crc32.size(), 1);
            ze_error error;
            CHECK(ze_scan_segments(&table, &src, i % 3 ? &digest : nullptr, &opts,
                                   i % 3 < 2 ? sums.data() : nullptr, &error) == ZE_OK);
            if (i % 3) CHECK(made.digests.totals == made.totals);
            if (i % 3 < 2) CHECK(sums == made.crc32);
        }
    });
}

TEST(scans_split_long_rows_over_threads) {
    Side side;
    side.add(50'000'003, -1);
    Files files;
    files.add(side.data[0].get(), side.sizes[0]);
    Rows rows;
    rows.add(0, 49'000'000, 0, 0, 1'000'003);
    rows.add(0, 1, 0, 0, 48'999'999);
    rows.add(0, 7, 0, 0, 0);
    rows.add(0, 20'000'000, 0, 0, 30'000'000);
    const ze_table table = rows.table();
    const ze_files src = files.files();
    std::vector<uint32_t> want;
    for (size_t i = 0; i < 4; ++i) {
        want.push_back(zeroelastic::crc32_of(0, side.data[0].get() + rows.src_offset[i], rows.nbytes[i]));
    }
    for (int threads = 1; threads <= 4; ++threads) {
        const ze_options opts = options(threads);
        std::vector<uint32_t> sums(4, 1);
        ze_error error;
        CHECK(ze_scan_segments(&table, &src, nullptr, &opts, sums.data(), &error) == ZE_OK);
        CHECK(sums == want);
    }
}

TEST(sums_of_memory_are_those_of_what_the_rows_say) {
    for_each_isa([] {
        for (int i = 0; i < 60; ++i) {
            Case made = make_case(static_cast<int>(between(0, 60)), i < 54 ? 9000 : 1 << 20);
            ze_table table = made.rows.table();
            table.dst = table.dst_offset = nullptr;
            const ze_buffers src = made.src.buffers();
            const ze_options opts = options(static_cast<int>(between(1, 4)));
            ze_digest digest = made.digests.digest();
            std::vector<uint32_t> sums(made.crc32.size(), 1);
            ze_error error;
            CHECK(ze_sum_segments(&table, &src, i % 3 ? &digest : nullptr, &opts,
                                  i % 3 < 2 ? sums.data() : nullptr, &error) == ZE_OK);
            if (i % 3) CHECK(made.digests.totals == made.totals);
            if (i % 3 < 2) CHECK(sums == made.crc32);
        }
    });
}

TEST(sums_of_memory_stay_inside_of_it_and_convert_nothing) {
    Side side;
    side.add(100, -1);
    const ze_buffers src = side.buffers();
    Rows rows;
    rows.add(0, 96, 0, 0, 4);
    rows.add(0, 97, 0, 0, 4);
    const ze_table table = rows.table();
    ze_error error;
    for (const int32_t cast : {ZE_CAST_NONE, ZE_CAST_F32_BF16}) {
        const ze_options opts = options(1, cast);
        CHECK(ze_sum_segments(&table, &src, nullptr, &opts, nullptr, &error) == ZE_BAD_TABLE);
        CHECK(error.offset == (cast == ZE_CAST_NONE ? 1 : -1));
    }
}

TEST(a_scan_converts_nothing) {
    Rows rows;
    rows.add(0, 0, 0, 0, 4);
    const ze_table table = rows.table();
    const char* path = "/dev/zero";
    const ze_files src{1, &path};
    const ze_options opts = options(1, ZE_CAST_F32_BF16);
    ze_error error;
    CHECK(ze_scan_segments(&table, &src, nullptr, &opts, nullptr, &error) == ZE_BAD_TABLE);
}

TEST(conversions_know_their_own_way_back) {
    for_each_isa([] {
        Side half, wide, back;
        half.add(65536 * 2, 0);
        wide.add(65536 * 4, 0);
        back.add(65536 * 2, 0);
        for (uint32_t i = 0; i < 65536; ++i) {
            half.data[0][2 * i] = static_cast<uint8_t>(i);
            half.data[0][2 * i + 1] = static_cast<uint8_t>(i >> 8);
        }
        const int32_t casts[2][2] = {{ZE_CAST_F16_F32, ZE_CAST_F32_F16},
                                     {ZE_CAST_BF16_F32, ZE_CAST_F32_BF16}};
        for (const auto& cast : casts) {
            Rows out, in;
            out.add(0, 0, 0, 0, 65536 * 2);
            in.add(0, 0, 0, 0, 65536 * 4);
            const ze_buffers h = half.buffers(), w = wide.buffers(), b = back.buffers();
            const ze_table there = out.table(), home = in.table();
            ze_options opts = options(2, cast[0]);
            ze_error error;
            CHECK(ze_copy_segments(&there, &h, &w, nullptr, &opts, nullptr, &error) == ZE_OK);
            opts.cast = cast[1];
            CHECK(ze_copy_segments(&home, &w, &b, nullptr, &opts, nullptr, &error) == ZE_OK);
            const uint32_t infinity = cast[0] == ZE_CAST_F16_F32 ? 0x7C00 : 0x7F80;
            for (uint32_t i = 0; i < 65536; ++i) {
                if ((i & 0x7FFF) > infinity) continue;  // which NaN it is may change
                CHECK(back.data[0][2 * i] == half.data[0][2 * i]);
                CHECK(back.data[0][2 * i + 1] == half.data[0][2 * i + 1]);
            }
        }
    });
}

TEST(failures_say_which_file_and_where) {
    Side side;
    side.add(10'000'000, 7);
    Files files;
    files.add(side.data[0].get(), 10'000'000);
    files.add(side.data[0].get(), 6'000'001);
    const char* paths[] = {files.files().paths[0], files.files().paths[1], "/nonexistent/file", "/dev/full"};
    const ze_files all{4, paths};
    const ze_buffers buffers = side.buffers();
    ze_error error;
    int64_t bytes_read = 0;
    for (int threads = 1; threads < 4; ++threads) {
        const ze_options opts = options(threads);
        Rows rows;
        rows.add(0, 0, 0, 0, 1'000'000);
        rows.add(1, 0, 0, 1'000'000, 9'000'000);
        ze_table table = rows.table();
        CHECK(ze_read_segments(&table, &all, &buffers, nullptr, &opts, nullptr, &bytes_read, &error) ==
              ZE_END_OF_FILE);
        CHECK(error.file == 1 && error.offset == 6'000'001 && error.side == ZE_SOURCE);
        rows.add(2, 0, 0, 0, 0);
        table = rows.table();
        CHECK(ze_read_segments(&table, &all, &buffers, nullptr, &opts, nullptr, &bytes_read, &error) ==
              ZE_END_OF_FILE);
        rows = Rows();
        rows.add(2, 0, 0, 0, 0);
        table = rows.table();
        CHECK(ze_read_segments(&table, &all, &buffers, nullptr, &opts, nullptr, &bytes_read, &error) ==
              ZE_OPEN_FAILED);
        CHECK(error.file == 2 && error.errnum == ENOENT);
        rows = Rows();
        rows.add(0, 0, 3, 5, 100);
        table = rows.table();
        CHECK(ze_write_segments(&table, &buffers, &all, nullptr, &opts, nullptr, &error) == ZE_WRITE_FAILED);
        CHECK(error.file == 3 && error.errnum == ENOSPC && error.offset == 5 && error.side == ZE_DESTINATION);
        rows = Rows();
        rows.add(1, 6'000'000, 0, 0, 2);
        table = rows.table();
        CHECK(ze_move_segments(&table, &all, &all, nullptr, &opts, nullptr, &error) == ZE_END_OF_FILE);
        CHECK(error.file == 1 && error.offset == 6'000'001);
        CHECK(ze_scan_segments(&table, &all, nullptr, &opts, nullptr, &error) == ZE_END_OF_FILE);
        CHECK(error.file == 1 && error.offset == 6'000'001 && error.side == ZE_SOURCE);
    }
}

TEST(rows_out_of_bounds_are_refused) {
    const int64_t most = INT64_MAX;
    const int64_t bad[][5] = {{1, 0, 0, 0, 1},    {-1, 0, 0, 0, 1},      {0, 0, 1, 0, 1},
                              {0, 0, -1, 0, 1},   {0, 9, 0, 0, 2},       {0, 0, 0, 9, 2},
                              {0, -1, 0, 0, 1},   {0, 0, 0, -1, 1},      {0, 0, 0, 0, -1},
                              {0, most, 0, 0, 1}, {0, 0, 0, most, most}, {0, 1, 0, 0, most}};
    for (const auto& row : bad) {
        Side src, dst;
        src.add(10, 1);
        dst.add(10, 2);
        Rows rows;
        rows.add(0, 0, 0, 0, 10);
        rows.add(row[0], row[1], row[2], row[3], row[4]);
        const ze_table table = rows.table();
        const ze_buffers from = src.buffers(), to = dst.buffers();
        const ze_options opts = options(1);
        ze_error error;
        CHECK(ze_copy_segments(&table, &from, &to, nullptr, &opts, nullptr, &error) == ZE_BAD_TABLE);
        CHECK(error.offset == 1 && dst.data[0][0] == 2);
    }
}

TEST(a_forked_child_works_with_threads_of_its_own) {
    Side side;
    side.add(8'000'000, -1);
    const uint64_t want = ze_digest_range(side.pointers[0], 2'000'000, 4, 1, 0, 4);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);
        _exit(ze_digest_range(side.pointers[0], 2'000'000, 4, 1, 0, 4) == want ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(ze_digest_range(side.pointers[0], 2'000'000, 4, 1, 0, 4) == want);
}

TEST(callers_on_several_threads_share_the_pool) {
    Side side;
    side.add(4'000'000, -1);
    const uint64_t want = ze_digest_range(side.pointers[0], 1'000'000, 4, 1, 0, 1);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
        callers.emplace_back([&] {
            for (int k = 0; k < 20; ++k)
                CHECK(ze_digest_range(side.pointers[0], 1'000'000, 4, 1, 0, 3) == want);
        });
    }
    for (std::thread& caller : callers) caller.join();
}

int main() {
    CHECK(ze_abi_version() == ZE_ABI_VERSION);
    for (const Test& test : tests()) {
        std::printf("%s\n", test.name);
        std::fflush(stdout);
        test.run();
    }
    std::printf("%zu tests passed (%s)\n", tests().size(), ze_build_info());
    return 0;
}
