// Numbers, already divided by their scales, to codes of a format.
#pragma once
#include "tables.h"

namespace ao::AO_ISA::coding {

// The nearest integers, ties to even. Clamping first is the same, since the bounds are integers, and
// lets a sum with 1.5 * 2^23 round: it leaves the integer, in two's complement, in the low bits.
static inline void encode_integers(const Format& f, const float* v, int64_t count, uint8_t* codes) {
  const float least = f.least, greatest = f.greatest;
  const uint32_t mask = (1u << f.bits) - 1;
  for (int64_t i = 0; i < count; ++i) {
    float x = v[i] == v[i] ? v[i] : 0.0f;
    x = x < least ? least : x;
    x = x > greatest ? greatest : x;
    codes[i] = static_cast<uint8_t>(bits_of(x + 0x1.8p23f) & mask);
  }
}

// As ao_core.numerics.encode_float: a sum of 2^23 quanta and a magnitude has the number of quanta in
// its low bits, rounded, and the exponent of the quantum in the high ones.
static inline void encode_floats(const Format& f, const float* v, int64_t count, uint8_t* codes) {
  const uint32_t least = bits_of(f.smallest_normal), greatest = bits_of(f.greatest);
  const int mantissa = f.mantissa, shift = 23 - mantissa, sign = f.bits - 1;
  const float to_quanta = as_float(static_cast<uint32_t>(127 + shift) << 23);
  const uint32_t base = ((least >> 23) + static_cast<uint32_t>(shift)) << mantissa;
  const uint32_t nan_code = f.nan_code;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(v[i]), absolute = bits & 0x7fffffff;
    const uint32_t magnitude = absolute > greatest ? greatest : absolute;
    uint32_t power = magnitude & kInfinity;
    power = power < least ? least : power;
    const uint32_t total = bits_of(as_float(power) * to_quanta + as_float(magnitude));
    const uint32_t code = (total & 0x7fffff) + (total >> 23 << mantissa) - base;
    codes[i] = static_cast<uint8_t>(absolute > kInfinity ? nan_code : code | bits >> 31 << sign);
  }
}

static inline bool has_nan(const float* v, int64_t count) {
  uint32_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(v[i]) & 0x7fffffff;
    greatest = magnitude > greatest ? magnitude : greatest;
  }
  return greatest > kInfinity;
}

static inline void encode_by_search(const Format& f, const float* v, int64_t count,
                                    uint8_t* codes) {
  switch (f.bits) {
    case 1: search<1>(f.tree, v, count, codes); break;
    case 2: search<2>(f.tree, v, count, codes); break;
    case 3: search<3>(f.tree, v, count, codes); break;
    case 4: search<4>(f.tree, v, count, codes); break;
    case 5: search<5>(f.tree, v, count, codes); break;
    case 6: search<6>(f.tree, v, count, codes); break;
    case 7: search<7>(f.tree, v, count, codes); break;
    default: search<8>(f.tree, v, count, codes);
  }
  if (!f.in_order) {
    for (int64_t i = 0; i < count; ++i) codes[i] = f.order[codes[i]];
  }
  if (!has_nan(v, count)) return;
  for (int64_t i = 0; i < count; ++i) codes[i] = v[i] == v[i] ? codes[i] : f.nan_code;
}

static inline void encode_values(const Format& f, const float* v, int64_t count, uint8_t* codes) {
  switch (f.rule) {
    case Rule::search: return encode_by_search(f, v, count, codes);
    case Rule::integer: return encode_integers(f, v, count, codes);
    case Rule::floating: return encode_floats(f, v, count, codes);
  }
}

}  // namespace ao::AO_ISA::coding
