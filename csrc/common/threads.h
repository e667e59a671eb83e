// A parallel loop, which its caller can end early.
#pragma once

#include <cstddef>
#include <functional>

namespace hf_ext {

// If set, loops that this thread runs call it between their tasks. It ends a loop by throwing.
const std::function<void()>*& check_of_this_thread();

// Calls task(i) for every i below count on up to `threads` threads. The first exception stops the loop and is rethrown.
void parallel_for(size_t count, int threads, const std::function<void(size_t)>& task);

}  // namespace hf_ext
