// Files into the memory of the fake device: the ring, its slots and events, splitting, and every failure.

#include <cerrno>
#include <numeric>
#include <thread>

#include "../../crc32.h"
#include "../../cuda/zeroelastic_cuda.h"
#include "file_cases.h"

namespace {

using zeroelastic::PinnedRing;
using zeroelastic::read_to_device;

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
    std::vector<uint32_t> sums(one.rows.nbytes.size(), 1);
    uint32_t* const crc32 = threads == 1 ? nullptr : sums.data();
    const int32_t code = read_to_device(table, from, buffers, digests == nullptr ? nullptr : &digest, options,
                                        device, stream, ring, crc32, &got, error);
    for (size_t i = 0; code == ZE_OK && crc32 != nullptr && i < sums.size(); ++i) {
        const unsigned char* row =
            one.files[static_cast<size_t>(one.rows.src[i])].data() + one.rows.src_offset[i];
        CHECK(sums[i] == zeroelastic::crc32_of(0, row, one.rows.nbytes[i]));
    }
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
                         0, nullptr, &ring, nullptr, &got, &error) == ZE_OK);
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
        CHECK(ze_cuda_read_segments(&table, &from, &to, nullptr, &options, 0, nullptr, nullptr, &got,
                                    &error) == ZE_OK);
        CHECK(got == total && memory.data()[0] == 1 && memory.data()[total - 1] == 0);
        CHECK(fake::counts().pinned_bytes == (int64_t{48} << 20) && fake::counts().host_allocations == 3);
    }
}

TEST(another_device_and_stream_are_used_and_the_callers_device_is_restored) {
    fake::reset(fake::Copies::kWhenWaited);
    PinnedRing ring(2, kSmallSlot);
    on_every_device([&](int device, cudaStream_t stream) {
        Case one = contiguous(5 * kSmallSlot, 1000, 2);
        const Files files(one.files);
        const DeviceSide side = on_device(one);
        ze_error error;
        CHECK(read(one, files, side, nullptr, &ring, &error, 1, device, stream) == ZE_OK);
        CHECK(side[0]->content() == expected(one.rows, one.files, one.before, one.cast)[0]);
    });
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
    with_every_failure([] {
        PinnedRing ring(3, kSmallSlot);
        Case one = contiguous(10 * kSmallSlot, 1000, 2);
        const Files files(one.files);
        const DeviceSide side = on_device(one);
        ze_error error;
        CHECK(read(one, files, side, nullptr, &ring, &error) == ZE_INTERNAL);
        CHECK(error.errnum == cudaErrorLaunchFailure);
        fake::reset(fake::Copies::kWhenWaited);
        check_arrives(&one, &ring, true);
    });
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
                                     {2, 0, 0, 0, nullptr, nullptr}, 0, nullptr, &ring, nullptr, &got,
                                     &error) == ZE_OK);
                CHECK(side[0]->content() == expected(one.rows, one.files, one.before, 0)[0]);
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
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
