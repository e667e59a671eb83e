#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fm_delta {

// Calls task(i) for every i below count on up to `threads` threads; the first exception stops the rest and is thrown here.
template <class Task>
void parallel_for(size_t count, int threads, const Task& task) {
    std::atomic<size_t> next{0};
    std::exception_ptr error;
    std::mutex lock;
    const auto work = [&] {
        try {
            for (size_t i; (i = next.fetch_add(1)) < count;) task(i);
        } catch (...) {
            const std::lock_guard<std::mutex> guard(lock);
            if (!error) error = std::current_exception();
            next = count;
        }
    };
    std::vector<std::thread> others;
    try {
        for (size_t i = 1; i < std::min<size_t>(size_t(std::max(threads, 1)), count); ++i) others.emplace_back(work);
    } catch (const std::system_error&) {
        // The system gives no more threads: those that run do the work.
    }
    work();
    for (std::thread& other : others) other.join();
    if (error) std::rethrow_exception(error);
}

}  // namespace fm_delta
