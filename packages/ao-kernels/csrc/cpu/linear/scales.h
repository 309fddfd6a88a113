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
  if constexpr (kType == Scale::u8) return to_float(code);
  if constexpr (kType == Scale::i8) return to_float(shift_right<24>(shift_left<24>(code)));
  // e4m3: float16 with one bit of exponent less, and the sign beside it
  const I wide = add(code, and_(code, splat_int(0x80)));
  return as_float(or_(bits_of(mul(e4m3_as_half(wide), splat(256.0f))), nan_of<7>(wide)));
}

AO_INLINE F scale_at(const void* scale, Scale type, int64_t i) {
  // a jump to one of many costs more than the scale itself
  if (type == Scale::bf16) [[likely]] return scale_at<Scale::bf16>(scale, i);
  switch (type) {
    case Scale::f32: return scale_at<Scale::f32>(scale, i);
    case Scale::f16: return scale_at<Scale::f16>(scale, i);
    case Scale::e8m0: return scale_at<Scale::e8m0>(scale, i);
    case Scale::u8: return scale_at<Scale::u8>(scale, i);
    case Scale::i8: return scale_at<Scale::i8>(scale, i);
    default: return scale_at<Scale::e4m3>(scale, i);
  }
}

// What multiplies those of a span of groups.
AO_INLINE F outer_at(const Scales& scales, int64_t i) {
  return scales.outer ? scale_at(scales.outer, scales.outer_type, i) : splat(1.0f);
}

// Zero points that are not scaled.
AO_INLINE F zero_at(const Linear& t, int64_t i) {
  switch (t.zero_type) {
    case Zero::f32: return load(static_cast<const float*>(t.zero) + i);
    case Zero::bf16: return as_float(shift_left<16>(load_words(static_cast<const uint16_t*>(t.zero) + i)));
    case Zero::f16: return half_to_float(static_cast<const uint16_t*>(t.zero) + i);
    default: break;
  }
  // a canonical code of an integer format: signed formats store it with the top bit flipped
  const I code = load_bytes(static_cast<const uint8_t*>(t.zero) + i);
  if (t.zero_flip == 0) return to_float(code);
  return add(to_float(xor_(code, splat_int(t.zero_flip))), splat(t.table[0]));
}

// Scales as floats, and what multiplies the sum of the activations: scale * (-zero), or -offset, for decoded
// values; for bytes counted from the least value scale * least more.
static void read_block(const Linear& t, int64_t block, float* scales, float* shifts) {
  const F base = splat(t.mode == Mode::int8 ? t.least : 0.0f);
  for (int64_t s = 0, g = 0; s < t.spans; ++s) {
    const int64_t span = (block * t.spans + s) * 16;
    const F outer = outer_at(t.scale, span), offset_outer = outer_at(t.offset, span);
    for (const int64_t end = g + t.span < t.groups ? g + t.span : t.groups; g < end; ++g) {
      const int64_t i = (block * t.groups + g) * 16;
      const F scale = mul(scale_at(t.scale.values, t.scale.type, i), outer);
      store(scales + g * 16, scale);
      if (t.zero_type == Zero::scaled) {
        const F offset = mul(scale_at(t.offset.values, t.offset.type, i), offset_outer);
        store(shifts + g * 16, sub(mul(scale, base), offset));
      } else if (t.zero_type != Zero::none) {
        store(shifts + g * 16, mul(scale, sub(base, zero_at(t, i))));
      }
    }
  }
}

}  // namespace ao::AO_ISA
