// What a caller is told of a call that takes long, and how it ends one.

#ifndef ZEROELASTIC_PROGRESS_H_
#define ZEROELASTIC_PROGRESS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "zeroelastic.h"

namespace zeroelastic {

// Made by the thread that calls, which alone runs the caller's function: with add(), and while it waits for
// others, with tell().
class Progress {
  public:
    static constexpr std::chrono::milliseconds kInterval{50};

    explicit Progress(const ze_options& options)
        : told_(options.progress),
          caller_(std::this_thread::get_id()),
          last_(std::chrono::steady_clock::now()) {}
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    // Whether there is somebody to tell.
    bool wanted() const {
        return told_ != nullptr;
    }

    bool cancelled() const {
        return cancelled_.load(std::memory_order_relaxed);
    }

    // So many bytes of the sources more are done. False, with `error` filled, where the call is to end.
    bool add(int64_t nbytes, ze_error* error) {
        if (!wanted()) return true;
        done_.fetch_add(nbytes, std::memory_order_relaxed);
        if (std::this_thread::get_id() == caller_) tell();
        return goes_on(error);
    }

    // Tells the caller what is done since it was told last, if it is time for that.
    void tell() {
        const auto now = std::chrono::steady_clock::now();
        if (now - last_ < kInterval) return;
        last_ = now;
        tell_now();
    }

    // When all is done: tells the rest. False, with `error` filled, where the caller does not want it any
    // more.
    bool finish(ze_error* error) {
        if (!wanted()) return true;
        tell_now();
        return goes_on(error);
    }

    // False, with `error` filled, when the caller has cancelled.
    bool goes_on(ze_error* error) const {
        if (!cancelled()) return true;
        *error = ze_error{};
        error->code = ZE_CANCELLED;
        return false;
    }

  private:
    void tell_now() {
        if (cancelled()) return;
        told_->nbytes = done_.exchange(0, std::memory_order_relaxed);
        told_->go_on = 0;
        told_->tell(told_);
        if (told_->go_on == 0) cancelled_.store(true, std::memory_order_relaxed);
    }

    ze_progress* const told_;
    const std::thread::id caller_;
    std::chrono::steady_clock::time_point last_;  // only touched by the caller's thread
    std::atomic<int64_t> done_{0};
    std::atomic<bool> cancelled_{false};
};

}  // namespace zeroelastic

#endif  // ZEROELASTIC_PROGRESS_H_
