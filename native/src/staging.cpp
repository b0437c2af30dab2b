#include "staging.h"

#include <algorithm>
#include <map>
#include <new>
#include <utility>

namespace spo {

staging::staging(const std::vector<matrix_shape> & shapes, const std::vector<int> & n_expert,
                 const std::vector<ggml_backend_buffer_type_t> & bufts, int n_buffers) {
    // A repacked buffer can hold no plain tensor, so each weight type has buffers of its own, on each device.
    using place = std::pair<ggml_backend_dev_t, ggml_type>;
    std::map<place, size_t>                     largest;
    std::map<place, ggml_backend_buffer_type_t> buft_of;
    std::vector<place>                          places;
    for (size_t m = 0; m < shapes.size(); ++m) {
        places.emplace_back(ggml_backend_buft_get_device(bufts[m]), shapes[m].type);
        size_t & bytes     = largest[places[m]];
        bytes              = std::max(bytes, bank::bytes_for(shapes[m], n_expert[m], bufts[m]));
        buft_of[places[m]] = bufts[m];
    }
    std::map<place, int> first;
    for (const auto & [where, bytes] : largest) {
        first[where] = int(stages_.size());
        for (int i = 0; i < n_buffers; ++i) {
            stages_.push_back({ buffer_ptr(ggml_backend_buft_alloc_buffer(buft_of[where], bytes)), -1, 0 });
            if (!stages_.back().memory) {
                throw std::bad_alloc();
            }
            ggml_backend_buffer_set_usage(stages_.back().memory.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            bytes_ += bytes;
        }
    }
    std::map<place, int> turn;
    for (size_t m = 0; m < shapes.size(); ++m) {
        stage_of_.push_back(first[places[m]] + turn[places[m]]++ % n_buffers);
        banks_.push_back(std::make_unique<bank>(shapes[m], n_expert[m], stages_[stage_of_.back()].memory.get(), 0));
    }
}

} // namespace spo
