// Where expert weights come from: ranges of GGUF files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace spo {

// One line: file, offset, length, reason.
struct source_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class file_source {
public:
    // Throws source_error when a file cannot be opened.
    file_source(const std::vector<std::string> & paths, int kind);
    ~file_source();
    file_source(const file_source &)             = delete;
    file_source & operator=(const file_source &) = delete;

    // A piece of a range: where its bytes go.
    struct piece {
        uint8_t * to;
        size_t    size;
    };

    // Fills `pieces` one after another with the bytes from `offset` on, in one read where the system allows.
    void read(int file, uint64_t offset, const piece * pieces, int n) const;

    // Fills `to` with bytes [offset, offset + size) of a file; all or source_error. Any thread.
    void read(int file, uint64_t offset, size_t size, void * to) const;

    // The system need not keep these bytes: they have been read to stay elsewhere.
    void forget(int file, uint64_t offset, size_t size) const;

    int kind() const { return kind_; } // spo_source in use, after falling back

private:
    struct opened {
        std::string path;
        int         fd       = -1;
        uint8_t *   mapped   = nullptr;
        uint64_t    map_size = 0;
    };

    void open(opened & file);
    void close_all();
    void read_buffered(const opened & file, uint64_t offset, const piece * pieces, int n) const;
    void read_direct(const opened & file, uint64_t offset, const piece * pieces, int n) const;
    void read_mapped(const opened & file, uint64_t offset, const piece * pieces, int n) const;

    int                 kind_;
    std::vector<opened> files_;
};

} // namespace spo
