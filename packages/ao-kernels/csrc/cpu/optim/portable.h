// Blocks of moments in plain C++. Loops are written for the compiler to vectorize.
#pragma once
#include "rows.h"

namespace ao::AO_ISA::optim {

// Blocks are prefetched so many blocks ahead; 0: that is left to the hardware.
constexpr int kAhead = 2;

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

static inline void decode_block(const StateFormat& f, const uint8_t* codes, float scale, float* out) {
  // computing takes less time than looking up
  if (f.coding == Coding::square) {
    for (int i = 0; i < kBlock; ++i) {
      const float root = static_cast<float>(codes[i] - 127);
      out[i] = root * __builtin_fabsf(root) * (1 / ao::optim::kSquares) * scale;
    }
  } else if (f.coding == Coding::fourth) {
    for (int i = 0; i < kBlock; ++i) {
      const float square = static_cast<float>(codes[i] * codes[i]);
      out[i] = square * square * (1 / ao::optim::kFourths) * scale;
    }
  } else {
    for (int i = 0; i < kBlock; ++i) out[i] = f.values[codes[i]] * scale;
  }
}

// New moments, and parameters in place.
template <Element kType>
static inline void advance(const Adam& a, const Piece& piece, Numbers& new_m, Numbers& new_v) {
  const float beta1 = a.beta1, rest1 = a.rest1, beta2 = a.beta2, rest2 = a.rest2;
  const float decay = a.decay, l2 = a.l2, unbias = a.unbias, eps = a.eps, rate = a.rate;
  float wide_p[kBlock], wide_g[kBlock], g[kBlock], out[kBlock];
  float *m = new_m.values, *v = new_v.values;
  const float *p = load_block<kType>(piece.p, wide_p), *grad = load_block<kType>(piece.g, wide_g);
  if (l2 != 0) {
    for (int i = 0; i < kBlock; ++i) g[i] = grad[i] + l2 * p[i];
    grad = g;
  }
  decode_block(a.m, piece.m_codes, piece.m_scale, m);
  decode_block(a.v, piece.v_codes, piece.v_scale, v);
  uint32_t m_greatest = 0, v_greatest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const float new_m = beta1 * m[i] + rest1 * grad[i], new_v = beta2 * v[i] + rest2 * grad[i] * grad[i];
    const uint32_t m_size = bits_of(new_m) & 0x7fffffff, v_size = bits_of(new_v) & 0x7fffffff;
    m[i] = new_m, v[i] = new_v;
    m_greatest = m_size > m_greatest ? m_size : m_greatest;
    v_greatest = v_size > v_greatest ? v_size : v_greatest;
    out[i] = decay * p[i] - rate * (new_m / (__builtin_sqrtf(new_v) * unbias + eps));
  }
  store_block<kType>(piece.p, out, piece.noise);
  new_m.greatest = m_greatest, new_v.greatest = v_greatest;
  new_m.unit = new_v.unit = 1, new_m.is_split = new_v.is_split = false;
}

}  // namespace ao::AO_ISA::optim
