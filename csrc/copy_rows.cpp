#include "copy_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "cast.h"
#include "copy.h"
#include "cpu.h"
#include "digest.h"

namespace zeroelastic {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30;
// What more is done with than copying comes to the first-level cache in pieces of this size.
constexpr int64_t kCachedBytes = int64_t{16} << 10;
// Where a row begins that is not where its predecessor ends: the processor cannot guess that, and it is
// fetched this many rows ahead, as far as this many bytes. What comes later it finds by itself.
constexpr int64_t kRowsAhead = 8;
constexpr int64_t kFetchedBytes = 2048;
constexpr int64_t kNear = 1024;

// `streaming` says that the row will be written past the caches.
void prefetch_row(const Copy& copy, int64_t row, bool streaming) {
    const ze_table& table = copy.table;
    if (!copy.in_order || row >= table.num_rows || table.nbytes[row] == 0) return;
    const int64_t nbytes = table.nbytes[row];
    const char* from = copy.source(row);
    const int64_t gap = from - (copy.source(row - 1) + table.nbytes[row - 1]);
    if (gap < 0 || gap > kNear) {
        const int64_t most = std::min(nbytes, kFetchedBytes);
        for (int64_t line = 0; line < most; line += 64) __builtin_prefetch(from + line);
    }
    const int64_t written = converted_bytes(nbytes, copy.cast);
    if (streaming &&
        copy.target(row) != copy.target(row - 1) + converted_bytes(table.nbytes[row - 1], copy.cast)) {
        LineWriter::expect(copy.target(row), written);
    }
}

// Partial digests, handed in by the hundreds: each atomic operation waits until all that was written before
// it has reached memory.
class Sums {
  public:
    Sums(const ze_digest* digest, std::mutex* totals) : digest_(digest), totals_(totals) {}

    DigestOf of(const Piece& piece) const {
        return digest_of(*digest_, piece);
    }

    void add(const Piece& piece, uint64_t part) {
        if (count_ == sums_.size()) hand_in();
        sums_[count_++] = {digest_->stream[piece.row], part};
    }

    void hand_in() {
        const std::lock_guard<std::mutex> lock(*totals_);
        for (size_t i = 0; i < count_; ++i) digest_->totals[sums_[i].first] += sums_[i].second;
        count_ = 0;
    }

  private:
    const ze_digest* digest_;
    std::mutex* totals_;
    std::array<std::pair<int64_t, uint64_t>, 512> sums_;
    size_t count_ = 0;
};

uint64_t digest_bytes(const DigestOf& digest, const char* from, int64_t nbytes) {
    return digest_elements(from, nbytes / digest.itemsize, digest.itemsize, digest.seed, digest.start);
}

// Converts whole lines straight past the caches; what is less than a line goes by way of the writer.
void put_converted(LineWriter* writer, int32_t cast, char* to, const char* from, int64_t count) {
    const bool narrow = cast == ZE_CAST_F32_BF16 || cast == ZE_CAST_F32_F16;
    if (narrow && writer->put_narrowed(to, from, count, cast == ZE_CAST_F32_BF16)) return;
    alignas(64) std::array<char, 64> part;
    const int64_t src_size = source_itemsize(cast);
    const int64_t dst_size = 6 - src_size;
    const auto put = [&](int64_t first, int64_t some) {
        cast_elements(cast, from + first * src_size, part.data(), some, false);
        writer->put(to + first * dst_size, part.data(), some * dst_size);
    };
    const int64_t line = 64 / dst_size;
    const int64_t to_boundary = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % 64);
    const int64_t lead = std::min(to_boundary / dst_size, count);
    const int64_t whole = to_boundary % dst_size == 0 ? (count - lead) / line * line : 0;
    if (lead > 0) put(0, lead);
    if (whole > 0) cast_elements(cast, from + lead * src_size, to + lead * dst_size, whole, true);
    for (int64_t done = lead + whole; done < count; done += line) put(done, std::min(line, count - done));
}

void copy_past_cache(const Copy& copy, Pieces* pieces, Checksums::OfUnit* checksums) {
    LineWriter writer;
    LineWriter copies_writer;
    Sums sums(copy.digest, copy.totals);
    const bool cast = copy.cast != ZE_CAST_NONE;
    const bool twice = copy.copies != nullptr || (cast && copy.digest != nullptr) || checksums->wanted();
    Piece piece;
    while (pieces->peek(twice ? kCachedBytes : kMostBytes, &piece)) {
        if (piece.within == 0) prefetch_row(copy, piece.row + kRowsAhead, true);
        const char* from = copy.source(piece.row) + piece.within;
        char* to = copy.target(piece.row) + converted_bytes(piece.within, copy.cast);
        if (checksums->wanted()) checksums->add(piece.row, from, piece.nbytes);
        if (!cast && copy.digest == nullptr) {
            writer.put(to, from, piece.nbytes);
        } else if (!cast) {
            sums.add(piece, writer.put_digested(to, from, piece.nbytes, sums.of(piece)));
        } else {
            if (copy.digest != nullptr) sums.add(piece, digest_bytes(sums.of(piece), from, piece.nbytes));
            put_converted(&writer, copy.cast, to, from, piece.nbytes / source_itemsize(copy.cast));
        }
        if (char* converted = copy.converted_copy(piece)) {
            put_converted(&copies_writer, copy.copies_cast, converted, from,
                          piece.nbytes / source_itemsize(copy.copies_cast));
        }
        pieces->take(piece);
    }
    writer.flush();
    copies_writer.flush();
    sums.hand_in();
}

void copy_to_cache(const Copy& copy, Pieces* pieces, Checksums::OfUnit* checksums) {
    Sums sums(copy.digest, copy.totals);
    const bool twice = copy.copies != nullptr || copy.digest != nullptr || checksums->wanted();
    Piece piece;
    while (pieces->peek(twice ? kCachedBytes : kMostBytes, &piece)) {
        if (piece.within == 0) prefetch_row(copy, piece.row + kRowsAhead, false);
        const char* from = copy.source(piece.row) + piece.within;
        char* to = copy.target(piece.row) + converted_bytes(piece.within, copy.cast);
        if (checksums->wanted()) checksums->add(piece.row, from, piece.nbytes);
        if (copy.digest != nullptr) sums.add(piece, digest_bytes(sums.of(piece), from, piece.nbytes));
        if (copy.cast == ZE_CAST_NONE) {
            std::memcpy(to, from, static_cast<size_t>(piece.nbytes));
        } else {
            cast_elements(copy.cast, from, to, piece.nbytes / source_itemsize(copy.cast), false);
        }
        if (char* converted = copy.converted_copy(piece)) {
            cast_elements(copy.copies_cast, from, converted, piece.nbytes / source_itemsize(copy.copies_cast),
                          false);
        }
        pieces->take(piece);
    }
    sums.hand_in();
}

}  // namespace

void add_digest(const Copy& copy, const Piece& piece, const void* data) {
    const uint64_t part =
        digest_bytes(digest_of(*copy.digest, piece), static_cast<const char*>(data), piece.nbytes);
    const std::lock_guard<std::mutex> lock(*copy.totals);
    copy.digest->totals[copy.digest->stream[piece.row]] += part;
}

void copy_rows(const Copy& copy, Pieces* pieces, int64_t total, Checksums::OfUnit* checksums) {
    (total > last_level_cache_bytes() ? copy_past_cache : copy_to_cache)(copy, pieces, checksums);
}

}  // namespace zeroelastic
