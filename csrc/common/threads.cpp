#include "threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace hf_ext {

const std::function<void()>*& check_of_this_thread() {
    thread_local const std::function<void()>* check = nullptr;
    return check;
}

void parallel_for(size_t count, int threads, const std::function<void(size_t)>& task) {
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
