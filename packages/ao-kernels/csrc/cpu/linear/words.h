// Activations as 16-bit fixed-point numbers, for int16 dot products with weights whose values are whole numbers of up
// to 8 bits. Processors whose bfloat16 products are made by AMX units make these four times as fast as dpbf16.
//
// Up to 128 columns share an exponent: their greatest number has all 15 bits, and those of bfloat16 within 1/128 of it
// are exact. Where numbers of a row differ so much that the average one keeps fewer bits than bfloat16 has, the row is
// followed by another one, its rest: what 16 bits leave, as 16 bits with exponents of their own.
//
// Sums are kept in the unit of the columns at hand. Where it changes, they are multiplied by the ratio of both.
#pragma once
#include "scales.h"

namespace ao::AO_ISA {

// Bits that the average number (by its exponent) may have below those of the greatest one.
constexpr int32_t kWordSpread = 7;
constexpr int kWordTop = 14;  // the exponent of the greatest word
// Numbers whose exponents are so far below the greatest one of their row lose bits: ratios of units stay far from the ends
// of float32.
constexpr int kWordDepth = 60;

// Columns that share an exponent: steps [begin, end).
struct WordBlock {
  int64_t begin, end;
  F x[kLimbTiles];
};

// Reads the block that begins with step `begin`: element(k, count) are 16 columns from k on.
template <class Function>
AO_INLINE int read_word_block(const Linear& t, KRange& at, int64_t begin, WordBlock& block, const Function& element) {
  int tiles = 0;
  int64_t s = begin;
  do {
    if (t.steps[s].group != at.group) at = k_range_of(t, t.steps[s].group);
    for (int i = 0; i < t.steps[s].tiles; ++i, at.k += 16) block.x[tiles++] = element(at.k, at.count());
  } while (++s < t.step_count && !t.steps[s].opens);
  block.begin = begin, block.end = s;
  return tiles;
}

static const uint8_t* row_of(const Linear& t, int64_t r) {
  return static_cast<const uint8_t*>(t.x) + r * t.x_stride * bytes_of(t.type);
}

// Whether a row needs more than 16 bits.
static bool leaves_rest(const Linear& t, int64_t r) {
  const uint8_t* const row = row_of(t, r);
  const auto element = [&](int64_t k, int count) { return load_as(t.type, row + k * bytes_of(t.type), count); };
  KRange at = k_range_of(t, 0);
  WordBlock block;
  for (int64_t s = 0; s < t.step_count; s = block.end) {
    const int tiles = read_word_block(t, at, s, block, element);
    I top = splat_int(0), exponents = top, zeros_or_minus_one = top;
    for (int i = 0; i < tiles; ++i) {
      const I magnitude = bits_of(abs(block.x[i]));
      top = max_int(top, magnitude);
      exponents = add(exponents, shift_right<23>(magnitude));
      zeros_or_minus_one = add(zeros_or_minus_one, shift_right<31>(subtract(splat_int(0), magnitude)));
    }
    const int32_t count = -sum_of(zeros_or_minus_one);
    if (count * (largest(top) >> 23) - sum_of(exponents) > count * kWordSpread) return true;
  }
  return false;
}

// Rounds numbers to words in a unit, which it returns, and leaves what these leave. Zeros take the unit before.
AO_INLINE float to_words(F (&x)[kLimbTiles], int tiles, float before, I (&words)[kLimbTiles]) {
  I top = splat_int(0);
  for (int i = 0; i < tiles; ++i) top = max_int(top, bits_of(abs(x[i])));
  const int32_t bits = largest(top);
  int exponent = (bits >> 23) - 127;
  if (exponent < -kWordDepth) exponent = -kWordDepth;
  const float unit = bits == 0 ? before : power_of_two(exponent - kWordTop);
  const F to_units = splat(1.0f / unit);
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
  const RowPacker packer{t, row, splat(power_of_two(-exponent)), 0.0f, bits == 0x7f800000};
  t.x_scale[r] = power_of_two(exponent);
  if (bits >= 0x7f800000) __builtin_memcpy(&t.x_scale[r], &bits, 4);  // infinity, or a NaN
  const auto element = [&](int64_t k, int count) { return packer.values(k, count); };
  auto* const sums = static_cast<float*>(t.x_sums);
  const float to_sums = 1.0f / t.table_unit;
  float first = power_of_two(-kWordTop), unit = first;
  KRange at = k_range_of(t, 0);
  WordBlock block;
  for (int64_t s = 0; s < t.step_count; s = block.end) {
    const int tiles = read_word_block(t, at, s, block, element);
    I words[kLimbTiles];
    const float before = unit;
    unit = first = to_words(block.x, tiles, first, words);
    if (rest) unit = to_words(block.x, tiles, before, words);
    t.x_ratios[place + s * rows] = before / unit;
    const I* word = words;
    for (; s < block.end; ++s) {
      I total = splat_int(0);
      for (int i = 0; i < t.steps[s].tiles; ++i, ++word, out += rows * 32) {
        store_words(out, bits_of(swap_middle(as_float(*word))));
        total = add(total, *word);
      }
      sums[place + s * rows] = static_cast<float>(sum_of(total)) * to_sums;
    }
  }
  t.x_zero[r] = unit * t.table_unit;
}

// Sums of words times very large scales would exceed float32 before the unit of the words brings them back. In rows of the
// weight that have such, the scales and zero-point terms of a block become smaller by a factor, which is returned; that of
// all other rows is 1.
constexpr int kGreatestWordScale = 84, kLowered = 48;  // exponents
AO_INLINE F lower_scales(const Linear& t, int64_t block, float* scales, float* zero_terms) {
  I greatest = splat_int(0);
  for (int64_t g = 0; g < t.groups; ++g) greatest = max_int(greatest, bits_of(abs(load(scales + g * 16))));
  const int32_t bound = (kGreatestWordScale + 127) << 23;
  if (largest(greatest) < bound) return splat(1.0f);
  float factors[16], inverse[16];
  int32_t sizes[16];
  store_vector(sizes, greatest);
  for (int n = 0; n < 16; ++n) {
    factors[n] = sizes[n] < bound ? 1.0f : power_of_two(kLowered), inverse[n] = 1.0f / factors[n];
  }
  for (int64_t g = 0; g < t.groups; ++g, scales += 16, zero_terms += 16) {
    const F scale = mul(load(scales), load(inverse));
    store(scales, scale);
    if (t.zero_type == Zero::none) continue;
    const bool scaled = t.zero_type == Zero::scaled;
    store(zero_terms, scaled ? mul(load(zero_terms), load(inverse))
                             : mul(scale, sub(zero(), zero_at(t, (block * t.groups + g) * 16))));
  }
  return load(factors);
}

// Adds the sums of what 16 bits left of some rows to those of the rows.
static void add_rests(const Linear& t, int64_t blocks, float* totals) {
  const float* rest = totals + outputs_of(t) * kPanelBlocks * 16;
  for (int64_t i = 0; i < t.rest_count; ++i, rest += kPanelBlocks * 16) {
    const int64_t r = t.rests[i];
    float* const row = totals + r * kPanelBlocks * 16;
    const F ratio = splat(t.x_zero[outputs_of(t) + i] / t.x_zero[r]);
    for (int64_t c = 0; c < blocks; ++c) store(row + c * 16, fma(load(rest + c * 16), ratio, load(row + c * 16)));
  }
}

// Brings sums from the last unit of their row back, and from lowered scales.
static void finish_words(const Linear& t, int64_t blocks, const F* lowered, float* totals) {
  for (int64_t r = 0; r < outputs_of(t); ++r, totals += kPanelBlocks * 16) {
    const F unit = splat(t.x_zero[r]);
    for (int64_t c = 0; c < blocks; ++c) store(totals + c * 16, mul(mul(load(totals + c * 16), unit), lowered[c]));
  }
}

}  // namespace ao::AO_ISA
