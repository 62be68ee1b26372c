// files -> files in bounded memory, inside the kernel where nothing has to look at the bytes.

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "cast.h"
#include "operations.h"
#include "table.h"

namespace zeroelastic {
namespace {

constexpr int64_t kUnitBytes = int64_t{16} << 20;
constexpr int64_t kCallBytes = int64_t{256} << 10;
// Below this, a read and a write cost no more than the system's own way of copying.
constexpr int64_t kInKernelBytes = int64_t{64} << 10;

bool not_possible(int errnum) {
    return errnum == EXDEV || errnum == EINVAL || errnum == ENOSYS || errnum == EOPNOTSUPP ||
           errnum == EPERM || errnum == EBADF || errnum == EISDIR || errnum == ETXTBSY;
}

// Moves a piece inside the kernel; `moved` says how much came across before that turned out to be impossible.
bool move_in_kernel(int from, int64_t from_offset, int to, int64_t to_offset, int64_t nbytes, int64_t* moved,
                    std::atomic<bool>* possible) {
    while (*moved < nbytes) {
        loff_t in = from_offset + *moved;
        loff_t out = to_offset + *moved;
        const ssize_t got = copy_file_range(from, &in, to, &out, static_cast<size_t>(nbytes - *moved), 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            // The ordinary calls that follow find the same error, if it is one, and can say where it is.
            if (got < 0 && not_possible(errno)) possible->store(false, std::memory_order_relaxed);
            return false;
        }
        *moved += got;
    }
    return true;
}

}  // namespace

int32_t move_segments(const ze_table& table, const ze_files& src, const ze_files& dst,
                      const ze_digest* digest, const ze_options& options, ze_error* error) {
    const int32_t cast = options.cast;
    if (!check_table(table, src.count, nullptr, dst.count, nullptr, digest, cast, error)) return error->code;
    const std::vector<int64_t> order = file_order(table, table.src, table.src_offset);
    const std::vector<Unit> units = make_units(
        table, order, table.src, choose_unit_bytes(total_bytes(table), options.threads, kUnitBytes));
    OpenFiles sources(src, O_RDONLY, ZE_SOURCE);
    OpenFiles destinations(dst, O_WRONLY, ZE_DESTINATION);
    // A destination counts one user per piece: it is closed, and flushed, after the last one.
    for (const Unit& unit : units) {
        sources.expect(unit.file);
        Pieces pieces(table, order, unit);
        Piece piece;
        while (pieces.peek(kUnitBytes * 2, &piece)) {
            destinations.expect(table.dst[piece.row]);
            pieces.take(piece);
        }
    }
    std::atomic<bool> in_kernel{digest == nullptr && cast == ZE_CAST_NONE};
    return run_units(units.size(), options.threads, error, [&](size_t index, ze_error* reason) {
        const Unit& unit = units[index];
        const int from = sources.acquire(unit.file, reason);
        if (from < 0) return false;
        std::vector<char> staging;
        Pieces pieces(table, order, unit);
        Piece whole;
        while (pieces.peek(kUnitBytes * 2, &whole)) {
            const int64_t file = table.dst[whole.row];
            const int to = destinations.acquire(file, reason);
            if (to < 0) return false;
            const int64_t src_offset = table.src_offset[whole.row];
            const int64_t dst_offset = table.dst_offset[whole.row];
            int64_t moved = 0;
            const bool done = whole.nbytes >= kInKernelBytes && in_kernel.load(std::memory_order_relaxed) &&
                              move_in_kernel(from, src_offset + whole.within, to, dst_offset + whole.within,
                                             whole.nbytes, &moved, &in_kernel);
            while (!done && moved < whole.nbytes) {
                Piece piece{whole.row, whole.within + moved, whole.nbytes - moved};
                if (piece.nbytes > kCallBytes) piece.nbytes = kCallBytes;
                const int64_t written = converted_bytes(piece.nbytes, cast);
                staging.resize(static_cast<size_t>(kCallBytes * 3));
                char* data = staging.data();
                if (!read_fully(from, data, piece.nbytes, src_offset + piece.within, unit.file, reason))
                    return false;
                if (digest != nullptr) add_digest(*digest, piece, data);
                if (cast != ZE_CAST_NONE) {
                    cast_elements(cast, data, data + kCallBytes, piece.nbytes / source_itemsize(cast), false);
                    data += kCallBytes;
                }
                if (!write_fully(to, data, written, dst_offset + converted_bytes(piece.within, cast), file,
                                 reason)) {
                    return false;
                }
                moved += piece.nbytes;
            }
            if (!destinations.release(file, options.sync != 0, reason)) return false;
            pieces.take(whole);
        }
        return sources.release(unit.file, false, reason);
    });
}

}  // namespace zeroelastic
