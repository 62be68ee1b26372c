// What the page cache holds of a file, looked at where it lies instead of being copied out first.

#ifndef ZEROELASTIC_MAPPED_H_
#define ZEROELASTIC_MAPPED_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "table.h"
#include "zeroelastic.h"

namespace zeroelastic {

// Whether it is worth looking whether the next range can be mapped: the pages of a file have mostly come into
// memory in the same way, so the more ranges in turn could not be, the more are then passed over.
class LargePages {
  public:
    bool expected() {
        return passed_over_.load(std::memory_order_relaxed) == 0 ||
               passed_over_.fetch_sub(1, std::memory_order_relaxed) <= 0;
    }

    void found(bool large) {
        const int misses =
            large ? 0 : std::min(misses_.load(std::memory_order_relaxed) * 2 + 1, kMostPassedOver);
        misses_.store(misses, std::memory_order_relaxed);
        passed_over_.store(misses / 2, std::memory_order_relaxed);
    }

  private:
    static constexpr int kMostPassedOver = 31;
    std::atomic<int> misses_{0};
    std::atomic<int> passed_over_{0};
};

// A range of a file, if all of it is in memory, in pages large enough that looking at them is faster than
// having them copied: those of 4 KiB are not. What is not in memory is better read: a mapping would fetch it
// page by page, and an error of the device would end the process. Nothing is mapped where the system does
// not say what is in memory: that takes Linux 6.5, and the right to write to the file.
//
// A page may leave memory again before it is looked at, milliseconds later. It is fetched again then; where
// that fails, or the file has been cut off, the thread gets SIGBUS. Then the whole range becomes zeros, and
// is no longer intact(). A thread has one Mapped at a time, and it alone looks at it.
class Mapped {
  public:
    Mapped(int fd, int64_t begin, int64_t end, LargePages* pages);
    ~Mapped();
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;

    explicit operator bool() const {
        return data_ != nullptr;
    }

    // The byte at an offset of the file, within the range.
    const char* at(int64_t offset) const {
        return data_ + (offset - first_);
    }

    // Whether all that was looked at, or might have been, was there; else the error of the file.
    bool intact(int64_t file, ze_error* error) const;

    // For the handler of SIGBUS: false for an address out of the range.
    bool lose(const void* address);

    // Counts what was looked at, for ze_mapped_bytes().
    static void saw(int64_t nbytes) {
        seen_.fetch_add(nbytes, std::memory_order_relaxed);
    }

    static int64_t bytes_seen() {
        return seen_.load(std::memory_order_relaxed);
    }

  private:
    static std::atomic<int64_t> seen_;

    void map(int fd, int64_t begin, int64_t end);
    void unmap();

    char* room_ = nullptr;
    size_t room_bytes_ = 0;
    char* data_ = nullptr;
    int64_t first_ = 0;  // the offset of what is at data_
    int64_t end_ = 0;
    int fd_ = -1;
    std::atomic<const char*> lost_{nullptr};  // the first address that was not there
};

// The range [begin, end) of a file that a unit reads; empty where that is mostly what lies between its rows.
struct Span {
    int64_t begin;
    int64_t end;
};
Span span_of(const ze_table& table, const std::vector<int64_t>& order, const Unit& unit);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_MAPPED_H_
