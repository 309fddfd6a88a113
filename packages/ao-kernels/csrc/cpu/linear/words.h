// Activations as 16-bit fixed-point numbers, for int16 dot products with weights whose values are whole numbers of up
// to 8 bits: four times as fast as products of bfloat16 on processors whose AMX units make these.
//
// The columns of a step, up to 128, share an exponent: their greatest has all 15 bits. Numbers of bfloat16 within 1/128
// of it are exact. Where numbers of a row differ so much that the average one keeps fewer bits than bfloat16 has, the
// row is followed by another one, its rest: what 16 bits leave, as 16 bits with exponents of their own.
#pragma once
#include "scales.h"

namespace ao::AO_ISA {

// Bits that the average number of a step (by its exponent) may have below those of the greatest one.
constexpr int32_t kWordSpread = 7;
constexpr int kWordTop = 14;  // the exponent of the greatest word
// Numbers so much smaller than the greatest of their row are taken for 0: units stay normal numbers.
constexpr int kWordDepth = 60;

// The columns of a step as floats.
AO_INLINE void load_step(const Linear& t, const uint8_t* row, KRange& at, int tiles, F (&x)[kLimbTiles]) {
  for (int i = 0; i < tiles; ++i, at.k += 16) x[i] = load_as(t.type, row + at.k * bytes_of(t.type), at.count());
}

static const uint8_t* row_of(const Linear& t, int64_t r) {
  return static_cast<const uint8_t*>(t.x) + r * t.x_stride * bytes_of(t.type);
}

// Whether a row needs more than 16 bits.
static bool leaves_rest(const Linear& t, int64_t r) {
  const uint8_t* const row = row_of(t, r);
  KRange at = k_range_of(t, 0);
  for (int64_t s = 0; s < t.step_count; ++s) {
    if (t.steps[s].group != at.group) at = k_range_of(t, t.steps[s].group);
    F x[kLimbTiles];
    load_step(t, row, at, t.steps[s].tiles, x);
    I top = splat_int(0), exponents = top, zeros_or_minus_one = top;
    for (int i = 0; i < t.steps[s].tiles; ++i) {
      const I magnitude = bits_of(abs(x[i]));
      top = max_int(top, magnitude);
      exponents = add(exponents, shift_right<23>(magnitude));
      zeros_or_minus_one = add(zeros_or_minus_one, shift_right<31>(subtract(splat_int(0), magnitude)));
    }
    const int32_t count = -sum_of(zeros_or_minus_one);
    if (count * (largest(top) >> 23) - sum_of(exponents) > count * kWordSpread) return true;
  }
  return false;
}

// Rounds the columns of a step to words; returns their unit, and leaves what the words leave.
AO_INLINE float to_words(F (&x)[kLimbTiles], int tiles, I (&words)[kLimbTiles]) {
  I top = splat_int(0);
  for (int i = 0; i < tiles; ++i) top = max_int(top, bits_of(abs(x[i])));
  int exponent = (largest(top) >> 23) - 127;
  if (exponent < -kWordDepth) exponent = -kWordDepth;
  const float unit = power_of_two(exponent - kWordTop);
  const F to_units = splat(power_of_two(kWordTop - exponent));
  for (int i = 0; i < tiles; ++i) {
    words[i] = round_to_int(mul(x[i], to_units));
    x[i] = sub(x[i], mul(to_float(words[i]), splat(unit)));
  }
  return unit;
}

// Packed row r: a row of activations, or the rest of one. `place` is that of its first unit, and of its first sum.
static void pack_words(const Linear& t, int64_t r, uint8_t* out, int64_t rows, int64_t place) {
  const bool rest = r >= outputs_of(t);
  const uint8_t* const row = row_of(t, rest ? t.rests[r - outputs_of(t)] : r);
  // rows are brought to numbers below 2, and outputs back
  const int32_t bits = greatest_bits(t.type, row, t.k);
  int exponent = bits == 0 ? 0 : (bits >> 23) - 127;
  exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
  const bool infinite = bits == 0x7f800000;
  const RowPacker packer{t, row, splat(power_of_two(-exponent)), 0.0f, infinite};
  float back = power_of_two(exponent);
  if (bits >= 0x7f800000) __builtin_memcpy(&back, &bits, 4);  // infinity, or a NaN
  t.x_scale[r] = back;
  KRange at = k_range_of(t, 0);
  for (int64_t s = 0; s < t.step_count; ++s) {
    if (t.steps[s].group != at.group) at = k_range_of(t, t.steps[s].group);
    const int tiles = t.steps[s].tiles;
    F x[kLimbTiles];
    for (int i = 0; i < tiles; ++i, at.k += 16) x[i] = packer.values(at.k, at.count());
    I words[kLimbTiles];
    float unit = to_words(x, tiles, words);
    if (rest) unit = to_words(x, tiles, words);
    I total = splat_int(0);
    for (int i = 0; i < tiles; ++i, out += rows * 32) {
      store_words(out, bits_of(swap_middle(as_float(words[i]))));
      total = add(total, words[i]);
    }
    t.x_units[place + s * rows] = unit * t.table_unit;
    static_cast<float*>(t.x_sums)[place + s * rows] = static_cast<float>(sum_of(total)) * unit;
  }
}

}  // namespace ao::AO_ISA
