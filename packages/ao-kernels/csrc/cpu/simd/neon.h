// 64-bit ARM, any processor: products of bytes in 16 bits, which are added up in pairs.
#pragma once
#include "neon_vectors.h"

#define AO_HAS_PAIRS 0
#define AO_HAS_ROW_PAIRS 0
#define AO_HAS_BYTE_TABLES 0

namespace ao::AO_ISA {

constexpr bool kWideBytes = false;  // products of bytes below 128 are the fast ones
constexpr int kByteBase = 0;        // bytes are unsigned

template <bool kSmall>
AO_INLINE i4 dot4(i4 acc, i4 w, i4 x) {
  const int8x16_t factors = vreinterpretq_s8_s32(x);
  // sums of two products fit 16 bits
  if constexpr (kSmall) {
    const int8x16_t bytes = vreinterpretq_s8_s32(w);
    const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(factors));
    return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(bytes, factors)));
  }
  const int8x16_t bytes = veorq_s8(vreinterpretq_s8_s32(w), vdupq_n_s8(-128));  // w - 128
  const i4 rest = vshlq_n_s32(vpaddlq_s16(vpaddlq_s8(factors)), 7);
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(bytes), vget_low_s8(factors)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(bytes, factors));
  return vaddq_s32(vaddq_s32(acc, rest), vpaddq_s32(low, high));
}

template <int i>
AO_INLINE Q quad_of(const uint8_t* x) {
  return splat_dword(x + 4 * i);
}

}  // namespace ao::AO_ISA

#include "planes.h"
