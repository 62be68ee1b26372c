// Rows of a table copied to memory, converted and digested in the same pass.

#ifndef ZEROELASTIC_COPY_ROWS_H_
#define ZEROELASTIC_COPY_ROWS_H_

#include <cstdint>
#include <mutex>

#include "checksums.h"
#include "table.h"
#include "zeroelastic.h"

namespace zeroelastic {

// What is copied from `buffers`. `copies` and `copies_cast` as in ze_options. Rows follow each other as in
// the table if `in_order`.
struct Copy {
    const ze_table& table;
    const ze_buffers* buffers;
    const ze_buffers& dst;
    const ze_digest* digest;
    int32_t cast;
    const ze_buffers* copies;
    int32_t copies_cast;
    bool in_order;
    std::mutex* totals;  // of the digests

    const char* source(int64_t row) const {
        const int64_t offset = table.src_offset[row];
        return static_cast<const char*>(buffers->data[table.src[row]]) + offset;
    }

    char* target(int64_t row) const {
        return static_cast<char*>(dst.data[table.dst[row]]) + table.dst_offset[row];
    }

    // Where the elements of a piece are kept once more, converted; null if they are not.
    char* converted_copy(const Piece& piece) const {
        const int64_t to = table.dst[piece.row];
        if (copies == nullptr || copies->data[to] == nullptr) return nullptr;
        return static_cast<char*>(copies->data[to]) +
               converted_bytes(table.dst_offset[piece.row] + piece.within, copies_cast);
    }
};

// Adds the digest of a piece, whose source bytes are at `data`, under the lock of the totals: other threads
// may be in copy_rows() with the same ones.
void add_digest(const Copy& copy, const Piece& piece, const void* data);

// Copies the pieces past the caches where the whole table, `total` bytes, is larger than the last-level
// cache; else it stays in the cache, where the next reader finds it. `checksums` get what is copied, as it is
// in the source.
void copy_rows(const Copy& copy, Pieces* pieces, int64_t total, Checksums::OfUnit* checksums);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_COPY_ROWS_H_
