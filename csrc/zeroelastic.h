// The C interface of the native engine: tables of byte runs moved between files and memory.
//
// A table has one row per run: `nbytes` bytes at `src_offset` of source `src` go to `dst_offset` of
// destination `dst`. Whether a side is a file or a memory buffer depends on the function. Every row is
// checked against the sides' sizes once, when the table is accepted, and trusted afterwards. Rows must not
// overlap in their destinations; sources may overlap each other. All quantities are in bytes and 64 bit.
//
// Functions return ZE_OK or the code that `error` then explains. They do not throw, keep no state but an idle
// thread pool, and may be called from several threads and after a fork.

#ifndef ZEROELASTIC_H_
#define ZEROELASTIC_H_

#include <stdint.h>

#define ZE_API __attribute__((visibility("default")))

// Raised with every change of this file, so that a library and its caller of different ages notice.
#define ZE_ABI_VERSION 15

#ifdef __cplusplus
extern "C" {
#endif

enum ze_code {
    ZE_OK = 0,
    ZE_OPEN_FAILED = 1,   // errnum
    ZE_READ_FAILED = 2,   // errnum, at offset
    ZE_END_OF_FILE = 3,   // the file ends at offset
    ZE_WRITE_FAILED = 4,  // errnum, at offset
    ZE_SYNC_FAILED = 5,   // errnum
    ZE_BAD_TABLE = 6,     // the row is in offset
    ZE_NO_MEMORY = 7,
    ZE_INTERNAL = 8,
    ZE_CANCELLED = 9,  // by the progress function
};

enum ze_side { ZE_SOURCE = 0, ZE_DESTINATION = 1 };

// Source and destination element of a conversion. With one, `nbytes` and `src_offset` count bytes of the
// source's elements, `dst_offset` bytes of the destination's. Digests are those of the source's bits.
enum ze_cast {
    ZE_CAST_NONE = 0,
    ZE_CAST_F32_BF16 = 1,
    ZE_CAST_F32_F16 = 2,
    ZE_CAST_BF16_F32 = 3,
    ZE_CAST_F16_F32 = 4,
};

// Instruction sets, each including those before it.
enum ze_isa_level { ZE_ISA_PLAIN = 0, ZE_ISA_AVX2 = 1, ZE_ISA_AVX512 = 2 };

typedef struct ze_error ze_error;
typedef struct ze_table ze_table;
typedef struct ze_files ze_files;
typedef struct ze_buffers ze_buffers;
typedef struct ze_digest ze_digest;
typedef struct ze_progress ze_progress;
typedef struct ze_options ze_options;

struct ze_error {
    int32_t code;
    int32_t errnum;
    int32_t side;  // of the file: ze_side
    int32_t reserved;
    int64_t file;
    int64_t offset;
};

struct ze_table {
    int64_t num_rows;
    const int64_t* src;
    const int64_t* src_offset;
    const int64_t* dst;
    const int64_t* dst_offset;
    const int64_t* nbytes;
};

struct ze_files {
    int64_t count;
    const char* const* paths;
};

struct ze_buffers {
    int64_t count;
    void* const* data;
    const int64_t* nbytes;
};

// What each row adds to a digest (see zeroelastic/core/digest.py); the columns run parallel to the table's
// rows.
struct ze_digest {
    int64_t num_streams;
    const uint64_t* seeds;
    uint64_t* totals;         // per stream, added to
    const int64_t* stream;    // index into seeds
    const int64_t* start;     // global position of the row's first element
    const int64_t* itemsize;  // 1, 2, 4 or 8
};

// The caller's progress function; a caller may put data of its own behind this structure. `report` is called
// on the caller's thread about every 50 ms, also while it only waits for other threads, and once at the end.
// If it does not set `keep_going`, it is not called again and the operation ends soon with ZE_CANCELLED: a
// function that fails before it can set anything has cancelled.
struct ze_progress {
    void (*report)(ze_progress* self);
    int64_t nbytes;      // of the sources, done since the last call; all calls together cover them
    int32_t keep_going;  // 0 before the call
    int32_t reserved;
};

struct ze_options {
    int32_t threads;        // at least 1, the caller included
    int32_t cast;           // ze_cast
    int32_t sync;           // write and move: flush what was written to the device
    int32_t copies_cast;    // read: the conversion of `copies`, not ZE_CAST_NONE where there are any
    ze_progress* progress;  // all but copy; may be null
    // read, without `cast`: for each destination, memory that gets its elements converted, at the same
    // positions, or null. Null for none at all.
    const ze_buffers* copies;
};

ZE_API int32_t ze_abi_version(void);

// The compiler and the instruction sets that were compiled in, one line.
ZE_API const char* ze_build_info(void);

// The instruction set in use, and the best one that this processor has.
ZE_API int32_t ze_isa(void);
ZE_API int32_t ze_best_isa(void);

// Use at most this instruction set: for tests and measurements, while nothing else runs. Returns the one in
// use.
ZE_API int32_t ze_limit_isa(int32_t isa);

// files -> memory. `digest` may be null, and so may `crc32`: else it gets the checksum
// of what was read of each row (see crc32.h), 0 for a row without bytes. `bytes_read` is what was read before
// an error, too.
ZE_API int32_t ze_read_segments(const ze_table* table, const ze_files* src, const ze_buffers* dst,
                                const ze_digest* digest, const ze_options* options, uint32_t* crc32,
                                int64_t* bytes_read, ze_error* error);

// memory -> memory. Source and destination runs must not overlap. `crc32` as for reading.
ZE_API int32_t ze_copy_segments(const ze_table* table, const ze_buffers* src, const ze_buffers* dst,
                                const ze_digest* digest, const ze_options* options, uint32_t* crc32,
                                ze_error* error);

// memory -> files that exist already; they are neither created nor truncated. `crc32` may be null: else it
// gets, for each row, the checksum of what was written of it (see crc32.h), 0 for a row without bytes.
ZE_API int32_t ze_write_segments(const ze_table* table, const ze_buffers* src, const ze_files* dst,
                                 const ze_digest* digest, const ze_options* options, uint32_t* crc32,
                                 ze_error* error);

// files -> files that exist already, through at most 1 MiB of memory per thread. `crc32` as for writing.
ZE_API int32_t ze_move_segments(const ze_table* table, const ze_files* src, const ze_files* dst,
                                const ze_digest* digest, const ze_options* options, uint32_t* crc32,
                                ze_error* error);

// files -> digests and checksums, through at most 1 MiB of memory per thread: a move that writes nothing. The
// table's destinations are not looked at and may be null; there is no conversion. `digest` and `crc32` may be
// null, `crc32` is of what was read of each row.
ZE_API int32_t ze_scan_segments(const ze_table* table, const ze_files* src, const ze_digest* digest,
                                const ze_options* options, uint32_t* crc32, ze_error* error);

// memory -> digests and checksums: as ze_scan_segments, of buffers.
ZE_API int32_t ze_sum_segments(const ze_table* table, const ze_buffers* src, const ze_digest* digest,
                               const ze_options* options, uint32_t* crc32, ze_error* error);

// The partial digest of `count` elements from global position `start` of the stream.
ZE_API uint64_t ze_digest_range(const void* data, int64_t count, int32_t itemsize, uint64_t seed,
                                int64_t start, int32_t threads);

// The checksum of `count` runs that lie one behind the other, from theirs.
ZE_API uint32_t ze_crc32_join(const uint32_t* crc32, const int64_t* nbytes, int64_t count);

#ifdef __cplusplus
}
#endif

#endif  // ZEROELASTIC_H_
