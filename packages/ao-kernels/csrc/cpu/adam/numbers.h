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
  const uint8_t *m_codes, *v_codes;
  float m_scale, v_scale;
  const uint32_t* noise;  // 16 bits for every parameter to be rounded with, or nullptr
  float *m, *v;           // the new moments
};

// The greatest magnitudes of a block's new moments, as bits; NaN is greater than all numbers.
struct Greatest {
  uint32_t m, v;
};

// A scale that may be divided by, and its inverse be multiplied with.
static inline bool is_usual(float scale) { return scale > 0x1p-80f && scale < 0x1p100f; }

}  // namespace ao::AO_ISA::optim
