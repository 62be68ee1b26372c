/* LD_PRELOAD: system calls on files of a marked path that are interrupted, cut short, or fail.
 *
 * FAULTY_PATH marks paths that contain it, FAULTY_MODE is a letter per fault: "i" every third call is interrupted, "s"
 * every call moves at most 1000 bytes, and "r", "w", "f" let the FAULTY_AT-th read, write or fsync fail with
 * FAULTY_ERRNO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LIMIT = 1000 };
static atomic_int calls[3], interrupted;

static int is_marked(int fd) {
    const char *marked = getenv("FAULTY_PATH");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (marked == NULL || length < 0) return 0;
    path[length] = 0;
    return strstr(path, marked) != NULL;
}

static int has(char fault) {
    const char *mode = getenv("FAULTY_MODE");
    return mode != NULL && strchr(mode, fault) != NULL;
}

/* Whether the call fails now, errno set; kind 0 is a read, 1 a write, 2 an fsync. */
static int fails(int fd, int kind) {
    if (!is_marked(fd)) return 0;
    if (has('i') && atomic_fetch_add(&interrupted, 1) % 3 == 1) {
        errno = EINTR;
        return 1;
    }
    if (has("rwf"[kind]) && atomic_fetch_add(&calls[kind], 1) + 1 >= atoi(getenv("FAULTY_AT"))) {
        errno = atoi(getenv("FAULTY_ERRNO"));
        return 1;
    }
    return 0;
}

static size_t shortened(int fd, size_t nbytes) { return is_marked(fd) && has('s') && nbytes > LIMIT ? LIMIT : nbytes; }

#define SIMPLE(name, kind, type)                                            \
    ssize_t name(int fd, type *at, size_t nbytes) {                         \
        static ssize_t (*next)(int, type *, size_t);                        \
        if (!next) next = (ssize_t (*)(int, type *, size_t))dlsym(RTLD_NEXT, #name); \
        return fails(fd, kind) ? -1 : next(fd, at, shortened(fd, nbytes));  \
    }
#define PLACED(name, kind, type)                                                    \
    ssize_t name(int fd, type *at, size_t nbytes, off_t offset) {                   \
        static ssize_t (*next)(int, type *, size_t, off_t);                         \
        if (!next) next = (ssize_t (*)(int, type *, size_t, off_t))dlsym(RTLD_NEXT, #name); \
        return fails(fd, kind) ? -1 : next(fd, at, shortened(fd, nbytes), offset);  \
    }
/* Of a list of buffers only the beginning of the first is moved. */
#define LISTED(name, kind)                                                         \
    ssize_t name(int fd, const struct iovec *list, int count, off_t offset) {      \
        static ssize_t (*next)(int, const struct iovec *, int, off_t);             \
        if (!next) next = (ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, #name); \
        if (fails(fd, kind)) return -1;                                            \
        if (!is_marked(fd) || !has('s')) return next(fd, list, count, offset);     \
        const struct iovec first = {list->iov_base, shortened(fd, list->iov_len)}; \
        return next(fd, &first, 1, offset);                                        \
    }

SIMPLE(read, 0, void)
SIMPLE(write, 1, const void)
PLACED(pread, 0, void)
PLACED(pread64, 0, void)
PLACED(pwrite, 1, const void)
PLACED(pwrite64, 1, const void)
LISTED(preadv, 0)
LISTED(preadv64, 0)
LISTED(pwritev, 1)
LISTED(pwritev64, 1)

int fsync(int fd) {
    static int (*next)(int);
    if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return fails(fd, 2) ? -1 : next(fd);
}
