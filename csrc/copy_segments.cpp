// memory -> memory: flatten, unflatten and repartition.

#include <mutex>
#include <vector>

#include "checksums.h"
#include "copy_rows.h"
#include "operations.h"
#include "table.h"

namespace zeroelastic {
namespace {

constexpr int64_t kUnitBytes = int64_t{16} << 20;

}  // namespace

int32_t copy_segments(const ze_table& table, const ze_buffers& src, const ze_buffers& dst,
                      const ze_digest* digest, const ze_options& options, uint32_t* crc32, ze_error* error) {
    if (!check_table(table, src.count, src.nbytes, dst.count, dst.nbytes, digest, options.cast, error,
                     options.threads)) {
        return error->code;
    }
    const int64_t total = total_bytes(table);
    const std::vector<int64_t> order;
    const std::vector<Unit> units =
        make_units(table, order, nullptr, choose_unit_bytes(total, options.threads, kUnitBytes));
    std::mutex totals;
    const Copy copy{table, &src, dst, digest, options.cast, nullptr, ZE_CAST_NONE, true, &totals};
    Progress nobody{ze_options{}};
    Checksums checksums(table, ZE_CAST_NONE, crc32, units.size());
    const int32_t code =
        run_units(units.size(), options.threads, &nobody, error, [&](int, size_t index, ze_error*) {
            Pieces pieces(table, order, units[index]);
            Checksums::OfUnit own(&checksums, index);
            copy_rows(copy, &pieces, total, &own);
            return true;
        });
    if (code == ZE_OK) checksums.join();
    return code;
}

}  // namespace zeroelastic
