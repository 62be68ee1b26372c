// memory -> digests and checksums, in one pass over it.

#include <vector>

#include "checksums.h"
#include "operations.h"
#include "table.h"

namespace zeroelastic {
namespace {

constexpr int64_t kUnitBytes = int64_t{16} << 20;
// What is digested comes to the first-level cache in pieces of this size, where its checksum is made of it.
constexpr int64_t kCachedBytes = int64_t{16} << 10;

}  // namespace

int32_t sum_segments(const ze_table& rows, const ze_buffers& src, const ze_digest* digest,
                     const ze_options& options, uint32_t* crc32, ze_error* error) {
    if (options.cast != ZE_CAST_NONE) {
        *error = failure(ZE_BAD_TABLE, 0, ZE_SOURCE, -1, -1);
        return error->code;
    }
    const ze_table table{rows.num_rows, rows.src, rows.src_offset, nullptr, nullptr, rows.nbytes};
    if (!check_table(table, src.count, src.nbytes, 0, nullptr, digest, options.cast, error)) {
        return error->code;
    }
    const std::vector<int64_t> order;
    const std::vector<Unit> units =
        make_units(table, order, nullptr, choose_unit_bytes(total_bytes(table), options.threads, kUnitBytes));
    Checksums checksums(table, options.cast, crc32, units.size());
    Progress progress(options);
    const auto work = [&](int, size_t index, ze_error* reason) {
        Checksums::OfUnit sums(&checksums, index);
        Pieces pieces(table, order, units[index]);
        Piece piece;
        while (pieces.peek(kCachedBytes, &piece)) {
            const char* data = static_cast<const char*>(src.data[table.src[piece.row]]) +
                               table.src_offset[piece.row] + piece.within;
            sums.add_digested(digest, piece, data);
            pieces.take(piece);
            if (!progress.add(piece.nbytes, reason)) return false;
        }
        return true;
    };
    const int32_t code = run_units(units.size(), options.threads, &progress, error, work);
    if (code != ZE_OK) return code;
    checksums.join();
    return progress.finish(error) ? ZE_OK : error->code;
}

}  // namespace zeroelastic
