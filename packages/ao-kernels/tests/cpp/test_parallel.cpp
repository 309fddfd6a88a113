#include <atomic>
#include <mutex>
#include <stdexcept>

#include "support.h"

using ao::test::Threads;

TEST_CASE("without a host everything runs in the caller's thread, in one part") {
  std::vector<int64_t> calls;
  const auto caller = std::this_thread::get_id();
  ao::parallel_for(3, 20, 1, [&](int64_t begin, int64_t end) {
    CHECK(std::this_thread::get_id() == caller);
    calls.insert(calls.end(), {begin, end});
  });
  CHECK(calls == std::vector<int64_t>{3, 20});
  CHECK(ao::num_threads() == 1);
}

TEST_CASE("every element is visited once, whatever the threads and the grain") {
  for (int threads : {1, 2, 3, 7}) {
    Threads pool(threads);
    CHECK(ao::num_threads() == threads);
    for (int64_t size : {1, 2, 16, 17, 100}) {
      for (int64_t grain : {1, 8, 1000}) {
        std::vector<std::atomic<int>> visits(static_cast<size_t>(size));
        std::atomic<int> parts = 0;
        ao::parallel_for(0, size, grain, [&](int64_t begin, int64_t end) {
          ++parts;
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        for (const auto& count : visits) REQUIRE(count == 1);
        CHECK(parts <= threads);
        if (grain >= size) CHECK(parts == 1);
      }
    }
  }
}

TEST_CASE("turns are each unit once, several at a time until the last ones") {
  for (int64_t units : {1, 3, 8, 41, 176}) {
    ao::WorkQueue queue(units, 2, 4, 4);
    int64_t next = 0;
    while (const auto work = queue.next()) {
      CHECK(work.chunk * units + work.first == next);
      const int64_t left = 2 * units - next, size = work.last - work.first;
      next += size;
      if (left > 8) CHECK((size % 4 == 0 || work.last == units));
      if (left <= 4) CHECK(size == 1);
    }
    CHECK(next == 2 * units);
    CHECK(!queue.next());
  }
}

TEST_CASE("an empty range calls nothing") {
  Threads pool(2);
  for (int64_t end : {5, 4}) {
    ao::parallel_for(5, end, 1, [](int64_t, int64_t) { FAIL("called"); });
  }
}

TEST_CASE("what the body throws reaches the caller") {
  const auto failing = [](int64_t, int64_t) { throw std::runtime_error("stop"); };
  CHECK_THROWS_WITH(ao::parallel_for(0, 4, 1, failing), "stop");
}

TEST_CASE("the pool of a test is gone after it") {
  { Threads pool(4); }
  CHECK(ao::num_threads() == 1);
}
