// A parallel loop, which its caller can end early.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace hf_ext {

// If set, loops that this thread runs call it between their tasks. It ends a loop by throwing.
inline const std::function<void()>*& check_of_this_thread() {
    thread_local const std::function<void()>* check = nullptr;
    return check;
}

// Calls task(i) for every i below count on up to `threads` threads. The first exception stops the loop and is rethrown.
template <class Task>
void parallel_for(size_t count, int threads, const Task& task) {
    std::atomic<size_t> next{0};
    std::exception_ptr error;
    std::mutex lock;
    const auto work = [&] {
        try {
            for (size_t i; (i = next.fetch_add(1)) < count;) {
                if (const auto* check = check_of_this_thread()) (*check)();
                task(i);
            }
        } catch (...) {
            const std::lock_guard<std::mutex> guard(lock);
            if (!error) error = std::current_exception();
            next = count;
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (size_t i = 1; i < std::min<size_t>(size_t(std::max(threads, 1)), count); ++i) helpers.emplace_back(work);
    } catch (const std::system_error&) {
        // The system refuses more threads: the running ones do the work.
    }
    work();
    for (std::thread& helper : helpers) helper.join();
    if (error) std::rethrow_exception(error);
}

}  // namespace hf_ext
