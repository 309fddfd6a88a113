// Threads in a process that was forked.
//
// OpenMP keeps the workers of a thread that has run a parallel region. A child of fork has that thread and none of
// its workers: its next region would wait for them for ever. A thread that starts in the child gets workers of its
// own, so such a one runs the regions of the thread that forked. To hand a region over takes some microseconds.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace ao {

// Runs what one other thread hands over. It waits for ever, and is never destroyed.
class Deputy {
 public:
  Deputy() { std::thread([this] { serve(); }).detach(); }

  // f(), with the exception that it ends in. Of one thread at a time.
  template <class F>
  void run(const F& f) {
    std::unique_lock<std::mutex> lock(mutex_);
    context_ = &f;
    work_ = [](const void* context) { (*static_cast<const F*>(context))(); };
    changed_.notify_all();
    changed_.wait(lock, [this] { return work_ == nullptr; });
    if (problem_) std::rethrow_exception(std::exchange(problem_, nullptr));
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return work_ != nullptr; });
      lock.unlock();
      try {
        work_(context_);
      } catch (...) {
        problem_ = std::current_exception();
      }
      lock.lock();
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  void (*work_)(const void*) = nullptr;
  const void* context_ = nullptr;
  std::exception_ptr problem_;
};

// Whether this thread is the one that a fork left, and who runs its regions.
struct Forked {
  bool is = false;
  Deputy* deputy = nullptr;
};
inline Forked& forked() {
  thread_local Forked state;
  return state;
}

// From now on children of fork know that they are.
inline void watch_forks() {
  // the deputy of a process that was forked itself is gone, too
  pthread_atfork(nullptr, nullptr, [] { forked() = {true, nullptr}; });
}

}  // namespace ao
