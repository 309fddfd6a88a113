// Vectors of 16 lanes in plain C++ with vector extensions, for any processor.
#pragma once
#include "portable.h"

#define AO_HAS_PAIRS 0
#define AO_HAS_ROW_PAIRS 0
#define AO_HAS_WORDS 0
#define AO_HAS_QUARTERS 0
#define AO_HAS_WORD_SUMS 0
#define AO_HAS_CODE_WORDS 0
#define AO_HAS_LIMBS 1  // products of bytes are faster than decoding, for activations in limbs
#define AO_HAS_BYTE_TABLES 0

namespace ao::AO_ISA {

constexpr bool kWideBytes = false;  // products of bytes below 128 take fewer steps
constexpr bool kByteShifts = false;
constexpr int kByteBase = 0;  // bytes are unsigned
constexpr int kRegisters = 4;       // that a vector takes
constexpr int kPanelRows = 3;       // 12 of 16 registers for sums
constexpr int kPanelBlocks = 1;

typedef int16_t s8 __attribute__((vector_size(16)));

AO_INLINE void load_weight(I& w, const uint8_t* p) { w = load_vector(p); }
AO_INLINE void load_weight(F& w, const uint8_t* p) { w = load_four<F, f4>(p); }

AO_INLINE f4 fma4(f4 x, f4 y, f4 z) { return x * y + z; }

// Adding 2^23 leaves no bits behind the point; from there on there are none.
AO_INLINE i4 nearest4(f4 x) {
  const f4 magnitude = (f4)((i4)x & 0x7fffffff);
  const i4 rounded = (i4)(magnitude + splat4(0x1p23f)) - 0x4b000000;
  const i4 negative = x < 0, whole = magnitude >= splat4(0x1p23f);
  return (whole & __builtin_convertvector(x, i4)) | (~whole & ((rounded ^ negative) - negative));
}

AO_INLINE f4 half_to_float4(i4 half) {
  const i4 sign = (i4)((u4)(half & 0x8000) << 16);
  const i4 magnitude = (half & 0x7fff) << 13;
  const i4 rebias = splat4(112 << 23);
  const i4 infinite = (half & 0x7c00) == 0x7c00, subnormal = (half & 0x7c00) == 0;
  const i4 normal = magnitude + rebias + (infinite & rebias);
  // a subnormal number is an integer times 2^-24: the mantissa of a number that is 2^-14 greater
  const f4 small = (f4)(magnitude + (113 << 23)) - splat4(0x1p-14f);
  return (f4)(select4(subnormal, (i4)small, normal) | sign);
}

AO_INLINE i4 float_to_half4(f4 x) {
  const i4 bits = (i4)x & 0x7fffffff;
  const i4 sign = (i4)((u4)x >> 16 & 0x8000);
  const i4 normal = (bits - (112 << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  // below 2^-14: adding 1/2 leaves multiples of 2^-24
  const i4 small = (i4)((f4)bits + splat4(0.5f)) - 0x3f000000;
  const i4 large = select4(bits > 0x7f800000, splat4(0x7e00), splat4(0x7c00));
  const i4 finite = select4(bits < 113 << 23, small, normal);
  return select4(bits >= 143 << 23, large, finite) | sign;
}

template <bool kSmall>
AO_INLINE i4 dot4(i4 acc, i4 w, i4 x) {
  const s8 even = (s8)(w & 0x00ff00ff) * ((s8)((u8)x << 8) >> 8);
  const s8 odd = (s8)((u8)w >> 8) * ((s8)x >> 8);
  const auto words = [](i4 sum, s8 products) { return sum + ((i4)((u4)products << 16) >> 16) + ((i4)products >> 16); };
  if constexpr (kSmall) return words(acc, even + odd);
  return words(words(acc, even), odd);
}

template <int i>
AO_INLINE Q quad_of(const uint8_t* x) {
  return splat_dword(x + 4 * i);
}

template <bool>
AO_INLINE I load_bits(const uint8_t* p) {
  const I rows = widen(reinterpret_cast<const uint16_t*>(p));
  const auto spread = [](i4 v) { return (v & 0x0f) | (v << 4 & 0x0f00) | (v << 8 & 0x0f0000) | (v << 12 & 0x0f000000); };
  return each<I>(spread, rows);
}

template <int kSize>
struct Lookup {
  uint8_t table[kSize];

  Lookup() = default;
  AO_METHOD explicit Lookup(const uint8_t* bytes) { __builtin_memcpy(table, bytes, kSize); }
  AO_METHOD I look_up(I codes) const {
    alignas(16) uint8_t bytes[64];
    store_vector(bytes, codes);
    for (uint8_t& byte : bytes) byte = table[byte];
    return load_vector(bytes);
  }
};


}  // namespace ao::AO_ISA

#include "codes.h"
