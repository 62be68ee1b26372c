#include "mapped.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

namespace zeroelastic {
namespace {

#ifdef __linux__

// As in <linux/mman.h>, which is older than this call on many systems; its number is the same on all
// processors.
constexpr long kCachestat = 451;
struct CacheRange {
    uint64_t offset;
    uint64_t nbytes;
};
struct CacheStat {  // in pages
    uint64_t cached;
    uint64_t dirty;
    uint64_t written_back;
    uint64_t evicted;
    uint64_t recently_evicted;
};

// Whether the pages of a range are in memory, which begins with a page.
bool in_memory(int fd, int64_t begin, int64_t end) {
    static const int64_t page = sysconf(_SC_PAGESIZE);
    CacheRange range{static_cast<uint64_t>(begin), static_cast<uint64_t>(end - begin)};
    CacheStat found{};
    if (syscall(kCachestat, fd, &range, &found, 0) != 0) return false;
    return found.cached == static_cast<uint64_t>((end - begin + page - 1) / page);
}

// The size of a file, which takes a file system to say. Not fstat(), which needs glibc 2.33.
int64_t size_of(int fd) {
    struct statx about;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE, &about) != 0) return -1;
    return static_cast<int64_t>(about.stx_size);
}

// What a thread looks at: for the handler of a signal, which can use no thread_local of a library that is
// loaded late. A thread writes and reads its own place alone.
struct Place {
    std::atomic<long> thread{0};
    Mapped* looked_at = nullptr;
};
Place places[1024];

Place* place_of(long thread) {
    for (Place& place : places) {
        if (place.thread.load(std::memory_order_relaxed) == thread) return &place;
    }
    return nullptr;
}

// False where no place is free.
bool take_place(Mapped* mapped) {
    const long thread = syscall(SYS_gettid);
    for (Place& place : places) {
        long none = 0;
        if (!place.thread.compare_exchange_strong(none, thread)) continue;
        place.looked_at = mapped;
        return true;
    }
    return false;
}

void give_up_place() {
    Place* const place = place_of(syscall(SYS_gettid));
    if (place == nullptr) return;
    place->looked_at = nullptr;
    place->thread.store(0);
}

struct sigaction other_handler;

void on_sigbus(int number, siginfo_t* info, void* context) {
    const Place* const place = info->si_code > 0 ? place_of(syscall(SYS_gettid)) : nullptr;
    if (place != nullptr && place->looked_at != nullptr && place->looked_at->lose(info->si_addr)) return;
    if ((other_handler.sa_flags & SA_SIGINFO) != 0) {
        other_handler.sa_sigaction(number, info, context);
    } else if (other_handler.sa_handler != SIG_DFL && other_handler.sa_handler != SIG_IGN) {
        other_handler.sa_handler(number);
    } else {
        sigaction(number, &other_handler, nullptr);
        if (info->si_code <= 0) raise(number);  // else the same access is made again
    }
}

// Not std::call_once(), which takes symbols of a newer glibc.
void handle_sigbus() {
    static const bool handled = [] {
        struct sigaction own = {};
        own.sa_sigaction = on_sigbus;
        own.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&own.sa_mask);
        sigaction(SIGBUS, nullptr, &other_handler);
        return sigaction(SIGBUS, &own, nullptr) == 0;
    }();
    static_cast<void>(handled);
}

int64_t faults() {
    rusage used;
    return getrusage(RUSAGE_THREAD, &used) == 0 ? static_cast<int64_t>(used.ru_minflt) : 0;
}

// Whether what is mapped at `data` is one large page: then its second half is there with the first.
// Sanitizers would touch memory of their own for it.
__attribute__((no_sanitize("address"))) __attribute__((no_sanitize("thread"))) bool is_large_page(
    const char* data) {
    static_cast<void>(*static_cast<const volatile char*>(data));
    const int64_t before = faults();
    static_cast<void>(*static_cast<const volatile char*>(data + kLargePage / 2));
    return faults() == before;
}

#endif

}  // namespace

std::atomic<int64_t> Mapped::seen_{0};

Mapped::Mapped(int fd, int64_t begin, int64_t end, LargePages* pages) {
#ifdef __linux__
    if (!pages->expected()) return;
    map(fd, begin, end);
    pages->found(data_ != nullptr);
#else
    static_cast<void>(fd);
    static_cast<void>(begin);
    static_cast<void>(end);
    static_cast<void>(pages);
#endif
}

#ifdef __linux__

void Mapped::map(int fd, int64_t begin, int64_t end) {
    if (end > size_of(fd)) return;  // beyond the end of the file there is nothing to look at
    // Whole large pages, so that they can be mapped as such; one inside the range stands for all.
    const int64_t first = begin / kLargePage * kLargePage;
    const int64_t inner = (begin + kLargePage - 1) / kLargePage * kLargePage;
    const int64_t last = (end + kLargePage - 1) / kLargePage * kLargePage;
    if (inner + kLargePage > end || !in_memory(fd, inner, inner + kLargePage)) return;
    // Addresses at which a large page may begin: not all file systems choose such.
    room_bytes_ = static_cast<size_t>(last - first + kLargePage);
    void* const room =
        mmap(nullptr, room_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return;
    room_ = static_cast<char*>(room);
    first_ = first;
    end_ = end;
    fd_ = fd;
    char* const data = room_ + static_cast<int64_t>(-reinterpret_cast<uintptr_t>(room) % kLargePage);
    const size_t nbytes = static_cast<size_t>(last - first);
    if (mmap(data, nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, first) == data) data_ = data;
    handle_sigbus();
    if (data_ == nullptr || !take_place(this) || !is_large_page(at(inner)) || !in_memory(fd, first, end))
        unmap();
}

bool Mapped::lose(const void* address) {
    const char* const lost = static_cast<const char*>(address);
    const size_t nbytes = room_bytes_ - static_cast<size_t>(kLargePage);
    if (data_ == nullptr || lost < data_ || lost >= data_ + nbytes) return false;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(data_, nbytes, PROT_READ, flags, -1, 0) != data_) return false;
    lost_.store(lost, std::memory_order_relaxed);
    return true;
}

bool Mapped::intact(int64_t file, ze_error* error) const {
    const int64_t size = size_of(fd_);
    const char* const lost = lost_.load(std::memory_order_relaxed);
    if (size >= end_ && lost == nullptr) return true;
    if (size >= 0 && size < end_) {
        *error = failure(ZE_END_OF_FILE, 0, ZE_SOURCE, file, size);
    } else {
        const int64_t at = lost == nullptr ? first_ : first_ + (lost - data_);
        *error = failure(ZE_READ_FAILED, EIO, ZE_SOURCE, file, at);
    }
    return false;
}

#else

bool Mapped::intact(int64_t, ze_error*) const {
    return true;
}

#endif

void Mapped::unmap() {
#ifdef __linux__
    give_up_place();
#endif
    munmap(room_, room_bytes_);
    room_ = data_ = nullptr;
}

Mapped::~Mapped() {
    if (room_ != nullptr) unmap();
}

Span span_of(const ze_table& table, const std::vector<int64_t>& order, const Unit& unit) {
    Pieces pieces(table, order, unit);
    Span span{std::numeric_limits<int64_t>::max(), 0};
    Piece part;
    while (pieces.peek(unit.nbytes, &part)) {
        const int64_t begin = table.src_offset[part.row] + part.within;
        span.begin = std::min(span.begin, begin);
        span.end = std::max(span.end, begin + part.nbytes);
        pieces.take(part);
    }
    if (span.end <= span.begin || span.end - span.begin > 2 * unit.nbytes) return {0, 0};
    return span;
}

}  // namespace zeroelastic
