// Threads, which the host of the library provides: torch's own pool, or whatever a test sets.
#pragma once

#include <atomic>
#include <cstdint>

namespace ao {

using Body = void (*)(int64_t begin, int64_t end, void* context);

struct Host {
  // Calls body on parts of [begin, end), possibly at once, and returns when all is done. A part is
  // smaller than `grain` only where it is the last one.
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);
  int (*num_threads)();
};

// Not to be called while kernels run. Until then everything runs in the caller's thread.
void set_host(const Host& host);
const Host& host();

// How many threads parallel_for may use at most.
int num_threads();

// As `Host::parallel_for`: by the team that this thread leads, or else by the host.
void share(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

// f(begin, end) on parts of [begin, end). F is a lambda of the calling unit, so that each unit has
// an instance of its own.
template <class F>
static inline void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (begin >= end) return;
  const Body body = [](int64_t first, int64_t last, void* context) {
    (*static_cast<const F*>(context))(first, last);
  };
  share(begin, end, grain, body, const_cast<F*>(&f));
}

// Runs work(context), with a team of threads for the loops in it; see `with_team`.
void lead_team(void (*work)(void* context), void* context);

// Whether this thread leads a team, whose loops cost next to nothing to start.
bool in_team();

// f(), whose loops are run by threads that stay awake until it ends: one region of the host for all of them. To start
// and to end a loop takes less than a microsecond. What f itself does runs in one thread, which need not be the
// caller's. Loops in loops, and teams in teams, start no threads.
template <class F>
static inline void with_team(const F& f) {
  lead_team([](void* context) { (*static_cast<const F*>(context))(); }, const_cast<F*>(&f));
}

// f() in so many threads at once.
template <class F>
static inline void in_threads(int64_t threads, const F& f) {
  if (threads == 1) return f();
  parallel_for(0, threads, 1, [&](int64_t, int64_t) { f(); });
}

// Dynamic scheduling. The work is `units` units for each of `chunks`; about `shares` pieces of it are left at any time.
// Threads take pieces as they become free: another program may hold one of them up, and all should end together.
// Units are taken in multiples of `width` where that is faster; the last ones are taken one by one.
class WorkQueue {
 public:
  // Units [first, last) of a chunk; empty where nothing is left.
  struct Work {
    int64_t first, last, chunk;
    explicit operator bool() const { return first < last; }
  };

  WorkQueue(int64_t units, int64_t chunks, int64_t shares, int64_t width = 1)
      : units_(units), total_(units * chunks), shares_(shares), width_(width) {}

  Work next() {
    for (int64_t begin = next_; begin < total_; begin = next_) {
      const int64_t first = begin % units_, left = total_ - begin, share = left / shares_;
      const int64_t least = 2 * left > shares_ * width_ ? width_ : 1;
      const int64_t most = share < least ? least : share - share % least;
      const int64_t size = most < units_ - first ? most : units_ - first;
      if (next_.compare_exchange_strong(begin, begin + size)) return {first, first + size, begin / units_};
    }
    return {};
  }

 private:
  const int64_t units_, total_, shares_, width_;
  std::atomic<int64_t> next_{0};
};

template <class F>
static inline void run_dynamic(int64_t units, int64_t chunks, int64_t threads, const F& f) {
  WorkQueue queue(units, chunks, 4 * threads);
  in_threads(threads, [&] {
    while (const auto work = queue.next()) f(work.first, work.last, work.chunk);
  });
}

}  // namespace ao
