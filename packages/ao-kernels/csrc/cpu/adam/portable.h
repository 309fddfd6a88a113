// Blocks of moments in plain C++. Loops are written for the compiler to vectorize.
#pragma once
#include "numbers.h"

namespace ao::AO_ISA::optim {

static inline float float_of(const uint8_t (*table)[256], uint8_t i) {
  return as_float(static_cast<uint32_t>(table[0][i]) | static_cast<uint32_t>(table[1][i]) << 8 |
                  static_cast<uint32_t>(table[2][i]) << 16 | static_cast<uint32_t>(table[3][i]) << 24);
}

// Codes of the numbers of a block / scale, none of which is NaN.
static inline void encode(const StateFormat& f, const float* numbers, float scale, uint8_t* codes) {
  float x[kBlock];
  uint16_t cells[kBlock];
  for (int i = 0; i < kBlock; ++i) x[i] = numbers[i] / scale;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t upper = bits_of(x[i]) >> 16;
    uint32_t a = upper & 0x7fff;
    a = a < f.least ? f.least : a;
    a = a > f.greatest ? f.greatest : a;
    const uint32_t exponent = a >> 7 & 31;
    cells[i] = static_cast<uint16_t>((a >> f.shift[exponent]) - f.offset[exponent] + (upper >> 15) * f.negative) & 511;
  }
  for (int i = 0; i < kBlock; ++i) {
    const uint8_t interval = f.cells[cells[i]];
    codes[i] = f.order[static_cast<uint8_t>(interval + (x[i] >= float_of(f.steps, interval)))];
  }
}

template <Element kType>
static inline const float* load(const void* from, float* buffer) {
  if constexpr (kType == Element::f32) return static_cast<const float*>(from);
  const uint16_t* words = static_cast<const uint16_t*>(from);
  for (int i = 0; i < kBlock; ++i) buffer[i] = as_float(static_cast<uint32_t>(words[i]) << 16);
  return buffer;
}

template <Element kType>
static inline void store(void* to, const float* from, const uint32_t* noise) {
  if constexpr (kType == Element::f32) {
    __builtin_memcpy(to, from, sizeof(float) * kBlock);
  } else {
    uint16_t* words = static_cast<uint16_t*>(to);
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t bits = bits_of(from[i]), magnitude = bits & 0x7fffffff;
      const uint32_t nearest = 0x7fff + (bits >> 16 & 1);
      const uint32_t carry = noise == nullptr ? nearest : magnitude < 0x7f800000 ? noise[i] : 0;
      words[i] = static_cast<uint16_t>((magnitude > 0x7f800000 ? bits | 0x400000 : bits + carry) >> 16);
    }
  }
}

// New moments, and parameters in place.
template <Element kType>
static inline Greatest advance(const Adam& a, const Piece& piece) {
  const float beta1 = a.beta1, rest1 = a.rest1, beta2 = a.beta2, rest2 = a.rest2;
  const float decay = a.decay, l2 = a.l2, unbias = a.unbias, eps = a.eps, rate = a.rate;
  const uint32_t sign = a.maximize ? 0x80000000 : 0;
  float wide[kBlock], g[kBlock], out[kBlock];
  float *m = piece.m, *v = piece.v;
  const float* grad = load<kType>(piece.g, wide);
  for (int i = 0; i < kBlock; ++i) g[i] = as_float(bits_of(grad[i]) ^ sign);
  const float* p = load<kType>(piece.p, wide);
  if (l2 != 0) {
    for (int i = 0; i < kBlock; ++i) g[i] += l2 * p[i];
  }
  for (int i = 0; i < kBlock; ++i) m[i] = float_of(a.m.values, piece.m_codes[i]) * piece.m_scale;
  for (int i = 0; i < kBlock; ++i) v[i] = float_of(a.v.values, piece.v_codes[i]) * piece.v_scale;
  uint32_t m_greatest = 0, v_greatest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const float new_m = beta1 * m[i] + rest1 * g[i], new_v = beta2 * v[i] + rest2 * g[i] * g[i];
    const uint32_t m_size = bits_of(new_m) & 0x7fffffff, v_size = bits_of(new_v) & 0x7fffffff;
    m[i] = new_m, v[i] = new_v;
    m_greatest = m_size > m_greatest ? m_size : m_greatest;
    v_greatest = v_size > v_greatest ? v_size : v_greatest;
    out[i] = decay * p[i] - rate * (new_m / (__builtin_sqrtf(new_v) * unbias + eps));
  }
  store<kType>(piece.p, out, piece.noise);
  return {m_greatest, v_greatest};
}

}  // namespace ao::AO_ISA::optim
