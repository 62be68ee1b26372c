// What the operations share: checking a table, cutting it into units of work, files that are opened when
// needed.

#ifndef ZEROELASTIC_TABLE_H_
#define ZEROELASTIC_TABLE_H_

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "digest.h"
#include "pool.h"
#include "progress.h"
#include "zeroelastic.h"

namespace zeroelastic {

// Bytes of one element before a conversion; 1 without one.
int64_t source_itemsize(int32_t cast);

// Bytes that `nbytes` bytes of source become. Either side of a conversion has twice the other's.
inline int64_t converted_bytes(int64_t nbytes, int32_t cast) {
    if (cast == ZE_CAST_NONE) return nbytes;
    return cast == ZE_CAST_F32_BF16 || cast == ZE_CAST_F32_F16 ? nbytes / 2 : nbytes * 2;
}

// Checks every row: sides exist, ranges are not negative, do not overflow and lie inside the buffers, rows
// are whole elements, and all together have less than 2^62 bytes. `src_bytes` and `dst_bytes` hold the sides'
// sizes, null for files; a table without destinations has none to check. Returns true if all is well, else
// the first row that is not in `error`. Many rows are checked by several threads.
bool check_table(const ze_table& table, int64_t num_src, const int64_t* src_bytes, int64_t num_dst,
                 const int64_t* dst_bytes, const ze_digest* digest, int32_t cast, ze_error* error,
                 int threads = 1);

// A run of rows that one thread moves: it begins `within` bytes into the row at position `first` of the
// order.
struct Unit {
    int64_t file = 0;
    int64_t first = 0;
    int64_t within = 0;
    int64_t nbytes = 0;
};

// The part of a row that lies in a unit.
struct Piece {
    int64_t row;
    int64_t within;
    int64_t nbytes;
};

// Rows are cut only at multiples of this, so that a cut never goes through an element.
constexpr int64_t kCut = 4096;

// Row positions sorted by (file, offset), or empty where the rows are in that order already.
std::vector<int64_t> file_order(const ze_table& table, const int64_t* file, const int64_t* offset);

// Cuts the rows, in `order` (empty: as they are), into units of about `unit_bytes`. With `file`, a unit never
// spans two files, and each file that a row names has at least one unit, be it empty. With `offset`, where
// rows lie in their files, units end where large pages do, as far as rows allow it.
std::vector<Unit> make_units(const ze_table& table, const std::vector<int64_t>& order, const int64_t* file,
                             int64_t unit_bytes, const int64_t* offset = nullptr);

// What the page cache keeps as one page at most, on Linux with 4 KiB pages.
constexpr int64_t kLargePage = int64_t{2} << 20;

// The bytes of a row from `within` on, at `offset` of a file, up to the end of a large page; 0 where it must
// not be cut there.
int64_t to_large_page(int64_t offset, int64_t within);

// A size for units: big enough to stream, small enough that all threads stay busy.
int64_t choose_unit_bytes(int64_t total_bytes, int threads, int64_t most);

int64_t total_bytes(const ze_table& table);

// The pieces of a unit, one after the other.
class Pieces {
  public:
    Pieces(const ze_table& table, const std::vector<int64_t>& order, const Unit& unit)
        : table_(table), order_(order), position_(unit.first), within_(unit.within), left_(unit.nbytes) {}

    // The next piece, of at most `most` bytes, without taking it; false at the end of the unit. Rows without
    // bytes are passed over.
    bool peek(int64_t most, Piece* piece) {
        while (left_ > 0) {
            const int64_t row = order_.empty() ? position_ : order_[static_cast<size_t>(position_)];
            const int64_t rest = table_.nbytes[row] - within_;
            if (rest > 0) {
                *piece = {row, within_, rest < left_ ? rest : left_};
                if (piece->nbytes > most) piece->nbytes = most;
                return true;
            }
            ++position_;
            within_ = 0;
        }
        return false;
    }

    void take(const Piece& piece) {
        within_ += piece.nbytes;
        left_ -= piece.nbytes;
    }

  private:
    const ze_table& table_;
    const std::vector<int64_t>& order_;
    int64_t position_;
    int64_t within_;
    int64_t left_;
};

// The most ranges of memory that one call reads or writes: IOV_MAX on Linux.
constexpr size_t kMaxVectors = 1024;

// Takes the next run of a file that is sorted by its sources: pieces that follow each other there, `most`
// bytes of them and less than kCut more. Returns its bytes; 0 at the end of the unit.
int64_t next_run(const ze_table& table, Pieces* pieces, int64_t most, std::vector<Piece>* run);

// The failure that comes first in the order of the units: the one that a single thread would have met.
class FirstError {
  public:
    // Whether there is a failure, so that no more units need to be started.
    bool failed() const {
        return failed_.load(std::memory_order_relaxed);
    }

    void record(size_t unit, const ze_error& error);

    // ZE_OK, or the failure's code; fills `error`.
    int32_t result(ze_error* error) const;

  private:
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
    size_t unit_ = 0;
    ze_error error_{};
};

// Files that are opened by the first unit that needs one and closed by the last, so that few are open at a
// time.
class OpenFiles {
  public:
    OpenFiles(const ze_files& files, int flags, ze_side side);
    ~OpenFiles();
    OpenFiles(const OpenFiles&) = delete;
    OpenFiles& operator=(const OpenFiles&) = delete;

    // Announce that one more unit uses the file.
    void expect(int64_t file);

    // The descriptor, or -1 with the reason in `error`.
    int acquire(int64_t file, ze_error* error);

    // Lets writes go past the page cache, where the file system is known to be as fast with them.
    void allow_direct() {
        direct_allowed_ = true;
    }

    // A descriptor of an acquired file for such writes; -1 where they are not to be made.
    int direct(int64_t file);

    // The system has refused such a write: no more are made.
    void refuse_direct(int64_t file);

    // A unit is done with the file. The last one closes it, after flushing it to the device if `sync` is
    // asked for; false with the reason in `error` where that fails.
    bool release(int64_t file, bool sync, ze_error* error);

  private:
    struct Slot {
        std::mutex mutex;
        int fd = -1;
        int direct = -1;
        bool direct_refused = false;
        int64_t units = 0;
    };

    const ze_files& files_;
    int flags_;
    ze_side side_;
    bool direct_allowed_ = false;
    std::unique_ptr<Slot[]> slots_;
};

ze_error failure(ze_code code, int errnum, ze_side side, int64_t file, int64_t offset);

// Runs fn(thread, unit index) over all units on several threads, in ascending order of their start, until one
// fails. fn returns true, or false after it has filled its error, and adds to `progress` what it has done;
// while the caller waits for the other threads, progress is reported.
template <typename Fn>
int32_t run_units(size_t num_units, int threads, Progress* progress, ze_error* error, const Fn& fn) {
    FirstError first;
    std::atomic<size_t> next{0};
    const size_t most = num_units < static_cast<size_t>(threads) ? num_units : static_cast<size_t>(threads);
    const auto work = [&](int thread) {
        while (!first.failed() && !progress->cancelled()) {
            const size_t unit = next.fetch_add(1, std::memory_order_relaxed);
            if (unit >= num_units) return;
            ze_error reason{};
            try {
                if (!fn(thread, unit, &reason)) first.record(unit, reason);
            } catch (...) {
                reason.code = ZE_NO_MEMORY;
                first.record(unit, reason);
            }
        }
    };
    if (progress->wanted()) {
        run_parallel(static_cast<int>(most), work, Progress::kInterval, [&] { progress->report(); });
    } else {
        run_parallel(static_cast<int>(most), work);
    }
    const int32_t code = first.result(error);
    return code != ZE_OK || progress->may_continue(error) ? code : error->code;
}

// Reads or writes all of a range, whatever the system does in pieces; false with `error` filled.
bool read_fully(int fd, void* data, int64_t nbytes, int64_t offset, int64_t file, ze_error* error);
bool write_fully(int fd, const void* data, int64_t nbytes, int64_t offset, int64_t file, ze_error* error);

// The same of ranges of memory that follow each other in the file, which are used up; `done` may be null,
// else the bytes that came across are added to it, also before an error.
bool read_vectors(int fd, std::vector<iovec>* vectors, int64_t offset, int64_t file, int64_t* done,
                  ze_error* error);
bool write_vectors(int fd, std::vector<iovec>* vectors, int64_t offset, int64_t file, ze_error* error);

// Adds the digest of a piece of a row, whose source bytes are at `data`.
void add_digest(const ze_digest& digest, const Piece& piece, const void* data);

// The two halves of it: what an element of the piece adds, and the sum to which the piece's part goes.
DigestOf digest_of(const ze_digest& digest, const Piece& piece);
void add_to_digest(const ze_digest& digest, const Piece& piece, uint64_t part);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_TABLE_H_
