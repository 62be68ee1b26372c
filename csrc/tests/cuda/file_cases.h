// What tests of files and the fake device share: files of a test's own, cases, and where these lie on the
// device.

#ifndef ZEROELASTIC_TESTS_FILE_CASES_H_
#define ZEROELASTIC_TESTS_FILE_CASES_H_

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>

#include "../../cuda/device_files.h"
#include "cases.h"

constexpr int64_t kSmallSlot = int64_t{64} << 10;

// Calls `run` with each function of CUDA that a transfer uses failing from its first, second or third call
// on.
template <typename Run>
void with_every_failure(const Run& run) {
    for (const char* function : {"cudaHostAlloc", "cudaMemcpyAsync", "cudaEventCreateWithFlags",
                                 "cudaEventRecord", "cudaEventSynchronize", "cudaStreamSynchronize"}) {
        for (int after = 0; after < 3; ++after) {
            if (after > 0 && std::string(function) == "cudaStreamSynchronize") continue;
            fake::reset(fake::Copies::kWhenWaited);
            fake::fail(function, after, cudaErrorLaunchFailure);
            run();
        }
    }
    fake::reset(fake::Copies::kWhenWaited);
}

// Calls `run` with a second device and a stream of it, and with the first and its default stream; the first
// is the caller's before and after.
template <typename Run>
void on_every_device(const Run& run) {
    cudaStream_t stream;
    CHECK(cudaSetDevice(1) == cudaSuccess && cudaStreamCreate(&stream) == cudaSuccess);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    for (const int device : {1, 0}) {
        run(device, device == 1 ? stream : nullptr);
        int now = -1;
        CHECK(cudaGetDevice(&now) == cudaSuccess && now == 0);
    }
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

class Files {
  public:
    explicit Files(const std::vector<Bytes>& contents) {
        const char* parent = getenv("TMPDIR");
        folder_ = std::string(parent == nullptr ? "/tmp" : parent) + "/zeroelastic-XXXXXX";
        CHECK(mkdtemp(folder_.data()) != nullptr);
        for (size_t i = 0; i < contents.size(); ++i) {
            names_.push_back(folder_ + "/" + std::to_string(i));
            std::FILE* file = std::fopen(names_.back().c_str(), "wb");
            CHECK(file != nullptr);
            CHECK(contents[i].empty() ||
                  std::fwrite(contents[i].data(), 1, contents[i].size(), file) == contents[i].size());
            CHECK(std::fclose(file) == 0);
        }
        for (const std::string& name : names_) paths_.push_back(name.c_str());
    }
    ~Files() {
        for (const std::string& name : names_) unlink(name.c_str());
        rmdir(folder_.c_str());
    }

    void remove(size_t number) {
        CHECK(unlink(names_[number].c_str()) == 0);
    }
    void truncate_to(size_t number, int64_t size) {
        CHECK(truncate(names_[number].c_str(), size) == 0);
    }
    Bytes content(size_t number) const {
        std::FILE* file = std::fopen(names_[number].c_str(), "rb");
        CHECK(file != nullptr && std::fseek(file, 0, SEEK_END) == 0);
        Bytes found(static_cast<size_t>(std::ftell(file)));
        std::rewind(file);
        CHECK(found.empty() || std::fread(found.data(), 1, found.size(), file) == found.size());
        CHECK(std::fclose(file) == 0);
        return found;
    }
    ze_files files() const {
        return {static_cast<int64_t>(paths_.size()), paths_.data()};
    }

  private:
    std::string folder_;
    std::vector<std::string> names_;
    std::vector<const char*> paths_;
};

inline int open_descriptors() {
    DIR* folder = opendir("/proc/self/fd");
    CHECK(folder != nullptr);
    int count = 0;
    while (readdir(folder) != nullptr) ++count;
    closedir(folder);
    return count;
}

struct Case {
    std::vector<Bytes> files;
    std::vector<Bytes> before;  // the destinations
    std::vector<int64_t> misaligned;
    Rows rows;
    Digests digests;
    int32_t cast = ZE_CAST_NONE;
};

inline Case make_case(int32_t cast, int num_rows, int64_t longest) {
    Case made;
    made.cast = cast;
    const int64_t itemsize =
        cast == ZE_CAST_NONE ? int64_t{1} << between(0, 3) : zeroelastic::source_itemsize(cast);
    const int64_t num_files = between(1, 4), num_buffers = between(1, 3);
    for (int64_t i = 0; i < num_files; ++i) made.files.push_back(random_bytes(between(0, longest * 3)));
    std::vector<int64_t> filled(static_cast<size_t>(num_buffers));
    for (int i = 0; i < num_rows; ++i) {
        const int64_t file = between(0, num_files - 1), buffer = between(0, num_buffers - 1);
        const int64_t size = static_cast<int64_t>(made.files[static_cast<size_t>(file)].size());
        const int64_t offset = between(0, size);
        const int64_t wanted = between(0, 3) == 0 ? between(0, longest) : between(0, 40);
        const int64_t nbytes = std::min(wanted, size - offset) / itemsize * itemsize;
        int64_t& end = filled[static_cast<size_t>(buffer)];
        end += between(0, 2) == 0 ? between(1, 9) : 0;
        made.rows.add(file, offset, buffer, end, nbytes);
        made.digests.add(itemsize);
        end += zeroelastic::converted_bytes(nbytes, cast);
    }
    for (const int64_t size : filled) {
        made.before.emplace_back(static_cast<size_t>(size + between(0, 9)), kUntouched);
        made.misaligned.push_back(between(0, 300));
    }
    // In any order.
    std::vector<size_t> order(made.rows.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random_engine());
    Case shuffled = made;
    for (size_t i = 0; i < order.size(); ++i) {
        const size_t j = order[i];
        shuffled.rows.src[i] = made.rows.src[j];
        shuffled.rows.src_offset[i] = made.rows.src_offset[j];
        shuffled.rows.dst[i] = made.rows.dst[j];
        shuffled.rows.dst_offset[i] = made.rows.dst_offset[j];
        shuffled.rows.nbytes[i] = made.rows.nbytes[j];
        shuffled.digests.stream[i] = made.digests.stream[j];
        shuffled.digests.start[i] = made.digests.start[j];
    }
    return shuffled;
}

// What a case has before as destinations, on the device.
inline DeviceSide on_device(const Case& one) {
    DeviceSide side;
    for (size_t i = 0; i < one.before.size(); ++i) {
        side.emplace_back(new DeviceMemory(one.before[i], one.misaligned[i]));
    }
    return side;
}

// What a case has as files, on the device.
inline DeviceSide sources_on_device(const Case& one) {
    DeviceSide side;
    for (const Bytes& content : one.files) side.emplace_back(new DeviceMemory(content, between(0, 300)));
    return side;
}

// A contiguous destination of `total` bytes, in rows of `length`, from several files in turn.
inline Case contiguous(int64_t total, int64_t length, size_t num_files) {
    Case made;
    made.files.resize(num_files);
    made.before.emplace_back(static_cast<size_t>(total), kUntouched);
    made.misaligned.push_back(0);
    for (int64_t at = 0; at < total; at += length) {
        const size_t file = static_cast<size_t>(at / length) % num_files;
        const int64_t nbytes = std::min(length, total - at);
        const Bytes more = random_bytes(nbytes);
        made.rows.add(static_cast<int64_t>(file), static_cast<int64_t>(made.files[file].size()), 0, at,
                      nbytes);
        made.digests.add(1);
        made.files[file].insert(made.files[file].end(), more.begin(), more.end());
    }
    return made;
}

#endif  // ZEROELASTIC_TESTS_FILE_CASES_H_
