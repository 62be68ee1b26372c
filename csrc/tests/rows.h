// The rows of a table, a vector for each column.

#ifndef ZEROELASTIC_TESTS_ROWS_H_
#define ZEROELASTIC_TESTS_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../zeroelastic.h"

struct Rows {
    std::vector<int64_t> src, src_offset, dst, dst_offset, nbytes;

    void add(int64_t s, int64_t s_offset, int64_t d, int64_t d_offset, int64_t length) {
        src.push_back(s);
        src_offset.push_back(s_offset);
        dst.push_back(d);
        dst_offset.push_back(d_offset);
        nbytes.push_back(length);
    }

    size_t size() const {
        return nbytes.size();
    }

    int64_t total() const {
        return std::accumulate(nbytes.begin(), nbytes.end(), int64_t{0});
    }

    ze_table table() const {
        return {static_cast<int64_t>(nbytes.size()),
                src.data(),
                src_offset.data(),
                dst.data(),
                dst_offset.data(),
                nbytes.data()};
    }
};

#endif  // ZEROELASTIC_TESTS_ROWS_H_
