// memory -> memory: flatten, unflatten and repartition, with a conversion and a digest in the same pass.

#include <algorithm>
#include <vector>

#include "cast.h"
#include "copy.h"
#include "cpu.h"
#include "operations.h"
#include "table.h"

namespace zeroelastic {
namespace {

constexpr int64_t kUnitBytes = int64_t{16} << 20;
// What is digested, too, comes to the first-level cache in pieces of this size, and is copied from there.
constexpr int64_t kCachedBytes = int64_t{16} << 10;
// How many rows ahead the beginning of a row is fetched: the processor cannot guess where it is.
constexpr int64_t kRowsAhead = 4;

void prefetch_row(const ze_table& table, const ze_buffers& src, int64_t row) {
    if (row >= table.num_rows) return;
    __builtin_prefetch(static_cast<const char*>(src.data[table.src[row]]) + table.src_offset[row]);
}

}  // namespace

int32_t copy_segments(const ze_table& table, const ze_buffers& src, const ze_buffers& dst,
                      const ze_digest* digest, const ze_options& options, ze_error* error) {
    const int32_t cast = options.cast;
    if (!check_table(table, src.count, src.nbytes, dst.count, dst.nbytes, digest, cast, error))
        return error->code;
    const int64_t total = total_bytes(table);
    // What fits the cache is better left there for whoever reads it next.
    const bool streaming = total > last_level_cache_bytes();
    const std::vector<int64_t> order;
    const std::vector<Unit> units =
        make_units(table, order, nullptr, choose_unit_bytes(total, options.threads, kUnitBytes));
    return run_units(units.size(), options.threads, error, [&](size_t index, ze_error*) {
        Pieces pieces(table, order, units[index]);
        const int64_t most = digest == nullptr ? kUnitBytes * 2 : kCachedBytes;
        Piece piece;
        while (pieces.peek(most, &piece)) {
            if (piece.within == 0) prefetch_row(table, src, piece.row + kRowsAhead);
            const char* from = static_cast<const char*>(src.data[table.src[piece.row]]) +
                               table.src_offset[piece.row] + piece.within;
            char* to = static_cast<char*>(dst.data[table.dst[piece.row]]) + table.dst_offset[piece.row] +
                       converted_bytes(piece.within, cast);
            if (digest != nullptr) add_digest(*digest, piece, from);
            if (cast == ZE_CAST_NONE) {
                copy_bytes(to, from, piece.nbytes, streaming);
            } else {
                cast_elements(cast, from, to, piece.nbytes / source_itemsize(cast), streaming);
            }
            pieces.take(piece);
        }
        if (streaming) end_streaming();
        return true;
    });
}

}  // namespace zeroelastic
