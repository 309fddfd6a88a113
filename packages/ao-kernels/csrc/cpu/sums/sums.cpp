#include "sums.h"

#include <algorithm>

#include "../isa.h"
#include "../parallel.h"

namespace ao {
namespace {

// Elements, counted once for each candidate, that are worth a thread.
constexpr int64_t kGrain = 1 << 18;
// Elements whose gradients are.
constexpr int64_t kLearnedGrain = 1 << 16;

}  // namespace

void scale_sums(const ScaleSums& s) {
  const int64_t work = std::max<int64_t>(s.columns * s.candidates, 1);
  parallel_for(0, s.rows, std::max<int64_t>(kGrain / work, 1),
               [&](int64_t begin, int64_t end) { isa().sums.rows(s, begin, end); });
}

void search_scales(const SearchScales& s) {
  int64_t tried = 2 + s.fits;
  for (int32_t i = 0; i < s.stage_count; ++i) tried += s.stages[i];
  const int64_t work = std::max<int64_t>(s.rows.columns * tried, 1);
  parallel_for(0, s.rows.rows, std::max<int64_t>(kGrain / work, 8),  // rows stand in lanes
               [&](int64_t begin, int64_t end) { isa().sums.search(s, begin, end); });
}

void learned_gradients(const LearnedGradients& call) {
  parallel_for(0, call.rows, std::max<int64_t>(kLearnedGrain / std::max<int64_t>(call.columns, 1), 1),
               [&](int64_t begin, int64_t end) { isa().sums.learned(call, begin, end); });
}

}  // namespace ao
