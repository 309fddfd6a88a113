// Vectors of 16 lanes on 64-bit ARM, four registers each: what its sets have in common. Each set adds products of bytes
// before it includes planes.h.
#pragma once
#include <arm_neon.h>

#include "portable.h"

#define AO_HAS_WORDS 0
#define AO_HAS_QUARTERS 0
#define AO_HAS_WORD_SUMS 0
#define AO_HAS_CODE_WORDS 0
#define AO_HAS_LIMBS 1  // products of bytes are faster than decoding, for activations in limbs

namespace ao::AO_ISA {

constexpr int kRegisters = 4;  // that a vector takes
constexpr int kPanelRows = 6;  // 24 of 32 registers for sums
constexpr int kPanelBlocks = 1;
constexpr bool kByteShifts = true;

AO_INLINE uint8x16_t as_bytes(i4 v) { return vreinterpretq_u8_s32(v); }
AO_INLINE uint16x8_t as_words(i4 v) { return vreinterpretq_u16_s32(v); }
AO_INLINE i4 from_bytes(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
AO_INLINE i4 from_words(uint16x8_t v) { return vreinterpretq_s32_u16(v); }

AO_INLINE f4 fma4(f4 x, f4 y, f4 z) { return vfmaq_f32(z, x, y); }
AO_INLINE i4 nearest4(f4 x) { return vcvtnq_s32_f32(x); }
AO_INLINE f4 half_to_float4(i4 half) { return vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(half))); }
AO_INLINE i4 float_to_half4(f4 x) { return vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(x)))); }

// Into registers at this point: gcc would load more weights than the sums leave registers for.
template <class V>
AO_INLINE V held(V v) {
  asm volatile("" : "+w"(v));
  return v;
}
AO_INLINE void load_weight(I& w, const uint8_t* p) {
  w = each<I>([](i4 v) { return held(v); }, load_vector(p));
}
AO_INLINE void load_weight(F& w, const uint8_t* p) {
  w = each<F>([](f4 v) { return held(v); }, load_four<F, f4>(p));
}

// Bytes, shifted right.
template <int kShift>
AO_INLINE I shift_bytes(I v) {
  return each<I>([](i4 p) { return from_bytes(vshrq_n_u8(as_bytes(p), kShift)); }, v);
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

// Tables of up to 4 registers, which look-ups take next to each other: gcc makes copies of what it puts together itself.
template <int kRegistersOfTable>
struct Registers;
template <>
struct Registers<0> {};
template <>
struct Registers<1> {
  uint8x16_t all;
  AO_METHOD void read(const uint8_t* p) { all = vld1q_u8(p); }
  AO_METHOD uint8x16_t look_up(uint8x16_t codes) const { return vqtbl1q_u8(all, codes); }
};
template <>
struct Registers<2> {
  uint8x16x2_t all;
  AO_METHOD void read(const uint8_t* p) { all = vld1q_u8_x2(p); }
  AO_METHOD uint8x16_t look_up(uint8x16_t codes) const { return vqtbl2q_u8(all, codes); }
};
template <>
struct Registers<4> {
  uint8x16x4_t all;
  AO_METHOD void read(const uint8_t* p) { all = vld1q_u8_x4(p); }
  AO_METHOD uint8x16_t look_up(uint8x16_t codes) const { return vqtbl4q_u8(all, codes); }
};

template <int kSize>
struct Lookup {
  static constexpr int kCount = (kSize + 15) / 16;
  Registers<kCount <= 4 ? kCount : 4> low;
  Registers<kCount == 8 ? 4 : 0> high;  // of 128 bytes, the second half

  Lookup() = default;
  AO_METHOD explicit Lookup(const uint8_t* bytes) {
    uint8_t part[16 * kCount];
    for (int i = 0; i < 16 * kCount; ++i) part[i] = bytes[i % kSize];
    low.read(part);
    if constexpr (kCount == 8) high.read(part + 64);
  }
  AO_METHOD uint8x16_t look_up(uint8x16_t codes) const {
    const uint8x16_t out = low.look_up(codes);
    if constexpr (kCount < 8) return out;
    // those below 64 are beyond the end then, and stay
    if constexpr (kCount == 8) return vqtbx4q_u8(out, high.all, vsubq_u8(codes, vdupq_n_u8(64)));
  }
  AO_METHOD I look_up(I codes) const {
    return each<I>([this](i4 v) { return from_bytes(look_up(as_bytes(v))); }, codes);
  }
};

}  // namespace ao::AO_ISA
