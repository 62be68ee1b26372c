// What the tests of the CUDA engine share: tables, memory of the fake device, and loops that are obviously
// right.

#ifndef ZEROELASTIC_TESTS_CASES_H_
#define ZEROELASTIC_TESTS_CASES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../../cast.h"
#include "../../digest.h"
#include "../../table.h"
#include "../check.h"
#include "../rows.h"
#include "cuda_runtime_api.h"
#include "fake.h"

using Bytes = std::vector<uint8_t>;

constexpr uint8_t kUntouched = 0xA5;

inline std::mt19937_64& random_engine() {
    static std::mt19937_64 one(7);
    return one;
}

inline int64_t between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_engine());
}

// Finite values in every type, so that no comparison is about which NaN it is.
inline Bytes random_bytes(int64_t size) {
    Bytes made(static_cast<size_t>(size));
    for (size_t i = 0; i < made.size(); i += 8) {
        const uint64_t word = random_engine()() & 0x3F3F3F3F3F3F3F3Fu;
        std::memcpy(made.data() + i, &word, std::min(made.size() - i, size_t{8}));
    }
    return made;
}

struct Digests {
    std::vector<uint64_t> seeds{3, 0xFFFFFFFFFFFFFFFFu};
    std::vector<uint64_t> totals{0, 0};
    std::vector<int64_t> stream, start, itemsize;

    void add(int64_t size) {
        stream.push_back(between(0, 1));
        start.push_back(between(0, int64_t{1} << 40));
        itemsize.push_back(size);
    }

    ze_digest digest() {
        return {2, seeds.data(), totals.data(), stream.data(), start.data(), itemsize.data()};
    }
};

// Device memory, some way into an allocation that ends where it ends.
class DeviceMemory {
  public:
    DeviceMemory(const Bytes& content, int64_t misaligned) : size_(content.size()), shift_(misaligned) {
        CHECK(cudaMalloc(&base_, size_ + static_cast<size_t>(shift_)) == cudaSuccess);
        std::memset(base_, kUntouched, static_cast<size_t>(shift_));
        if (size_ > 0) std::memcpy(data(), content.data(), size_);
    }
    ~DeviceMemory() {
        CHECK(cudaFree(base_) == cudaSuccess);
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    uint8_t* data() const {
        return static_cast<uint8_t*>(base_) + shift_;
    }
    int64_t size() const {
        return static_cast<int64_t>(size_);
    }
    Bytes content() const {
        return Bytes(data(), data() + size_);
    }

  private:
    size_t size_;
    int64_t shift_;
    void* base_ = nullptr;
};

using DeviceSide = std::vector<std::unique_ptr<DeviceMemory>>;

struct Pointers {
    explicit Pointers(const DeviceSide& side) {
        for (const auto& memory : side) {
            data.push_back(memory->data());
            sizes.push_back(memory->size());
        }
    }

    ze_buffers buffers() const {
        return {static_cast<int64_t>(data.size()), data.data(), sizes.data()};
    }

    std::vector<void*> data;
    std::vector<int64_t> sizes;
};

// What a table makes of its sources, one row after the other.
inline std::vector<Bytes> expected(const Rows& rows, const std::vector<Bytes>& src, std::vector<Bytes> dst,
                                   int32_t cast) {
    for (size_t i = 0; i < rows.size(); ++i) {
        const uint8_t* from = src[static_cast<size_t>(rows.src[i])].data() + rows.src_offset[i];
        uint8_t* to = dst[static_cast<size_t>(rows.dst[i])].data() + rows.dst_offset[i];
        if (rows.nbytes[i] == 0) continue;
        if (cast == ZE_CAST_NONE) {
            std::memcpy(to, from, static_cast<size_t>(rows.nbytes[i]));
        } else {
            zeroelastic::cast_elements(cast, from, to, rows.nbytes[i] / zeroelastic::source_itemsize(cast),
                                       false);
        }
    }
    return dst;
}

inline std::vector<uint64_t> expected_totals(const Rows& rows, const std::vector<Bytes>& src,
                                             const Digests& digests) {
    std::vector<uint64_t> totals(digests.seeds.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        const size_t stream = static_cast<size_t>(digests.stream[i]);
        totals[stream] += zeroelastic::digest_elements(
            src[static_cast<size_t>(rows.src[i])].data() + rows.src_offset[i],
            rows.nbytes[i] / digests.itemsize[i], static_cast<int>(digests.itemsize[i]),
            digests.seeds[stream], digests.start[i]);
    }
    return totals;
}

#endif  // ZEROELASTIC_TESTS_CASES_H_
