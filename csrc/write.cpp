// memory -> files: vectored writes in file order, several files at a time.

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cast.h"
#include "checksums.h"
#include "operations.h"
#include "table.h"

namespace zeroelastic {
namespace {

constexpr int64_t kUnitBytes = int64_t{4} << 20;
constexpr int64_t kStagedCallBytes = int64_t{128} << 10;
// The page cache takes what one call writes of a large page in as large a page as that is: such pages are
// written and read faster, and can be looked at in place.
constexpr int64_t kCallBytes = kLargePage;

// The alignment that O_DIRECT needs of addresses, offsets and lengths.
constexpr int64_t kBlock = 4096;

// What one thread gathers a call in that begins at another place of a block in memory than in the file.
class Staging {
  public:
    char* get() {
        constexpr int64_t kBytes = kCallBytes + kCut + 2 * kBlock;
        if (data_ == nullptr) data_.reset(static_cast<char*>(std::aligned_alloc(kBlock, kBytes)));
        if (data_ == nullptr) throw std::bad_alloc();
        return data_.get();
    }

  private:
    struct Free {
        void operator()(char* data) const {
            std::free(data);
        }
    };
    std::unique_ptr<char, Free> data_;
};

struct Write {
    const ze_table& table;
    const std::vector<int64_t>& order;
    const ze_buffers& src;
    const ze_digest* digest;
    int32_t cast;
    bool sync;
    Progress* progress;
    OpenFiles* files;
};

// Writes ranges of memory that follow each other in the file at `offset`: whole blocks past the page cache,
// by `direct`, and through it what is left on either side, or where the system refuses.
bool write_blocks(const Write& write, int fd, int direct, std::vector<iovec>* vectors, int64_t offset,
                  int64_t nbytes, int64_t file, Staging* staging, ze_error* error) {
    const int64_t head = (kBlock - offset % kBlock) % kBlock;
    const int64_t whole = (nbytes - head) / kBlock * kBlock;
    if (nbytes <= head || whole == 0) return write_vectors(fd, vectors, offset, file, error);
    char* data = static_cast<char*>(vectors->front().iov_base);
    if (vectors->size() > 1 ||
        (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(head)) % kBlock != 0) {
        data = staging->get() + offset % kBlock;
        char* to = data;
        for (const iovec& vector : *vectors) {
            std::memcpy(to, vector.iov_base, vector.iov_len);
            to += vector.iov_len;
        }
    }
    if (!write_fully(fd, data, head, offset, file, error)) return false;
    int64_t done = head;
    while (done < head + whole) {
        const ssize_t put =
            pwrite(direct, data + done, static_cast<size_t>(head + whole - done), offset + done);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0 && errno != EINVAL && errno != EOPNOTSUPP && errno != EFAULT) {
            *error = failure(ZE_WRITE_FAILED, errno, ZE_DESTINATION, file, offset + done);
            return false;
        }
        if (put < 0) write.files->refuse_direct(file);
        if (put > 0) done += put;
        if (put <= 0 || put % kBlock != 0) break;
    }
    return write_fully(fd, data + done, nbytes - done, offset + done, file, error);
}

bool write_unit(const Write& write, const Unit& unit, int fd, Staging* direct_staging,
                Checksums::OfUnit* sums, ze_error* error) {
    const ze_table& table = write.table;
    Pieces pieces(table, write.order, unit);
    std::vector<iovec> vectors;
    std::vector<char> staging;
    const bool casting = write.cast != ZE_CAST_NONE;
    const int64_t most = casting ? kStagedCallBytes : kCallBytes;
    if (casting) staging.resize(static_cast<size_t>(2 * (most + kCut)));
    Piece piece;
    bool more = true;
    while (more) {
        vectors.clear();
        int64_t begin = 0;
        int64_t nbytes = 0;  // as written
        int64_t taken = 0;   // of the source
        while (vectors.size() < kMaxVectors && taken < most) {
            more = pieces.peek((most - taken + kCut - 1) / kCut * kCut, &piece);
            if (!more) break;
            const int64_t offset = table.dst_offset[piece.row] + converted_bytes(piece.within, write.cast);
            if (nbytes > 0 && (offset != begin + nbytes || offset % kLargePage == 0)) break;
            if (nbytes == 0) begin = offset;
            if (!casting) {
                const int64_t rest = to_large_page(table.dst_offset[piece.row], piece.within);
                if (rest > 0) piece.nbytes = std::min(piece.nbytes, rest);
            }
            char* from = static_cast<char*>(write.src.data[table.src[piece.row]]) +
                         table.src_offset[piece.row] + piece.within;
            const int64_t written = converted_bytes(piece.nbytes, write.cast);
            if (casting) {
                if (write.digest != nullptr) add_digest(*write.digest, piece, from);
                char* staged = staging.data() + nbytes;
                cast_elements(write.cast, from, staged, piece.nbytes / source_itemsize(write.cast), false);
                from = staged;
                if (sums->wanted()) sums->add(piece.row, from, written);
            } else {
                sums->add_digested(write.digest, piece, from);
            }
            if (!vectors.empty() &&
                static_cast<char*>(vectors.back().iov_base) + vectors.back().iov_len == from) {
                vectors.back().iov_len += static_cast<size_t>(written);
            } else {
                vectors.push_back({from, static_cast<size_t>(written)});
            }
            nbytes += written;
            taken += piece.nbytes;
            pieces.take(piece);
        }
        const int direct = nbytes > 0 && !casting ? write.files->direct(unit.file) : -1;
        if (direct >= 0) {
            if (!write_blocks(write, fd, direct, &vectors, begin, nbytes, unit.file, direct_staging, error)) {
                return false;
            }
        } else if (nbytes > 0) {
            if (!write_vectors(fd, &vectors, begin, unit.file, error)) return false;
#ifdef SYNC_FILE_RANGE_WRITE
            // The device starts on it while we go on; whether all is well is for the fsync to find out.
            if (write.sync) sync_file_range(fd, begin, nbytes, SYNC_FILE_RANGE_WRITE);
#endif
        }
        if (!write.progress->add(taken, error)) return false;
    }
    return true;
}

// Units of all files in turn: most file systems let only one thread at a time write to a file.
std::vector<size_t> in_turn(const std::vector<Unit>& units) {
    std::vector<size_t> rank(units.size());
    for (size_t i = 0; i < units.size(); ++i) {
        rank[i] = i > 0 && units[i].file == units[i - 1].file ? rank[i - 1] + 1 : 0;
    }
    std::vector<size_t> turns(units.size());
    for (size_t i = 0; i < units.size(); ++i) turns[i] = i;
    std::stable_sort(turns.begin(), turns.end(), [&](size_t a, size_t b) { return rank[a] < rank[b]; });
    return turns;
}

}  // namespace

int32_t write_segments(const ze_table& table, const ze_buffers& src, const ze_files& dst,
                       const ze_digest* digest, const ze_options& options, uint32_t* crc32, ze_error* error) {
    OpenFiles files(dst, O_WRONLY, ZE_DESTINATION);
    Progress progress(options);
    const int32_t code =
        write_open_segments(table, src, &files, dst.count, digest, options, &progress, crc32, error);
    return code != ZE_OK || progress.finish(error) ? code : error->code;
}

int32_t write_open_segments(const ze_table& table, const ze_buffers& src, OpenFiles* files, int64_t num_files,
                            const ze_digest* digest, const ze_options& options, Progress* progress,
                            uint32_t* crc32, ze_error* error) {
    if (!check_table(table, src.count, src.nbytes, num_files, nullptr, digest, options.cast, error)) {
        return error->code;
    }
    const std::vector<int64_t> order = file_order(table, table.dst, table.dst_offset);
    const std::vector<Unit> units = make_units(
        table, order, table.dst, choose_unit_bytes(total_bytes(table), options.threads, kUnitBytes),
        options.cast == ZE_CAST_NONE ? table.dst_offset : nullptr);
    for (const Unit& unit : units) files->expect(unit.file);
    const std::vector<size_t> turns = in_turn(units);
    const Write write{table, order, src, digest, options.cast, options.sync != 0, progress, files};
    std::vector<Staging> staging(static_cast<size_t>(options.threads));
    Checksums checksums(table, options.cast, crc32, units.size());
    const int32_t code = run_units(
        units.size(), options.threads, progress, error, [&](int thread, size_t index, ze_error* reason) {
            const Unit& unit = units[turns[index]];
            const int fd = files->acquire(unit.file, reason);
            if (fd < 0) return false;
            Checksums::OfUnit sums(&checksums, turns[index]);
            return write_unit(write, unit, fd, &staging[static_cast<size_t>(thread)], &sums, reason) &&
                   files->release(unit.file, options.sync != 0, reason);
        });
    if (code == ZE_OK) checksums.join();
    return code;
}

}  // namespace zeroelastic
