// Vectors of 16 lanes on 64-bit ARM: four registers each.
#pragma once
#include <arm_neon.h>

#include "portable.h"

#define AO_HAS_PAIRS 0
#define AO_HAS_WORDS 0
#define AO_HAS_QUARTERS 0
#define AO_HAS_WORD_SUMS 0
#define AO_HAS_CODE_WORDS 0
#define AO_HAS_LIMBS 1  // products of bytes are faster than decoding, for activations in limbs
#define AO_HAS_BYTE_TABLES 0

namespace ao::AO_ISA {

constexpr bool kWideBytes = false;  // products of bytes below 128 are the fast ones
constexpr int kRegisters = 4;       // that a vector takes
constexpr int kPanelRows = 6;       // 24 of 32 registers for sums
constexpr int kPanelBlocks = 1;

AO_INLINE uint8x16_t as_bytes(i4 v) { return vreinterpretq_u8_s32(v); }
AO_INLINE uint16x8_t as_words(i4 v) { return vreinterpretq_u16_s32(v); }
AO_INLINE i4 from_bytes(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
AO_INLINE i4 from_words(uint16x8_t v) { return vreinterpretq_s32_u16(v); }

AO_INLINE f4 fma4(f4 x, f4 y, f4 z) { return vfmaq_f32(z, x, y); }
AO_INLINE i4 nearest4(f4 x) { return vcvtnq_s32_f32(x); }
AO_INLINE f4 half_to_float4(i4 half) { return vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(half))); }
AO_INLINE i4 float_to_half4(f4 x) { return vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(x)))); }

// Both signed.
AO_INLINE i4 dot_signed(i4 acc, int8x16_t w, int8x16_t x) {
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(acc, w, x);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(w, x));
  return vaddq_s32(acc, vpaddq_s32(low, high));
#endif
}
template <bool kSmall>
AO_INLINE i4 dot4(i4 acc, i4 w, i4 x) {
  const int8x16_t bytes = vreinterpretq_s8_s32(w), factors = vreinterpretq_s8_s32(x);
  if constexpr (!kSmall) {  // w - 128 is signed
    const i4 rest = vshlq_n_s32(vpaddlq_s16(vpaddlq_s8(factors)), 7);
    return dot_signed(vaddq_s32(acc, rest), veorq_s8(bytes, vdupq_n_s8(-128)), factors);
  }
#ifndef __ARM_FEATURE_DOTPROD
  // sums of two products fit 16 bits
  const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(factors));
  return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(bytes, factors)));
#endif
  return dot_signed(acc, bytes, factors);
}

template <bool>
AO_INLINE I load_bits(const uint8_t* p) {
  const uint8x16_t first = vld1q_u8(p), second = vld1q_u8(p + 16);
  const uint8x16_t first_high = vshrq_n_u8(first, 4), second_high = vshrq_n_u8(second, 4);
  return {from_bytes(vzip1q_u8(first, first_high)), from_bytes(vzip2q_u8(first, first_high)),
          from_bytes(vzip1q_u8(second, second_high)), from_bytes(vzip2q_u8(second, second_high))};
}
AO_INLINE I even_words(I low, I high) {
  return each<I>([](i4 p, i4 q) { return from_words(vsliq_n_u16(as_words(p), as_words(q), 8)); }, low, high);
}
AO_INLINE I odd_words(I low, I high) {
  return each<I>([](i4 p, i4 q) { return from_words(vsriq_n_u16(as_words(q), as_words(p), 8)); }, low, high);
}
AO_INLINE I even_dwords(I low, I high) {
  return each<I>([](i4 p, i4 q) { return (i4)vsliq_n_s32(p, q, 16); }, low, high);
}
AO_INLINE I odd_dwords(I low, I high) {
  return each<I>([](i4 p, i4 q) { return (i4)vsriq_n_s32(q, p, 16); }, low, high);
}

template <int kSize>
struct Lookup {
  static constexpr int kCount = (kSize + 15) / 16;
  uint8x16_t tables[kCount];

  Lookup() = default;
  AO_METHOD explicit Lookup(const uint8_t* bytes) {
    uint8_t part[16 * kCount];
    for (int i = 0; i < 16 * kCount; ++i) part[i] = bytes[i % kSize];
    for (int t = 0; t < kCount; ++t) tables[t] = vld1q_u8(part + 16 * t);
  }
  AO_METHOD uint8x16_t look_up(uint8x16_t codes) const {
    if constexpr (kCount == 1) return vqtbl1q_u8(tables[0], codes);
    if constexpr (kCount == 2) return vqtbl2q_u8({{tables[0], tables[1]}}, codes);
    if constexpr (kCount >= 4) {
      const uint8x16_t out = vqtbl4q_u8({{tables[0], tables[1], tables[2], tables[3]}}, codes);
      if constexpr (kCount == 4) return out;
      const uint8x16_t rest = vsubq_u8(codes, vdupq_n_u8(64));
      return vqtbx4q_u8(out, {{tables[4], tables[5], tables[6], tables[7]}}, rest);
    }
  }
  AO_METHOD I look_up(I codes) const {
    return each<I>([this](i4 v) { return from_bytes(look_up(as_bytes(v))); }, codes);
  }
};

}  // namespace ao::AO_ISA

#include "planes.h"
