#include "trellis.h"

#include <algorithm>
#include <vector>

#include "../isa.h"
#include "../memory.h"
#include "../parallel.h"

namespace ao {
namespace {

// Weights that are worth a thread, in a matmul with one row.
constexpr int64_t kGrain = 1 << 15;

thread_local ThreadWorkspace kept_space;

// The values of states as they are in a ring, as integers.
std::vector<float> values_of(const TrellisFormat& f) {
  std::vector<float> values(kStates);
  for (int32_t state = 0; state < kStates; ++state) {
    values[static_cast<size_t>(state)] = f.table[state * f.multiplier % kStates >> (kStateBits - 8)];
  }
  return values;
}

int64_t halves_of(int64_t n) { return (n + kHalf - 1) / kHalf; }

}  // namespace

void search_trellis(const TrellisFormat& format, TrellisSearch t) {
  if (t.rings == 0) return;
  const std::vector<float> values = values_of(format);
  std::vector<float> by_digits(kStates);
  const uint32_t digit = (1u << t.bits) - 1;
  for (uint32_t state = 0; state < kStates; ++state) {
    uint32_t turned = 0;
    for (uint32_t rest = state, i = 0; i < kStateBits / static_cast<uint32_t>(t.bits); ++i, rest >>= t.bits) {
      turned = turned << t.bits | (rest & digit);
    }
    by_digits[state] = values[turned] / kUnit;
  }
  t.values = by_digits.data();
  const TrellisKernels& kernels = isa().trellis;
  parallel_for(0, t.rings, 1, [&](int64_t begin, int64_t end) {
    kernels.search(t, begin, end, kept_space.get(kernels.search_scratch(t)));
  });
}

void multiply_trellis(Trellis t) {
  const TrellisKernels& kernels = isa().trellis;
  const std::vector<float> values = values_of(t);
  t.values = values.data();
  const Memory wide = allocate(t.m * t.k * static_cast<int64_t>(sizeof(float)));
  float* const rows = reinterpret_cast<float*>(wide.get());
  parallel_for(0, t.m, std::max<int64_t>(1, kGrain / t.k), [&](int64_t begin, int64_t end) {
    kernels.widen(t, begin, end, rows);
  });
  t.rows = rows;
  const int64_t grain = std::max<int64_t>(1, kGrain / (t.k * kHalf * t.m));
  parallel_for(0, halves_of(t.n), grain, [&](int64_t begin, int64_t end) {
    kernels.multiply(t, begin, end, kept_space.get(kernels.scratch(t)));
  });
}

void decode_trellis(Trellis t) {
  const TrellisKernels& kernels = isa().trellis;
  const std::vector<float> values = values_of(t);
  t.values = values.data(), t.x = nullptr, t.m = 0;
  const int64_t grain = std::max<int64_t>(1, kGrain / (t.k * kHalf));
  parallel_for(0, halves_of(t.n), grain, [&](int64_t begin, int64_t end) {
    kernels.decode(t, begin, end, kept_space.get(kernels.scratch(t)));
  });
}

}  // namespace ao
