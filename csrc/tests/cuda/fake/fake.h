// What a test says to the fake CUDA runtime, and asks of it.
//
// Device memory is host memory that the fake handed out. What is asynchronous in CUDA may be put off as long
// as CUDA allows, so that memory which is used again too early shows in the bytes. A pointer of the wrong
// kind, a stream or an event of another device is an error, as in CUDA. A kernel runs with a thread of its
// own for every thread of a block, so a sanitizer sees races inside a block and every access beyond an
// allocation.

#ifndef ZEROELASTIC_TESTS_FAKE_H_
#define ZEROELASTIC_TESTS_FAKE_H_

#include <cstdint>

#include "cuda_runtime_api.h"

namespace fake {

constexpr int kNumDevices = 2;

enum class Copies {
    kAtOnce,      // as they are asked for
    kWhenWaited,  // not before somebody waits for an event or a stream that is behind them
};

// Forgets failures and counts; nothing may be in flight.
void reset(Copies copies);

// From the `after`-th call on (0: the next), `function` fails with `status`.
void fail(const char* function, int after, cudaError_t status);

struct Counts {
    int64_t pinned_bytes;       // now
    int64_t most_pinned_bytes;  // ever
    int64_t device_bytes;       // now
    int64_t host_allocations;
    int64_t async_copies;
    int64_t events;  // now
    int64_t launches;
    int64_t in_flight;  // operations that nobody has waited for
};
Counts counts();

}  // namespace fake

#endif  // ZEROELASTIC_TESTS_FAKE_H_
