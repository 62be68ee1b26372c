// Device buffers to device buffers: copy, conversion and digest of many rows in one launch.
//
// A row is cut into chunks of a few KiB, and a chunk is done by one warp. The plan on the device is the table
// of the rows and the row of each chunk; where a chunk lies in its row is arithmetic. A grid that fills the
// device once takes the chunks in strides, so thousands of short rows cost no more launches than one long
// row.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "../cast.h"
#include "../table.h"
#include "digests.cuh"
#include "on_device.h"
#include "zeroelastic_cuda.h"

namespace {

using namespace zeroelastic::gpu;

// As many blocks fit a multiprocessor as have no registers spilled.
template <int kCast, bool kSums>
__global__ void __launch_bounds__(kThreads, kSums ? 4 : 6) run_chunks(Launch launch) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const uint32_t begin = blockIdx.x * launch.spacing;
    const uint32_t end = min(begin + launch.span, launch.num_chunks);
    uint32_t number = begin + threadIdx.x / kWarp;
    uint32_t row_number = number < end ? row_of_chunk(launch, number) : 0;
    __shared__ uint64_t weights[kSums ? kTable : 1];
    if (kSums) {
        prefetch(launch.rows + row_number);
        make_weights<1>(weights);
    }
    RunningSum sum(launch.totals);
    while (number < end) {
        const Row row = launch.rows[row_number];
        const Chunk chunk = chunk_of<kCast, kSums>(row, number);
        const uint32_t next = number + launch.step;
        row_number = next < end ? row_of_chunk(launch, next) : row_number;
        if (kSums) {
            if (launch.row_of == nullptr) prefetch(launch.rows + row_number);
            sum.add(row.stream, convert_and_sum<kCast>(chunk, row, weights + 1, lane), lane);
        } else {
            convert_chunk<kCast>(chunk, lane);
        }
        number = next;
    }
    if (kSums) sum.flush(lane);
}

using Kernel = void (*)(Launch);

template <bool kSums>
Kernel kernel_of(int32_t cast) {
    switch (cast) {
        case ZE_CAST_F32_BF16:
            return run_chunks<ZE_CAST_F32_BF16, kSums>;
        case ZE_CAST_F32_F16:
            return run_chunks<ZE_CAST_F32_F16, kSums>;
        case ZE_CAST_BF16_F32:
            return run_chunks<ZE_CAST_BF16_F32, kSums>;
        case ZE_CAST_F16_F32:
            return run_chunks<ZE_CAST_F16_F32, kSums>;
        default:
            return run_chunks<ZE_CAST_NONE, kSums>;
    }
}

int32_t fail(ze_code code, int errnum, int64_t row, ze_error* error) {
    *error = {code, errnum, ZE_SOURCE, 0, -1, row};
    return code;
}

// Adds a row as kernels take it, and its chunks. Copies are cut where a line of the destination begins, and
// with a digest where a block of it does.
template <bool kSums>
void add_chunks(Row row, int32_t cast, std::vector<Row>* rows, std::vector<uint32_t>* row_of) {
    const int64_t each = chunk_bytes<kSums>(row.log_itemsize);
    int64_t first = each;
    if (kSums) {
        first -= (row.start % kBlock) << row.log_itemsize;
    } else {
        const int64_t over = static_cast<int64_t>(row.dst % 128) / destination_bytes(cast);
        first -= over * source_bytes(cast);
    }
    if (row.nbytes == 0) return;
    row.first_bytes = static_cast<uint32_t>(first);
    row.first_chunk = static_cast<uint32_t>(row_of->size());
    const int64_t behind = std::max<int64_t>(row.nbytes - first, 0);
    const int64_t chunks = 1 + (behind + each - 1) / each;
    row_of->insert(row_of->end(), static_cast<size_t>(chunks), static_cast<uint32_t>(rows->size()));
    rows->push_back(row);
}

}  // namespace

struct ze_cuda_plan {
    int device = 0;
    int64_t num_streams = 0;
    char* memory = nullptr;                 // rows, the row of each chunk, and totals that are the plan's own
    unsigned long long* totals = nullptr;   // on the device
    unsigned long long* results = nullptr;  // pinned, where the totals are the plan's own
    Kernel kernel = nullptr;
    unsigned blocks = 0;
    Launch launch{};

    ~ze_cuda_plan() {
        const zeroelastic::OnDevice on(device);
        cudaFree(memory);
        cudaFreeHost(results);
    }
};

namespace {

template <bool kSums>
int32_t cut_rows(const ze_table& table, const ze_buffers& src, const ze_buffers* dst, const ze_digest* digest,
                 int32_t cast, std::vector<Row>* rows, std::vector<uint32_t>* row_of, ze_error* error) {
    const uint64_t src_size = static_cast<uint64_t>(source_bytes(cast));
    const uint64_t dst_size = static_cast<uint64_t>(destination_bytes(cast));
    rows->reserve(static_cast<size_t>(table.num_rows));
    for (int64_t i = 0; i < table.num_rows; ++i) {
        Row row{};
        row.nbytes = table.nbytes[i];
        row.src =
            reinterpret_cast<uint64_t>(src.data[table.src[i]]) + static_cast<uint64_t>(table.src_offset[i]);
        if (dst != nullptr) {
            row.dst = reinterpret_cast<uint64_t>(dst->data[table.dst[i]]) +
                      static_cast<uint64_t>(table.dst_offset[i]);
        }
        if (digest != nullptr) {
            while (int64_t{1} << row.log_itemsize < digest->itemsize[i]) ++row.log_itemsize;
            row.start = digest->start[i];
            row.stream = static_cast<uint32_t>(digest->stream[i]);
            row.seed = digest->seeds[row.stream];
        }
        // Kernels take whole elements: of the conversion, and of the digest that goes with it.
        if (row.src % src_size != 0 || row.dst % dst_size != 0 ||
            (digest != nullptr && digest->itemsize[i] % static_cast<int64_t>(src_size) != 0)) {
            return fail(ZE_BAD_TABLE, 0, i, error);
        }
        add_chunks<kSums>(row, cast, rows, row_of);
    }
    return ZE_OK;
}

// How blocks share the chunks of a plan. Where only copies are made, a block takes a few chunks of each warp
// that lie side by side, and the device starts the next block where one has ended. With a digest, a block
// makes its weights first, so it takes more; of what is too little for that, and of digests alone, a grid
// that fills the device takes strides.
void share_chunks(int64_t num_chunks, int64_t fitting, ze_cuda_plan* plan) {
    const bool sums = plan->num_streams > 0;
    const int64_t warps = kWarps * fitting;
    const int64_t each = (num_chunks + warps - 1) / warps;
    const int64_t turns = plan->kernel == sum_chunks ? (each + kMostChunks - 1) / kMostChunks : each;
    const int64_t batch = turns == 0 ? 1 : (each + turns - 1) / turns;
    const int64_t rounds = num_chunks / (warps * (sums ? 4 : 8));  // so that each place has 4 or 8 blocks
    Launch& launch = plan->launch;
    launch.num_chunks = static_cast<uint32_t>(num_chunks);
    launch.batch = static_cast<uint32_t>(batch);
    if (plan->kernel == sum_chunks || (sums && rounds < 8)) {
        launch.spacing = static_cast<uint32_t>(kWarps * batch);
        launch.span = launch.num_chunks;
        plan->blocks =
            static_cast<unsigned>(std::min((num_chunks + launch.spacing - 1) / launch.spacing, fitting));
        launch.step = plan->blocks * launch.spacing;
        return;
    }
    launch.spacing = launch.span =
        static_cast<uint32_t>(kWarps * std::max<int64_t>(1, std::min<int64_t>(rounds, sums ? 8 : 4)));
    launch.step = kWarps;
    plan->blocks = static_cast<unsigned>((num_chunks + launch.span - 1) / launch.span);
}

size_t rounded(size_t nbytes) {
    return (nbytes + 255) / 256 * 256;
}

// Puts a plan on its device: one allocation, and one upload of each of its tables.
cudaError_t upload(const std::vector<Row>& rows, const std::vector<uint32_t>& row_of, bool own_totals,
                   ze_cuda_plan* plan) {
    const zeroelastic::OnDevice on(plan->device);
    int processors = 0;
    int per_processor = 0;
    cudaError_t status = on.status();
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, plan->device);
    }
    if (status == cudaSuccess) {
        status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, plan->kernel, kThreads, 0);
    }
    const int64_t num_chunks = static_cast<int64_t>(row_of.size());
    const bool one_chunk_each = rows.size() == row_of.size();
    const size_t rows_bytes = rounded(rows.size() * sizeof(Row));
    const size_t row_of_bytes = one_chunk_each ? 0 : rounded(row_of.size() * sizeof(uint32_t));
    const size_t totals_bytes = own_totals ? static_cast<size_t>(plan->num_streams) * sizeof(uint64_t) : 0;
    if (status == cudaSuccess && rows_bytes + row_of_bytes + totals_bytes > 0) {
        status =
            cudaMalloc(reinterpret_cast<void**>(&plan->memory), rows_bytes + row_of_bytes + totals_bytes);
    }
    if (status == cudaSuccess && totals_bytes > 0) {
        status = cudaHostAlloc(reinterpret_cast<void**>(&plan->results), totals_bytes, cudaHostAllocPortable);
        plan->totals = reinterpret_cast<unsigned long long*>(plan->memory + rows_bytes + row_of_bytes);
    }
    if (status == cudaSuccess && num_chunks > 0) {
        status = cudaMemcpy(plan->memory, rows.data(), rows.size() * sizeof(Row), cudaMemcpyHostToDevice);
        if (status == cudaSuccess && row_of_bytes > 0) {
            status = cudaMemcpy(plan->memory + rows_bytes, row_of.data(), row_of.size() * sizeof(uint32_t),
                                cudaMemcpyHostToDevice);
        }
        // That returns when the host's memory is free again. A stream of the caller's need not wait for the
        // default one, so the upload must have ended before there is a plan to run.
        if (status == cudaSuccess) status = cudaStreamSynchronize(nullptr);
    }
    if (status != cudaSuccess) return status;
    plan->launch.rows = reinterpret_cast<const Row*>(plan->memory);
    if (row_of_bytes > 0) plan->launch.row_of = reinterpret_cast<const uint32_t*>(plan->memory + rows_bytes);
    plan->launch.totals = plan->totals;
    share_chunks(num_chunks, processors * std::max(per_processor, 1), plan);
    return cudaSuccess;
}

int32_t make_plan(const ze_table& table, const ze_buffers& src, const ze_buffers* dst,
                  const ze_digest* digest, int32_t cast, int32_t device, std::unique_ptr<ze_cuda_plan>* plan,
                  ze_error* error) {
    constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
    // What check_table does not know: a digest alone converts nothing; streams and rows are counted in 32
    // bits.
    if ((dst == nullptr && (digest == nullptr || cast != ZE_CAST_NONE)) || table.num_rows > kMost ||
        (digest != nullptr && digest->num_streams >= kMost)) {
        return fail(ZE_BAD_TABLE, 0, -1, error);
    }
    ze_table checked = table;
    if (dst == nullptr) checked.dst = nullptr;
    if (!zeroelastic::check_table(checked, src.count, src.nbytes, dst == nullptr ? 0 : dst->count,
                                  dst == nullptr ? nullptr : dst->nbytes, digest, cast, error)) {
        return error->code;
    }
    // Chunks are counted in 32 bits, with room for a number that is a stride behind the last one.
    if (zeroelastic::total_bytes(table) / kChunkBytes + 2 * table.num_rows > (int64_t{1} << 31)) {
        return fail(ZE_BAD_TABLE, 0, -1, error);
    }
    std::unique_ptr<ze_cuda_plan> made(new ze_cuda_plan);
    made->device = device;
    std::vector<Row> rows;
    std::vector<uint32_t> row_of;
    int32_t code;
    if (digest == nullptr) {
        made->kernel = kernel_of<false>(cast);
        code = cut_rows<false>(table, src, dst, digest, cast, &rows, &row_of, error);
    } else {
        made->kernel = dst == nullptr ? sum_chunks : kernel_of<true>(cast);
        code = cut_rows<true>(table, src, dst, digest, cast, &rows, &row_of, error);
    }
    if (code != ZE_OK) return code;
    if (digest != nullptr) {
        made->num_streams = digest->num_streams;
        made->totals = reinterpret_cast<unsigned long long*>(digest->totals);
    }
    const cudaError_t status =
        upload(rows, row_of, digest != nullptr && digest->totals == nullptr, made.get());
    if (status != cudaSuccess) return fail(ZE_INTERNAL, status, -1, error);
    *plan = std::move(made);
    return ZE_OK;
}

// Enqueues a plan; its own totals begin at zero each time.
cudaError_t run_plan(const ze_cuda_plan& plan, cudaStream_t stream) {
    if (plan.results != nullptr) {
        const cudaError_t status =
            cudaMemsetAsync(plan.totals, 0, static_cast<size_t>(plan.num_streams) * sizeof(uint64_t), stream);
        if (status != cudaSuccess) return status;
    }
    if (plan.launch.num_chunks == 0) return cudaSuccess;
    Launch launch = plan.launch;
    void* arguments[] = {&launch};
    return cudaLaunchKernel(plan.kernel, dim3(plan.blocks), dim3(kThreads), arguments, 0, stream);
}

}  // namespace

extern "C" {

int32_t ze_abi_version(void) {
    return ZE_ABI_VERSION;
}

#define ZE_TEXT_(x) #x
#define ZE_TEXT(x) ZE_TEXT_(x)

const char* ze_build_info(void) {
    return "nvcc " ZE_TEXT(__CUDACC_VER_MAJOR__) "." ZE_TEXT(__CUDACC_VER_MINOR__) ", sm_80, sm_90 and PTX";
}

const char* ze_cuda_error_text(int32_t errnum) {
    return cudaGetErrorString(static_cast<cudaError_t>(errnum));
}

int32_t ze_cuda_plan_create(const ze_table* table, const ze_buffers* src, const ze_buffers* dst,
                            const ze_digest* digest, int32_t cast, int32_t device, ze_cuda_plan** plan,
                            ze_error* error) {
    *error = ze_error{};
    *plan = nullptr;
    try {
        std::unique_ptr<ze_cuda_plan> made;
        const int32_t code = make_plan(*table, *src, dst, digest, cast, device, &made, error);
        *plan = made.release();
        return code;
    } catch (const std::bad_alloc&) {
        return fail(ZE_NO_MEMORY, 0, -1, error);
    }
}

int32_t ze_cuda_plan_run(const ze_cuda_plan* plan, void* stream, ze_error* error) {
    *error = ze_error{};
    const zeroelastic::OnDevice on(plan->device);
    cudaError_t status = on.status();
    if (status == cudaSuccess) status = run_plan(*plan, static_cast<cudaStream_t>(stream));
    return status == cudaSuccess ? ZE_OK : fail(ZE_INTERNAL, status, -1, error);
}

int32_t ze_cuda_plan_finish(const ze_cuda_plan* plan, void* stream, uint64_t* totals, ze_error* error) {
    *error = ze_error{};
    const zeroelastic::OnDevice on(plan->device);
    const size_t count = plan->results == nullptr ? 0 : static_cast<size_t>(plan->num_streams);
    cudaError_t status = on.status();
    if (status == cudaSuccess && count > 0) {
        status = cudaMemcpyAsync(plan->results, plan->totals, count * sizeof(uint64_t),
                                 cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream));
    }
    if (status == cudaSuccess) status = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) return fail(ZE_INTERNAL, status, -1, error);
    for (size_t i = 0; i < count; ++i) totals[i] += plan->results[i];
    return ZE_OK;
}

void ze_cuda_plan_destroy(ze_cuda_plan* plan) {
    delete plan;
}

}  // extern "C"
