// A pool of idle threads that is made when it is first needed and made anew in a forked child.

#ifndef ZEROELASTIC_POOL_H_
#define ZEROELASTIC_POOL_H_

#include <chrono>
#include <functional>

namespace zeroelastic {

// Calls work(0), ..., work(n - 1), each on a thread of its own, for some 1 <= n <= threads; returns when all
// have returned. work(0) runs on the caller's thread. n is 1 while the pool is busy with another caller, and
// smaller than asked for where the system gives no more threads. `work` must not throw.
void run_parallel(int threads, const std::function<void(int)>& work);

// The same; the caller's thread calls `meanwhile` every so often while it waits for the others.
void run_parallel(int threads, const std::function<void(int)>& work, std::chrono::milliseconds interval,
                  const std::function<void()>& meanwhile);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_POOL_H_
