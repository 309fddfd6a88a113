// Numbers to codes and back in one pass: what a dense matrix is as a format rounds it.
#pragma once
#include "blocks.h"
#include "decode.h"

namespace ao::AO_ISA::coding {

// As `encode_integers`, and the integers in place of codes.
static inline void round_integers(const Format& f, float* v, int64_t count) {
  const float least = f.least, greatest = f.greatest;
  for (int64_t i = 0; i < count; ++i) {
    float x = v[i] == v[i] ? v[i] : 0.0f;
    x = x < least ? least : x;
    x = x > greatest ? greatest : x;
    v[i] = (x + 0x1.8p23f) - 0x1.8p23f;
  }
}

// As `encode_floats`: what is left of the sum without the 2^23 quanta is the rounded magnitude.
static inline void round_floats(const Format& f, float* v, int64_t count) {
  const uint32_t least = bits_of(f.smallest_normal), greatest = bits_of(f.greatest);
  const float to_quanta = as_float(static_cast<uint32_t>(127 + 23 - f.mantissa) << 23);
  const uint32_t of_nan = bits_of(f.table[f.nan_code]);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(v[i]), absolute = bits & 0x7fffffff;
    const uint32_t magnitude = absolute > greatest ? greatest : absolute;
    uint32_t power = magnitude & kInfinity;
    power = power < least ? least : power;
    const float quanta = as_float(power) * to_quanta;
    const uint32_t rounded = bits_of((quanta + as_float(magnitude)) - quanta) | (bits & 0x80000000);
    v[i] = as_float(absolute > kInfinity ? of_nan : rounded);
  }
}

// What the codes of numbers stand for. `codes` has memory for as many.
static inline void round_values(const Format& f, float* v, int64_t count, uint8_t* codes) {
  if (f.rule == Rule::integer && f.is_integer) return round_integers(f, v, count);
  if (f.rule == Rule::floating && f.is_float) return round_floats(f, v, count);
  encode_values(f, v, count, codes);
  decode_values(f, codes, count, v);
}

// Elements [begin, end) of a row; affine(group) is of its block.
template <class F>
static inline void round_run(const Quantize& q, int64_t row, int64_t begin, int64_t end, const F& affine) {
  alignas(64) float values[kPiece];
  alignas(64) uint8_t codes[kPiece];
  const Blocks& b = q.blocks;
  for (; begin < end; begin += kPiece) {
    const int64_t count = begin + kPiece < end ? kPiece : end - begin;
    divide(q, row, begin, count, affine, values);
    round_values(q.format, values, count, codes);
    for (int64_t i = 0, group = begin / b.block_k; i < count; ++group) {
      const int64_t last = (group + 1) * b.block_k - begin, stop = last < count ? last : count;
      const auto [scale, zero] = affine(group);
      if (q.zero_kind == ZeroKind::none) {
        for (; i < stop; ++i) values[i] *= scale;
      } else {
        for (; i < stop; ++i) values[i] = (values[i] - zero) * scale;
      }
    }
    write(q.type, values, count, at(q.y, q.type, row * b.k + begin));
  }
}

}  // namespace ao::AO_ISA::coding
