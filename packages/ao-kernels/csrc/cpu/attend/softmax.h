// Weights of the tokens of a tile, by online softmax.
#pragma once
#include "numbers.h"

namespace ao::AO_ISA::attention {

struct Span {
  int64_t begin, end;
};

// What one part has found: of each row the greatest logit, the sum of weights, and the weighted values.
struct Part {
  float* greatest;
  float* total;
  float* values;  // (rows, value_size)
};
AO_INLINE Part part_at(const Attend& a, float* memory) {
  return {memory, memory + a.rows, memory + 2 * a.rows};
}

// Logits of a row, a tile, become weights; 0 outside of `seen`, which is relative to the tile. What the sums so far
// are to be multiplied by.
static inline float soften(float* logits, Span seen, float softcap, float& greatest, float& total) {
  if (seen.begin >= seen.end) {
    __builtin_memset(logits, 0, kTokenTile * sizeof(float));
    return 1.0f;
  }
  constexpr float kNone = -__builtin_inff();
  if (softcap != 0) {
    for (int64_t t = 0; t < kTokenTile; t += 16) {
      store(logits + t, mul(splat(softcap), tanh_of(mul(load(logits + t), splat(1 / softcap)))));
    }
  }
  for (int64_t t = 0; t < seen.begin; ++t) logits[t] = kNone;
  for (int64_t t = seen.end; t < kTokenTile; ++t) logits[t] = kNone;
  F most = splat(greatest);
  for (int64_t t = 0; t < kTokenTile; t += 16) most = max(load(logits + t), most);
  const float highest = greatest_of(most), base = highest == kNone ? 0.0f : highest;
  const F shift = splat(base);
  F sums = zero();
  for (int64_t t = 0; t < kTokenTile; t += 16) {
    const F weights = exp_of(sub(load(logits + t), shift));
    store(logits + t, weights), sums = add(sums, weights);
  }
  if (seen.end - seen.begin < kTokenTile) {  // those that are not seen have counted a little
    for (int64_t t = 0; t < seen.begin; ++t) logits[t] = 0;
    for (int64_t t = seen.end; t < kTokenTile; ++t) logits[t] = 0;
    sums = zero();
    for (int64_t t = 0; t < kTokenTile; t += 16) sums = add(sums, load(logits + t));
  }
  const float kept = exp_of(greatest - base);
  greatest = highest;
  total = total * kept + sum(sums);
  return kept;
}

}  // namespace ao::AO_ISA::attention
