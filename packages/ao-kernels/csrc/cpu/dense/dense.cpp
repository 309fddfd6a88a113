#include "dense.h"

#include <algorithm>

#include "../isa.h"
#include "../parallel.h"

namespace ao {
namespace {

// Columns that a thread takes together, and multiplications below which a second one costs more than it saves.
constexpr int64_t kWidth = 16, kSerialWork = 1 << 17;

}  // namespace

void run_dense(const Dense& call) {
  if (call.m == 0 || call.n == 0) return;
  const int64_t threads = call.n * call.k <= kSerialWork / call.m ? 1 : num_threads();
  run_dynamic((call.n + kWidth - 1) / kWidth, 1, threads, [&](int64_t first, int64_t last, int64_t) {
    isa().dense.columns(call, first * kWidth, std::min(last * kWidth, call.n));
  });
}

}  // namespace ao
