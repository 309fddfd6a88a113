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
  F most[2] = {splat(greatest), splat(greatest)};
  for (int64_t t = 0; t < kTokenTile; t += 32) {
    most[0] = max(load(logits + t), most[0]), most[1] = max(load(logits + t + 16), most[1]);
  }
  const float highest = greatest_of(max(most[0], most[1])), base = highest == kNone ? 0.0f : highest;
  const F shift = splat(base);
  F both[2] = {zero(), zero()};
  for (int64_t t = 0; t < kTokenTile; t += 32) {
    const F weights = exp_of(sub(load(logits + t), shift)), others = exp_of(sub(load(logits + t + 16), shift));
    store(logits + t, weights), both[0] = add(both[0], weights);
    store(logits + t + 16, others), both[1] = add(both[1], others);
  }
  F sums = add(both[0], both[1]);
  if (seen.end - seen.begin < kTokenTile) {  // those that are not seen have counted a little
    for (int64_t t = 0; t < seen.begin; ++t) logits[t] = 0;
    for (int64_t t = seen.end; t < kTokenTile; ++t) logits[t] = 0;
    sums = zero();
    for (int64_t t = 0; t < kTokenTile; t += 16) sums = add(sums, load(logits + t));
  }
  const float kept = greatest == base ? 1.0f : exp_of(greatest - base);
  greatest = highest;
  total = total * kept + sum(sums);
  return kept;
}

}  // namespace ao::AO_ISA::attention
