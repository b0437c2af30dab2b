// Where graphs meet the engine: called by the patched llama.cpp while it builds a graph.
#pragma once

#include "ggml.h"

namespace spo {

// llama_moe_hook of the patch; `data` is the engine.
ggml_tensor * moe_hook(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * w, ggml_tensor * cur, ggml_tensor * ids,
                       void * data);

} // namespace spo
