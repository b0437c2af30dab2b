// A file of random bytes that goes with its scope.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

struct temp_file {
    std::string          path;
    std::vector<uint8_t> bytes;

    explicit temp_file(size_t size, unsigned seed = 1) : bytes(size) {
        const char * folder = std::getenv("TMPDIR");
        path                = std::string(folder ? folder : "/tmp") + "/speculoe-test-XXXXXX";
        const int    fd     = mkstemp(path.data());
        std::mt19937 random(seed);
        for (uint8_t & b : bytes) {
            b = uint8_t(random());
        }
        if (fd < 0 || ::write(fd, bytes.data(), size) != ssize_t(size) || ::close(fd) != 0) {
            throw std::runtime_error("cannot write " + path);
        }
    }
    ~temp_file() { std::remove(path.c_str()); }
    temp_file(const temp_file &)             = delete;
    temp_file & operator=(const temp_file &) = delete;

    void truncate(size_t size) const {
        if (::truncate(path.c_str(), off_t(size)) != 0) {
            throw std::runtime_error("cannot truncate " + path);
        }
    }
};
