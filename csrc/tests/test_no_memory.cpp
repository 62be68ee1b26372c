// What happens where the system gives no memory: nothing is thrown across the C interface.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "../digest.h"
#include "../zeroelastic.h"
#include "check.h"

namespace {

std::atomic<bool> out_of_memory{false};

}  // namespace

void* operator new(size_t size, const std::nothrow_t&) noexcept {
    return out_of_memory ? nullptr : std::malloc(size == 0 ? 1 : size);
}

void* operator new(size_t size) {
    void* made = operator new(size, std::nothrow);
    if (made == nullptr) throw std::bad_alloc();
    return made;
}

void operator delete(void* made) noexcept {
    std::free(made);
}

void operator delete(void* made, size_t) noexcept {
    std::free(made);
}

TEST(a_digest_without_memory_for_threads_is_made_by_the_caller) {
    std::vector<unsigned char> data(4096 * 1024);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 7 + i / 251);
    const int64_t count = static_cast<int64_t>(data.size());
    const uint64_t expected = zeroelastic::digest_elements(data.data(), count, 1, 5, 3);
    const pid_t child = fork();  // the child has no pool yet
    CHECK(child >= 0);
    if (child == 0) {
        out_of_memory = true;
        const uint64_t got = ze_digest_range(data.data(), count, 1, 5, 3, 4);
        out_of_memory = false;
        _exit(got == expected ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
