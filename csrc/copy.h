// Copying runs of bytes at the speed of memory.

#ifndef ZEROELASTIC_COPY_H_
#define ZEROELASTIC_COPY_H_

#include <cstdint>

#include "cpu.h"
#include "digest.h"
#include "zeroelastic.h"

namespace zeroelastic {

// Copies runs past the caches, in whole lines. The end of a run that fills no line waits here for the
// beginning of the next one, so that runs that follow each other in memory never fetch a line to overwrite a
// part of it. Nothing is certain to be in its place before flush(), after which other threads may look at it.
// Bytes between the runs are not touched.
class LineWriter {
  public:
    LineWriter();
    ~LineWriter() {
        flush();
    }
    LineWriter(const LineWriter&) = delete;
    LineWriter& operator=(const LineWriter&) = delete;

    void put(char* to, const char* from, int64_t nbytes);

    // Converts `count` elements of fp32 on the way. False, and nothing done, where there are no kernels for
    // that.
    bool put_narrowed(char* to, const char* from, int64_t count, bool to_bf16);

    // Also returns the partial digest of what is copied, whole elements, in one pass over it.
    uint64_t put_digested(char* to, const char* from, int64_t nbytes, const DigestOf& digest);

    // Fetches the lines at both ends of a run that will be put later and does not follow its predecessor.
    static void expect(const char* to, int64_t nbytes);

    void flush();

  private:
    int64_t fill(char* to, const char* from, int64_t nbytes);
    void keep(char* to, const char* from, int64_t nbytes);
    void write_kept();
#if ZE_X86
    void narrow_avx512(char* to, const char* from, int64_t count, bool to_bf16);
#endif

    alignas(64) char kept_[64];  // [begin_, end_) of the line at line_
    char* line_ = nullptr;
    int64_t begin_ = 0;
    int64_t end_ = 0;
    const ze_isa_level isa_;
};

// Waits until other threads may look at what was written past the caches.
void end_streaming();

}  // namespace zeroelastic

#endif  // ZEROELASTIC_COPY_H_
