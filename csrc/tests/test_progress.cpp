// Reports of long operations to their caller, and how it cancels them: on its own thread, also while it only
// waits.

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../progress.h"
#include "../table.h"
#include "../zeroelastic.h"
#include "check.h"
#include "rows.h"

namespace {

using Clock = std::chrono::steady_clock;

// Counts the bytes that are reported, and cancels after a number of reports.
struct Listener : ze_progress {
    explicit Listener(int limit) : ze_progress{count, 0, 0, 0}, most(limit) {}

    static void count(ze_progress* self) {
        Listener& listener = *static_cast<Listener*>(self);
        CHECK(std::this_thread::get_id() == listener.thread && self->nbytes >= 0 && self->keep_going == 0);
        CHECK(listener.calls < listener.most);
        listener.nbytes_reported += self->nbytes;
        self->keep_going = ++listener.calls < listener.most ? 1 : 0;
    }

    const int most;
    const std::thread::id thread = std::this_thread::get_id();
    int calls = 0;
    int64_t nbytes_reported = 0;
};

// Rows that are all the same range of one source and of one destination, which is written with the same bytes
// again and again.
struct Repeated : Rows {
    Repeated(int64_t count, int64_t each, int64_t from = 0) {
        for (int64_t i = 0; i < count; ++i) add(0, from, 0, 0, each);
    }
};

class File {
  public:
    explicit File(int64_t size) {
        char name[] = "/tmp/zeroelastic-test-XXXXXX";
        const int fd = mkstemp(name);
        CHECK(fd >= 0 && ftruncate(fd, size) == 0);
        close(fd);
        path_ = name;
        name_ = path_.c_str();
    }
    ~File() {
        unlink(name_);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    ze_files files() const {
        return {1, &name_};
    }

  private:
    std::string path_;
    const char* name_;
};

// The operations, each as it is called with a table of one source and one destination.
enum Operation { kRead, kWrite, kMove, kScan, kSum };

int32_t run(Operation operation, const Repeated& rows, int64_t size, int threads, ze_progress* progress,
            ze_error* error) {
    const File src(size), dst(size);
    std::vector<char> memory(static_cast<size_t>(size));
    void* const data = memory.data();
    const ze_buffers buffers{1, &data, &size};
    const ze_files from = src.files(), to = dst.files();
    const ze_table table = rows.table();
    const ze_options options{threads, ZE_CAST_NONE, 0, 0, progress, nullptr};
    std::vector<uint32_t> crc32(rows.size());
    int64_t bytes_read = 0;
    switch (operation) {
        case kRead:
            return ze_read_segments(&table, &from, &buffers, nullptr, &options, crc32.data(), &bytes_read,
                                    error);
        case kWrite:
            return ze_write_segments(&table, &buffers, &to, nullptr, &options, nullptr, error);
        case kMove:
            return ze_move_segments(&table, &from, &to, nullptr, &options, nullptr, error);
        case kScan:
            return ze_scan_segments(&table, &from, nullptr, &options, crc32.data(), error);
        default:
            return ze_sum_segments(&table, &buffers, nullptr, &options, crc32.data(), error);
    }
}

// The lowest number that a file that is opened gets: the same again when all are closed.
int next_descriptor() {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    close(fd);
    return fd;
}

}  // namespace

TEST(every_byte_is_reported) {
    for (const Operation operation : {kRead, kWrite, kMove, kScan, kSum}) {
        for (int threads = 1; threads <= 3; ++threads) {
            for (const int64_t nbytes : {int64_t{0}, int64_t{5}, int64_t{3'000'001}}) {
                const Repeated rows(1, nbytes * threads);
                Listener listener(1'000'000);
                ze_error error;
                CHECK(run(operation, rows, 16 << 20, threads, &listener, &error) == ZE_OK);
                CHECK(listener.nbytes_reported == rows.total() && listener.calls >= 1);
            }
        }
    }
}

TEST(a_caller_that_cancels_ends_what_would_take_long) {
    const Repeated rows(1'000'000, 1 << 20);  // a tebibyte
    for (const Operation operation : {kRead, kWrite, kMove, kScan, kSum}) {
        // Destinations overlap, which several threads must not write to.
        for (int threads = 1; threads <= (operation == kScan ? 4 : 1); ++threads) {
            const int before = next_descriptor();
            Listener listener(3);
            ze_error error;
            CHECK(run(operation, rows, 1 << 20, threads, &listener, &error) == ZE_CANCELLED);
            CHECK(error.code == ZE_CANCELLED && listener.calls == 3);
            CHECK(listener.nbytes_reported > 0 && listener.nbytes_reported < rows.total());
            CHECK(next_descriptor() == before);
        }
    }
}

TEST(a_caller_that_cancels_in_the_end_has_cancelled) {
    for (const Operation operation : {kRead, kWrite, kMove, kScan, kSum}) {
        Listener listener(1);
        ze_error error;
        CHECK(run(operation, Repeated(1, 100), 100, 2, &listener, &error) == ZE_CANCELLED);
        CHECK(listener.nbytes_reported == 100);
    }
}

TEST(an_error_of_the_engine_is_not_hidden) {
    Listener listener(1'000'000);
    ze_error error;
    CHECK(run(kScan, Repeated(1, 100, 5), 50, 2, &listener, &error) == ZE_END_OF_FILE);
    CHECK(error.offset == 50);
}

TEST(a_report_may_call_the_engine) {
    struct Caller : ze_progress {
        int64_t reported;
    } outer{{[](ze_progress* self) {
                 Listener inner(1'000'000);
                 ze_error error;
                 const Repeated rows(1, 3'000'000);
                 CHECK(run(kScan, rows, 3'000'000, 2, &inner, &error) == ZE_OK);
                 CHECK(inner.nbytes_reported == rows.total());
                 static_cast<Caller*>(self)->reported += self->nbytes;
                 self->keep_going = 1;
             },
             0, 0, 0},
            0};
    ze_error error;
    const Repeated rows(300, 10'000'000);
    CHECK(run(kScan, rows, 10'000'000, 2, &outer, &error) == ZE_OK);
    CHECK(outer.reported == rows.total());
}

TEST(a_caller_that_waits_for_others_gets_reports_and_can_cancel) {
    std::atomic<bool> started{false};
    Listener listener(3);
    ze_options options{2, ZE_CAST_NONE, 0, 0, &listener, nullptr};
    zeroelastic::Progress progress(options);
    ze_error error;
    const Clock::time_point limit = Clock::now() + std::chrono::seconds(60);
    const auto work = [&](int thread, size_t, ze_error* reason) {
        if (thread == 0) {
            while (!started.load() && Clock::now() < limit) std::this_thread::yield();
            return true;
        }
        started.store(true);
        while (progress.add(1, reason)) {
            CHECK(Clock::now() < limit);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return false;
    };
    CHECK(zeroelastic::run_units(2, 2, &progress, &error, work) == ZE_CANCELLED);
    CHECK(listener.calls == 3 && listener.nbytes_reported > 0);
}
