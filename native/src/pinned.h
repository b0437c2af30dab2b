// Experts in memory that a device reads by itself: an upload from there is one copy, which no thread of
// ours has to feed. Drivers limit such memory, so it comes in slices, and there may be less of it than
// asked for: what has no place is read from its file each time, through the staging of a lane.
#pragma once

#include "bank.h"
#include "source.h"

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace spo {

class pinned_experts {
public:
    // All experts of one matrix, as they lie in a file.
    struct range {
        int      file;
        uint64_t offset;
        size_t   size;
    };

    // Reads `wanted`, in this order, while they fit into `most` bytes and the driver gives slices of `buft`;
    // the system's own cache need not keep them then. Throws source_error.
    pinned_experts(ggml_backend_buffer_type_t buft, const file_source & source, const std::vector<range> & wanted,
                   size_t most, size_t slice = size_t(1) << 30);

    // Bytes [offset, offset + size) of a file, or null.
    const uint8_t * find(int file, uint64_t offset, size_t size) const;
    // All experts of the matrix at `offset`, [ne0, ne1, n_expert], where graphs can read them; or null.
    ggml_tensor * tensor(int file, uint64_t offset, const matrix_shape & shape, int n_expert);
    size_t        bytes() const { return bytes_; }

private:
    struct place {
        size_t                size;
        uint8_t *             data;
        ggml_backend_buffer_t memory;
        context_ptr           context; // once it was asked for
        ggml_tensor *         tensor = nullptr;
    };

    std::vector<buffer_ptr>                   slices_;
    std::map<std::pair<int, uint64_t>, place> places_; // by file and offset
    size_t                                    bytes_ = 0;
};

} // namespace spo
