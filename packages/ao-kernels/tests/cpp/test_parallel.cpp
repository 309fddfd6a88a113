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

namespace {

// The host calls body on the parts one after the other, in the caller's thread, or not at all for the last ones.
int64_t parts_made = 3;
void one_by_one(int64_t begin, int64_t end, int64_t, ao::Body body, void* context) {
  for (int64_t i = begin; i < std::min(end, begin + parts_made); ++i) body(i, i + 1, context);
}
int three_threads() { return 3; }

// Sums of the loops of a program, each of which needs the one before.
int64_t chain(int64_t loops, int64_t size) {
  std::vector<int64_t> numbers(static_cast<size_t>(size), 1);
  for (int64_t loop = 0; loop < loops; ++loop) {
    std::vector<int64_t> sums(numbers.size());
    ao::parallel_for(0, size, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sums[i] = numbers[i] + numbers[(i + 1) % size];
    });
    numbers = sums;
  }
  return numbers[0];
}

}  // namespace

TEST_CASE("the loops of a team are whole, and each one follows the one before") {
  for (int threads : {1, 2, 3, 7}) {
    Threads pool(threads);
    int64_t found = 0;
    ao::with_team([&] {
      CHECK(ao::num_threads() == threads);
      found = chain(40, 50);
    });
    CHECK(found == int64_t{1} << 40);
  }
}

TEST_CASE("threads of a team take parts of loops, and no part is below the grain") {
  Threads pool(2);
  std::atomic<int> parts = 0, inside = 0, together = 0;
  ao::with_team([&] {
    // both parts wait for each other, so two threads must be there
    ao::parallel_for(0, 2, 1, [&](int64_t, int64_t) {
      ++inside;
      for (int i = 0; i < 1 << 24 && inside < 2; ++i) std::this_thread::yield();
      if (inside == 2) ++together;
    });
    for (int64_t grain : {1, 10, 19, 20}) ao::parallel_for(0, 20, grain, [&](int64_t, int64_t) { ++parts; });
  });
  CHECK(together == 2);
  CHECK(parts == 2 + 2 + 1 + 1);
}

TEST_CASE("a host that is serial, or that makes fewer threads than it says, is enough for a team") {
  const ao::Host before = ao::host();
  ao::set_host({one_by_one, three_threads});
  for (int64_t made : {1, 3}) {
    parts_made = made;
    int64_t programs = 0, found = 0;
    ao::with_team([&] {
      ++programs;
      found = chain(5, 9);
    });
    CHECK(programs == 1);
    CHECK(found == 32);
  }
  ao::set_host(before);
}

TEST_CASE("teams in teams and in loops, and loops in loops, start no threads") {
  Threads pool(3);
  std::atomic<int64_t> sum = 0;
  ao::with_team([&] {
    const auto leader = std::this_thread::get_id();
    ao::with_team([&] {
      CHECK(std::this_thread::get_id() == leader);
      CHECK(chain(4, 8) == 16);
    });
    ao::parallel_for(0, 6, 1, [&](int64_t begin, int64_t end) {
      const auto own = std::this_thread::get_id();
      ao::with_team([&] {
        ao::parallel_for(begin, end, 1, [&](int64_t b, int64_t e) {
          if (std::this_thread::get_id() == own) sum += e - b;
        });
      });
    });
  });
  CHECK(sum == 6);
}

TEST_CASE("what a loop or the program of a team throws reaches the caller, and the team goes on where it is caught") {
  Threads pool(3);
  int64_t after = 0;
  ao::with_team([&] {
    for (int i = 0; i < 50; ++i) {
      const auto failing = [](int64_t, int64_t) { throw std::runtime_error("loop"); };
      CHECK_THROWS_WITH(ao::parallel_for(0, 3, 1, failing), "loop");
      after += chain(1, 4);
    }
  });
  CHECK(after == 100);
  const auto wrong = [] { ao::with_team([] { throw std::logic_error("program"); }); };
  CHECK_THROWS_WITH(wrong(), "program");
  const auto in_loop = [] {
    ao::with_team([] { ao::parallel_for(0, 9, 1, [](int64_t, int64_t) { throw std::logic_error("part"); }); });
  };
  CHECK_THROWS_WITH(in_loop(), "part");
  CHECK(chain(3, 4) == 8);
}

TEST_CASE("several threads have a team each at once") {
  Threads pool(2);
  std::vector<std::thread> callers;
  std::atomic<int> right = 0;
  for (int t = 0; t < 3; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < 20; ++i) ao::with_team([&] { right += chain(20, 16) == 1 << 20; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(right == 60);
}
