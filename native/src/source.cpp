#include "source.h"

#include "speculoe/speculoe.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef O_DIRECT
#define O_DIRECT 0 // macOS: F_NOCACHE would be its way; reads are buffered there
#endif

namespace spo {

namespace {

constexpr size_t direct_align = 4096;            // logical blocks are 512 or 4096
constexpr size_t direct_chunk = size_t(1) << 20; // measured: larger ones gain nothing on one disk

std::string range_text(const std::string & path, uint64_t offset, size_t size) {
    return path + ": " + std::to_string(size) + " bytes at offset " + std::to_string(offset);
}

[[noreturn]] void fail_short(const std::string & path, uint64_t offset, size_t size, uint64_t end) {
    throw source_error(range_text(path, offset, size) + " cannot be read, the file now ends at " + std::to_string(end) +
                       "; restore it and open the model again");
}

[[noreturn]] void fail_errno(const std::string & path, uint64_t offset, size_t size, int code) {
    throw source_error(range_text(path, offset, size) + " cannot be read: " + std::strerror(code) + "; check the disk");
}

struct aligned_free {
    void operator()(uint8_t * p) const { std::free(p); }
};

uint8_t * bounce_buffer() {
    thread_local std::unique_ptr<uint8_t, aligned_free> buffer;
    if (!buffer) {
        void * p = nullptr;
        if (posix_memalign(&p, direct_align, direct_chunk + direct_align) != 0) {
            throw std::bad_alloc();
        }
        buffer.reset(static_cast<uint8_t *>(p));
    }
    return buffer.get();
}

constexpr int max_pieces = 8; // of one system call; an expert has two or three

size_t total(const file_source::piece * pieces, int n) {
    size_t size = 0;
    for (int i = 0; i < n; ++i) {
        size += pieces[i].size;
    }
    return size;
}

// Copies `size` bytes to where `pieces` want those that begin at `at` of them all.
void scatter(const file_source::piece * pieces, int n, size_t at, const uint8_t * from, size_t size) {
    for (int i = 0; i < n && size > 0; ++i) {
        if (at >= pieces[i].size) {
            at -= pieces[i].size;
            continue;
        }
        const size_t count = std::min(size, pieces[i].size - at);
        std::memcpy(pieces[i].to + at, from, count);
        from += count;
        size -= count;
        at = 0;
    }
}

} // namespace

file_source::file_source(const std::vector<std::string> & paths, int kind) : kind_(kind) {
    try {
        for (const std::string & path : paths) {
            files_.push_back({ path, -1, nullptr, 0 });
            open(files_.back());
        }
    } catch (...) {
        close_all();
        throw;
    }
}

file_source::~file_source() { close_all(); }

void file_source::close_all() {
    for (opened & file : files_) {
        if (file.mapped) {
            munmap(file.mapped, file.map_size);
        }
        if (file.fd >= 0) {
            ::close(file.fd);
        }
    }
    files_.clear();
}

void file_source::open(opened & file) {
    if (kind_ == SPO_SOURCE_DIRECT) {
        file.fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        if (file.fd >= 0 && O_DIRECT != 0) {
            return;
        }
        kind_ = SPO_SOURCE_BUFFERED; // tmpfs and some network filesystems refuse
    }
    if (file.fd < 0) {
        file.fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (file.fd < 0) {
        throw source_error(file.path + " cannot be opened: " + std::strerror(errno));
    }
#ifdef POSIX_FADV_RANDOM
    // Experts are scattered: read-ahead would fetch megabytes nobody asked for.
    posix_fadvise(file.fd, 0, 0, POSIX_FADV_RANDOM);
#endif
    if (kind_ == SPO_SOURCE_MAPPED) {
        struct stat st;
        if (fstat(file.fd, &st) != 0 || st.st_size == 0) {
            throw source_error(file.path + " cannot be mapped: it is empty");
        }
        void * p = mmap(nullptr, size_t(st.st_size), PROT_READ, MAP_SHARED, file.fd, 0);
        if (p == MAP_FAILED) {
            throw source_error(file.path + " cannot be mapped: " + std::strerror(errno));
        }
        file.mapped   = static_cast<uint8_t *>(p);
        file.map_size = uint64_t(st.st_size);
    }
}

void file_source::read(int file, uint64_t offset, size_t size, void * to) const {
    const piece one{ static_cast<uint8_t *>(to), size };
    read(file, offset, &one, 1);
}

void file_source::read(int file, uint64_t offset, const piece * pieces, int n) const {
    const opened & f = files_[file];
    switch (kind_) {
        case SPO_SOURCE_DIRECT: read_direct(f, offset, pieces, n); break;
        case SPO_SOURCE_MAPPED: read_mapped(f, offset, pieces, n); break;
        default: read_buffered(f, offset, pieces, n); break;
    }
}

void file_source::forget(int file, uint64_t offset, size_t size) const {
#ifdef POSIX_FADV_DONTNEED
    posix_fadvise(files_[file].fd, off_t(offset), off_t(size), POSIX_FADV_DONTNEED);
#else
    (void) file, (void) offset, (void) size;
#endif
}

void file_source::read_buffered(const opened & file, uint64_t offset, const piece * pieces, int n) const {
    const size_t                  size = total(pieces, n);
    std::array<iovec, max_pieces> parts;
    size_t                        done = 0;
    while (done < size) {
        size_t skip  = done;
        int    count = 0;
        for (int i = 0; i < n && count < max_pieces; ++i) {
            if (skip >= pieces[i].size) {
                skip -= pieces[i].size;
                continue;
            }
            parts[count++] = { pieces[i].to + skip, pieces[i].size - skip };
            skip           = 0;
        }
        const ssize_t got = preadv(file.fd, parts.data(), count, off_t(offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            fail_errno(file.path, offset, size, errno);
        }
        if (got == 0) {
            fail_short(file.path, offset, size, offset + done);
        }
        done += size_t(got);
    }
}

void file_source::read_direct(const opened & file, uint64_t offset, const piece * pieces, int n) const {
    uint8_t *      bounce = bounce_buffer();
    const size_t   size   = total(pieces, n);
    const uint64_t end    = offset + size;
    uint64_t       at     = offset & ~uint64_t(direct_align - 1);
    while (at < end) {
        const size_t want =
            std::min<uint64_t>(direct_chunk, (end - at + direct_align - 1) & ~uint64_t(direct_align - 1));
        const ssize_t got = pread(file.fd, bounce, want, off_t(at));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            fail_errno(file.path, offset, size, errno);
        }
        const uint64_t from = std::max(at, offset);
        const uint64_t upto = std::min(at + uint64_t(got), end);
        if (upto <= from) {
            fail_short(file.path, offset, size, at + uint64_t(got));
        }
        scatter(pieces, n, size_t(from - offset), bounce + (from - at), size_t(upto - from));
        if (upto < end && got % ssize_t(direct_align) != 0) {
            fail_short(file.path, offset, size, upto); // only the last block of a file is partial
        }
        at += uint64_t(got);
    }
}

void file_source::read_mapped(const opened & file, uint64_t offset, const piece * pieces, int n) const {
    // Touching a page behind the end of a file that shrank kills the process; look first. A file cut
    // between this look and the copy still would: buffered and direct reads have no such window.
    const size_t size = total(pieces, n);
    struct stat  st;
    if (fstat(file.fd, &st) != 0) {
        fail_errno(file.path, offset, size, errno);
    }
    const uint64_t end = std::min(uint64_t(st.st_size), file.map_size);
    if (offset + size > end) {
        fail_short(file.path, offset, size, end);
    }
    scatter(pieces, n, 0, file.mapped + offset, size);
}

} // namespace spo
