// Where graphs meet the engine: called by the patched llama.cpp while it builds a graph.
#pragma once

struct llama_moe_hooks;

namespace spo {

// For llama_set_moe_hooks; their data is the engine.
const llama_moe_hooks & moe_hooks();

} // namespace spo
