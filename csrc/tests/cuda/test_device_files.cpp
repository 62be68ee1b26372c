// Files into the memory of the fake device and back: the ring, its slots and events, splitting, every
// failure.

#include <dirent.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <numeric>
#include <string>
#include <thread>

#include "../../crc32.h"
#include "../../cuda/device_files.h"
#include "../../cuda/zeroelastic_cuda.h"
#include "cases.h"

namespace {

std::atomic<int> flushes{0};
std::atomic<int> fail_flush{0};  // the one that fails, counted from the last change; 0: none

}  // namespace

// In place of the system's.
extern "C" int fsync(int fd) {
    ++flushes;
    if (fail_flush > 0 && --fail_flush == 0) {
        errno = EIO;
        return -1;
    }
    return static_cast<int>(syscall(SYS_fsync, fd));
}

namespace {

using zeroelastic::PinnedRing;
using zeroelastic::read_to_device;
using zeroelastic::write_from_device;

constexpr int64_t kSmallSlot = int64_t{64} << 10;

class Files {
  public:
    explicit Files(const std::vector<Bytes>& contents) {
        const char* parent = getenv("TMPDIR");
        folder_ = std::string(parent == nullptr ? "/tmp" : parent) + "/zeroelastic-XXXXXX";
        CHECK(mkdtemp(folder_.data()) != nullptr);
        for (size_t i = 0; i < contents.size(); ++i) {
            names_.push_back(folder_ + "/" + std::to_string(i));
            std::FILE* file = std::fopen(names_.back().c_str(), "wb");
            CHECK(file != nullptr);
            CHECK(contents[i].empty() ||
                  std::fwrite(contents[i].data(), 1, contents[i].size(), file) == contents[i].size());
            CHECK(std::fclose(file) == 0);
        }
        for (const std::string& name : names_) paths_.push_back(name.c_str());
    }
    ~Files() {
        for (const std::string& name : names_) unlink(name.c_str());
        rmdir(folder_.c_str());
    }

    void remove(size_t number) {
        CHECK(unlink(names_[number].c_str()) == 0);
    }
    void truncate_to(size_t number, int64_t size) {
        CHECK(truncate(names_[number].c_str(), size) == 0);
    }
    Bytes content(size_t number) const {
        std::FILE* file = std::fopen(names_[number].c_str(), "rb");
        CHECK(file != nullptr && std::fseek(file, 0, SEEK_END) == 0);
        Bytes found(static_cast<size_t>(std::ftell(file)));
        std::rewind(file);
        CHECK(found.empty() || std::fread(found.data(), 1, found.size(), file) == found.size());
        CHECK(std::fclose(file) == 0);
        return found;
    }
    ze_files files() const {
        return {static_cast<int64_t>(paths_.size()), paths_.data()};
    }

  private:
    std::string folder_;
    std::vector<std::string> names_;
    std::vector<const char*> paths_;
};

int open_descriptors() {
    DIR* folder = opendir("/proc/self/fd");
    CHECK(folder != nullptr);
    int count = 0;
    while (readdir(folder) != nullptr) ++count;
    closedir(folder);
    return count;
}

struct Case {
    std::vector<Bytes> files;
    std::vector<Bytes> before;  // the destinations
    std::vector<int64_t> misaligned;
    Rows rows;
    Digests digests;
    int32_t cast = ZE_CAST_NONE;
};

Case make_case(int32_t cast, int num_rows, int64_t longest) {
    Case made;
    made.cast = cast;
    const int64_t itemsize =
        cast == ZE_CAST_NONE ? int64_t{1} << between(0, 3) : zeroelastic::source_itemsize(cast);
    const int64_t num_files = between(1, 4), num_buffers = between(1, 3);
    for (int64_t i = 0; i < num_files; ++i) made.files.push_back(random_bytes(between(0, longest * 3)));
    std::vector<int64_t> filled(static_cast<size_t>(num_buffers));
    for (int i = 0; i < num_rows; ++i) {
        const int64_t file = between(0, num_files - 1), buffer = between(0, num_buffers - 1);
        const int64_t size = static_cast<int64_t>(made.files[static_cast<size_t>(file)].size());
        const int64_t offset = between(0, size);
        const int64_t wanted = between(0, 3) == 0 ? between(0, longest) : between(0, 40);
        const int64_t nbytes = std::min(wanted, size - offset) / itemsize * itemsize;
        int64_t& end = filled[static_cast<size_t>(buffer)];
        end += between(0, 2) == 0 ? between(1, 9) : 0;
        made.rows.add(file, offset, buffer, end, nbytes);
        made.digests.add(itemsize);
        end += zeroelastic::converted_bytes(nbytes, cast);
    }
    for (const int64_t size : filled) {
        made.before.emplace_back(static_cast<size_t>(size + between(0, 9)), kUntouched);
        made.misaligned.push_back(between(0, 300));
    }
    // In any order.
    std::vector<size_t> order(made.rows.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random_engine());
    Case shuffled = made;
    for (size_t i = 0; i < order.size(); ++i) {
        const size_t j = order[i];
        shuffled.rows.src[i] = made.rows.src[j];
        shuffled.rows.src_offset[i] = made.rows.src_offset[j];
        shuffled.rows.dst[i] = made.rows.dst[j];
        shuffled.rows.dst_offset[i] = made.rows.dst_offset[j];
        shuffled.rows.nbytes[i] = made.rows.nbytes[j];
        shuffled.digests.stream[i] = made.digests.stream[j];
        shuffled.digests.start[i] = made.digests.start[j];
    }
    return shuffled;
}

DeviceSide on_device(const Case& one) {
    DeviceSide side;
    for (size_t i = 0; i < one.before.size(); ++i) {
        side.emplace_back(new DeviceMemory(one.before[i], one.misaligned[i]));
    }
    return side;
}

int32_t read(const Case& one, const Files& files, const DeviceSide& side, Digests* digests, PinnedRing* ring,
             ze_error* error, int threads = 2, int device = 0, cudaStream_t stream = nullptr,
             int64_t* bytes_read = nullptr) {
    const ze_table table = one.rows.table();
    const ze_files from = files.files();
    const Pointers to(side);
    const ze_buffers buffers = to.buffers();
    const ze_options options{threads, one.cast, 0, 0, nullptr, nullptr};
    ze_digest digest{};
    if (digests != nullptr) digest = digests->digest();
    int64_t got = 0;
    const int32_t code = read_to_device(table, from, buffers, digests == nullptr ? nullptr : &digest, options,
                                        device, stream, ring, &got, error);
    if (bytes_read != nullptr) *bytes_read = got;
    CHECK(fake::counts().in_flight == 0 && fake::counts().events == 0);
    return code;
}

void check_arrives(Case* one, PinnedRing* ring, bool digested, int threads = 2) {
    const Files files(one->files);
    const DeviceSide side = on_device(*one);
    const int descriptors = open_descriptors();
    ze_error error;
    int64_t bytes_read = -1;
    CHECK(read(*one, files, side, digested ? &one->digests : nullptr, ring, &error, threads, 0, nullptr,
               &bytes_read) == ZE_OK);
    CHECK(open_descriptors() == descriptors);
    CHECK(bytes_read == std::accumulate(one->rows.nbytes.begin(), one->rows.nbytes.end(), int64_t{0}));
    const std::vector<Bytes> want = expected(one->rows, one->files, one->before, one->cast);
    for (size_t i = 0; i < side.size(); ++i) CHECK(side[i]->content() == want[i]);
    if (digested) CHECK(one->digests.totals == expected_totals(one->rows, one->files, one->digests));
}

// A contiguous destination of `total` bytes, in rows of `length`, from several files in turn.
Case contiguous(int64_t total, int64_t length, size_t num_files) {
    Case made;
    made.files.resize(num_files);
    made.before.emplace_back(static_cast<size_t>(total), kUntouched);
    made.misaligned.push_back(0);
    for (int64_t at = 0; at < total; at += length) {
        const size_t file = static_cast<size_t>(at / length) % num_files;
        const int64_t nbytes = std::min(length, total - at);
        const Bytes more = random_bytes(nbytes);
        made.rows.add(static_cast<int64_t>(file), static_cast<int64_t>(made.files[file].size()), 0, at,
                      nbytes);
        made.digests.add(1);
        made.files[file].insert(made.files[file].end(), more.begin(), more.end());
    }
    return made;
}

TEST(whatever_the_table_the_bytes_and_digests_arrive) {
    for (const fake::Copies copies : {fake::Copies::kAtOnce, fake::Copies::kWhenWaited}) {
        fake::reset(copies);
        for (int i = 0; i < 60; ++i) {
            const int num_slots = static_cast<int>(between(1, 3));
            PinnedRing ring(num_slots, kSmallSlot);
            Case one =
                make_case(static_cast<int32_t>(between(0, 4)), static_cast<int>(between(0, 60)), 70'000);
            check_arrives(&one, &ring, i % 2 == 0, static_cast<int>(between(1, 3)));
            CHECK(fake::counts().pinned_bytes <= num_slots * kSmallSlot);
        }
        CHECK(fake::counts().pinned_bytes == 0 && fake::counts().device_bytes == 0);
    }
}

TEST(rows_longer_than_the_ring_are_cut_inside_no_element) {
    fake::reset(fake::Copies::kWhenWaited);
    for (int32_t cast = ZE_CAST_NONE; cast <= ZE_CAST_F16_F32; ++cast) {
        PinnedRing ring(2, kSmallSlot);
        Case one;
        one.cast = cast;
        const int64_t nbytes = 1'000'000 / 8 * 8, made = zeroelastic::converted_bytes(nbytes, cast);
        one.files.push_back(random_bytes(nbytes + 3));
        one.before.emplace_back(static_cast<size_t>(made + 20), kUntouched);
        one.misaligned.push_back(13);
        one.rows.add(0, 3, 0, 11, nbytes);
        one.digests.add(cast == ZE_CAST_NONE ? 8 : zeroelastic::source_itemsize(cast));
        check_arrives(&one, &ring, true);
    }
}

TEST(what_is_contiguous_on_the_device_is_one_copy_per_slot) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(3, kSmallSlot);
    Case one = contiguous(10 * kSmallSlot, 4096, 5);
    check_arrives(&one, &ring, false);
    CHECK(fake::counts().async_copies == 10);
    CHECK(fake::counts().host_allocations == 3);
    // A hole in the middle makes one more.
    fake::reset(fake::Copies::kWhenWaited);
    Case holed = contiguous(kSmallSlot / 2, 100, 5);
    holed.rows.nbytes[7] = 50;
    check_arrives(&holed, &ring, false);
    CHECK(fake::counts().async_copies == 2 && fake::counts().host_allocations == 0);
}

TEST(neighbours_in_different_buffers_are_not_one_copy) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(1, kSmallSlot);
    Case one;
    one.files.push_back(random_bytes(512));
    const DeviceMemory memory(Bytes(512, kUntouched), 0);
    one.rows.add(0, 0, 0, 0, 256);
    one.rows.add(0, 256, 1, 0, 256);
    const Files files(one.files);
    void* pointers[] = {memory.data(), memory.data() + 256};
    const int64_t sizes[] = {256, 256};
    const ze_table table = one.rows.table();
    ze_error error;
    int64_t got;
    CHECK(read_to_device(table, files.files(), {2, pointers, sizes}, nullptr, {1, 0, 0, 0, nullptr, nullptr},
                         0, nullptr, &ring, &got, &error) == ZE_OK);
    CHECK(memory.content() == one.files[0] && fake::counts().async_copies == 2);
}

TEST(slots_are_pinned_when_needed_and_kept) {
    fake::reset(fake::Copies::kAtOnce);
    PinnedRing ring(3, kSmallSlot);
    for (int i = 0; i < 3; ++i) {
        Case small = contiguous(1000, 10, 1);
        check_arrives(&small, &ring, true);
        CHECK(fake::counts().pinned_bytes == kSmallSlot);
    }
    Case large = contiguous(20 * kSmallSlot, 5000, 3);
    check_arrives(&large, &ring, true);
    CHECK(fake::counts().host_allocations == 3 && fake::counts().most_pinned_bytes == 3 * kSmallSlot);
}

TEST(the_librarys_own_ring_is_bounded_and_used_again) {
    fake::reset(fake::Copies::kWhenWaited);
    // 60 MiB, of a file that is one hole.
    const int64_t total = int64_t{60} << 20;
    const Files files(std::vector<Bytes>{Bytes(1, 1)});
    CHECK(truncate(files.files().paths[0], total) == 0);
    const DeviceMemory memory(Bytes(static_cast<size_t>(total), kUntouched), 0);
    Rows rows;
    rows.add(0, 0, 0, 0, total);
    const ze_table table = rows.table();
    void* pointer = memory.data();
    const ze_buffers to{1, &pointer, &total};
    const ze_files from = files.files();
    const ze_options options{2, ZE_CAST_NONE, 0, 0, nullptr, nullptr};
    for (int i = 0; i < 2; ++i) {
        int64_t got = 0;
        ze_error error;
        CHECK(ze_cuda_read_segments(&table, &from, &to, nullptr, &options, 0, nullptr, &got, &error) ==
              ZE_OK);
        CHECK(got == total && memory.data()[0] == 1 && memory.data()[total - 1] == 0);
        CHECK(fake::counts().pinned_bytes == (int64_t{48} << 20) && fake::counts().host_allocations == 3);
    }
}

TEST(another_device_and_stream_are_used_and_the_callers_device_is_restored) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(2, kSmallSlot);
    cudaStream_t stream;
    CHECK(cudaSetDevice(1) == cudaSuccess && cudaStreamCreate(&stream) == cudaSuccess);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    for (const int device : {1, 0}) {
        Case one = contiguous(5 * kSmallSlot, 1000, 2);
        const Files files(one.files);
        const DeviceSide side = on_device(one);
        ze_error error;
        CHECK(read(one, files, side, nullptr, &ring, &error, 1, device, device == 1 ? stream : nullptr) ==
              ZE_OK);
        CHECK(side[0]->content() == expected(one.rows, one.files, one.before, one.cast)[0]);
        int now = -1;
        CHECK(cudaGetDevice(&now) == cudaSuccess && now == 0);
    }
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    Case one = contiguous(10, 10, 1);
    const Files files(one.files);
    const DeviceSide side = on_device(one);
    ze_error error;
    CHECK(read(one, files, side, nullptr, &ring, &error, 1, 7) == ZE_INTERNAL);
    CHECK(error.errnum == cudaErrorInvalidDevice);
}

TEST(files_that_fail_are_named_as_the_host_reader_names_them) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(2, kSmallSlot);
    for (const int64_t end : {int64_t{0}, int64_t{1234}, kSmallSlot, 3 * kSmallSlot + 77}) {
        Case one = contiguous(8 * kSmallSlot, 8 * kSmallSlot, 1);
        Files files(one.files);
        const DeviceSide side = on_device(one);
        files.truncate_to(0, end);
        const int descriptors = open_descriptors();
        ze_error error;
        CHECK(read(one, files, side, nullptr, &ring, &error) == ZE_END_OF_FILE);
        CHECK(error.side == ZE_SOURCE && error.file == 0 && error.offset == end);
        CHECK(open_descriptors() == descriptors);
    }
    Case one = contiguous(4 * kSmallSlot, 1000, 3);
    {
        Files files(one.files);
        const DeviceSide side = on_device(one);
        files.remove(2);
        ze_error error;
        CHECK(read(one, files, side, nullptr, &ring, &error) == ZE_OPEN_FAILED);
        CHECK(error.side == ZE_SOURCE && error.file == 2 && error.errnum == ENOENT);
    }
    // An empty row opens its file, too.
    Case empty;
    empty.files.push_back({});
    empty.before.emplace_back(4, kUntouched);
    empty.misaligned.push_back(0);
    empty.rows.add(0, 0, 0, 4, 0);
    {
        Files files(empty.files);
        const DeviceSide side = on_device(empty);
        ze_error error;
        CHECK(read(empty, files, side, nullptr, &ring, &error) == ZE_OK);
        files.remove(0);
        CHECK(read(empty, files, side, nullptr, &ring, &error) == ZE_OPEN_FAILED);
        CHECK(side[0]->content() == empty.before[0]);
    }
    check_arrives(&one, &ring, true);
}

TEST(every_failure_of_cuda_is_reported_with_nothing_left_in_flight) {
    for (const char* function : {"cudaHostAlloc", "cudaMemcpyAsync", "cudaEventCreateWithFlags",
                                 "cudaEventRecord", "cudaEventSynchronize", "cudaStreamSynchronize"}) {
        for (int after = 0; after < 3; ++after) {
            if (after > 0 && std::string(function) == "cudaStreamSynchronize") continue;
            fake::reset(fake::Copies::kWhenWaited);
            PinnedRing ring(3, kSmallSlot);
            Case one = contiguous(10 * kSmallSlot, 1000, 2);
            const Files files(one.files);
            const DeviceSide side = on_device(one);
            fake::fail(function, after, cudaErrorLaunchFailure);
            ze_error error;
            CHECK(read(one, files, side, nullptr, &ring, &error) == ZE_INTERNAL);
            CHECK(error.errnum == cudaErrorLaunchFailure);
            fake::reset(fake::Copies::kWhenWaited);
            check_arrives(&one, &ring, true);
        }
    }
    // A file's failure is the one that is told, whatever CUDA says while it is being cleaned up.
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(3, kSmallSlot);
    Case one = contiguous(2 * kSmallSlot, 1000, 1);
    Files files(one.files);
    files.truncate_to(0, kSmallSlot + 5);
    const DeviceSide side = on_device(one);
    fake::fail("cudaStreamSynchronize", 0, cudaErrorLaunchFailure);
    ze_error error;
    CHECK(read(one, files, side, nullptr, &ring, &error) == ZE_END_OF_FILE);
    fake::reset(fake::Copies::kAtOnce);
}

TEST(a_bad_row_is_refused_before_anything_happens) {
    fake::reset(fake::Copies::kAtOnce);
    const int64_t bad[][5] = {
        {1, 0, 0, 0, 1}, {0, 0, 1, 0, 1}, {0, 0, 0, 9, 2}, {0, -1, 0, 0, 1}, {0, 0, 0, 0, -1}};
    for (const auto& row : bad) {
        PinnedRing ring(1, kSmallSlot);
        Case one = contiguous(10, 10, 1);
        one.rows.add(row[0], row[1], row[2], row[3], row[4]);
        const Files files(one.files);
        const DeviceSide side = on_device(one);
        ze_error error;
        CHECK(read(one, files, side, nullptr, &ring, &error) == ZE_BAD_TABLE);
        CHECK(error.offset == 1 && side[0]->content() == one.before[0]);
        CHECK(fake::counts().host_allocations == 0);
    }
}

TEST(callers_on_several_threads_take_turns) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(2, kSmallSlot);
    std::vector<Case> cases;
    for (int i = 0; i < 4; ++i) cases.push_back(contiguous(6 * kSmallSlot, 3000, 2));
    std::vector<std::thread> callers;
    for (Case& one : cases) {
        callers.emplace_back([&] {
            const Files files(one.files);
            const DeviceSide side = on_device(one);
            const ze_table table = one.rows.table();
            const Pointers to(side);
            for (int k = 0; k < 5; ++k) {
                ze_error error;
                int64_t got;
                CHECK(read_to_device(table, files.files(), to.buffers(), nullptr,
                                     {2, 0, 0, 0, nullptr, nullptr}, 0, nullptr, &ring, &got,
                                     &error) == ZE_OK);
                CHECK(side[0]->content() == expected(one.rows, one.files, one.before, 0)[0]);
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
}

// --- writes: what a case has as files lies on the device, and what it has before in files -----------------

DeviceSide sources_on_device(const Case& one) {
    DeviceSide side;
    for (const Bytes& content : one.files) side.emplace_back(new DeviceMemory(content, between(0, 300)));
    return side;
}

int32_t write(const Case& one, const DeviceSide& side, const Files& files, Digests* digests, PinnedRing* ring,
              std::vector<uint32_t>* crc32, ze_error* error, int threads = 2, int sync = 0, int device = 0,
              cudaStream_t stream = nullptr) {
    const ze_table table = one.rows.table();
    const ze_files to = files.files();
    const Pointers from(side);
    const ze_options options{threads, one.cast, sync, 0, nullptr, nullptr};
    ze_digest digest{};
    if (digests != nullptr) digest = digests->digest();
    const int32_t code =
        write_from_device(table, from.buffers(), to, digests == nullptr ? nullptr : &digest, options, device,
                          stream, ring, crc32 == nullptr ? nullptr : crc32->data(), error);
    CHECK(fake::counts().in_flight == 0 && fake::counts().events == 0);
    return code;
}

void check_written(Case* one, PinnedRing* ring, bool digested, bool summed, int threads = 2) {
    const Files files(one->before);
    const DeviceSide side = sources_on_device(*one);
    const int descriptors = open_descriptors();
    std::vector<uint32_t> sums(one->rows.size(), 1);
    ze_error error;
    CHECK(write(*one, side, files, digested ? &one->digests : nullptr, ring, summed ? &sums : nullptr, &error,
                threads, static_cast<int>(between(0, 1))) == ZE_OK);
    CHECK(open_descriptors() == descriptors);
    const std::vector<Bytes> want = expected(one->rows, one->files, one->before, one->cast);
    for (size_t i = 0; i < want.size(); ++i) CHECK(files.content(i) == want[i]);
    for (size_t i = 0; i < side.size(); ++i) CHECK(side[i]->content() == one->files[i]);
    if (digested) CHECK(one->digests.totals == expected_totals(one->rows, one->files, one->digests));
    for (size_t i = 0; summed && i < sums.size(); ++i) {
        const uint8_t* made = want[static_cast<size_t>(one->rows.dst[i])].data() + one->rows.dst_offset[i];
        const int64_t nbytes = zeroelastic::converted_bytes(one->rows.nbytes[i], one->cast);
        CHECK(sums[i] == (nbytes == 0 ? 0 : zeroelastic::crc32_of(0, made, nbytes)));
    }
}

TEST(whatever_the_table_the_files_digests_and_checksums_are_right) {
    for (const fake::Copies copies : {fake::Copies::kAtOnce, fake::Copies::kWhenWaited}) {
        fake::reset(copies);
        const int64_t kept = fake::counts().pinned_bytes;  // the library's own ring
        for (int i = 0; i < 60; ++i) {
            const int num_slots = static_cast<int>(between(1, 3));
            PinnedRing ring(num_slots, kSmallSlot);
            Case one =
                make_case(static_cast<int32_t>(between(0, 4)), static_cast<int>(between(0, 60)), 70'000);
            check_written(&one, &ring, i % 2 == 0, i % 3 != 0, static_cast<int>(between(1, 3)));
            CHECK(fake::counts().pinned_bytes <= kept + num_slots * kSmallSlot);
        }
        CHECK(fake::counts().pinned_bytes == kept && fake::counts().device_bytes == 0);
    }
}

TEST(written_rows_longer_than_the_ring_are_cut_inside_no_element) {
    fake::reset(fake::Copies::kWhenWaited);
    for (int32_t cast = ZE_CAST_NONE; cast <= ZE_CAST_F16_F32; ++cast) {
        PinnedRing ring(2, kSmallSlot);
        Case one;
        one.cast = cast;
        const int64_t nbytes = 1'000'000 / 8 * 8, made = zeroelastic::converted_bytes(nbytes, cast);
        one.files.push_back(random_bytes(nbytes + 3));
        one.before.emplace_back(static_cast<size_t>(made + 20), kUntouched);
        one.rows.add(0, 3, 0, 11, nbytes);
        one.digests.add(cast == ZE_CAST_NONE ? 8 : zeroelastic::source_itemsize(cast));
        check_written(&one, &ring, true, true);
    }
}

TEST(copies_of_the_next_slots_are_asked_for_before_one_is_written) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(3, kSmallSlot);
    Case one = contiguous(10 * kSmallSlot, 10 * kSmallSlot, 1);
    const Files files(one.before);
    const DeviceSide side = sources_on_device(one);
    // The file is gone when the first slot is to be written: by then all three have been asked for.
    Files gone(one.before);
    gone.remove(0);
    ze_error error;
    CHECK(write(one, side, gone, nullptr, &ring, nullptr, &error) == ZE_OPEN_FAILED);
    CHECK(error.side == ZE_DESTINATION && error.file == 0 && error.errnum == ENOENT);
    CHECK(fake::counts().async_copies == 3);
    fake::reset(fake::Copies::kWhenWaited);
    CHECK(write(one, side, files, nullptr, &ring, nullptr, &error) == ZE_OK);
    CHECK(files.content(0) == one.files[0]);
    CHECK(fake::counts().async_copies <= 11);  // 10 slots, of which each is short by its misalignment
}

TEST(a_write_uses_another_device_and_stream_and_restores_the_callers) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(2, kSmallSlot);
    cudaStream_t stream;
    CHECK(cudaSetDevice(1) == cudaSuccess && cudaStreamCreate(&stream) == cudaSuccess);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    for (const int device : {1, 0}) {
        Case one = contiguous(5 * kSmallSlot, 1000, 2);
        const Files files(one.before);
        const DeviceSide side = sources_on_device(one);
        ze_error error;
        CHECK(write(one, side, files, nullptr, &ring, nullptr, &error, 1, 0, device,
                    device == 1 ? stream : nullptr) == ZE_OK);
        CHECK(files.content(0) == expected(one.rows, one.files, one.before, one.cast)[0]);
        int now = -1;
        CHECK(cudaGetDevice(&now) == cudaSuccess && now == 0);
    }
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST(every_failure_of_cuda_in_a_write_is_reported_with_nothing_left_in_flight) {
    for (const char* function : {"cudaHostAlloc", "cudaMemcpyAsync", "cudaEventCreateWithFlags",
                                 "cudaEventRecord", "cudaEventSynchronize", "cudaStreamSynchronize"}) {
        for (int after = 0; after < 3; ++after) {
            if (after > 0 && std::string(function) == "cudaStreamSynchronize") continue;
            fake::reset(fake::Copies::kWhenWaited);
            PinnedRing ring(3, kSmallSlot);
            Case one = contiguous(10 * kSmallSlot, 1000, 2);
            const Files files(one.before);
            const DeviceSide side = sources_on_device(one);
            const int descriptors = open_descriptors();
            fake::fail(function, after, cudaErrorLaunchFailure);
            ze_error error;
            CHECK(write(one, side, files, nullptr, &ring, nullptr, &error) == ZE_INTERNAL);
            CHECK(error.errnum == cudaErrorLaunchFailure && open_descriptors() == descriptors);
            fake::reset(fake::Copies::kWhenWaited);
            check_written(&one, &ring, true, true);
        }
    }
}

TEST(a_file_is_flushed_once_after_its_last_row_and_a_failure_of_that_is_told) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(2, kSmallSlot);
    Case one = contiguous(7 * kSmallSlot, 7 * kSmallSlot, 1);
    one.before.emplace_back(8, kUntouched);
    one.rows.add(0, 0, 1, 0, 8);
    const Files files(one.before);
    const DeviceSide side = sources_on_device(one);
    ze_error error;
    for (const int sync : {0, 1}) {
        flushes = 0;
        CHECK(write(one, side, files, nullptr, &ring, nullptr, &error, 2, sync) == ZE_OK);
        CHECK(flushes == 2 * sync);
    }
    fail_flush = 2;
    CHECK(write(one, side, files, nullptr, &ring, nullptr, &error, 2, 1) == ZE_SYNC_FAILED);
    CHECK(error.side == ZE_DESTINATION && error.file == 1 && error.errnum == EIO);
    fail_flush = 0;
}

TEST(a_full_disk_is_named_with_the_byte) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(2, kSmallSlot);
    const Case one = contiguous(3 * kSmallSlot, 3 * kSmallSlot, 1);
    const DeviceSide side = sources_on_device(one);
    const char* path = "/dev/full";
    const ze_table table = one.rows.table();
    const Pointers from(side);
    ze_error error;
    CHECK(write_from_device(table, from.buffers(), {1, &path}, nullptr, {1, 0, 0, 0, nullptr, nullptr}, 0,
                            nullptr, &ring, nullptr, &error) == ZE_WRITE_FAILED);
    CHECK(error.side == ZE_DESTINATION && error.errnum == ENOSPC && error.offset == 0);
    CHECK(fake::counts().in_flight == 0 && fake::counts().events == 0);
}

TEST(a_bad_row_is_refused_before_anything_is_written) {
    fake::reset(fake::Copies::kAtOnce);
    const int64_t bad[][5] = {
        {1, 0, 0, 0, 1}, {0, 0, 1, 0, 1}, {0, 9, 0, 0, 2}, {0, 0, 0, -1, 1}, {0, 0, 0, 0, -1}};
    for (const auto& row : bad) {
        PinnedRing ring(1, kSmallSlot);
        Case one = contiguous(10, 10, 1);
        one.rows.add(row[0], row[1], row[2], row[3], row[4]);
        const Files files(one.before);
        const DeviceSide side = sources_on_device(one);
        ze_error error;
        CHECK(write(one, side, files, nullptr, &ring, nullptr, &error) == ZE_BAD_TABLE);
        CHECK(error.offset == 1 && files.content(0) == one.before[0]);
        CHECK(fake::counts().host_allocations == 0);
    }
}

TEST(readers_and_writers_take_turns_with_the_ring) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(2, kSmallSlot);
    std::vector<Case> cases;
    for (int i = 0; i < 4; ++i) cases.push_back(contiguous(6 * kSmallSlot, 3000, 2));
    std::vector<std::thread> callers;
    for (size_t i = 0; i < cases.size(); ++i) {
        callers.emplace_back([&, i] {
            const Case& one = cases[i];
            const Bytes want = expected(one.rows, one.files, one.before, 0)[0];
            const Files from(one.files), to(one.before);
            DeviceSide sources, targets;
            for (const Bytes& content : one.files) sources.emplace_back(new DeviceMemory(content, 0));
            for (const Bytes& content : one.before) targets.emplace_back(new DeviceMemory(content, 0));
            const ze_table table = one.rows.table();
            const Pointers src(sources), dst(targets);
            const ze_options options{2, 0, 0, 0, nullptr, nullptr};
            for (int k = 0; k < 5; ++k) {
                ze_error error;
                int64_t got;
                if (i % 2 == 0) {
                    CHECK(read_to_device(table, from.files(), dst.buffers(), nullptr, options, 0, nullptr,
                                         &ring, &got, &error) == ZE_OK);
                    CHECK(targets[0]->content() == want);
                } else {
                    CHECK(write_from_device(table, src.buffers(), to.files(), nullptr, options, 0, nullptr,
                                            &ring, nullptr, &error) == ZE_OK);
                    CHECK(to.content(0) == want);
                }
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
}

TEST(sums_on_the_device_are_those_of_the_host) {
    fake::reset(fake::Copies::kWhenWaited);
    for (int i = 0; i < 20; ++i) {
        Case one = make_case(ZE_CAST_NONE, static_cast<int>(between(0, 40)), 5'000);
        const DeviceSide side = sources_on_device(one);
        const Pointers from(side);
        const ze_buffers src = from.buffers();
        ze_table table = one.rows.table();
        table.dst = table.dst_offset = nullptr;
        const ze_digest digest = one.digests.digest();
        ze_error error;
        CHECK(ze_cuda_sum_segments(&table, &src, &digest, 0, nullptr, &error) == ZE_OK);
        CHECK(one.digests.totals == expected_totals(one.rows, one.files, one.digests));
        CHECK(ze_cuda_sum_segments(&table, &src, nullptr, 0, nullptr, &error) == ZE_BAD_TABLE);
        fake::fail("cudaLaunchKernel", 0, cudaErrorLaunchFailure);
        const bool launches =
            std::any_of(one.rows.nbytes.begin(), one.rows.nbytes.end(), [](int64_t n) { return n > 0; });
        CHECK(ze_cuda_sum_segments(&table, &src, &digest, 0, nullptr, &error) ==
              (launches ? ZE_INTERNAL : ZE_OK));
        fake::reset(fake::Copies::kWhenWaited);
    }
    CHECK(fake::counts().device_bytes == 0);
}

TEST(rows_of_more_blocks_than_a_task_takes_are_summed_whole) {
    fake::reset(fake::Copies::kAtOnce);
    for (const int64_t itemsize : {1, 2, 4, 8}) {
        for (const int64_t start : {0, 1023, 5001}) {
            Case one;
            const int64_t count = 40'000 + start % 7;
            one.files.push_back(random_bytes(count * itemsize + 3));
            one.rows.add(0, 3 * (start % 2), 0, 0, count * itemsize);
            one.digests.add(itemsize);
            one.digests.start.back() = start;
            const DeviceSide side = sources_on_device(one);
            const Pointers from(side);
            const ze_buffers src = from.buffers();
            ze_table table = one.rows.table();
            table.dst = table.dst_offset = nullptr;
            const ze_digest digest = one.digests.digest();
            ze_error error;
            CHECK(ze_cuda_sum_segments(&table, &src, &digest, 0, nullptr, &error) == ZE_OK);
            CHECK(one.digests.totals == expected_totals(one.rows, one.files, one.digests));
        }
    }
}

// The control: what the tests above rely on.
TEST(the_fake_shows_memory_that_is_used_again_too_early) {
    fake::reset(fake::Copies::kWhenWaited);
    void* pinned = nullptr;
    CHECK(cudaHostAlloc(&pinned, 8, cudaHostAllocPortable) == cudaSuccess);
    const DeviceMemory memory(Bytes(8, kUntouched), 0);
    std::memset(pinned, 1, 8);
    CHECK(cudaMemcpyAsync(memory.data(), pinned, 8, cudaMemcpyHostToDevice, nullptr) == cudaSuccess);
    std::memset(pinned, 2, 8);
    CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);
    CHECK(memory.content() == Bytes(8, 2));
    Bytes pageable(8);
    CHECK(cudaMemcpyAsync(memory.data(), pageable.data(), 8, cudaMemcpyHostToDevice, nullptr) ==
          cudaErrorInvalidValue);
    CHECK(cudaFreeHost(pinned) == cudaSuccess);
}

}  // namespace

int main() {
    CHECK(ze_abi_version() == ZE_ABI_VERSION);
    for (const Test& test : tests()) {
        std::printf("%s\n", test.name);
        std::fflush(stdout);
        test.run();
    }
    std::printf("%zu tests passed\n", tests().size());
    return 0;
}
