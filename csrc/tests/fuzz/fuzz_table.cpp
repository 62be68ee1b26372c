// What the engine makes of any table: libFuzzer's entry point. Every operation gets rows with numbers of the
// fuzzer's choice between small files and buffers that lie on the heap exactly as long as they say, so that
// the address sanitizer sees any access beyond. What is wrong must come back as a code, and nothing outside
// of the files and buffers may change.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../rows.h"
#include "zeroelastic.h"

namespace {

constexpr int64_t kMostRows = 48;
constexpr int64_t kMostSides = 4;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}

// Takes numbers off the front of the fuzzer's bytes; zeros behind their end.
class Input {
  public:
    Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    uint64_t bytes(size_t count) {
        uint64_t value = 0;
        for (size_t i = 0; i < count && at_ < size_; ++i) {
            value |= static_cast<uint64_t>(data_[at_++]) << (8 * i);
        }
        return value;
    }

    int64_t below(int64_t limit) {
        return static_cast<int64_t>(bytes(2) % static_cast<uint64_t>(limit));
    }

    // Mostly small and plausible, sometimes any 64 bits, or close to where arithmetic ends.
    int64_t number(int64_t usual) {
        switch (bytes(1) % 8) {
            case 0:
                return static_cast<int64_t>(bytes(8));
            case 1:
                return static_cast<int64_t>((uint64_t{1} << bytes(1) % 64) + bytes(1) - 128);
            default:
                return below(usual + 1);
        }
    }

  private:
    const uint8_t* data_;
    size_t size_;
    size_t at_ = 0;
};

// Files in memory, by name.
class Files {
  public:
    Files(int64_t count, Input* input) {
        for (int64_t i = 0; i < count; ++i) {
            const int fd = memfd_create("fuzz", MFD_CLOEXEC);
            if (fd < 0) fail("memfd_create");
            const int64_t size = input->below(20000);
            if (ftruncate(fd, size) != 0) fail("ftruncate");
            // A sparse file claims much more than there is of it.
            if (input->bytes(1) == 7 && ftruncate(fd, int64_t{1} << 62) != 0) fail("ftruncate");
            fds_.push_back(fd);
            names_.push_back("/proc/self/fd/" + std::to_string(fd));
        }
        for (const std::string& name : names_) paths_.push_back(name.c_str());
    }
    ~Files() {
        for (const int fd : fds_) close(fd);
    }
    Files(const Files&) = delete;
    Files& operator=(const Files&) = delete;

    ze_files files() const {
        return {static_cast<int64_t>(paths_.size()), paths_.data()};
    }

    // No file of a source may become longer or shorter.
    std::vector<int64_t> sizes() const {
        std::vector<int64_t> sizes;
        for (const int fd : fds_) sizes.push_back(lseek(fd, 0, SEEK_END));
        return sizes;
    }

  private:
    std::vector<int> fds_;
    std::vector<std::string> names_;
    std::vector<const char*> paths_;
};

class Buffers {
  public:
    Buffers(int64_t count, Input* input) {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t size = input->below(20000);
            data_.emplace_back(new uint8_t[static_cast<size_t>(size)]());
            pointers_.push_back(data_.back().get());
            sizes_.push_back(size);
        }
    }
    ze_buffers buffers() const {
        return {static_cast<int64_t>(data_.size()), pointers_.data(), sizes_.data()};
    }

  private:
    std::vector<std::unique_ptr<uint8_t[]>> data_;
    std::vector<void*> pointers_;
    std::vector<int64_t> sizes_;
};

struct Columns : Rows {
    std::vector<int64_t> stream, start, itemsize;
};

struct Reported {
    ze_progress progress;
    int64_t nbytes;
    uint64_t most_calls;
};

void report(ze_progress* self) {
    Reported* reported = reinterpret_cast<Reported*>(self);
    if (self->nbytes < 0) fail("less than nothing was done");
    reported->nbytes += self->nbytes;
    // Called every 50 ms, as often as the fuzzer allows, and never for longer than a second.
    self->keep_going = reported->most_calls-- > 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    const uint64_t operation = input.bytes(1) % 8;
    const int64_t num_src = input.below(kMostSides) + 1;
    const int64_t num_dst = input.below(kMostSides) + 1;
    const int64_t num_rows = input.below(kMostRows + 1);
    const int64_t num_streams = input.below(4);
    Columns rows;
    for (int64_t row = 0; row < num_rows; ++row) {
        rows.src.push_back(input.number(num_src));
        rows.src_offset.push_back(input.number(9000));
        rows.dst.push_back(input.number(num_dst));
        rows.dst_offset.push_back(input.number(9000));
        rows.nbytes.push_back(input.number(9000));
        rows.stream.push_back(input.number(num_streams));
        rows.start.push_back(input.number(9000));
        rows.itemsize.push_back(int64_t{1} << input.below(5));
    }
    std::vector<uint64_t> seeds(static_cast<size_t>(num_streams), 12345);
    std::vector<uint64_t> totals(static_cast<size_t>(num_streams));
    std::vector<uint32_t> crc32(static_cast<size_t>(num_rows));
    const ze_digest digest{num_streams,        seeds.data(),      totals.data(),
                           rows.stream.data(), rows.start.data(), rows.itemsize.data()};
    const uint64_t wanted = input.bytes(1);
    const ze_digest* const digests = wanted & 1 ? &digest : nullptr;
    uint32_t* const sums = wanted & 2 ? crc32.data() : nullptr;
    Reported reported{{report, 0, 0, 0}, 0, input.bytes(1) % 20};
    // Threads would write into each other's overlapping rows, which callers promise not to have.
    const ze_options options{
        operation == 5 ? 4 : 1, static_cast<int32_t>(input.number(4)), 0, 0, &reported.progress, nullptr};
    const ze_table table = rows.table();
    ze_error error{};
    int32_t code = ZE_OK;
    Files files(num_src, &input);
    const std::vector<int64_t> before = files.sizes();
    const ze_files src = files.files();
    if (operation == 0) {
        const Buffers dst(num_dst, &input);
        const ze_buffers buffers = dst.buffers();
        int64_t bytes_read = 0;
        code = ze_read_segments(&table, &src, &buffers, digests, &options, sums, &bytes_read, &error);
        if (bytes_read < 0) fail("less than nothing was read");
    } else if (operation == 1) {
        const Buffers from(num_src, &input), to(num_dst, &input);
        const ze_buffers a = from.buffers(), b = to.buffers();
        code = ze_copy_segments(&table, &a, &b, digests, &options, sums, &error);
    } else if (operation == 2 || operation == 3) {
        Files to(num_dst, &input);
        const Buffers from(num_src, &input);
        const ze_files b = to.files();
        const ze_buffers a = from.buffers();
        code = operation == 2 ? ze_write_segments(&table, &a, &b, digests, &options, sums, &error)
                              : ze_move_segments(&table, &src, &b, digests, &options, sums, &error);
    } else if (operation == 4 || operation == 5) {
        code = ze_scan_segments(&table, &src, digests, &options, sums, &error);
    } else if (operation == 6) {
        const Buffers from(num_src, &input);
        const ze_buffers a = from.buffers();
        code = ze_sum_segments(&table, &a, digests, &options, sums, &error);
    } else {
        ze_crc32_join(crc32.data(), rows.start.data(), 0);
        const Buffers one(1, &input);
        const ze_buffers buffers = one.buffers();
        const int64_t itemsize = int64_t{1} << input.below(4);
        const int64_t start = static_cast<int64_t>(input.bytes(7));
        ze_digest_range(buffers.data[0], buffers.nbytes[0] / itemsize, static_cast<int32_t>(itemsize),
                        input.bytes(8), start, 2);
    }
    if (code != error.code) fail("the code returned is not the one explained");
    if (code == ZE_INTERNAL || code == ZE_NO_MEMORY) fail("a table of this size needs no memory");
    if (files.sizes() != before) fail("a source has changed its size");
    if (code == ZE_BAD_TABLE && reported.nbytes != 0) fail("something was done for a table that is refused");
    if (code == ZE_BAD_TABLE && (error.offset < -1 || error.offset >= num_rows)) fail("no such row");
    return 0;
}
