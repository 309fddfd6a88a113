// What the steps of all instruction sets share.
#pragma once
#include "kernels.h"
#include "rules.h"

namespace ao::AO_ISA::optim {

using ao::optim::as_float;
using ao::optim::bits_of;

constexpr int kBlock = static_cast<int>(kStateBlock);

// A whole block of a tensor.
struct Piece {
  void* p;
  const void* g;
  const uint8_t *m_codes, *v_codes;  // v: null where there is one moment alone
  float m_scale, v_scale;
  const uint32_t* noise;  // 16 bits for every parameter to be rounded with, or nullptr
};

// The new moments of a block.
struct Numbers {
  alignas(64) float values[kBlock];
  uint16_t negative[kBlock / 16];  // a bit each; only where they are split
  uint32_t greatest;               // magnitude, as bits; NaN is greater than all numbers
  float unit;                      // what all of these are to be multiplied by
  bool is_split;                   // whether `values` are magnitudes
};

// Makes `values` what they stand for.
static inline void whole(Numbers& of) {
  if (of.unit == 1 && !of.is_split) return;
  for (int i = 0; i < kBlock; ++i) {
    const bool is_negative = of.is_split && (of.negative[i / 16] >> i % 16 & 1);
    of.values[i] *= is_negative ? -of.unit : of.unit;
  }
  of.unit = 1, of.is_split = false;
}

// The scale of a block, as ao_core.numerics.choose_qparams has it: NaN for a block with a NaN.
static inline float stored_scale(float greatest, float reach, float of_zeros) {
  const float by = greatest / reach;
  const float stored = by < 0x1p-126f ? 0x1p-126f : by > 0x1.fffffep127f ? 0x1.fffffep127f : by;
  return greatest == 0 ? of_zeros : stored;
}

// A scale that may be divided by, and its inverse be multiplied with.
static inline bool is_usual(float scale) { return scale > 0x1p-80f && scale < 0x1p100f; }

}  // namespace ao::AO_ISA::optim
