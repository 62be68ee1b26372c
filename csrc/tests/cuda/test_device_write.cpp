// The memory of the fake device into files: the ring, the order of copies and writes, flushes, and every
// failure. What a case has as files lies on the device, and what it has before in files.

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "../../crc32.h"
#include "../direct_writes.h"
#include "file_cases.h"

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
    on_every_device([&](int device, cudaStream_t stream) {
        Case one = contiguous(5 * kSmallSlot, 1000, 2);
        const Files files(one.before);
        const DeviceSide side = sources_on_device(one);
        ze_error error;
        CHECK(write(one, side, files, nullptr, &ring, nullptr, &error, 1, 0, device, stream) == ZE_OK);
        CHECK(files.content(0) == expected(one.rows, one.files, one.before, one.cast)[0]);
    });
}

TEST(every_failure_of_cuda_in_a_write_is_reported_with_nothing_left_in_flight) {
    with_every_failure([] {
        PinnedRing ring(3, kSmallSlot);
        Case one = contiguous(10 * kSmallSlot, 1000, 2);
        const Files files(one.before);
        const DeviceSide side = sources_on_device(one);
        const int descriptors = open_descriptors();
        ze_error error;
        CHECK(write(one, side, files, nullptr, &ring, nullptr, &error) == ZE_INTERNAL);
        CHECK(error.errnum == cudaErrorLaunchFailure && open_descriptors() == descriptors);
        fake::reset(fake::Copies::kWhenWaited);
        check_written(&one, &ring, true, true);
    });
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

TEST(what_is_flushed_goes_past_the_page_cache_from_where_it_is) {
    for (const int64_t first : {64, 4096, 5003}) {
        fake::reset(fake::Copies::kWhenWaited);
        direct_writes::reset();
        PinnedRing ring(2, 16 * kSmallSlot);
        Case one;
        const int64_t nbytes = 70 * kSmallSlot + 40;
        one.files.push_back(random_bytes(nbytes + 24));
        one.before.emplace_back(static_cast<size_t>(nbytes + 2 * first), kUntouched);
        one.rows.add(0, 8, 0, first, nbytes / 2);  // side by side on the device, and not in the file
        one.rows.add(0, 8 + nbytes / 2, 0, 2 * first + nbytes / 2, nbytes - nbytes / 2);
        for (int i = 0; i < 2; ++i) one.digests.add(4);
        check_written(&one, &ring, true, true);
        const Files files(one.before);
        const DeviceSide side = sources_on_device(one);
        ze_error error;
        direct_writes::reset();
        CHECK(write(one, side, files, nullptr, &ring, nullptr, &error, 2, 1) == ZE_OK);
        CHECK(files.content(0) == expected(one.rows, one.files, one.before, one.cast)[0]);
        const int64_t left = direct_writes::possible() ? nbytes - direct_writes::bytes : 0;
        CHECK(0 <= left && left < nbytes / 8);
        for (const int code : {EFAULT, EIO}) {  // what a driver has given out may be no memory to a disk
            direct_writes::reset();
            direct_writes::fails_with = code;
            const bool reported = code == EIO && direct_writes::possible();
            CHECK(write(one, side, files, nullptr, &ring, nullptr, &error, 2, 1) ==
                  (reported ? ZE_WRITE_FAILED : ZE_OK));
        }
        direct_writes::reset();
    }
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
                                         &ring, nullptr, &got, &error) == ZE_OK);
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

}  // namespace
