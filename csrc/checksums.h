// The checksum of each row of a table, of which several units may have a part.

#ifndef ZEROELASTIC_CHECKSUMS_H_
#define ZEROELASTIC_CHECKSUMS_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "crc32.h"
#include "digest_crc32.h"
#include "table.h"

namespace zeroelastic {

// Units come one after the other in the order of the rows' bytes, whichever thread takes them when. A row
// that lies in one unit is done with it; of the others, of which a unit has at most two, the parts wait for
// join().
class Checksums {
    struct Part {
        int64_t row;
        int64_t nbytes;
        uint32_t crc32;
    };

  public:
    // `crc32` may be null: then there is nothing to do.
    Checksums(const ze_table& table, int32_t cast, uint32_t* crc32, size_t num_units)
        : table_(table), cast_(cast), crc32_(crc32), parts_(crc32 == nullptr ? 0 : num_units) {
        if (crc32 != nullptr) std::fill(crc32, crc32 + table.num_rows, 0);
    }

    // What one thread sums of one unit; its parts are handed in when it goes.
    class OfUnit {
      public:
        OfUnit(Checksums* all, size_t unit) : all_(all), unit_(unit) {}
        ~OfUnit() {
            if (wanted()) all_->parts_[unit_] = std::move(parts_);
        }
        OfUnit(const OfUnit&) = delete;
        OfUnit& operator=(const OfUnit&) = delete;

        bool wanted() const {
            return all_->crc32_ != nullptr;
        }

        // The next bytes of a row, as they are written.
        void add(int64_t row, const void* data, int64_t nbytes) {
            Part* part = part_of(row);
            part->crc32 = crc32_of(part->crc32, data, nbytes);
            end(part, nbytes);
        }

        // A piece that is written as it is: to its checksum and its digest, as far as these are wanted.
        void add_digested(const ze_digest* digest, const Piece& piece, const void* data) {
            if (digest != nullptr && wanted()) {
                Part* part = part_of(piece.row);
                const DigestOf of = digest_of(*digest, piece);
                add_to_digest(*digest, piece, digest_and_crc32(data, piece.nbytes, of, &part->crc32));
                end(part, piece.nbytes);
            } else if (digest != nullptr) {
                add_digest(*digest, piece, data);
            } else if (wanted()) {
                add(piece.row, data, piece.nbytes);
            }
        }

      private:
        Part* part_of(int64_t row) {
            if (parts_.empty() || parts_.back().row != row) parts_.push_back({row, 0, 0});
            return &parts_.back();
        }

        // After `nbytes` more bytes of the last part.
        void end(Part* part, int64_t nbytes) {
            part->nbytes += nbytes;
            if (part->nbytes < converted_bytes(all_->table_.nbytes[part->row], all_->cast_)) return;
            all_->crc32_[part->row] = part->crc32;
            parts_.pop_back();
        }

        Checksums* all_;
        size_t unit_;
        std::vector<Part> parts_;
    };

    // When all units are done.
    void join() {
        for (const std::vector<Part>& unit : parts_) {
            for (const Part& part : unit) {
                crc32_[part.row] = crc32_join(crc32_[part.row], part.crc32, part.nbytes);
            }
        }
    }

  private:
    const ze_table& table_;
    const int32_t cast_;
    uint32_t* const crc32_;
    std::vector<std::vector<Part>> parts_;
};

}  // namespace zeroelastic

#endif  // ZEROELASTIC_CHECKSUMS_H_
