#include "parallel.h"

#include <utility>

#include "team.h"

namespace ao {
namespace {

void serial_for(int64_t begin, int64_t end, int64_t, Body body, void* context) {
  body(begin, end, context);
}

int one_thread() { return 1; }

Host current = {serial_for, one_thread};

// What this thread does at present.
struct Here {
  Team* leads = nullptr;
  bool in_loop = false;  // of a team
};
thread_local Here here;

}  // namespace

void set_host(const Host& host) { current = host; }

const Host& host() { return current; }

int num_threads() { return here.leads ? here.leads->threads() : current.num_threads(); }

void share(int64_t begin, int64_t end, int64_t grain, Body body, void* context) {
  if (here.in_loop) return body(begin, end, context);
  if (here.leads) return here.leads->run({body, context, begin, end}, grain);
  current.parallel_for(begin, end, grain, body, context);
}

void lead_team(void (*work)(void* context), void* context) {
  const int threads = here.in_loop || here.leads ? 1 : current.num_threads();
  if (threads == 1) return work(context);
  Team team(threads);
  const auto lead = [&] {
    const Here before = std::exchange(here, {&team, false});
    const Restore restore([&] { here = before; });
    work(context);
  };
  const auto enter = [&] { team.enter(lead); };
  const Body body = [](int64_t, int64_t, void* f) { (*static_cast<decltype(enter)*>(f))(); };
  current.parallel_for(0, threads, 1, body, const_cast<void*>(static_cast<const void*>(&enter)));
  team.rethrow();
}

bool in_team() { return here.leads != nullptr; }

bool set_in_loop(bool value) { return std::exchange(here.in_loop, value); }

}  // namespace ao
