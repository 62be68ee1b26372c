// files -> files in bounded memory, inside the kernel where nothing has to look at the bytes; and files ->
// nowhere, for their digests and checksums.

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "cast.h"
#include "checksums.h"
#include "operations.h"
#include "table.h"

namespace zeroelastic {
namespace {

constexpr int64_t kUnitBytes = int64_t{8} << 20;
// The memory of a thread. The system reads faster in large calls; what it has read is still in the
// second-level cache, or most of it.
constexpr int64_t kStagingBytes = int64_t{960} << 10;
// With a progress function, the most that the kernel moves between two reports.
constexpr int64_t kReportBytes = int64_t{4} << 20;
// Below this, a read and a write cost no more than the system's own way of copying.
constexpr int64_t kInKernelBytes = int64_t{64} << 10;

bool not_possible(int errnum) {
    return errnum == EXDEV || errnum == EINVAL || errnum == ENOSYS || errnum == EOPNOTSUPP ||
           errnum == EPERM || errnum == EBADF || errnum == EISDIR || errnum == ETXTBSY;
}

// Moves a piece inside the kernel; `moved` says how much came across before that turned out to be impossible.
// False, with `error` filled, when the caller cancels.
bool move_in_kernel(int from, int64_t from_offset, int to, int64_t to_offset, int64_t nbytes, int64_t* moved,
                    std::atomic<bool>* possible, Progress* progress, ze_error* error) {
    while (*moved < nbytes) {
        loff_t in = from_offset + *moved;
        loff_t out = to_offset + *moved;
        int64_t most = nbytes - *moved;
        if (progress->wanted()) most = std::min(most, kReportBytes);
        const ssize_t got = copy_file_range(from, &in, to, &out, static_cast<size_t>(most), 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            // The ordinary calls that follow find the same error, if it is one, and can say where it is.
            if (got < 0 && not_possible(errno)) possible->store(false, std::memory_order_relaxed);
            return true;
        }
        *moved += got;
        if (!progress->add(got, error)) return false;
    }
    return true;
}

struct Move {
    const ze_table& table;
    const std::vector<int64_t>& order;
    const ze_digest* digest;
    int32_t cast;
    bool sync;
    OpenFiles* destinations;  // null: what is read goes nowhere
    Progress* progress;
    std::atomic<bool> in_kernel;

    // Bytes of a run, and the room for it and what a piece of it becomes.
    int64_t call_bytes() const {
        return cast == ZE_CAST_NONE ? kStagingBytes : kStagingBytes / 3 / kCut * kCut;
    }
    int64_t staged_bytes() const {
        return call_bytes() + kCut;
    }
    size_t staging_bytes() const {
        return static_cast<size_t>(staged_bytes() * (cast == ZE_CAST_NONE ? 1 : 3));
    }
};

// What one thread does with one unit.
class UnitMove {
  public:
    UnitMove(Move* move, const Unit& unit, int from, Checksums::OfUnit* sums, char* staging)
        : move_(*move),
          unit_(unit),
          from_(from),
          sums_(*sums),
          pieces_(move->table, move->order, unit),
          staging_(staging) {}

    bool run(ze_error* error) {
        Piece part;  // all that the unit has of a row
        while (pieces_.peek(kUnitBytes * 2, &part)) {
            if (part.nbytes >= kInKernelBytes && move_.in_kernel.load(std::memory_order_relaxed)) {
                int64_t moved = 0;
                if (!move_in_kernel(part, &moved, error)) return false;
                if (moved == part.nbytes) continue;
            }
            if (!move_run(error)) return false;
        }
        return true;
    }

  private:
    // The piece as far as the kernel can move it.
    bool move_in_kernel(Piece piece, int64_t* moved, ze_error* error) {
        const int64_t src_offset = move_.table.src_offset[piece.row] + piece.within;
        const int64_t dst_offset = move_.table.dst_offset[piece.row] + piece.within;
        const int to = move_.destinations->acquire(move_.table.dst[piece.row], error);
        if (to < 0) return false;
        if (!zeroelastic::move_in_kernel(from_, src_offset, to, dst_offset, piece.nbytes, moved,
                                         &move_.in_kernel, move_.progress, error)) {
            return false;
        }
        piece.nbytes = *moved;
        pieces_.take(piece);
        return *moved == 0 || release(piece, error);
    }

    // The next run of the source, through memory.
    bool move_run(ze_error* error) {
        const int64_t nbytes = next_run(move_.table, &pieces_, move_.call_bytes(), &run_);
        const int64_t offset = move_.table.src_offset[run_.front().row] + run_.front().within;
        const char* data = staging_;
        if (!read_fully(from_, staging_, nbytes, offset, unit_.file, error)) return false;
        for (const Piece& piece : run_) {
            if (!put(piece, data, error)) return false;
            data += piece.nbytes;
        }
        return move_.progress->add(nbytes, error);
    }

    bool put(const Piece& piece, const char* data, ze_error* error) {
        const int64_t written = converted_bytes(piece.nbytes, move_.cast);
        if (move_.cast == ZE_CAST_NONE) {
            sums_.add_digested(move_.digest, piece, data);
        } else {
            if (move_.digest != nullptr) add_digest(*move_.digest, piece, data);
            char* made = staging_ + move_.staged_bytes();
            cast_elements(move_.cast, data, made, piece.nbytes / source_itemsize(move_.cast), false);
            data = made;
            if (sums_.wanted()) sums_.add(piece.row, data, written);
        }
        if (move_.destinations == nullptr) return true;
        const int64_t file = move_.table.dst[piece.row];
        const int64_t offset = move_.table.dst_offset[piece.row] + converted_bytes(piece.within, move_.cast);
        const int to = move_.destinations->acquire(file, error);
        return to >= 0 && write_fully(to, data, written, offset, file, error) && release(piece, error);
    }

    // The destination, if that was the last piece of what the unit has of the row.
    bool release(const Piece& piece, ze_error* error) {
        const int64_t end = piece.within + piece.nbytes;
        put_ += piece.nbytes;
        if (end < move_.table.nbytes[piece.row] && put_ < unit_.nbytes) return true;
        return move_.destinations->release(move_.table.dst[piece.row], move_.sync, error);
    }

    Move& move_;
    const Unit& unit_;
    const int from_;
    Checksums::OfUnit& sums_;
    Pieces pieces_;
    int64_t put_ = 0;
    std::vector<Piece> run_;
    char* const staging_;
};

// A destination counts one user per unit and row: it is closed, and flushed, after the last one.
void expect_destinations(const ze_table& table, const std::vector<int64_t>& order,
                         const std::vector<Unit>& units, OpenFiles* destinations) {
    for (const Unit& unit : units) {
        Pieces pieces(table, order, unit);
        Piece part;
        while (pieces.peek(unit.nbytes, &part)) {
            destinations->expect(table.dst[part.row]);
            pieces.take(part);
        }
    }
}

// `dst` is null for a table without destinations.
int32_t move_or_scan(const ze_table& table, const ze_files& src, const ze_files* dst, const ze_digest* digest,
                     const ze_options& options, uint32_t* crc32, ze_error* error) {
    const int32_t cast = options.cast;
    const int64_t num_dst = dst == nullptr ? 0 : dst->count;
    if (!check_table(table, src.count, nullptr, num_dst, nullptr, digest, cast, error)) return error->code;
    const std::vector<int64_t> order = file_order(table, table.src, table.src_offset);
    const std::vector<Unit> units = make_units(
        table, order, table.src, choose_unit_bytes(total_bytes(table), options.threads, kUnitBytes));
    OpenFiles sources(src, O_RDONLY, ZE_SOURCE);
    for (const Unit& unit : units) sources.expect(unit.file);
    std::optional<OpenFiles> destinations;
    if (dst != nullptr) {
        destinations.emplace(*dst, O_WRONLY, ZE_DESTINATION);
        expect_destinations(table, order, units, &*destinations);
    }
    Checksums checksums(table, cast, crc32, units.size());
    const bool unseen = digest == nullptr && crc32 == nullptr && cast == ZE_CAST_NONE && dst != nullptr;
    Progress progress(options);
    Move move{table,     order,   digest, cast, options.sync != 0, dst == nullptr ? nullptr : &*destinations,
              &progress, {unseen}};
    std::vector<std::unique_ptr<char[]>> staging(static_cast<size_t>(options.threads));
    const auto work = [&](int thread, size_t index, ze_error* reason) {
        const Unit& unit = units[index];
        const int from = sources.acquire(unit.file, reason);
        if (from < 0) return false;
        std::unique_ptr<char[]>& own = staging[static_cast<size_t>(thread)];
        if (own == nullptr) own.reset(new char[move.staging_bytes()]);
        Checksums::OfUnit sums(&checksums, index);
        return UnitMove(&move, unit, from, &sums, own.get()).run(reason) &&
               sources.release(unit.file, false, reason);
    };
    const int32_t code = run_units(units.size(), options.threads, &progress, error, work);
    if (code != ZE_OK) return code;
    checksums.join();
    return progress.finish(error) ? ZE_OK : error->code;
}

}  // namespace

int32_t move_segments(const ze_table& table, const ze_files& src, const ze_files& dst,
                      const ze_digest* digest, const ze_options& options, uint32_t* crc32, ze_error* error) {
    return move_or_scan(table, src, &dst, digest, options, crc32, error);
}

int32_t scan_segments(const ze_table& table, const ze_files& src, const ze_digest* digest,
                      const ze_options& options, uint32_t* crc32, ze_error* error) {
    if (options.cast != ZE_CAST_NONE) {
        *error = failure(ZE_BAD_TABLE, 0, ZE_SOURCE, -1, -1);
        return error->code;
    }
    const ze_table rows{table.num_rows, table.src, table.src_offset, nullptr, nullptr, table.nbytes};
    return move_or_scan(rows, src, nullptr, digest, options, crc32, error);
}

}  // namespace zeroelastic
