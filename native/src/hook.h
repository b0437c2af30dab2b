// Where graphs meet the engine: called by the patched llama.cpp while it builds a graph.
#pragma once

#include <memory>

struct llama_moe_hooks;

namespace spo {

class engine;
class miss_branch;

// For llama_set_moe_hooks; their data is the engine.
const llama_moe_hooks & moe_hooks();

// For engine::set_misses.
std::unique_ptr<miss_branch> make_miss_branch(engine & owner);

} // namespace spo
