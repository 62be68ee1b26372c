#include "table.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/types.h>
#ifdef __linux__
#include <sys/vfs.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "digest.h"

namespace zeroelastic {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Whether [offset, offset + nbytes) is a range within [0, size), or of a file where the size is not known.
bool inside(int64_t offset, int64_t nbytes, const int64_t* sizes, int64_t side) {
    if (offset < 0 || nbytes < 0 || offset > kMost - nbytes) return false;
    return sizes == nullptr || offset + nbytes <= sizes[side];
}

// Calls `call` until all of the vectors went through it; false after `failed` was given the offset in the
// file and what the call returned.
template <typename Call, typename Failed>
bool transfer(const Call& call, int fd, std::vector<iovec>* vectors, int64_t offset, int64_t* done,
              const Failed& failed) {
    iovec* at = vectors->data();
    size_t left = vectors->size();
    while (left > 0) {
        const ssize_t moved = call(fd, at, static_cast<int>(left), offset);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) {
            failed(offset, moved);
            return false;
        }
        offset += moved;
        if (done != nullptr) *done += moved;
        size_t rest = static_cast<size_t>(moved);
        while (left > 0 && rest >= at->iov_len) {
            rest -= at->iov_len;
            ++at;
            --left;
        }
        if (rest > 0) {
            at->iov_base = static_cast<char*>(at->iov_base) + rest;
            at->iov_len -= rest;
        }
    }
    return true;
}

}  // namespace

int64_t source_itemsize(int32_t cast) {
    switch (cast) {
        case ZE_CAST_F32_BF16:
        case ZE_CAST_F32_F16:
            return 4;
        case ZE_CAST_BF16_F32:
        case ZE_CAST_F16_F32:
            return 2;
        default:
            return 1;
    }
}

ze_error failure(ze_code code, int errnum, ze_side side, int64_t file, int64_t offset) {
    return {code, errnum, side, 0, file, offset};
}

bool check_table(const ze_table& table, int64_t num_src, const int64_t* src_bytes, int64_t num_dst,
                 const int64_t* dst_bytes, const ze_digest* digest, int32_t cast, ze_error* error,
                 int threads) {
    // So many rows take about as long to check as a thread takes to wake.
    constexpr int64_t kRowsPerThread = 16384;
    *error = failure(ZE_BAD_TABLE, 0, ZE_SOURCE, -1, -1);
    if (table.num_rows < 0 || cast < ZE_CAST_NONE || cast > ZE_CAST_F16_F32) return false;
    const int64_t partial = source_itemsize(cast) - 1;  // a mask: sizes are powers of two
    const auto good = [&](int64_t row) {
        const int64_t nbytes = table.nbytes[row];
        bool fits = table.src[row] >= 0 && table.src[row] < num_src && nbytes >= 0 && nbytes <= kMost / 2 &&
                    (nbytes & partial) == 0 &&
                    inside(table.src_offset[row], nbytes, src_bytes, table.src[row]);
        if (table.dst != nullptr) {
            fits = fits && table.dst[row] >= 0 && table.dst[row] < num_dst &&
                   inside(table.dst_offset[row], converted_bytes(nbytes, cast), dst_bytes, table.dst[row]);
        }
        if (fits && digest != nullptr) {
            const int64_t size = digest->itemsize[row];
            fits = digest->stream[row] >= 0 && digest->stream[row] < digest->num_streams &&
                   digest->start[row] >= 0 && (size == 1 || size == 2 || size == 4 || size == 8) &&
                   (nbytes & (size - 1)) == 0 && digest->start[row] <= kMost - nbytes;
        }
        return fits;
    };
    const int64_t num_parts = std::clamp<int64_t>(table.num_rows / kRowsPerThread, 1, threads);
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> bad{table.num_rows};
    run_parallel(static_cast<int>(num_parts), [&](int) {
        for (int64_t part = next.fetch_add(1); part < num_parts; part = next.fetch_add(1)) {
            int64_t row = table.num_rows / num_parts * part;
            const int64_t end = part + 1 < num_parts ? row + table.num_rows / num_parts : table.num_rows;
            while (row < end && good(row)) ++row;
            int64_t before = bad.load();
            while (row < end && row < before && !bad.compare_exchange_weak(before, row)) {
            }
        }
    });
    // Also of all rows together, so that whatever is counted in bytes can be counted.
    int64_t total = 0;
    for (int64_t row = 0; row < bad.load(); ++row) {
        if (table.nbytes[row] > kMost / 2 - total) bad.store(row);
        total += table.nbytes[row];
    }
    if (bad.load() < table.num_rows) {
        error->offset = bad.load();
        return false;
    }
    *error = ze_error{};
    return true;
}

std::vector<int64_t> file_order(const ze_table& table, const int64_t* file, const int64_t* offset) {
    const auto before = [&](int64_t a, int64_t b) {
        return file[a] != file[b] ? file[a] < file[b] : offset[a] < offset[b];
    };
    bool sorted = true;
    for (int64_t row = 1; row < table.num_rows && sorted; ++row) sorted = !before(row, row - 1);
    std::vector<int64_t> order;
    if (sorted) return order;
    order.resize(static_cast<size_t>(table.num_rows));
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(), before);
    return order;
}

int64_t total_bytes(const ze_table& table) {
    return std::accumulate(table.nbytes, table.nbytes + table.num_rows, int64_t{0});
}

int64_t choose_unit_bytes(int64_t total, int threads, int64_t most) {
    // However long a (sparse) file claims to be, its units fit into memory.
    constexpr int64_t kMostUnits = int64_t{1} << 20;
    const int64_t fair = total / (static_cast<int64_t>(threads) * 4);
    const int64_t unit = std::max(std::clamp(fair, int64_t{256} << 10, most), total / kMostUnits);
    return (unit + kCut - 1) / kCut * kCut;
}

int64_t to_large_page(int64_t offset, int64_t within) {
    constexpr int64_t kElement = 8;  // the longest
    if (offset % kElement != 0 || within % kElement != 0) return 0;
    return kLargePage - (offset + within) % kLargePage;
}

std::vector<Unit> make_units(const ze_table& table, const std::vector<int64_t>& order, const int64_t* file,
                             int64_t unit_bytes, const int64_t* offset) {
    // So many short rows make a unit, too: finding their addresses is work as well.
    constexpr int64_t kMostRows = 16384;
    std::vector<Unit> units;
    Unit current;
    int64_t rows = 0;
    bool open = false;
    for (int64_t position = 0; position < table.num_rows; ++position) {
        const int64_t row = order.empty() ? position : order[static_cast<size_t>(position)];
        if (open && ((file != nullptr && file[row] != current.file) || rows == kMostRows)) {
            units.push_back(current);
            open = false;
        }
        // The usual case: a short row, of which there may be very many.
        if (open && table.nbytes[row] < unit_bytes - current.nbytes - kCut) {
            current.nbytes += table.nbytes[row];
            ++rows;
            continue;
        }
        int64_t within = 0;
        do {
            if (!open) {
                current = {file == nullptr ? 0 : file[row], position, within, 0};
                rows = 0;
                open = true;
            }
            const int64_t rest = table.nbytes[row] - within;
            int64_t room = std::max(kCut, (unit_bytes - current.nbytes) / kCut * kCut);
            if (offset != nullptr) {
                const int64_t more = to_large_page(offset[row], within + room) % kLargePage;
                if (more > 0) room += more;
            }
            // The rest of a row goes along if it is not worth a unit of its own.
            const int64_t taken = rest - room < kCut ? rest : room;
            current.nbytes += taken;
            within += taken;
            ++rows;
            const bool goes_on = offset != nullptr && within == table.nbytes[row] &&
                                 current.nbytes < unit_bytes + kLargePage &&
                                 to_large_page(offset[row], within) % kLargePage != 0;
            if (current.nbytes >= unit_bytes && !goes_on) {
                units.push_back(current);
                open = false;
            }
        } while (within < table.nbytes[row]);
    }
    if (open) units.push_back(current);
    return units;
}

int64_t next_run(const ze_table& table, Pieces* pieces, int64_t most, std::vector<Piece>* run) {
    run->clear();
    int64_t nbytes = 0;
    int64_t end = 0;
    Piece piece;
    while (run->size() < kMaxVectors && nbytes < most &&
           pieces->peek((most - nbytes + kCut - 1) / kCut * kCut, &piece)) {
        const int64_t offset = table.src_offset[piece.row] + piece.within;
        if (nbytes > 0 && offset != end) break;
        run->push_back(piece);
        pieces->take(piece);
        nbytes += piece.nbytes;
        end = offset + piece.nbytes;
    }
    return nbytes;
}

void FirstError::record(size_t unit, const ze_error& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_.load() || unit < unit_) {
        unit_ = unit;
        error_ = error;
    }
    failed_.store(true);
}

int32_t FirstError::result(ze_error* error) const {
    *error = error_;
    return error_.code;
}

OpenFiles::OpenFiles(const ze_files& files, int flags, ze_side side)
    : files_(files), flags_(flags), side_(side), slots_(new Slot[static_cast<size_t>(files.count)]) {}

OpenFiles::~OpenFiles() {
    for (int64_t i = 0; i < files_.count; ++i) {
        for (const int fd : {slots_[static_cast<size_t>(i)].fd, slots_[static_cast<size_t>(i)].direct}) {
            if (fd >= 0) close(fd);
        }
    }
}

void OpenFiles::expect(int64_t file) {
    ++slots_[static_cast<size_t>(file)].units;
}

int OpenFiles::acquire(int64_t file, ze_error* error) {
    Slot& slot = slots_[static_cast<size_t>(file)];
    std::lock_guard<std::mutex> lock(slot.mutex);
    while (slot.fd < 0) {
        slot.fd = open(files_.paths[file], flags_ | O_CLOEXEC);
        if (slot.fd < 0 && errno != EINTR) {
            *error = failure(ZE_OPEN_FAILED, errno, side_, file, 0);
            return -1;
        }
    }
    return slot.fd;
}

int OpenFiles::direct(int64_t file) {
#if defined(O_DIRECT) && defined(__linux__)
    // On a block device of this machine. Over a network each of these writes would wait for an answer.
    constexpr int64_t kExt4 = 0xEF53, kXfs = 0x58465342;
    if (!direct_allowed_) return -1;
    Slot& slot = slots_[static_cast<size_t>(file)];
    std::lock_guard<std::mutex> lock(slot.mutex);
    if (slot.direct < 0 && !slot.direct_refused) {
        struct statfs found{};
        const bool known = fstatfs(slot.fd, &found) == 0 && (static_cast<int64_t>(found.f_type) == kExt4 ||
                                                             static_cast<int64_t>(found.f_type) == kXfs);
        if (known) slot.direct = open(files_.paths[file], O_WRONLY | O_DIRECT | O_CLOEXEC);
        slot.direct_refused = slot.direct < 0;
    }
    return slot.direct_refused ? -1 : slot.direct;
#else
    static_cast<void>(file);
    return -1;
#endif
}

void OpenFiles::refuse_direct(int64_t file) {
    Slot& slot = slots_[static_cast<size_t>(file)];
    std::lock_guard<std::mutex> lock(slot.mutex);
    slot.direct_refused = true;
}

bool OpenFiles::release(int64_t file, bool sync, ze_error* error) {
    Slot& slot = slots_[static_cast<size_t>(file)];
    std::lock_guard<std::mutex> lock(slot.mutex);
    if (--slot.units > 0) return true;
    const int fd = slot.fd;
    slot.fd = -1;
    if (slot.direct >= 0) close(slot.direct);
    slot.direct = -1;
    int errnum = 0;
    while (sync && fsync(fd) != 0) {
        if (errno == EINTR) continue;
        errnum = errno;
        break;
    }
    // Network file systems may report a failed write no earlier than here.
    if (close(fd) != 0 && errnum == 0 && errno != EINTR && (flags_ & O_ACCMODE) != O_RDONLY) errnum = errno;
    if (errnum == 0) return true;
    *error = failure(ZE_SYNC_FAILED, errnum, side_, file, 0);
    return false;
}

bool read_fully(int fd, void* data, int64_t nbytes, int64_t offset, int64_t file, ze_error* error) {
    std::vector<iovec> whole{{data, static_cast<size_t>(nbytes)}};
    return nbytes <= 0 || read_vectors(fd, &whole, offset, file, nullptr, error);
}

bool write_fully(int fd, const void* data, int64_t nbytes, int64_t offset, int64_t file, ze_error* error) {
    std::vector<iovec> whole{{const_cast<void*>(data), static_cast<size_t>(nbytes)}};
    return nbytes <= 0 || write_vectors(fd, &whole, offset, file, error);
}

bool read_vectors(int fd, std::vector<iovec>* vectors, int64_t offset, int64_t file, int64_t* done,
                  ze_error* error) {
    return transfer(preadv, fd, vectors, offset, done, [&](int64_t at, ssize_t got) {
        *error = got == 0 ? failure(ZE_END_OF_FILE, 0, ZE_SOURCE, file, at)
                          : failure(ZE_READ_FAILED, errno, ZE_SOURCE, file, at);
    });
}

bool write_vectors(int fd, std::vector<iovec>* vectors, int64_t offset, int64_t file, ze_error* error) {
    return transfer(pwritev, fd, vectors, offset, nullptr, [&](int64_t at, ssize_t put) {
        *error = failure(ZE_WRITE_FAILED, put == 0 ? ENOSPC : errno, ZE_DESTINATION, file, at);
    });
}

DigestOf digest_of(const ze_digest& digest, const Piece& piece) {
    const int64_t itemsize = digest.itemsize[piece.row];
    return {static_cast<int>(itemsize), digest.seeds[digest.stream[piece.row]],
            digest.start[piece.row] + piece.within / itemsize};
}

void add_to_digest(const ze_digest& digest, const Piece& piece, uint64_t part) {
    __atomic_fetch_add(&digest.totals[digest.stream[piece.row]], part, __ATOMIC_RELAXED);
}

void add_digest(const ze_digest& digest, const Piece& piece, const void* data) {
    const DigestOf of = digest_of(digest, piece);
    add_to_digest(digest, piece,
                  digest_elements(data, piece.nbytes / of.itemsize, of.itemsize, of.seed, of.start));
}

}  // namespace zeroelastic
