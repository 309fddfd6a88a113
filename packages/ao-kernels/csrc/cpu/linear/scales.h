// Scales and zero points of a block of columns, as floats.
#pragma once
#include "pack.h"

namespace ao::AO_ISA {

// NaN where all `kBits` bits of a code are set, which is how small floats mark it; 0 elsewhere.
template <int kBits>
AO_INLINE I nan_of(I code) {
  const I marked = shift_right<31>(shift_left<31 - kBits>(add(code, splat_int(1))));
  return and_(marked, splat_int(0x7fc00000));
}

template <Scale kType>
AO_INLINE F scale_at(const void* scale, int64_t i) {
  if constexpr (kType == Scale::f32) return load(static_cast<const float*>(scale) + i);
  if constexpr (kType == Scale::bf16) {
    return as_float(shift_left<16>(load_words(static_cast<const uint16_t*>(scale) + i)));
  }
  if constexpr (kType == Scale::f16) return half_to_float(static_cast<const uint16_t*>(scale) + i);
  const I code = load_bytes(static_cast<const uint8_t*>(scale) + i);
  if constexpr (kType == Scale::e8m0) {
    // the exponent of float32; 0 is the subnormal 2^-127
    return as_float(or_(max_int(shift_left<23>(code), splat_int(0x00400000)), nan_of<8>(code)));
  }
  // e4m3, never negative as a scale: float16 with one bit of exponent less
  return as_float(or_(bits_of(mul(e4m3_as_half(code), splat(256.0f))), nan_of<7>(code)));
}

AO_INLINE F scale_at(const Linear& t, int64_t i) {
  switch (t.scale_type) {
    case Scale::f32: return scale_at<Scale::f32>(t.scale, i);
    case Scale::bf16: return scale_at<Scale::bf16>(t.scale, i);
    case Scale::f16: return scale_at<Scale::f16>(t.scale, i);
    case Scale::e8m0: return scale_at<Scale::e8m0>(t.scale, i);
    default: return scale_at<Scale::e4m3>(t.scale, i);
  }
}

AO_INLINE F zero_at(const Linear& t, int64_t i) {
  switch (t.zero_type) {
    case Zero::f32: return load(static_cast<const float*>(t.zero) + i);
    case Zero::bf16: return as_float(shift_left<16>(load_words(static_cast<const uint16_t*>(t.zero) + i)));
    case Zero::f16: return half_to_float(static_cast<const uint16_t*>(t.zero) + i);
    default: break;
  }
  // a canonical code of an integer format: signed formats store it with the top bit flipped
  const I code = xor_(load_bytes(static_cast<const uint8_t*>(t.zero) + i), splat_int(t.zero_flip));
  return add(to_float(code), splat(t.table[0]));
}

// Scales as floats, and what multiplies the sum of the activations: scale * (-zero) for decoded values,
// scale * (least - zero) for bytes counted from the least value.
static void read_block(const Linear& t, int64_t block, float* scales, float* shifts) {
  const F factor = splat(t.outer * t.table_unit);
  const F base = splat(t.mode == Mode::int8 ? t.least : 0.0f);
  for (int64_t g = 0; g < t.groups; ++g) {
    const int64_t i = (block * t.groups + g) * 16;
    const F scale = mul(scale_at(t, i), factor);
    store(scales + g * 16, scale);
    if (t.zero_type != Zero::none) store(shifts + g * 16, mul(scale, sub(base, zero_at(t, i))));
  }
}

}  // namespace ao::AO_ISA
