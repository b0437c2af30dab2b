#include "staging.h"

#include <algorithm>
#include <map>
#include <new>

namespace spo {

staging::staging(const std::vector<matrix_shape> & shapes, const std::vector<int> & n_expert,
                 const std::vector<ggml_backend_buffer_type_t> & bufts, int n_buffers) {
    // A repacked buffer can hold no plain tensor, so each weight type has buffers of its own.
    std::map<ggml_type, size_t>                     largest;
    std::map<ggml_type, ggml_backend_buffer_type_t> buft_of;
    for (size_t m = 0; m < shapes.size(); ++m) {
        size_t & bytes          = largest[shapes[m].type];
        bytes                   = std::max(bytes, bank::bytes_for(shapes[m], n_expert[m], bufts[m]));
        buft_of[shapes[m].type] = bufts[m];
    }
    std::map<ggml_type, int> first;
    for (const auto & [type, bytes] : largest) {
        first[type] = int(stages_.size());
        for (int i = 0; i < n_buffers; ++i) {
            stages_.push_back({ buffer_ptr(ggml_backend_buft_alloc_buffer(buft_of[type], bytes)), -1, 0 });
            if (!stages_.back().memory) {
                throw std::bad_alloc();
            }
            ggml_backend_buffer_set_usage(stages_.back().memory.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            bytes_ += bytes;
        }
    }
    std::map<ggml_type, int> turn;
    for (size_t m = 0; m < shapes.size(); ++m) {
        const ggml_type type = shapes[m].type;
        stage_of_.push_back(first[type] + turn[type]++ % n_buffers);
        banks_.push_back(std::make_unique<bank>(shapes[m], n_expert[m], stages_[stage_of_.back()].memory.get(), 0));
    }
}

} // namespace spo
