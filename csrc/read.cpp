// files -> memory, by vectored reads of whole file runs, scattered straight into their destinations.

#include <fcntl.h>
#include <sys/uio.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "cast.h"
#include "checksums.h"
#include "copy_rows.h"
#include "operations.h"
#include "table.h"

namespace zeroelastic {
namespace {

constexpr int64_t kUnitBytes = int64_t{8} << 20;
// With more work to do on what was read, read no more at a time than stays in a core's cache.
constexpr int64_t kCachedCallBytes = int64_t{128} << 10;
constexpr int64_t kCallBytes = int64_t{4} << 20;

struct Read {
    const Copy& copy;
    const std::vector<int64_t>& order;
    Progress* progress;
};

// Whether every row that is to be kept converted, too, is of whole elements and has room there.
bool check_copies(const ze_table& table, const ze_buffers& dst, const ze_options& options, ze_error* error) {
    const ze_buffers* copies = options.copies;
    if (copies == nullptr) return true;
    *error = failure(ZE_BAD_TABLE, 0, ZE_SOURCE, -1, -1);
    const int32_t cast = options.copies_cast;
    if (options.cast != ZE_CAST_NONE || cast <= ZE_CAST_NONE || cast > ZE_CAST_F16_F32 ||
        copies->count != dst.count) {
        return false;
    }
    const int64_t partial = source_itemsize(cast) - 1;
    for (int64_t row = 0; row < table.num_rows; ++row) {
        const int64_t end = table.dst_offset[row] + table.nbytes[row];
        if (copies->data[table.dst[row]] == nullptr) continue;
        if (((table.dst_offset[row] | table.nbytes[row]) & partial) != 0 ||
            converted_bytes(end, cast) > copies->nbytes[table.dst[row]]) {
            error->offset = row;
            return false;
        }
    }
    *error = ze_error{};
    return true;
}

bool read_unit(const Read& read, const Unit& unit, int fd, Checksums::OfUnit* checksums, int64_t* bytes_read,
               ze_error* error) {
    const Copy& copy = read.copy;
    Pieces pieces(copy.table, read.order, unit);
    std::vector<Piece> run;
    std::vector<iovec> vectors;
    std::vector<char> staging;
    const bool casting = copy.cast != ZE_CAST_NONE;
    const bool twice = casting || copy.digest != nullptr || copy.copies != nullptr || checksums->wanted();
    const int64_t most = twice ? kCachedCallBytes : kCallBytes;
    for (;;) {
        const int64_t nbytes = next_run(copy.table, &pieces, most, &run);
        if (nbytes == 0) return true;
        const int64_t offset = copy.table.src_offset[run.front().row] + run.front().within;
        vectors.clear();
        if (!casting) {
            for (const Piece& piece : run) {
                char* to = copy.target(piece.row) + piece.within;
                if (!vectors.empty() &&
                    static_cast<char*>(vectors.back().iov_base) + vectors.back().iov_len == to) {
                    vectors.back().iov_len += static_cast<size_t>(piece.nbytes);
                } else {
                    vectors.push_back({to, static_cast<size_t>(piece.nbytes)});
                }
            }
        } else {
            staging.resize(static_cast<size_t>(std::max(nbytes, kCachedCallBytes)));
            vectors.push_back({staging.data(), static_cast<size_t>(nbytes)});
        }
        if (!read_vectors(fd, &vectors, offset, unit.file, bytes_read, error)) return false;
        const char* staged = staging.data();
        for (const Piece& piece : run) {
            char* to = copy.target(piece.row) + converted_bytes(piece.within, copy.cast);
            const char* from = casting ? staged : to;
            if (checksums->wanted()) checksums->add(piece.row, from, piece.nbytes);
            if (copy.digest != nullptr) add_digest(copy, piece, from);
            if (casting) {
                cast_elements(copy.cast, from, to, piece.nbytes / source_itemsize(copy.cast), false);
                staged += piece.nbytes;
            }
            if (char* converted = copy.converted_copy(piece)) {
                cast_elements(copy.copies_cast, from, converted,
                              piece.nbytes / source_itemsize(copy.copies_cast), false);
            }
        }
        if (!read.progress->add(nbytes, error)) return false;
    }
}

}  // namespace

int32_t read_segments(const ze_table& table, const ze_files& src, const ze_buffers& dst,
                      const ze_digest* digest, const ze_options& options, uint32_t* crc32,
                      int64_t* bytes_read, ze_error* error) {
    OpenFiles files(src, O_RDONLY, ZE_SOURCE);
    Progress progress(options);
    const int32_t code = read_open_segments(table, &files, src.count, dst, digest, options, &progress, crc32,
                                            bytes_read, error);
    return code != ZE_OK || progress.finish(error) ? code : error->code;
}

int32_t read_open_segments(const ze_table& table, OpenFiles* files, int64_t num_files, const ze_buffers& dst,
                           const ze_digest* digest, const ze_options& options, Progress* progress,
                           uint32_t* crc32, int64_t* bytes_read, ze_error* error) {
    *bytes_read = 0;
    if (!check_table(table, num_files, nullptr, dst.count, dst.nbytes, digest, options.cast, error) ||
        !check_copies(table, dst, options, error)) {
        return error->code;
    }
    const std::vector<int64_t> order = file_order(table, table.src, table.src_offset);
    const int64_t total = total_bytes(table);
    const std::vector<Unit> units =
        make_units(table, order, table.src, choose_unit_bytes(total, options.threads, kUnitBytes));
    for (const Unit& unit : units) files->expect(unit.file);
    std::mutex totals;
    const Copy copy{table,         nullptr, dst, digest, options.cast, options.copies, options.copies_cast,
                    order.empty(), &totals};
    const Read read{copy, order, progress};
    Checksums checksums(table, ZE_CAST_NONE, crc32, units.size());
    const int32_t code =
        run_units(units.size(), options.threads, progress, error, [&](int, size_t index, ze_error* reason) {
            const Unit& unit = units[index];
            const int fd = files->acquire(unit.file, reason);
            if (fd < 0) return false;
            Checksums::OfUnit own(&checksums, index);
            int64_t got = 0;
            const bool done = read_unit(read, unit, fd, &own, &got, reason);
            __atomic_fetch_add(bytes_read, got, __ATOMIC_RELAXED);
            return files->release(unit.file, false, reason) && done;
        });
    if (code == ZE_OK) checksums.join();
    return code;
}

}  // namespace zeroelastic
