// Writes past the page cache as a test sees them: pwrite and fstatfs in place of the system's. One file of a
// program includes it.

#ifndef ZEROELASTIC_TESTS_DIRECT_WRITES_H_
#define ZEROELASTIC_TESTS_DIRECT_WRITES_H_

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "check.h"

namespace direct_writes {

std::atomic<int64_t> bytes{0}, calls{0};
std::atomic<int> fails_with{0};  // each, from the call `after` on
std::atomic<int64_t> after{0};
std::atomic<int64_t> at_most{0};  // bytes of a call; 0: all
std::atomic<int64_t> file_system{0xEF53};

inline void reset() {
    bytes = calls = after = at_most = 0;
    fails_with = 0;
    file_system = 0xEF53;
}

// Whether the system has such writes where tests put their files.
inline bool possible() {
    const char* parent = getenv("TMPDIR");
    std::string path = std::string(parent == nullptr ? "/tmp" : parent) + "/zeroelastic-XXXXXX";
    const int made = mkstemp(path.data());
    CHECK(made >= 0);
    close(made);
    const int fd = open(path.c_str(), O_WRONLY | O_DIRECT);
    if (fd >= 0) close(fd);
    unlink(path.c_str());
    return fd >= 0;
}

}  // namespace direct_writes

extern "C" ssize_t pwrite(int fd, const void* data, size_t nbytes, off_t offset) {
    if ((fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
        CHECK(reinterpret_cast<uintptr_t>(data) % 4096 == 0 && nbytes % 4096 == 0 && offset % 4096 == 0);
        if (direct_writes::calls++ >= direct_writes::after && direct_writes::fails_with != 0) {
            errno = direct_writes::fails_with;
            return -1;
        }
        const size_t most = static_cast<size_t>(direct_writes::at_most.load());
        if (most > 0 && nbytes > most) nbytes = most;
        if (most % 4096 != 0) {  // the system would not stop there of a file like this one
            fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT);
            const ssize_t put = syscall(SYS_pwrite64, fd, data, nbytes, offset);
            fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_DIRECT);
            return put;
        }
        direct_writes::bytes += static_cast<int64_t>(nbytes);
    }
    return syscall(SYS_pwrite64, fd, data, nbytes, offset);
}

extern "C" int fstatfs(int fd, struct statfs* found) noexcept {
    const int code = static_cast<int>(syscall(SYS_fstatfs, fd, found));
    found->f_type = static_cast<decltype(found->f_type)>(direct_writes::file_system.load());
    return code;
}

#endif  // ZEROELASTIC_TESTS_DIRECT_WRITES_H_
