// Scales and zero points of a block of N, as floats.
#pragma once
#include "pack.h"

namespace ao::AO_ISA {

template <Scale kType>
AO_INLINE F scale_at(const void* scale, int64_t i) {
  if constexpr (kType == Scale::f32) return load(static_cast<const float*>(scale) + i);
  if constexpr (kType == Scale::bf16) {
    return as_float(shift_left<16>(load_words(static_cast<const uint16_t*>(scale) + i)));
  }
  if constexpr (kType == Scale::f16) return half_to_float(static_cast<const uint16_t*>(scale) + i);
  const uint8_t* const bytes = static_cast<const uint8_t*>(scale) + i;
  if constexpr (kType == Scale::e4m3) return mul(e4m3_as_half(bytes), splat(256.0f));
  const I code = load_bytes(bytes);
  if constexpr (kType == Scale::e8m0) {
    // the exponent of float32; 0 is the subnormal 2^-127, and 255 infinity, which 0 makes NaN
    const F power = as_float(max_int(shift_left<23>(code), splat_int(0x00400000)));
    return fma(power, zero(), power);
  }
  return to_float(kType == Scale::i8 ? sign_extend_byte(code) : code);
}

// Those of several blocks, `stride` apart: a jump to one of many types costs more than a scale itself.
template <Scale kType, int kBlocks>
AO_INLINE void scales_at(const void* scale, int64_t i, int64_t stride, F (&out)[kBlocks]) {
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) out[b] = scale_at<kType>(scale, i + b * stride);
}
template <int kBlocks>
AO_INLINE void scales_at(const void* scale, Scale type, int64_t i, int64_t stride, F (&out)[kBlocks]) {
  if (type == Scale::bf16) [[likely]] return scales_at<Scale::bf16>(scale, i, stride, out);
  switch (type) {
    case Scale::f32: return scales_at<Scale::f32>(scale, i, stride, out);
    case Scale::f16: return scales_at<Scale::f16>(scale, i, stride, out);
    case Scale::e8m0: return scales_at<Scale::e8m0>(scale, i, stride, out);
    case Scale::u8: return scales_at<Scale::u8>(scale, i, stride, out);
    case Scale::i8: return scales_at<Scale::i8>(scale, i, stride, out);
    default: return scales_at<Scale::e4m3>(scale, i, stride, out);
  }
}
AO_INLINE F scale_at(const void* scale, Scale type, int64_t i) {
  F out[1];
  scales_at(scale, type, i, 0, out);
  return out[0];
}

// What multiplies those of a span of groups.
AO_INLINE F outer_at(const ScaleView& scales, int64_t i) {
  return scales.outer ? scale_at(scales.outer, scales.outer_type, i) : splat(1.0f);
}

// Zero points that are not scaled, of several blocks.
template <int kBlocks>
AO_INLINE void zeros_at(const Linear& t, int64_t i, int64_t stride, F (&out)[kBlocks]) {
  switch (t.zero_type) {
    case Zero::f32: return scales_at<Scale::f32>(t.zero, i, stride, out);
    case Zero::bf16: return scales_at<Scale::bf16>(t.zero, i, stride, out);
    case Zero::f16: return scales_at<Scale::f16>(t.zero, i, stride, out);
    default: break;
  }
  // canonical codes of an integer format: signed formats store them with the top bit flipped
  if (t.zero_flip == 0) return scales_at<Scale::u8>(t.zero, i, stride, out);
  for (int b = 0; b < kBlocks; ++b) {
    const I code = load_bytes(static_cast<const uint8_t*>(t.zero) + i + b * stride);
    out[b] = add(to_float(xor_(code, splat_int(t.zero_flip))), splat(t.table[0]));
  }
}
AO_INLINE F zero_at(const Linear& t, int64_t i) {
  F out[1];
  zeros_at(t, i, 0, out);
  return out[0];
}

// Scales as floats, and the zero-point terms, which multiply the sum of the activations: scale * (-zero), or -offset,
// for decoded values; for bytes, scale * what they count from more.
static void read_block(const Linear& t, int64_t block, float* scales, float* zero_terms) {
  const F base = splat(t.mode == Mode::int8 ? base_of(t) : 0.0f);
  for (int64_t s = 0, g = 0; s < t.spans; ++s) {
    const int64_t span = (block * t.spans + s) * 16;
    const F outer = outer_at(t.scale, span), offset_outer = outer_at(t.offset, span);
    for (const int64_t end = g + t.span < t.groups ? g + t.span : t.groups; g < end; ++g) {
      const int64_t i = (block * t.groups + g) * 16;
      const F scale = mul(scale_at(t.scale.values, t.scale.type, i), outer);
      store(scales + g * 16, scale);
      if (t.zero_type == Zero::scaled) {
        const F offset = mul(scale_at(t.offset.values, t.offset.type, i), offset_outer);
        store(zero_terms + g * 16, sub(mul(scale, base), offset));
      } else if (t.zero_type != Zero::none) {
        store(zero_terms + g * 16, mul(scale, sub(base, zero_at(t, i))));
      }
    }
  }
}

}  // namespace ao::AO_ISA
