// The kernels of segments.cu on the host, through their C interface: every alignment, conversion and digest.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "../../cuda/zeroelastic_cuda.h"
#include "cases.h"

namespace {

struct Plan {
    ze_cuda_plan* plan = nullptr;
    ~Plan() {
        ze_cuda_plan_destroy(plan);
    }
};

// Runs a table between fake device buffers and compares everything, the bytes around included.
void check_runs(const Rows& rows, const std::vector<Bytes>& src, const std::vector<Bytes>& dst,
                const std::vector<int64_t>& misaligned, Digests* digests, int32_t cast) {
    DeviceSide from_side, to_side;
    for (size_t i = 0; i < src.size(); ++i) from_side.emplace_back(new DeviceMemory(src[i], misaligned[i]));
    for (size_t i = 0; i < dst.size(); ++i) to_side.emplace_back(new DeviceMemory(dst[i], misaligned[i + 1]));
    const Pointers from(from_side), to(to_side);
    const DeviceMemory totals(Bytes(16, 0), 0);
    const ze_table table = rows.table();
    const ze_buffers from_buffers = from.buffers(), to_buffers = to.buffers();
    ze_digest digest{};
    if (digests != nullptr) {
        digest = digests->digest();
        digest.totals = reinterpret_cast<uint64_t*>(totals.data());
    }
    Plan plan;
    ze_error error;
    CHECK(ze_cuda_plan_create(&table, &from_buffers, dst.empty() ? nullptr : &to_buffers,
                              digests == nullptr ? nullptr : &digest, cast, 0, &plan.plan, &error) == ZE_OK);
    CHECK(ze_cuda_plan_run(plan.plan, nullptr, &error) == ZE_OK);
    const std::vector<Bytes> want = dst.empty() ? dst : expected(rows, src, dst, cast);
    for (size_t i = 0; i < dst.size(); ++i) CHECK(to_side[i]->content() == want[i]);
    if (digests != nullptr) {
        std::vector<uint64_t> got(2);
        std::memcpy(got.data(), totals.data(), 16);
        CHECK(got == expected_totals(rows, src, *digests));
    }
}

TEST(every_misalignment_of_both_sides_and_every_kind_of_length) {
    fake::reset(fake::Copies::kAtOnce);
    for (const int64_t length : {1, 2, 15, 16, 17, 33, 511, 512, 530, 2080, 8191, 8192, 8193, 20'001}) {
        Rows rows;
        int64_t s = 0, d = 0;
        for (int64_t shift = 0; shift < 16; ++shift) {
            for (int64_t other = 0; other < 16; ++other) {
                s = (s + 15) / 16 * 16 + shift;
                d = (d + 15) / 16 * 16 + other;
                rows.add(0, s, 0, d, length);
                s += length;
                d += length;
            }
        }
        // Exactly as long as what is used: an access beyond is outside the allocation.
        check_runs(rows, {random_bytes(s)}, {Bytes(static_cast<size_t>(d), kUntouched)}, {0, 0}, nullptr,
                   ZE_CAST_NONE);
    }
}

TEST(random_rows_with_conversions_and_digests) {
    fake::reset(fake::Copies::kAtOnce);
    for (int i = 0; i < 40; ++i) {
        const int32_t cast = i % 5;
        const bool digested = i % 3 == 0;
        const int64_t src_size = cast == ZE_CAST_NONE ? (digested ? int64_t{1} << between(0, 3) : 1)
                                                      : zeroelastic::source_itemsize(cast);
        const int64_t dst_size = cast == ZE_CAST_NONE ? 1 : 6 - src_size;
        const int64_t step = cast == ZE_CAST_NONE ? 1 : src_size;
        Rows rows;
        Digests digests;
        const std::vector<Bytes> src{random_bytes(40'000), random_bytes(1'000)};
        std::vector<int64_t> filled(2);
        for (int64_t row = between(0, 25); row > 0; --row) {
            const int64_t s = between(0, 1), d = between(0, 1);
            const int64_t size = static_cast<int64_t>(src[static_cast<size_t>(s)].size());
            const int64_t offset = between(0, size / step) * step;
            const int64_t wanted =
                between(0, 2) == 0 ? between(0, digested ? 9'000 : 30'000) : between(0, 100);
            const int64_t nbytes = std::min(wanted, size - offset) / src_size * src_size;
            int64_t& end = filled[static_cast<size_t>(d)];
            end += between(0, 9) * dst_size;
            rows.add(s, offset, d, end, nbytes);
            digests.add(src_size);
            end += nbytes / step * dst_size;
        }
        std::vector<Bytes> dst;
        for (const int64_t size : filled) dst.emplace_back(static_cast<size_t>(size + 3), kUntouched);
        const int64_t element = std::max(step, dst_size);
        std::vector<int64_t> misaligned;
        for (int k = 0; k < 3; ++k) misaligned.push_back(between(0, 20) * element);
        check_runs(rows, src, dst, misaligned, digested ? &digests : nullptr, cast);
        if (digested && cast == ZE_CAST_NONE) check_runs(rows, src, {}, misaligned, &digests, cast);
    }
}

TEST(digests_of_elements_at_any_address_and_position) {
    fake::reset(fake::Copies::kAtOnce);
    for (const int64_t itemsize : {1, 2, 4, 8}) {
        Rows rows;
        Digests digests;
        int64_t at = 0;
        for (const int64_t start : {0, 1, 1023, 1024, 5000}) {
            for (const int64_t count : {0, 1, 31, 32, 1023, 1025}) {
                rows.add(0, at, 0, at, count * itemsize);
                digests.add(itemsize);
                digests.start.back() = start;
                at += count * itemsize + 1;
            }
        }
        Bytes data(static_cast<size_t>(at), 0xFF);
        check_runs(rows, {data}, {Bytes(data.size(), kUntouched)}, {0, 0}, &digests, ZE_CAST_NONE);
    }
}

TEST(blocks_that_take_many_chunks_and_grids_that_take_strides_do_all_of_them) {
    fake::reset(fake::Copies::kAtOnce);
    for (const int64_t nbytes : {40'000, 600'000, 3'000'000}) {
        Rows rows;
        Digests digests;
        rows.add(0, 4, 0, 8, nbytes);
        digests.add(4);
        digests.start.back() = 1000;
        const std::vector<Bytes> src{random_bytes(nbytes + 4)};
        const std::vector<Bytes> dst{Bytes(static_cast<size_t>(nbytes + 12), kUntouched)};
        check_runs(rows, src, dst, {0, 0}, nullptr, ZE_CAST_NONE);
        check_runs(rows, src, dst, {0, 0}, &digests, ZE_CAST_NONE);
        check_runs(rows, src, {}, {0, 0}, &digests, ZE_CAST_NONE);
    }
}

TEST(conversions_of_every_exponent_and_of_numbers_where_rounding_turns) {
    fake::reset(fake::Copies::kAtOnce);
    Bytes wide, half;
    for (uint32_t upper = 0; upper < 0x10000; upper += 3) {
        for (const uint32_t lower : {0u, 1u, 0x0FFFu, 0x1000u, 0x1001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
            const uint32_t bits = upper << 16 | lower;
            if ((bits & 0x7FFFFFFF) > 0x7F800000) continue;
            const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&bits);
            wide.insert(wide.end(), bytes, bytes + 4);
        }
    }
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        if ((bits & 0x7FFF) > 0x7C00) continue;  // of float16; in bfloat16 these are numbers
        half.push_back(static_cast<uint8_t>(bits));
        half.push_back(static_cast<uint8_t>(bits >> 8));
    }
    for (const int32_t cast : {ZE_CAST_F32_BF16, ZE_CAST_F32_F16, ZE_CAST_BF16_F32, ZE_CAST_F16_F32}) {
        const Bytes& src = cast == ZE_CAST_F32_BF16 || cast == ZE_CAST_F32_F16 ? wide : half;
        const int64_t nbytes = static_cast<int64_t>(src.size());
        Rows rows;
        rows.add(0, 0, 0, 0, nbytes);
        const Bytes dst(static_cast<size_t>(zeroelastic::converted_bytes(nbytes, cast)), kUntouched);
        for (const int64_t shift : {0, 4, 8, 12}) check_runs(rows, {src}, {dst}, {shift, 0}, nullptr, cast);
    }
}

TEST(bad_tables_and_failures_are_reported) {
    fake::reset(fake::Copies::kAtOnce);
    const DeviceMemory memory(random_bytes(100), 0), other(random_bytes(100), 0);
    void* pointers[] = {memory.data()};
    void* others[] = {other.data()};
    const int64_t size = 100;
    const ze_buffers src{1, pointers, &size}, dst{1, others, &size};
    Plan plan;
    ze_error error;
    const int64_t bad[][5] = {{1, 0, 0, 0, 4},  {0, 0, 1, 0, 4},  {0, 98, 0, 0, 4}, {0, 0, 0, 98, 4},
                              {0, -1, 0, 0, 4}, {0, 0, 0, -1, 4}, {0, 0, 0, 0, -4}};
    for (const auto& row : bad) {
        Rows rows;
        rows.add(0, 0, 0, 0, 4);
        rows.add(row[0], row[1], row[2], row[3], row[4]);
        const ze_table table = rows.table();
        CHECK(ze_cuda_plan_create(&table, &src, &dst, nullptr, 0, 0, &plan.plan, &error) == ZE_BAD_TABLE);
        CHECK(error.offset == 1 && plan.plan == nullptr);
    }
    const int64_t most = std::numeric_limits<int64_t>::max();
    for (const int64_t start : {int64_t{-1}, most - 3, most}) {  // the last element has no position
        Rows digested;
        Digests digests;
        digested.add(0, 0, 0, 0, 4);
        digests.add(1);
        digests.start = {start};
        const ze_table table = digested.table();
        const ze_digest digest = digests.digest();
        CHECK(ze_cuda_plan_create(&table, &src, nullptr, &digest, 0, 0, &plan.plan, &error) == ZE_BAD_TABLE);
        CHECK(error.offset == 0 && plan.plan == nullptr);
        ze_digest too_many = digest;
        too_many.num_streams = int64_t{1} << 33;
        CHECK(ze_cuda_plan_create(&table, &src, nullptr, &too_many, 0, 0, &plan.plan, &error) ==
              ZE_BAD_TABLE);
    }
    Rows rows;
    rows.add(0, 2, 0, 0, 8);  // not aligned to the elements of a conversion
    const ze_table table = rows.table();
    CHECK(ze_cuda_plan_create(&table, &src, &dst, nullptr, ZE_CAST_F32_BF16, 0, &plan.plan, &error) ==
          ZE_BAD_TABLE);
    for (const char* function : {"cudaMalloc", "cudaMemcpy", "cudaLaunchKernel"}) {
        fake::fail(function, 0, cudaErrorMemoryAllocation);
        int32_t code = ze_cuda_plan_create(&table, &src, &dst, nullptr, 0, 0, &plan.plan, &error);
        if (code == ZE_OK) code = ze_cuda_plan_run(plan.plan, nullptr, &error);
        CHECK(code == ZE_INTERNAL && error.errnum == cudaErrorMemoryAllocation);
        ze_cuda_plan_destroy(plan.plan);
        plan.plan = nullptr;
        fake::reset(fake::Copies::kAtOnce);
    }
}

TEST(a_plan_with_totals_of_its_own_gives_them_for_each_run) {
    const Bytes data = random_bytes(5000);
    Rows rows;
    Digests digests;
    rows.add(0, 3, 0, 8, 4000);
    digests.add(8);
    for (const char* failing : {"", "cudaMalloc", "cudaHostAlloc", "cudaMemcpy", "cudaMemsetAsync",
                                "cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"}) {
        for (int after = 0; after < 3; ++after) {
            fake::reset(fake::Copies::kWhenWaited);
            const DeviceMemory src(data, 0), dst(Bytes(5000, kUntouched), 5);
            const fake::Counts before = fake::counts();
            void *from[] = {src.data()}, *to[] = {dst.data()};
            const int64_t size = 5000;
            const ze_table table = rows.table();
            const ze_buffers from_buffers{1, from, &size}, to_buffers{1, to, &size};
            digests.totals = {1, 1};  // added to
            ze_digest digest = digests.digest();
            digest.totals = nullptr;
            fake::fail(failing, after, cudaErrorLaunchFailure);
            ze_error error;
            int32_t code = ZE_OK;
            {
                Plan plan;
                code = ze_cuda_plan_create(&table, &from_buffers, &to_buffers, &digest, ZE_CAST_NONE, 0,
                                           &plan.plan, &error);
                for (int run = 0; run < 2 && code == ZE_OK; ++run) {
                    code = ze_cuda_plan_run(plan.plan, nullptr, &error);
                    if (code != ZE_OK) break;
                    code = ze_cuda_plan_finish(plan.plan, nullptr, digests.totals.data(), &error);
                }
            }
            CHECK(fake::counts().device_bytes == before.device_bytes);
            CHECK(fake::counts().pinned_bytes == before.pinned_bytes);
            if (code != ZE_OK) {
                CHECK(code == ZE_INTERNAL && error.errnum == cudaErrorLaunchFailure && *failing != 0);
                continue;
            }
            CHECK(*failing == 0 || after > 0);
            CHECK(dst.content() == expected(rows, {data}, {Bytes(5000, kUntouched)}, ZE_CAST_NONE)[0]);
            std::vector<uint64_t> want = expected_totals(rows, {data}, digests);
            for (uint64_t& total : want) total = 1 + 2 * total;
            CHECK(digests.totals == want);
        }
    }
    fake::reset(fake::Copies::kAtOnce);
}

TEST(digests_of_copies_between_any_addresses_cross_blocks_and_streams) {
    fake::reset(fake::Copies::kAtOnce);
    for (const int64_t itemsize : {1, 2, 4, 8}) {
        for (const int64_t shift : {int64_t{0}, itemsize, int64_t{4}, int64_t{6}, int64_t{9}}) {
            Rows rows;
            Digests digests;
            int64_t s = shift, d = itemsize == 4 ? 12 : shift / 2;
            for (const int64_t count : {5000, 3, 1024, 0, 700, 2049}) {
                rows.add(0, s, 0, d, count * itemsize);
                digests.add(itemsize);
                digests.start.back() = count % 1000 * 3;
                s += count * itemsize;
                d += count * itemsize + (count % 2) * itemsize;
            }
            check_runs(rows, {random_bytes(s)}, {Bytes(static_cast<size_t>(d), kUntouched)}, {0, 0}, &digests,
                       ZE_CAST_NONE);
        }
    }
}

}  // namespace
