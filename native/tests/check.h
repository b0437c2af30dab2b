// The least a test needs: TEST(name) { CHECK(...); } and a runner in main.cpp.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using test_list = std::vector<std::pair<const char *, std::function<void()>>>;

inline test_list & all_tests() {
    static test_list tests;
    return tests;
}

struct registered_test {
    registered_test(const char * name, std::function<void()> run) { all_tests().emplace_back(name, std::move(run)); }
};

#define TEST(name)                                                                                                     \
    static void                  name();                                                                               \
    static const registered_test registered_##name(#name, name);                                                       \
    static void                  name()

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            throw std::runtime_error(std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " #condition);          \
        }                                                                                                              \
    } while (false)
