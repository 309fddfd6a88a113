// Functions of vectors that attention needs, and rows as limbs.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA::attention {

// e^x, for x up to 87; numbers below -87 count as that, NaN stays.
AO_INLINE F exp_of(F x) {
  x = max(splat(-87.0f), x);
#if AO_HAS_QUARTERS
  // 2^n * 2^f for f in [-1/2, 1/2], by a polynomial with an error of 2e-7
  const F power = mul(x, splat(1.44269504f)), whole = nearest(power), f = sub(power, whole);
  F p = splat(0.00134004327f);
  constexpr float kRest[] = {0.00967603736f, 0.0555032715f, 0.240221068f, 0.693147182f, 1.00000012f};
#pragma GCC unroll 5
  for (const float c : kRest) p = fma(p, f, splat(c));
  return times_power(p, whole);
#else
  const I n = round_to_int(mul(x, splat(1.44269504f)));
  const F whole = to_float(n);
  F r = fma(whole, splat(-0.693359375f), x);  // exact
  r = fma(whole, splat(2.12194440e-4f), r);
  F p = splat(1.0f / 5040);
  constexpr float kRest[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
#pragma GCC unroll 7
  for (const float c : kRest) p = fma(p, r, splat(c));
  return as_float(add(bits_of(p), shift_left<23>(n)));
#endif
}
AO_INLINE float exp_of(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp_of(splat(x)));
  return x == -__builtin_inff() ? 0.0f : lanes[0];
}

AO_INLINE F tanh_of(F x) {  // 1 - 2 / (e^2x + 1)
  const F y = max(splat(-20.0f), min(splat(20.0f), x));
  return sub(splat(1.0f), div(splat(2.0f), add(exp_of(add(y, y)), splat(1.0f))));
}

AO_INLINE float greatest_of(F v) {
#if AO_HAS_QUARTERS
  return greatest_lane(v);
#else
  alignas(64) float lanes[16];
  store(lanes, v);
  float most = lanes[0];
  for (int i = 1; i < 16; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
#endif
}

// Numbers as limbs: signed bytes of fixed-point numbers, lowest first, of which `unit` is the unit.
struct Limbs {
  float unit;
  int32_t sum[3];  // of each limb over all numbers
};

AO_INLINE float two_to(int exponent) {  // from -126 to 127
  const int32_t bits = (exponent + 127) << 23;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// The greatest magnitude of numbers so far, as bits, of which NaN are the greatest.
AO_INLINE I greatest_bits(I top, F x) { return max_int(top, bits_of(abs(x))); }

// `count`, a multiple of 16, numbers to kLimbs rows of `stride` bytes; `top`: of all by greatest_bits. What is no number
// makes the unit NaN.
template <int kLimbs>
static Limbs to_limbs(const float* x, int64_t count, I top, int8_t* out, int64_t stride) {
  constexpr int kTop = 8 * kLimbs - 2;                            // the exponent of the largest number
  constexpr float kLimit = kLimbs == 3 ? 8355711.0f : kLimbs == 2 ? 32639.0f : 127.0f;  // 127 in each limb
  const int32_t bits = largest(top);
  Limbs limbs{};
  if (bits >= 0x7f800000) {
    limbs.unit = __builtin_nanf("");
    for (int l = 0; l < kLimbs; ++l) __builtin_memset(out + l * stride, 0, static_cast<size_t>(count));
    return limbs;
  }
  float most;
  __builtin_memcpy(&most, &bits, 4);
  int unit = (bits >> 23) - 127 - kTop;
  unit = unit < -100 ? -100 : unit;
  if (most * two_to(-unit) > kLimit) ++unit;
  limbs.unit = two_to(unit);
  F to_units = splat(two_to(-unit));
  if constexpr (kLimbs == 1) {  // too few bits to leave half of one unused
    most = most > 1e-30f ? most : 1e-30f;
    limbs.unit = most / 127, to_units = splat(127 / most);
  }
  I sums[kLimbs];  // of what is left for a limb and those above it
  for (I& sum : sums) sum = splat_int(0);
  for (int64_t i = 0; i < count; i += 16) {
    I rest = round_to_int(mul(load(x + i), to_units));
#pragma GCC unroll 3
    for (int l = 0; l < kLimbs; ++l) {
      store_bytes(reinterpret_cast<uint8_t*>(out) + l * stride + i, rest);
      sums[l] = add(sums[l], rest);
      rest = shift_right<8>(add(rest, splat_int(128)));  // the low byte is signed
    }
  }
  uint32_t left[kLimbs + 1] = {};
  for (int l = 0; l < kLimbs; ++l) left[l] = static_cast<uint32_t>(sum_of(sums[l]));
  for (int l = 0; l < kLimbs; ++l) limbs.sum[l] = static_cast<int32_t>(left[l] - 256 * left[l + 1]);
  return limbs;
}

template <int kLimbs>
static Limbs to_limbs(const float* x, int64_t count, int8_t* out, int64_t stride) {
  I top = splat_int(0);
  for (int64_t i = 0; i < count; i += 16) top = greatest_bits(top, load(x + i));
  return to_limbs<kLimbs>(x, count, top, out, stride);
}

// -- one limb, for codes of 4 bits --------------------------------------------------------------------------
//
// What a row loses by it is a small part of what 4 bits have lost: products are with codes less their middle, and what
// the middle makes is added in floats.
constexpr int32_t kMiddle = 8;

// `count` numbers, none below 0, to unsigned bytes. What is added before they are rounded differs from token to token, so
// that what many small weights have in common is not lost; 0 stays 0.
static Limbs to_bytes(const float* x, int64_t count, I top, uint8_t* out) {
  alignas(64) static constexpr float kAdded[16] = {-15, 1, -7, 9, -11, 5, -3, 13, -13, 3, -5, 11, -9, 7, -1, 15};
  const int32_t bits = largest(top);
  Limbs limbs{};
  if (bits >= 0x7f800000) {
    limbs.unit = __builtin_nanf("");
    __builtin_memset(out, 0, static_cast<size_t>(count));
    return limbs;
  }
  float most;
  __builtin_memcpy(&most, &bits, 4);
  most = most > 1e-30f ? most : 1e-30f;
  limbs.unit = most / 255;
  const F to_units = splat(255 / most), added = mul(load(kAdded), splat(1.0f / 32));
  I sums = splat_int(0);
  for (int64_t i = 0; i < count; i += 16) {
    const I whole = round_to_int(fma(load(x + i), to_units, added));
    store_bytes(out + i, whole), sums = add(sums, whole);
  }
  limbs.sum[0] = sum_of(sums);
  return limbs;
}

// Sums of products with limbs, and with codes that are `least` too small, as one number each, in units.
template <int kLimbs>
AO_INLINE F joined(const I (&acc)[kLimbs], const Limbs& limbs, int32_t least) {
  F total = zero();
  for (int l = kLimbs - 1; l >= 0; --l) {
    total = fma(total, splat(256.0f), to_float(add(acc[l], splat_int(limbs.sum[l] * least))));
  }
  return mul(total, splat(limbs.unit));
}

}  // namespace ao::AO_ISA::attention
