// 64-bit ARM with dot products of signed bytes (FEAT_DotProd).
#pragma once
#include "neon_lanes.h"

#define AO_HAS_PAIRS 0
#define AO_HAS_ROW_PAIRS 0
#define AO_HAS_BYTE_TABLES 1  // look-ups of bytes by 6 bits

namespace ao::AO_ISA {

constexpr bool kWideBytes = true;  // products of bytes take all 8 bits at full speed
constexpr int kByteBase = 128;     // because those of 8 bits are signed: 128 less

template <bool>
AO_INLINE i4 dot4(i4 acc, i4 w, i4 x) {
  return vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}
template <bool, int i>
AO_INLINE I dot_quads(I acc, Q w, Lane<i> x) {
  const auto dot = [x](i4 sum, i4 bytes) -> i4 { return vdotq_laneq_s32(sum, vreinterpretq_s8_s32(bytes), x.row, i); };
  return each<I>(dot, acc, w);
}

}  // namespace ao::AO_ISA

#include "neon_tables.h"
