#include "invariant.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

namespace ao {
namespace {

// AO_BATCH_INVARIANT wants it for the whole process
int at_first() {
  const char* set = std::getenv("AO_BATCH_INVARIANT");
  return set && *set && *set != '0';
}

std::atomic<int> wanted{at_first()};

}  // namespace

bool batch_invariant() { return wanted.load(std::memory_order_relaxed) > 0; }

int want_batch_invariant(int change) {
  int before = wanted.load(), after;
  do after = std::max(0, before + change);
  while (!wanted.compare_exchange_weak(before, after));
  return after;
}

}  // namespace ao
