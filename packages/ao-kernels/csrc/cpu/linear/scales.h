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

template <Scale kType>
static void read_scales(const Linear& t, int64_t block, float* scales) {
  for (int64_t g = 0; g < t.groups; ++g) {
    store(scales + g * 16, mul(scale_at<kType>(t.scale, (block * t.groups + g) * 16), splat(t.outer * t.table_unit)));
  }
}

static F zero_at(const Linear& t, int64_t i) {
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
  switch (t.scale_type) {
    case Scale::f32: read_scales<Scale::f32>(t, block, scales); break;
    case Scale::bf16: read_scales<Scale::bf16>(t, block, scales); break;
    case Scale::f16: read_scales<Scale::f16>(t, block, scales); break;
    case Scale::e8m0: read_scales<Scale::e8m0>(t, block, scales); break;
    case Scale::e4m3: read_scales<Scale::e4m3>(t, block, scales); break;
  }
  if (t.zero_type == Zero::none) return;
  const F base = splat(t.mode == Mode::f32 || t.mode == Mode::pairs ? 0.0f : t.least);
  for (int64_t g = 0; g < t.groups; ++g) {
    const F zero_value = zero_at(t, (block * t.groups + g) * 16);
    store(shifts + g * 16, mul(load(scales + g * 16), sub(base, zero_value)));
  }
}

}  // namespace ao::AO_ISA
