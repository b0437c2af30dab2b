// A routing trace run through slot tables: what a policy would have hit, without any bytes.
#pragma once

#include "speculoe/speculoe.h"

namespace spo {

// Throws std::invalid_argument, naming the value, when the parameters contradict themselves.
spo_replay_counts replay(const spo_replay_params & params);

} // namespace spo
