// Linear layers with sparse weights, y = act(x) @ w.T + bias, and masks of weights that are trained, on all threads.
#pragma once
#include "kernels.h"

namespace ao {

// Fields of `BlockSparse` up to `act` are the caller's; the rest is made here. Sizes may be 0.
void run_block_sparse(const BlockSparse& call);
// Fields of `TwoFour` up to `x_stride`, of which `expand` needs no activations but y and its type.
void run_two_four(const TwoFour& call);
void expand_two_four(const TwoFour& call);
void mask_tiles(const TileMask& call);

}  // namespace ao
