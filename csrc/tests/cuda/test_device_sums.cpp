// Digests of the memory of the fake device.

#include <algorithm>

#include "../../cuda/zeroelastic_cuda.h"
#include "file_cases.h"

namespace {

// The digests of device memory by a plan that is run once.
int32_t sum_once(const ze_table& table, const ze_buffers& src, ze_digest digest, ze_error* error) {
    uint64_t* totals = digest.totals;
    digest.totals = nullptr;
    ze_cuda_plan* plan = nullptr;
    int32_t code = ze_cuda_plan_create(&table, &src, nullptr, &digest, ZE_CAST_NONE, 0, &plan, error);
    if (code == ZE_OK) code = ze_cuda_plan_run(plan, nullptr, error);
    if (code == ZE_OK) code = ze_cuda_plan_finish(plan, nullptr, totals, error);
    ze_cuda_plan_destroy(plan);
    return code;
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
        CHECK(sum_once(table, src, digest, &error) == ZE_OK);
        CHECK(one.digests.totals == expected_totals(one.rows, one.files, one.digests));
        ze_cuda_plan* plan = nullptr;
        CHECK(ze_cuda_plan_create(&table, &src, nullptr, nullptr, ZE_CAST_NONE, 0, &plan, &error) ==
              ZE_BAD_TABLE);
        fake::fail("cudaLaunchKernel", 0, cudaErrorLaunchFailure);
        const bool launches =
            std::any_of(one.rows.nbytes.begin(), one.rows.nbytes.end(), [](int64_t n) { return n > 0; });
        CHECK(sum_once(table, src, digest, &error) == (launches ? ZE_INTERNAL : ZE_OK));
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
            CHECK(sum_once(table, src, digest, &error) == ZE_OK);
            CHECK(one.digests.totals == expected_totals(one.rows, one.files, one.digests));
        }
    }
}

}  // namespace
