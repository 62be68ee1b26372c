#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace zeroelastic {
namespace {

// New versions of the C library and of libstdc++ give some functions a new symbol version. A library that
// calls them does not load on the older systems of the tag manylinux_2_28. So this file calls
// pthread_cond_wait() and sigprocmask(), not std::condition_variable::wait() and pthread_sigmask(), and waits
// by the system's clock, not by the steady one, which takes pthread_cond_clockwait().
template <typename Ready>
void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, const Ready& ready) {
    while (!ready()) pthread_cond_wait(condition.native_handle(), lock.mutex()->native_handle());
}

class Pool {
  public:
    void run(int threads, const std::function<void(int)>& work, std::chrono::milliseconds interval,
             const std::function<void()>& meanwhile) {
        if (taken_.exchange(true, std::memory_order_acquire)) {
            work(0);
            return;
        }
        const Turn turn{taken_};
        grow(threads - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            helpers_ = std::min(threads - 1, size_);
            running_ = helpers_;
            work_ = &work;
            ++generation_;
        }
        wake_.notify_all();
        work(0);
        std::unique_lock<std::mutex> lock(mutex_);
        const auto done = [this] { return running_ == 0; };
        while (meanwhile && !done_.wait_until(lock, std::chrono::system_clock::now() + interval, done)) {
            lock.unlock();
            meanwhile();
            lock.lock();
        }
        wait(done_, lock, done);
        work_ = nullptr;
    }

  private:
    // Not a mutex: what is called meanwhile may come back here on the same thread.
    struct Turn {
        std::atomic<bool>& taken;
        ~Turn() {
            taken.store(false, std::memory_order_release);
        }
    };

    // Threads are never joined: they sleep until the process ends, and a child of a fork has none of them.
    void grow(int wanted) {
        sigset_t all;
        sigset_t before;
        sigfillset(&all);
        while (size_ < wanted) {
            // Signals are the business of the threads that the host program knows. On Linux this mask is the
            // calling thread's.
            sigprocmask(SIG_SETMASK, &all, &before);
            bool started = true;
            try {
                std::thread([this, index = size_, seen = generation_] { serve(index, seen); }).detach();
            } catch (const std::system_error&) {
                started = false;
            }
            sigprocmask(SIG_SETMASK, &before, nullptr);
            if (!started) return;
            ++size_;
        }
    }

    void serve(int index, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wait(wake_, lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (index >= helpers_) continue;
            const std::function<void(int)>* work = work_;
            lock.unlock();
            (*work)(index + 1);
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::atomic<bool> taken_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    uint64_t generation_ = 0;
    int size_ = 0;  // only touched by whose turn it is
    int helpers_ = 0;
    int running_ = 0;
    const std::function<void(int)>* work_ = nullptr;
};

std::atomic<Pool*> current{nullptr};

// The child of a fork has the parent's pool in memory but none of its threads: it is left alone and
// forgotten.
void forget() {
    current.store(nullptr);
}

Pool& pool() {
    Pool* found = current.load();
    if (found != nullptr) return *found;
    static const int registered = pthread_atfork(nullptr, nullptr, forget);
    static_cast<void>(registered);
    Pool* made = new Pool;
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

}  // namespace

void run_parallel(int threads, const std::function<void(int)>& work) {
    run_parallel(threads, work, {}, nullptr);
}

void run_parallel(int threads, const std::function<void(int)>& work, std::chrono::milliseconds interval,
                  const std::function<void()>& meanwhile) {
    if (threads <= 1) {
        work(0);
    } else {
        pool().run(threads, work, interval, meanwhile);
    }
}

}  // namespace zeroelastic
