#include "hadamard.h"

#include <algorithm>

#include "../isa.h"
#include "../memory.h"
#include "../parallel.h"

namespace ao {
namespace {

// Elements that are worth a thread.
constexpr int64_t kGrain = 1 << 15;
// Elements of short blocks that are worked on at a time.
constexpr int64_t kShort = 4096;

thread_local ThreadWorkspace kept_blocks;

}  // namespace

void plan_hadamard(Hadamard& h) {
  const bool alone = h.power >= kLanes;
  h.unit = alone ? h.block : h.factors == 0 ? kShort : kLanes * h.block;
  h.scratch = !alone && h.factors == 0 ? 0 : h.unit * (h.factors == 0 ? 1 : 2);
}

void run_hadamard(const Hadamard& call) {
  if (call.count == 0) return;
  Hadamard h = call;
  plan_hadamard(h);
  int64_t additions = 1;  // for an element, about
  for (int i = 0; i < h.factors; ++i) additions += h.factor[i].order / 16;
  const int64_t units = (h.count + h.unit - 1) / h.unit;
  const int64_t grain = std::max<int64_t>(1, kGrain / (h.unit * additions));
  parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    float* const scratch = reinterpret_cast<float*>(kept_blocks.get(h.scratch * static_cast<int64_t>(sizeof(float))));
    isa().hadamard.transform(h, begin, end, scratch);
  });
}

}  // namespace ao
