// A test is a function that registers itself; a failed CHECK says where and ends the program.

#ifndef ZEROELASTIC_TESTS_CHECK_H_
#define ZEROELASTIC_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <vector>

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

#define TEST(name)                                                                  \
    static void name();                                                             \
    static const bool name##_registered = (tests().push_back({#name, name}), true); \
    static void name()

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                  \
        }                                                                                  \
    } while (false)

#endif  // ZEROELASTIC_TESTS_CHECK_H_
