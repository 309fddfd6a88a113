// Blocks of moments in plain C++. Loops are written for the compiler to vectorize.
#pragma once
#include "numbers.h"

namespace ao::AO_ISA::optim {

// Codes of the numbers of a block / scale, none of which is NaN.
static inline void look_up_codes(const StateFormat& f, const float* numbers, float scale, uint8_t* codes) {
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
    codes[i] = f.order[static_cast<uint8_t>(interval + (x[i] >= f.steps[interval]))];
  }
}

// Codes of the numbers of a block / scale, none of which is NaN.
static inline void encode(const StateFormat& f, const Numbers& of, float scale, uint8_t* codes) {
  const float* numbers = of.values;
  if (f.coding == Coding::table || !is_usual(scale)) return look_up_codes(f, numbers, scale, codes);
  const float inverse = 1.0f / scale;
  const auto all = [&](auto code) {
    for (int i = 0; i < kBlock; ++i) codes[i] = code(numbers[i] * inverse);
  };
  if (f.coding == Coding::square) return all([](float x) { return ao::optim::square_code(x); });
  if (f.coding == Coding::fourth) return all([](float x) { return ao::optim::fourth_code(x); });
  if (f.coding == Coding::e4m3) return all([](float x) { return ao::optim::e4m3_code(x); });
  all([](float x) { return ao::optim::e5m3_code(x); });
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
static inline void advance(const Adam& a, const Piece& piece, Numbers& new_m, Numbers& new_v) {
  const float beta1 = a.beta1, rest1 = a.rest1, beta2 = a.beta2, rest2 = a.rest2;
  const float decay = a.decay, l2 = a.l2, unbias = a.unbias, eps = a.eps, rate = a.rate;
  float wide_p[kBlock], wide_g[kBlock], g[kBlock], out[kBlock];
  float *m = new_m.values, *v = new_v.values;
  const float *p = load<kType>(piece.p, wide_p), *grad = load<kType>(piece.g, wide_g);
  if (l2 != 0) {
    for (int i = 0; i < kBlock; ++i) g[i] = grad[i] + l2 * p[i];
    grad = g;
  }
  for (int i = 0; i < kBlock; ++i) m[i] = a.m.values[piece.m_codes[i]] * piece.m_scale;
  for (int i = 0; i < kBlock; ++i) v[i] = a.v.values[piece.v_codes[i]] * piece.v_scale;
  uint32_t m_greatest = 0, v_greatest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const float new_m = beta1 * m[i] + rest1 * grad[i], new_v = beta2 * v[i] + rest2 * grad[i] * grad[i];
    const uint32_t m_size = bits_of(new_m) & 0x7fffffff, v_size = bits_of(new_v) & 0x7fffffff;
    m[i] = new_m, v[i] = new_v;
    m_greatest = m_size > m_greatest ? m_size : m_greatest;
    v_greatest = v_size > v_greatest ? v_size : v_greatest;
    out[i] = decay * p[i] - rate * (new_m / (__builtin_sqrtf(new_v) * unbias + eps));
  }
  store<kType>(piece.p, out, piece.noise);
  new_m.greatest = m_greatest, new_v.greatest = v_greatest;
  new_m.unit = new_v.unit = 1, new_m.is_split = new_v.is_split = false;
}

}  // namespace ao::AO_ISA::optim
