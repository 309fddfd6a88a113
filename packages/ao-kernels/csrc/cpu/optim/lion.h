// A block of Lion: one moment, whose blend with the gradient has the sign of each parameter's move.
//
// Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.
#pragma once
#include "rows.h"

namespace ao::AO_ISA::optim {

// The new moment, and parameters in place. The second moment is not there.
template <Element kType>
static inline void advance(const Lion& s, const Piece& piece, Numbers& moment, Numbers&) {
  const float beta1 = s.beta1, rest1 = s.rest1, beta2 = s.beta2, rest2 = s.rest2;
  const float decay = s.decay, rate = s.rate;
  float wide_p[kBlock], wide_g[kBlock], out[kBlock];
  float* m = moment.values;
  const float *p = load_block<kType>(piece.p, wide_p), *g = load_block<kType>(piece.g, wide_g);
  decode_block(s.m, piece.m_codes, piece.m_scale, m);
  uint32_t greatest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const float blend = beta1 * m[i] + rest1 * g[i], next = beta2 * m[i] + rest2 * g[i];
    const float above = blend > 0 ? rate : 0, below = blend < 0 ? rate : 0;
    const uint32_t size = bits_of(next) & 0x7fffffff;
    greatest = size > greatest ? size : greatest;
    out[i] = decay * p[i] - (above - below);
    m[i] = next;
  }
  store_block<kType>(piece.p, out, piece.noise);
  moment.greatest = greatest, moment.unit = 1, moment.is_split = false;
}

}  // namespace ao::AO_ISA::optim
