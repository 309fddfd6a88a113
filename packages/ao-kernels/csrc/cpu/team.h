// Threads that stay awake from loop to loop. The first one to enter leads: it runs the program, and publishes each loop.
// The others serve: they look for a loop and take parts of it.
//
// The leader takes parts, too, and waits for those threads alone that joined a loop. So nothing depends on how many
// threads of the host come, or when: it may run its parts one after the other, or have a thread come too late.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>

#include "parallel.h"

namespace ao {

// Sets whether loops that this thread starts from now on run in it alone; returns what it was.
bool set_in_loop(bool value);

// Runs f at the end of a scope.
template <class F>
struct Restore {
  explicit Restore(F f) : f_(f) {}
  ~Restore() { f_(); }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

 private:
  F f_;
};

// A wait that leaves the processor to others after some microseconds.
class Wait {
 public:
  void once() {
    if (++count_ > kSpins) return std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  static constexpr int kSpins = 2000;
  int count_ = 0;
};

class Team {
 public:
  struct Loop {
    Body body;
    void* context;
    int64_t begin, end;
  };

  explicit Team(int threads) : threads_(threads) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // What a thread of the host does. It never throws.
  template <class F>
  void enter(const F& program) noexcept {
    if (led_.exchange(true)) return serve();
    try {
      program();
    } catch (...) {
      problem_ = std::current_exception();
    }
    gate_.store(kOver, std::memory_order_release);
  }

  // The exception that the program ended in.
  void rethrow() {
    if (problem_) std::rethrow_exception(std::exchange(problem_, nullptr));
  }

  // By the leader: a loop in parts as `Host::parallel_for` has them.
  void run(const Loop& loop, int64_t grain) {
    const int64_t size = loop.end - loop.begin, full = size / std::max<int64_t>(1, grain);
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads_, full));
    if (parts == 1) return loop.body(loop.begin, loop.end, loop.context);
    loop_ = loop, part_ = (size + parts - 1) / parts;
    next_.store(loop.begin, std::memory_order_relaxed);
    ended_.store(0, std::memory_order_relaxed);
    gate_.store(++number_ << kNumber | kOpen, std::memory_order_release);
    take_parts();
    // from here on nobody joins, and who joined is waited for
    const uint64_t joined = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & (kOpen - 1);
    for (Wait wait; ended_.load(std::memory_order_acquire) != joined;) wait.once();
    if (failed_.exchange(false)) rethrow();
  }

 private:
  // the gate: how many threads joined, whether more may, whether all is over, and the number of the loop
  static constexpr uint64_t kOpen = 1 << 16, kOver = 1 << 17;
  static constexpr int kNumber = 18;

  void serve() {
    uint64_t last = 0;  // loop that this thread was in
    for (Wait wait;;) {
      uint64_t gate = gate_.load(std::memory_order_acquire);
      if (gate & kOver) return;
      if (!(gate & kOpen) || gate >> kNumber == last) {
        wait.once();
        continue;
      }
      if (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) continue;
      last = gate >> kNumber;
      take_parts();
      ended_.fetch_add(1, std::memory_order_release);
      wait = {};
    }
  }

  // Parts that nobody has taken, until there are none. After an exception there are none.
  void take_parts() {
    const bool before = set_in_loop(true);
    for (int64_t first; (first = next_.fetch_add(part_, std::memory_order_relaxed)) < loop_.end;) {
      try {
        loop_.body(first, std::min(first + part_, loop_.end), loop_.context);
      } catch (...) {
        next_.store(loop_.end, std::memory_order_relaxed);
        if (!failed_.exchange(true)) problem_ = std::current_exception();
      }
    }
    set_in_loop(before);
  }

  const int threads_;
  // by the leader, while nobody is in a loop
  Loop loop_{};
  int64_t part_ = 1;
  uint64_t number_ = 0;
  std::exception_ptr problem_;
  std::atomic<bool> led_{false}, failed_{false};
  // each in a line of its own: who waits for one does not hold up who counts on another
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> ended_{0};
};

}  // namespace ao
