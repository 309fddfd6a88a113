// What the steps of all instruction sets share.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA::optim {

constexpr int kBlock = static_cast<int>(kStateBlock);

static inline uint32_t bits_of(float v) { return __builtin_bit_cast(uint32_t, v); }
static inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

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

}  // namespace ao::AO_ISA::optim
