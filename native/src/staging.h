// Where prompts stream through: buffers that hold all experts of one matrix at a time, at the place
// their own ids name. The plan, who uses which buffer, is fixed; the engine fills and waits.
#pragma once

#include "bank.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace spo {

struct stage {
    buffer_ptr memory;
    int        holds   = -1; // matrix whose experts are in it or on their way, or -1
    int        pending = 0;  // copies not yet landed
};

// Bookkeeping only; not thread-safe, the engine's lock guards it.
class staging {
public:
    // shapes[m] and bufts[m] describe matrix m in the order graphs use them.
    staging(const std::vector<matrix_shape> & shapes, const std::vector<int> & n_expert,
            const std::vector<ggml_backend_buffer_type_t> & bufts, int n_buffers);

    stage &  of(int matrix) { return stages_[stage_of_[matrix]]; }
    bank &   bank_of(int matrix) { return *banks_[matrix]; }
    uint64_t bytes() const { return bytes_; }

    // The matrix whose product has not been computed yet keeps its stage from being refilled.
    int  in_use() const { return in_use_; }
    void use(int matrix) { in_use_ = matrix; }
    bool free_for(int matrix) const {
        return in_use_ < 0 || in_use_ == matrix || stage_of_[in_use_] != stage_of_[matrix];
    }

private:
    std::vector<stage>                 stages_;
    std::vector<int>                   stage_of_; // [matrix]
    std::vector<std::unique_ptr<bank>> banks_;    // [matrix], over the stage's memory
    uint64_t                           bytes_  = 0;
    int                                in_use_ = -1;
};

} // namespace spo
