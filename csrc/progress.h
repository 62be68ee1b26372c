// Reports the progress of a long call to its caller, who may cancel it.

#ifndef ZEROELASTIC_PROGRESS_H_
#define ZEROELASTIC_PROGRESS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "zeroelastic.h"

namespace zeroelastic {

// Made by the calling thread, which alone runs the caller's function: in add(), and while it waits for other
// threads in report().
class Progress {
  public:
    static constexpr std::chrono::milliseconds kInterval{50};

    explicit Progress(const ze_options& options)
        : progress_(options.progress),
          caller_(std::this_thread::get_id()),
          last_(std::chrono::steady_clock::now()) {}
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    // Whether the caller wants reports.
    bool wanted() const {
        return progress_ != nullptr;
    }

    bool cancelled() const {
        return cancelled_.load(std::memory_order_relaxed);
    }

    // Adds bytes of the sources that were processed. False, with `error` filled, when the call has to end.
    bool add(int64_t nbytes, ze_error* error) {
        if (!wanted()) return true;
        done_.fetch_add(nbytes, std::memory_order_relaxed);
        if (std::this_thread::get_id() == caller_) report();
        return may_continue(error);
    }

    // Reports what was done since the last report, if the interval has passed.
    void report() {
        const auto now = std::chrono::steady_clock::now();
        if (now - last_ < kInterval) return;
        last_ = now;
        report_now();
    }

    // Reports the rest when all is done. False, with `error` filled, when the caller has cancelled.
    bool finish(ze_error* error) {
        if (!wanted()) return true;
        report_now();
        return may_continue(error);
    }

    // False, with `error` filled, when the caller has cancelled.
    bool may_continue(ze_error* error) const {
        if (!cancelled()) return true;
        *error = ze_error{};
        error->code = ZE_CANCELLED;
        return false;
    }

  private:
    void report_now() {
        if (cancelled()) return;
        progress_->nbytes = done_.exchange(0, std::memory_order_relaxed);
        progress_->keep_going = 0;
        progress_->report(progress_);
        if (progress_->keep_going == 0) cancelled_.store(true, std::memory_order_relaxed);
    }

    ze_progress* const progress_;
    const std::thread::id caller_;
    std::chrono::steady_clock::time_point last_;  // only touched by the caller's thread
    std::atomic<int64_t> done_{0};
    std::atomic<bool> cancelled_{false};
};

}  // namespace zeroelastic

#endif  // ZEROELASTIC_PROGRESS_H_
