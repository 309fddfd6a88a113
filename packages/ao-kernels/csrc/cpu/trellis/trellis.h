// Weights on a trellis, on all threads.
#pragma once
#include "kernels.h"

namespace ao {

// The values of all states, for a scale of 1; or as integers, or with the newest code at the bottom.
void search_trellis(const TrellisFormat& format, TrellisSearch t);

// Fields up to `y` are the caller's. `m`, `n` and `k` are positive.
void multiply_trellis(Trellis t);
// The dense weight; x, bias and m do not matter.
void decode_trellis(Trellis t);

}  // namespace ao
